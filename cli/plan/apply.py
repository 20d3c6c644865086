"""Carrying out a plan: all of its files are written, or none is.

Every new file is made beside its place first, and every old one is copied there, so what
usually fails (a full disk, a folder that is read-only) fails before anything changed, and
taking back what was moved needs no space on the disk. The lock is moved last.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path

from ..errors import ConflictError, WriteError
from ..project.journal import (
    JOURNAL_PATH,
    Change,
    content_hash,
    discard,
    remove_journal,
    write_journal,
)
from ..project.lock import LOCK_PATH
from ..project.target import inside, own_place
from ..project.text_file import read_text
from .entry import Entry
from .plan import Plan


def apply_plan(*plans: Plan) -> None:
    """Write the files of `plans`, all of one project, and its lock.

    Raises:
        ConflictError: If a conflict of theirs is not settled, or if a file is not as it was
            when they were made.
        WriteError: If the file system refuses; then every file is as it was.
    """
    if any(plan.conflicts for plan in plans):
        raise ConflictError("the plan has conflicts; nothing was written")
    root, lock = plans[0].root, plans[0].lock
    contents: dict[Path, bytes | None] = {}
    for plan in plans:
        lock = plan.new_lock(lock)
        for entry in plan.entries:
            if entry.is_changed:
                _check_unchanged(root, entry)
            if entry.is_written:
                contents[inside(root, entry.path)] = entry.content
            elif entry.status == "remove":
                contents[own_place(root, entry.path)] = None
    text = lock.to_text() if lock.layers else None
    if text != read_text(root / LOCK_PATH):
        contents[inside(root, LOCK_PATH)] = text.encode() if text else None
    if contents:
        write_all(root, contents)


def _check_unchanged(root: Path, entry: Entry) -> None:
    """Refuse to write over what was saved since the plan was made: it may wait for hours."""
    before = (entry.old or "").replace("\r\n", "\n")
    if (read_text(inside(root, entry.path)) or "") != before:
        raise ConflictError(
            f"{entry.path} was changed in the meantime; nothing was written. Run this again"
        )


def write_all(root: Path, contents: Mapping[Path, bytes | None]) -> None:
    """Write each content to its path, or remove the file where it is None, or do nothing.

    Raises:
        WriteError: If the file system refuses.
    """
    undo = _Undo(root)
    journal = inside(root, JOURNAL_PATH)
    try:
        undo.make_folders(journal.parent)
        changes = [_prepare(path, content, undo) for path, content in contents.items()]
        write_journal(root, changes)
        for change in changes:
            undo.done.append(change)
            change.carry_out()
    except OSError as error:
        where = error.filename2 or error.filename or "a file"
        reason = f"cannot write {where}: {error.strerror or error}"
        left = undo.run()
        raise WriteError(f"{reason}; {left or 'nothing was written'}") from error
    except BaseException:
        undo.run()
        raise
    with suppress(OSError):
        discard(root, changes)


def _prepare(path: Path, content: bytes | None, undo: "_Undo") -> Change:
    """Everything that changing `path` takes, beside it."""
    undo.make_folders(path.parent)
    _remove_stale(path)
    backup = _beside(path, "old") if os.path.lexists(path) else None
    if backup is not None:
        undo.created.append(backup)
        shutil.copy2(path, backup, follow_symlinks=False)
    temporary = None if content is None else _beside(path, "new")
    if temporary is not None and content is not None:
        undo.created.append(temporary)
        with temporary.open("xb") as file:
            file.write(content)
        if backup is not None:
            shutil.copymode(path, temporary)
    return Change(path, temporary, backup, content_hash(path))


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.torchshard-{kind}")


def _remove_stale(path: Path) -> None:
    """Remove what a run that was killed before it had decided left beside `path`."""
    for kind in ("old", "new"):
        for stale in path.parent.glob(f".{escape(path.name)}.*.torchshard-{kind}"):
            stale.unlink()


class _Undo:
    """What it takes to put everything back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.created: list[Path] = []
        self.folders: list[Path] = []
        self.done: list[Change] = []

    def make_folders(self, folder: Path) -> None:
        if not folder.exists():
            self.make_folders(folder.parent)
            folder.mkdir()
            self.folders.append(folder)

    def run(self) -> str:
        """Put everything back.

        The journal goes first: with it, a run that is killed here would be carried on.

        Returns:
            What could not be put back; empty if all was.
        """
        with suppress(OSError):
            remove_journal(self.root)
        stuck = [change for change in reversed(self.done) if not _take_back(change)]
        backups = {change.backup for change in stuck}
        with suppress(OSError):
            for path in self.created:
                if path not in backups:
                    path.unlink(missing_ok=True)
            for folder in reversed(self.folders):
                folder.rmdir()
        left = [f"{change.path} (as it was: {change.backup})" for change in stuck]
        return f"and cannot put back {', '.join(left)}" if left else ""


def _take_back(change: Change) -> bool:
    """Whether the file is as it was again."""
    try:
        change.take_back()
    except OSError:
        return False
    return True
