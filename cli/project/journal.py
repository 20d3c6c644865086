"""`.torchshard/journal.json`: the changes that a run has decided on and not yet finished.

A run first makes every new file beside its place, then writes this list, then moves the
files. So one that is killed before the list is there has changed nothing, and one that is
killed after it is finished by the next run, whichever command that is: all or nothing,
also where nobody was left to take anything back.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError, WriteError
from .target import inside, own_place

JOURNAL_PATH = ".torchshard/journal.json"


@dataclass(frozen=True)
class Change:
    """One file that changes; all paths are below the root, and without links.

    Attributes:
        path: The file.
        temporary: Its new content; None if the file is removed.
        backup: Its old content; None if there was no file.
        old_hash: Hash of its old content; empty if there was no file.
    """

    path: Path
    temporary: Path | None
    backup: Path | None
    old_hash: str

    def carry_out(self) -> None:
        """Move the new content into its place, or remove the file."""
        if self.temporary is not None:
            os.replace(self.temporary, self.path)
        else:
            self.path.unlink(missing_ok=True)

    def take_back(self) -> None:
        """Put the old content back, with its mode and times; this needs no disk space."""
        if self.backup is not None:
            os.replace(self.backup, self.path)
        else:
            self.path.unlink(missing_ok=True)

    @property
    def is_pending(self) -> bool:
        """Whether it was not carried out yet."""
        if self.temporary is not None:
            return self.temporary.exists()
        return content_hash(self.path) == self.old_hash


def content_hash(path: Path) -> str:
    """Hash of the bytes at `path`; empty if there is no file."""
    if not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_journal(root: Path, changes: Sequence[Change]) -> None:
    """Decide on `changes`: from here on they are carried out, by this run or the next."""
    fields = [_to_json(root, change) for change in changes]
    path = _place(root)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    os.replace(temporary, path)


def remove_journal(root: Path) -> None:
    """Forget the changes: all are carried out, or all are taken back."""
    for path in (_place(root), _place(root).with_suffix(".tmp")):
        path.unlink(missing_ok=True)


def _place(root: Path) -> Path:
    return inside(root, JOURNAL_PATH)


def is_interrupted(root: Path) -> bool:
    """Whether a run was killed here before it had finished, or is at it now."""
    return (root / JOURNAL_PATH).exists()


def finish_interrupted(root: Path) -> None:
    """Carry out what a killed run had decided on; nothing where there is no such run.

    Raises:
        UsageError: If the journal cannot be understood.
        WriteError: If a file was changed since, or the file system refuses.
    """
    if not is_interrupted(root):
        return
    pending = [change for change in _read_journal(root) if change.is_pending]
    for change in pending:
        if content_hash(change.path) != change.old_hash:
            raise WriteError(
                f"an earlier run was killed while it wrote, and {change.path} was changed "
                f"since; nothing was written. Take what you need from {change.temporary}, "
                f"then delete {JOURNAL_PATH}"
            )
    try:
        for change in pending:
            change.carry_out()
        discard(root, _read_journal(root))
    except OSError as error:
        raise WriteError(
            f"an earlier run was killed while it wrote, and cannot be finished: "
            f"{error.filename}: {error.strerror or error}"
        ) from error


def discard(root: Path, changes: Sequence[Change]) -> None:
    """Remove the backups of changes that are carried out, then the journal.

    What cannot be removed is left to the next run.
    """
    for change in changes:
        if change.backup is not None:
            change.backup.unlink(missing_ok=True)
    remove_journal(root)
    folder = _place(root).parent
    if not any(folder.iterdir()):
        folder.rmdir()  # the lock of the last layer is gone


def _read_journal(root: Path) -> list[Change]:
    try:
        listed = json.loads((root / JOURNAL_PATH).read_text("utf-8"))
        return [_from_json(root, fields) for fields in listed]
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"cannot read {JOURNAL_PATH}, in which a killed run left what it was about to "
            f"do: {error}. Look at `git status` or your editor's history, then delete it"
        ) from error


def _to_json(root: Path, change: Change) -> dict[str, str | None]:
    paths = {
        "path": change.path,
        "temporary": change.temporary,
        "backup": change.backup,
    }
    relative = {
        name: path.relative_to(root.resolve()).as_posix() if path else None
        for name, path in paths.items()
    }
    return {**relative, "old_hash": change.old_hash}


def _from_json(root: Path, fields: dict[str, str | None]) -> Change:
    def path_of(name: str) -> Path | None:
        value = fields[name]
        return None if value is None else own_place(root, value)

    path = path_of("path")
    if path is None:
        raise ValueError("a change without a path")
    return Change(
        path, path_of("temporary"), path_of("backup"), fields["old_hash"] or ""
    )
