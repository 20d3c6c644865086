"""Fetching a template from a folder, an archive or a repository, by cookiecutter's own means.

What is fetched is read into memory and the scratch folder removed: neither the home folder
nor the folder for temporary files keeps anything, and no cache can be stale.
"""

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UnavailableError
from .source import local_path, without_secret
from .template_files import Files, read_folder, read_shared


def fetched_files(source: str, root: Path) -> Files:
    """The files of the template at `source`, and the partials in a `_shared` beside it.

    Args:
        source: A folder, a zip, or a URL of either or of a repository.
        root: Folder from which a relative path counts.

    Raises:
        UnavailableError: If it cannot be fetched, or holds no template.
        TemplateError: If a path in it cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="torchshard-") as name, _only_in(name):
        folder = _fetch(source, root, name)
        label = without_secret(source).rstrip("/")
        shared = {}
        if local_path(source, root) == folder:
            shared = dict(read_shared(folder.parent, os.path.dirname(label)))
        return {**shared, **read_folder(folder, label)}


def _fetch(source: str, root: Path, scratch: str) -> Path:
    """The folder with the template of `source`, fetched below `scratch` unless it is here."""
    from cookiecutter.config import BUILTIN_ABBREVIATIONS
    from cookiecutter.exceptions import CookiecutterException
    from cookiecutter.repository import determine_repo_dir

    local = local_path(source, root)
    try:
        folder, _ = determine_repo_dir(
            template=str(local or source),
            abbreviations=BUILTIN_ABBREVIATIONS,
            clone_to_dir=scratch,
            checkout=None,
            no_input=True,
        )
    except subprocess.CalledProcessError as error:
        said = error.output.decode(errors="replace").strip().splitlines()
        raise _cannot(source, said[-1] if said else str(error)) from error
    except (CookiecutterException, OSError) as error:
        raise _cannot(source, str(error) or type(error).__name__) from error
    return Path(folder)


def _cannot(source: str, why: str) -> UnavailableError:
    message = f"cannot fetch the template {source}: {why.splitlines()[0]}"
    return UnavailableError(message.replace(source, without_secret(source)))


@contextmanager
def _only_in(scratch: str) -> Iterator[None]:
    """Keep all that cookiecutter and git make or say below `scratch`, for a while.

    cookiecutter unpacks archives into a temporary folder that it leaves, and logs a
    traceback where git fails; git would ask for a password at the terminal.
    """
    silent = logging.getLogger("cookiecutter.vcs")
    before = tempfile.tempdir, os.environ.get("GIT_TERMINAL_PROMPT"), silent.disabled
    tempfile.tempdir, silent.disabled = scratch, True
    os.environ["GIT_TERMINAL_PROMPT"] = "0"
    try:
        yield
    finally:
        tempfile.tempdir, prompt, silent.disabled = before
        del os.environ["GIT_TERMINAL_PROMPT"]
        if prompt is not None:
            os.environ["GIT_TERMINAL_PROMPT"] = prompt
