"""The plan: what would happen to which file. Every command is a view of one.

Making a plan reads the files that it is about and nothing else; `apply.py` carries it out.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .catalogue import Catalogue
from .errors import UsageError
from .header import read_header
from .layer import Layer
from .lock import Lock, LockedLayer, read_lock
from .package_init import add_export
from .render import render_template
from .target import inside

Status = Literal["create", "identical", "update", "conflict", "skip", "overwrite"]
WRITTEN: tuple[Status, ...] = ("create", "update", "overwrite")


@dataclass(frozen=True)
class Entry:
    """One file of a plan.

    Attributes:
        path: Posix path relative to the root.
        status: What happens to it. `conflict` is a question; `skip` and `overwrite` are its
            answers.
        old: Its text now; None if it does not exist.
        new: Its text afterwards, unless it is skipped.
        note: Why it is a conflict.
        is_generated: Whether all of it comes from the template.
    """

    path: str
    status: Status
    old: str | None
    new: str
    note: str = ""
    is_generated: bool = True

    @property
    def is_written(self) -> bool:
        """Whether applying the plan writes it."""
        return self.status in WRITTEN

    @property
    def line_counts(self) -> tuple[int, int]:
        """Lines added and lines removed."""
        return line_counts(self.old or "", self.new)

    def diff(self) -> str:
        """A unified diff from the file to what the plan would write."""
        before = "/dev/null" if self.old is None else self.path
        lines = difflib.unified_diff(
            (self.old or "").splitlines(keepends=True),
            self.new.splitlines(keepends=True),
            before,
            self.path,
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def line_counts(old: str, new: str) -> tuple[int, int]:
    """How many lines were added and removed on the way from `old` to `new`."""
    lines = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    added = sum(line.startswith("+ ") for line in lines)
    removed = sum(line.startswith("- ") for line in lines)
    return added, removed


@dataclass(frozen=True)
class Plan:
    """What a layer needs.

    Attributes:
        root: The project's root.
        layer: The layer.
        template_hash: Content hash of its template.
        entries: The files, in the order in which they are shown.
        lock: The lock as it is on disk.
        reason: How the template was found; empty if it was named.
    """

    root: Path
    layer: Layer
    template_hash: str
    entries: Sequence[Entry]
    lock: Lock
    reason: str = ""

    @property
    def conflicts(self) -> list[Entry]:
        """The files that need an answer before the plan can be carried out."""
        return [entry for entry in self.entries if entry.status == "conflict"]

    @property
    def written(self) -> list[Entry]:
        """The files that it writes."""
        return [entry for entry in self.entries if entry.is_written]

    def answered(self, answers: Mapping[str, Status]) -> "Plan":
        """The same, with the conflicts that `answers` names, by path, settled."""
        entries = [
            replace(entry, status=answers.get(entry.path, entry.status))
            for entry in self.entries
        ]
        return replace(self, entries=entries)

    def answered_all(self, answer: Status) -> "Plan":
        """The same, with every conflict settled alike."""
        return self.answered({entry.path: answer for entry in self.conflicts})

    def new_lock(self) -> Lock:
        """The lock afterwards; it advances for the files that are as generated, alone."""
        generated = [entry for entry in self.entries if entry.is_generated]
        before = self.lock.layers.get(self.layer.key)
        paths = {entry.path for entry in generated}
        kept = before.files if before else {}
        locked = LockedLayer(
            layer=self.layer,
            template_hash=self.template_hash,
            files={path: file for path, file in kept.items() if path in paths},
        )
        texts = {
            entry.path: entry.new
            for entry in generated
            if entry.is_written or entry.status == "identical"
        }
        return self.lock.with_layer(locked.with_texts(texts))


def make_plan(root: Path, layer: Layer, templates: Catalogue) -> Plan:
    """The plan that generates `layer` under `root`.

    Raises:
        UsageError: If a file lies outside the root or belongs to another layer, or if the
            package's `__init__.py` cannot take the name.
        TemplateError: If the template does not render.
    """
    lock = read_lock(root)
    template = templates.load(layer.template, layer.source)
    layer = replace(layer, options=template.complete(layer.options))
    texts = render_template(template, layer)
    entries = [_entry(root, layer, lock, path, texts[path]) for path in texts]
    if "." in layer.import_path:
        entries.append(_export_entry(root, layer))
    return Plan(root, layer, template.content_hash(), entries, lock)


def _entry(root: Path, layer: Layer, lock: Lock, path: str, new: str) -> Entry:
    owner = lock.owner(path)
    if owner is not None and owner.key != layer.key:
        raise UsageError(
            f"{path} belongs to {owner.class_name}; choose another file with --module NAME"
        )
    old = read_text(inside(root, path))
    if old is None:
        return Entry(path, "create", None, new)
    if old == new:
        return Entry(path, "identical", old, new)
    locked = lock.layers.get(layer.key)
    base = locked.files[path].text if locked and path in locked.files else None
    note = edit_note(layer, old, base)
    return Entry(path, "conflict" if note else "update", old, new, note)


def edit_note(layer: Layer, text: str, base: str | None) -> str:
    """How `text` departs from what was generated; empty if it is as generated.

    Args:
        layer: The layer that it was generated for.
        text: The text of the file.
        base: The text as generated, from the lock; without it the header answers.
    """
    if base is not None:
        added, removed = line_counts(base, text)
        edited = "edited since it was generated: "
        return "" if text == base else f"{edited}{counts_text(added, removed)}"
    header = read_header(text)
    if header is None:
        return "not generated by torchshard"
    if header.class_name != layer.class_name:
        return f"generated for {header.class_name}"
    return "edited since it was generated" if header.is_edited else ""


def counts_text(added: int, removed: int) -> str:
    """Lines added and removed, for people: `+4 -1`."""
    return (
        " ".join([f"+{added}"] * bool(added) + [f"-{removed}"] * bool(removed)) or "+0"
    )


def _export_entry(root: Path, layer: Layer) -> Entry:
    path = f"{layer.package}/__init__.py"
    old = read_text(inside(root, path), keep_newlines=True) or ""
    try:
        new = add_export(old, layer.module, layer.class_name)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    status: Status = "identical" if old == new else "update"
    return Entry(path, status, old, new, is_generated=False)


def read_text(path: Path, *, keep_newlines: bool = False) -> str | None:
    """The text of a file; None if there is none.

    Bytes that are not UTF-8 become marks, so such a file never equals a generated one.

    Raises:
        UsageError: If it cannot be read, or if it has to be kept as it is and is not UTF-8.
    """
    try:
        content = path.read_bytes()
        text = content.decode(errors="strict" if keep_newlines else "replace")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return text if keep_newlines else text.replace("\r\n", "\n")
