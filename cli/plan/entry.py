"""One file of a plan: what happens to it, and how that looks as a diff."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, unified_diff
from typing import Literal

from .merge import MARKERS, has_markers, merge_texts

Status = Literal[
    "create",
    "identical",
    "update",
    "conflict",
    "skip",
    "overwrite",
    "merged",
    "marked",
    "unresolved",
    "edited",
    "remove",
    "keep",
    "release",
]
Answer = Literal["skip", "overwrite", "merge"]
WRITTEN: tuple[Status, ...] = ("create", "update", "overwrite", "merged", "marked")
UNSETTLED: tuple[Status, ...] = ("conflict", "marked", "unresolved")
UNRESOLVED = "holds conflict markers; settle them first"


@dataclass(frozen=True)
class Entry:
    """One file of a plan.

        create      it does not exist, and is made
        identical   it is as it should be
        update      it is not edited, and takes the template's text
        conflict    it is edited: a question, whose answers are skip, overwrite and merge
        skip        it stays as it is
        overwrite   it takes the template's text, and the edits are lost
        merged      the template's changes join the edits
        marked      the same, with conflict markers where both changed the same lines
        unresolved  it holds conflict markers already, so nothing is merged into it
        edited      it is edited, and the template has nothing new for it
        remove      it is deleted
        keep        it stays as it is, and in the lock
        release     it stays as it is, and leaves the lock: it is the user's own from now on

    Attributes:
        path: Posix path relative to the root.
        status: What happens to it.
        old: Its text now; None if it does not exist.
        new: Its text afterwards, unless it is skipped; None if it is removed.
        note: Why.
        generated: The template's text; None where the file is not the template's.
        base: The text as it was generated; None where that is not known.
        can_merge: Whether `old` is a text that was made from `base`.
        newline: What ends its lines on disk.
        num_conflicts: How many places are marked in `new`.
    """

    path: str
    status: Status
    old: str | None
    new: str | None
    note: str = ""
    generated: str | None = None
    base: str | None = None
    can_merge: bool = False
    newline: str = "\n"
    num_conflicts: int = 0

    @property
    def is_generated(self) -> bool:
        """Whether all of it comes from the template."""
        return self.generated is not None

    @property
    def is_written(self) -> bool:
        """Whether applying the plan writes it."""
        return self.status in WRITTEN

    @property
    def is_changed(self) -> bool:
        """Whether applying the plan writes or removes it."""
        return self.is_written or self.status == "remove"

    @property
    def is_recorded(self) -> bool:
        """Whether the lock holds it afterwards, if it did before."""
        return self.is_generated or self.status == "keep"

    @property
    def content(self) -> bytes | None:
        """Its bytes afterwards, with the line ends that it has; None if it is removed."""
        if self.new is None:
            return None
        return self.new.replace("\n", self.newline).encode()

    @property
    def line_counts(self) -> tuple[int, int]:
        """Lines added and lines removed."""
        return line_counts(self.old or "", self.new or "")

    def answered(self, answer: Answer) -> "Entry":
        """The same, with its conflict settled."""
        return self._merged() if answer == "merge" else replace(self, status=answer)

    def _merged(self) -> "Entry":
        """The same with edits and template joined; a conflict still where that cannot be."""
        old, base, generated = self.old, self.base, self.generated
        if not self.can_merge or old is None or base is None or generated is None:
            return self
        if has_markers(old):
            return replace(self, status="unresolved", new=old, note=UNRESOLVED)
        if base == generated:
            return replace(self, status="edited", new=old)
        merge = merge_texts(base, old, generated)
        yours = counts_text(*line_counts(base, old))
        theirs = counts_text(*line_counts(base, generated))
        merged = replace(
            self,
            status="merged",
            new=merge.text,
            note=f"your {yours} kept, template {theirs} applied",
        )
        if not merge.num_conflicts:
            return merged
        hunks = "hunk" if merge.num_conflicts == 1 else "hunks"
        note = f"{merge.num_conflicts} {hunks} marked {MARKERS}"
        return replace(
            merged, status="marked", note=note, num_conflicts=merge.num_conflicts
        )

    def diff(self) -> str:
        """A unified diff from the file to what the plan would make of it."""
        return diff_texts(self.old, self.new, self.path, self.path)


def diff_texts(before: str | None, after: str | None, name: str, new_name: str) -> str:
    """A unified diff; None is a file that does not exist."""
    lines = unified_diff(
        (before or "").splitlines(keepends=True),
        (after or "").splitlines(keepends=True),
        "/dev/null" if before is None else name,
        "/dev/null" if after is None else new_name,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def line_counts(old: str, new: str) -> tuple[int, int]:
    """How many lines were added and removed on the way from `old` to `new`."""
    added, removed = 0, 0
    for num_removed, num_added in _replacements(old.splitlines(), new.splitlines()):
        added, removed = added + num_added, removed + num_removed
    return added, removed


def _replacements(old: list[str], new: list[str]) -> Iterator[tuple[int, int]]:
    """For each place that differs, how many lines there were and are."""
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for name, start, end, new_start, new_end in matcher.get_opcodes():
        if name != "equal":
            yield end - start, new_end - new_start


def counts_text(added: int, removed: int) -> str:
    """Lines added and removed, for people: `+4 -1`."""
    return (
        " ".join([f"+{added}"] * bool(added) + [f"-{removed}"] * bool(removed)) or "+0"
    )
