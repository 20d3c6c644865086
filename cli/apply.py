"""Carrying out a plan: all of its files are written, or none is."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from .errors import ConflictError, WriteError
from .lock import LOCK_PATH
from .plan import Plan, read_text
from .target import inside


def apply_plan(plan: Plan) -> None:
    """Write the files of `plan` and its lock.

    Raises:
        ConflictError: If a conflict of it is not settled.
        WriteError: If the file system refuses; then every file is as it was.
    """
    if plan.conflicts:
        raise ConflictError("the plan has conflicts; nothing was written")
    texts = {entry.path: entry.new for entry in plan.written}
    lock = plan.new_lock().to_text()
    if lock != read_text(plan.root / LOCK_PATH):
        texts[LOCK_PATH] = lock
    write_all({inside(plan.root, path): text for path, text in texts.items()})


def write_all(texts: Mapping[Path, str]) -> None:
    """Write every text to its path, or leave all as it was.

    Each goes to a new file beside its place first, and all are moved after that, so what
    usually fails (a full disk, a folder that is read-only) fails before anything changed.

    Raises:
        WriteError: If the file system refuses.
    """
    undo = _Undo()
    try:
        prepared = {path: _prepare(path, text, undo) for path, text in texts.items()}
        for path, temporary in prepared.items():
            undo.remember(path)
            os.replace(temporary, path)
    except OSError as error:
        undo.run()
        where = error.filename2 or error.filename or "a file"
        raise WriteError(
            f"cannot write {where}: {error.strerror or error}; nothing was written"
        ) from error
    except BaseException:
        undo.run()
        raise


def _prepare(path: Path, text: str, undo: "_Undo") -> Path:
    """A complete new file beside `path`, with its permissions."""
    undo.make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    undo.created.append(temporary)
    with temporary.open("xb") as file:
        file.write(text.encode())
    if path.exists():
        shutil.copymode(path, temporary)
    return temporary


class _Undo:
    """What it takes to put everything back."""

    def __init__(self) -> None:
        self.created: list[Path] = []
        self.folders: list[Path] = []
        self.contents: dict[Path, bytes | None] = {}

    def make_folders(self, folder: Path) -> None:
        if not folder.exists():
            self.make_folders(folder.parent)
            folder.mkdir()
            self.folders.append(folder)

    def remember(self, path: Path) -> None:
        self.contents[path] = path.read_bytes() if path.exists() else None

    def run(self) -> None:
        for path, content in self.contents.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                path.write_bytes(content)
        for path in self.created:
            path.unlink(missing_ok=True)
        for folder in reversed(self.folders):
            folder.rmdir()
