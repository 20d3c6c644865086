"""Errors of the command line, each with the exit code that it ends in.

    CliError                1
    ├── ConflictError       1   a file of yours would be overwritten
    ├── WriteError          1   the file system refused
    ├── VerifyError         1   a layer differs from its dense twin (verify.py)
    ├── UsageError          2   the command line, or a file it names, cannot be used
    │   └── UnavailableError    a template that is not there, or cannot be fetched
    ├── TemplateError       3   a template cannot be read or rendered
    └── UntrustedError      4   a template is code, and nobody said that it may run

`main.py` turns them into click's exceptions, in one place. No torchshard here.
"""


class CliError(Exception):
    """Anything that the command line reports without a traceback."""

    exit_code = 1


class ConflictError(CliError, FileExistsError):
    """A file that was edited, or that is not ours, would be overwritten."""


class WriteError(CliError, OSError):
    """A file could not be written; whatever had been written was taken back."""


class UsageError(CliError, ValueError):
    """A name, an option, a folder or a lock that cannot be used."""

    exit_code = 2


class UnavailableError(UsageError, LookupError):
    """A template that no longer is, or not yet, where it is looked for."""


class TemplateError(CliError, RuntimeError):
    """A template that cannot be read or rendered."""

    exit_code = 3


class UntrustedError(CliError, PermissionError):
    """A template that is not bundled, where nobody said that its code may run."""

    exit_code = 4
