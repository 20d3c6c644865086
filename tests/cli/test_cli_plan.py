"""The parts of a plan: the edit of `__init__.py`, and writing all files or none."""

import os
import subprocess
import sys

import pytest
from cli_project import Project, write
from hypothesis import given
from hypothesis import strategies as st
from torchshard_cli.errors import UsageError
from torchshard_cli.plan import apply
from torchshard_cli.project.package_init import add_export


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


LONG = ", ".join(f'"Parallel{letter * 6}"' for letter in "ABCE")
CASES = {
    "empty": ("", "from .middle import Middle as Middle\n"),
    "docstring": (
        '"""Doc."""\n',
        '"""Doc."""\n\nfrom .middle import Middle as Middle\n',
    ),
    "docstring without a newline": (
        '"""Doc."""',
        '"""Doc."""\n\nfrom .middle import Middle as Middle\n',
    ),
    "licence": ("# MIT\n", "# MIT\n\nfrom .middle import Middle as Middle\n"),
    "licence and code": (
        "# MIT\n\n__version__ = 1\n",
        "# MIT\n\nfrom .middle import Middle as Middle\n\n__version__ = 1\n",
    ),
    "licence right above code": (
        "# MIT\n__version__ = 1\n",
        "# MIT\nfrom .middle import Middle as Middle\n\n__version__ = 1\n",
    ),
    "comment of the first": (
        '"""Doc."""\n\n# about nano\nfrom .nano import Nano\n',
        '"""Doc."""\n\nfrom .middle import Middle\n\n# about nano\n'
        "from .nano import Nano\n",
    ),
    "docstring and code": (
        '"""Doc."""\n\n__version__ = 1\n',
        '"""Doc."""\n\nfrom .middle import Middle as Middle\n\n__version__ = 1\n',
    ),
    "first": (
        "from .nano import Nano\n",
        "from .middle import Middle\nfrom .nano import Nano\n",
    ),
    "last": (
        "from .alpha import Alpha\n",
        "from .alpha import Alpha\nfrom .middle import Middle\n",
    ),
    "between, with comments": (
        "# about alpha\nfrom .alpha import Alpha  # one\n\n# about nano\n"
        "from .nano import Nano\n\nx = 1\n",
        "# about alpha\nfrom .alpha import Alpha  # one\n"
        "from .middle import Middle\n\n# about nano\n"
        "from .nano import Nano\n\nx = 1\n",
    ),
    "repeated names": (
        "from .nano import Nano as Nano\n",
        "from .middle import Middle as Middle\nfrom .nano import Nano as Nano\n",
    ),
    "numbers in order": (
        "from .m2 import B\nfrom .m10 import A\n",
        "from .m2 import B\nfrom .m10 import A\nfrom .middle import Middle\n",
    ),
    "after absolute imports": (
        "from __future__ import annotations\n\nimport os\n\nprint(os)\n",
        "from __future__ import annotations\n\nimport os\n\n"
        "from .middle import Middle as Middle\n\nprint(os)\n",
    ),
    "after parents and siblings": (
        "from .. import up\nfrom ..up import Up\nfrom . import zebra\n",
        "from .. import up\nfrom ..up import Up\nfrom . import zebra\n"
        "from .middle import Middle\n",
    ),
    "after a long import": (
        "from .alpha import (\n    Alpha,\n    Beta,\n)\nfrom .nano import Nano\n",
        "from .alpha import (\n    Alpha,\n    Beta,\n)\n"
        "from .middle import Middle\nfrom .nano import Nano\n",
    ),
    "another name of the module": (
        "from .middle import Other\n",
        "from .middle import Middle, Other\n",
    ),
    "many names of the module": (
        "from .middle import (\n    CONSTANT,\n    Alpha,\n    function,\n)\n",
        "from .middle import (\n    CONSTANT,\n    Alpha,\n    Middle,\n    function,\n"
        ")\n",
    ),
    "a list": (
        '__all__ = ["Alpha", "Nano"]\n',
        'from .middle import Middle\n\n__all__ = ["Alpha", "Middle", "Nano"]\n',
    ),
    "an empty list": (
        "__all__: list[str] = []\n",
        'from .middle import Middle\n\n__all__: list[str] = ["Middle"]\n',
    ),
    "an empty tuple": (
        "__all__ = ()\n",
        'from .middle import Middle\n\n__all__ = ("Middle",)\n',
    ),
    "a list that gets too long": (
        f"__all__ = [{LONG}]\n",
        "from .middle import Middle\n\n__all__ = [\n"
        '    "Middle",\n    "ParallelAAAAAA",\n    "ParallelBBBBBB",\n'
        '    "ParallelCCCCCC",\n    "ParallelEEEEEE",\n]\n',
    ),
    "a long list": (
        'from .nano import Nano\n\n__all__ = [\n    "Alpha",  # first\n    "Nano",\n]\n',
        "from .middle import Middle\nfrom .nano import Nano\n\n__all__ = [\n"
        '    "Alpha",  # first\n    "Middle",\n    "Nano",\n]\n',
    ),
    "the end of a long list": (
        '__all__ = [\n    "Alpha",\n    "Beta",\n]\n',
        "from .middle import Middle\n\n"
        '__all__ = [\n    "Alpha",\n    "Beta",\n    "Middle",\n]\n',
    ),
    "a list after a letter of two bytes": (
        'é = __all__ = ["Alpha"]\n',
        'from .middle import Middle\n\né = __all__ = ["Alpha", "Middle"]\n',
    ),
    "a list that is computed": (
        "import os\n\n__all__ = dir(os)\n",
        "import os\n\nfrom .middle import Middle as Middle\n\n__all__ = dir(os)\n",
    ),
}
UNFORMATTED = {
    "single quotes": (
        "__all__ = ['Alpha', 'Nano']\n",
        "from .middle import Middle\n\n__all__ = ['Alpha', 'Middle', 'Nano']\n",
    ),
    "windows": (
        '"""Doc."""\r\n\r\nfrom .nano import Nano\r\n',
        '"""Doc."""\r\n\r\nfrom .middle import Middle\r\nfrom .nano import Nano\r\n',
    ),
    "byte order mark": (
        '\ufefffrom .a import A\n__all__ = ["A"]\n',
        "\ufefffrom .a import A\nfrom .middle import Middle\n"
        '__all__ = ["A", "Middle"]\n',
    ),
    "packed lines": (
        '__all__ = ["Alpha",\n           "Beta", "Nano"]\n',
        'from .middle import Middle\n\n__all__ = ["Alpha",\n'
        '           "Beta", "Middle", "Nano"]\n',
    ),
    "no last comma": (
        '__all__ = [\n    "Alpha",\n    "Beta"\n]\n',
        'from .middle import Middle\n\n__all__ = [\n    "Alpha",\n    "Beta",\n'
        '    "Middle",\n]\n',
    ),
    "no parentheses": (
        '__all__ = "Alpha", "Beta"\n',
        'from .middle import Middle\n\n__all__ = ("Alpha", "Beta", "Middle")\n',
    ),
    "comment among names": (
        "from .middle import (  # why\n    Other,\n)\n",
        "from .middle import (  # why\n    Other,\n)\nfrom .middle import Middle\n",
    ),
}


@pytest.mark.parametrize("case", [*CASES, *UNFORMATTED])
def test_the_name_is_inserted_and_nothing_else_changes(case):
    """In isort's order, in `__all__` too where there is one; a second time is no change."""
    before, after = {**CASES, **UNFORMATTED}[case]
    assert add_export(before, "middle", "Middle") == after
    assert add_export(after, "middle", "Middle") == after


def test_the_result_is_formatted_and_sorted(tmp_path):
    """ruff agrees with each of the cases that were clean before."""
    for number, (before, after) in enumerate(CASES.values()):
        write(tmp_path / f"before{number}" / "__init__.py", before)
        write(tmp_path / f"after{number}" / "__init__.py", after)
    (tmp_path / "before2" / "__init__.py").unlink()  # it lacks its last newline
    for arguments in (["check", "--select", "I,E9,F821,RUF022"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--preview"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@given(st.permutations(["alpha", "conv2d", "conv10d", "middle", "zeta"]))
def test_any_order_of_insertion_gives_the_same_file(modules):
    """So two people who add a layer each end up with the same text."""
    text = '"""Doc."""\n\n__all__ = []\n'
    for module in modules:
        text = add_export(text, module, module.title())
    names = '"Alpha", "Conv2D", "Conv10D", "Middle", "Zeta"'
    assert text == (
        '"""Doc."""\n\nfrom .alpha import Alpha\nfrom .conv2d import Conv2D\n'
        "from .conv10d import Conv10D\nfrom .middle import Middle\n"
        f"from .zeta import Zeta\n\n__all__ = [{names}]\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "from .middle import *\n",
        "from .middle import Middle as Middle\n",
        "from .middle import (\n    Middle,\n    Other,\n)\n",
    ],
)
def test_a_name_that_is_exported_already_is_left_alone(text):
    """However it is written."""
    assert add_export(text, "middle", "Middle") == text


@pytest.mark.parametrize(
    "text",
    [
        "from .other import Middle\n",
        "from .other import Other as Middle\n",
        "class Middle:\n    pass\n",
        "def Middle():\n    pass\n",
        "Middle = 1\n",
        "import x as Middle\n",
    ],
)
def test_a_name_that_means_something_else_is_refused(text):
    """With the line on which it is defined."""
    with pytest.raises(UsageError) as caught:
        add_export(f"\n{text}", "middle", "Middle")
    assert str(caught.value) == (
        "'Middle' is already defined in __init__.py, line 2; choose another name"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"def broken(:\n",
            "zoo/__init__.py: __init__.py is not valid Python, line 1: invalid syntax; "
            "mend it first",
        ),
        (
            b"from .x import ParallelTiny\n",
            "zoo/__init__.py: 'ParallelTiny' is already defined in __init__.py, line 1; "
            "choose another name",
        ),
        (b"# \xff\n", "cannot read {init}: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_an_init_that_cannot_take_the_name_stops_all(project, content, message):
    """Exit code 2, and nothing written."""
    project.init.write_bytes(content)
    before = project.contents()
    result = project.run("new-layer", "ParallelTiny", "--force")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message.format(init=project.init)}")
    assert project.contents() == before


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4, 5])
def test_a_failure_midway_changes_nothing(project, monkeypatch, failing_call):
    """Whichever of the journal and the four files cannot be moved into its place."""
    write(project.module, "mine = 1\n")
    before = project.contents()
    calls = []

    def replace(source, target):
        calls.append(target)
        if len(calls) == failing_call:  # what follows puts things back
            raise OSError(28, "No space left on device", str(target))
        os.rename(source, target)

    monkeypatch.setattr(apply.os, "replace", replace)
    result = project.run("new-layer", "ParallelTiny", "--force")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: cannot write {calls[failing_call - 1]}: No space left on device; "
        "nothing was written\n"
    )
    assert project.contents() == before
    assert not project.lock.parent.exists()


def test_an_interruption_midway_changes_nothing(project, monkeypatch):
    """Ctrl-C is no exception to that."""
    before = project.contents()

    def replace(source, target):
        if str(source).endswith("new") and str(target).endswith("__init__.py"):
            raise KeyboardInterrupt
        os.rename(source, target)

    monkeypatch.setattr(apply.os, "replace", replace)
    assert project.run("new-layer", "ParallelTiny").exit_code == 130
    assert project.contents() == before


def test_a_folder_that_is_read_only_is_reported(project, monkeypatch):
    """Exit code 1, the folder's file named, nothing written.

    The refusal is made up, since the file system refuses an administrator nothing.
    """
    before = project.contents()
    real_open = apply.Path.open

    def refuse(path, *arguments, **keywords):
        if path.parent.name == "tests" and "xb" in arguments:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **keywords)

    monkeypatch.setattr(apply.Path, "open", refuse)
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: cannot write {project.test.parent}/.test_")
    assert result.stderr.endswith(": Permission denied; nothing was written\n")
    assert project.contents() == before


def test_the_mode_of_a_file_is_kept(project):
    """A new file gets the usual one."""
    os.chmod(project.init, 0o640)
    project.generate()
    umask = os.umask(0)
    os.umask(umask)
    assert project.init.stat().st_mode & 0o777 == 0o640
    assert project.module.stat().st_mode & 0o777 == 0o666 & ~umask
