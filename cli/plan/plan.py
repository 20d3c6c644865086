"""The plan: what would happen to which file. Every command is a view of one.

Making a plan reads the files that it is about and nothing else; `apply.py` carries it out.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from ..project.header import read_header
from ..project.layer import Layer
from ..project.lock import Lock, LockedFile, LockedLayer, read_lock
from ..project.package_init import add_export
from ..project.target import inside
from ..project.text_file import read_file, read_text
from ..template.catalogue import Catalogue
from ..template.render import render_template
from .entry import UNSETTLED, Answer, Entry, counts_text, line_counts


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

    @property
    def unsettled(self) -> list[Entry]:
        """The files that a person has to look at once the plan is carried out."""
        return [entry for entry in self.entries if entry.status in UNSETTLED]

    def answered(self, answers: Mapping[str, Answer]) -> "Plan":
        """The same, with the conflicts that `answers` names, by path, settled."""
        entries = [
            entry.answered(answers[entry.path])
            if entry.status == "conflict" and entry.path in answers
            else entry
            for entry in self.entries
        ]
        return replace(self, entries=entries)

    def answered_all(self, answer: Answer) -> "Plan":
        """The same, with every conflict settled alike, as far as it can be."""
        return self.answered(dict.fromkeys([e.path for e in self.conflicts], answer))

    def new_lock(self, lock: Lock) -> Lock:
        """`lock` afterwards; it advances for the files that are as generated, alone."""
        recorded = {entry.path for entry in self.entries if entry.is_recorded}
        if not recorded:
            return lock.without(self.layer.key)
        before = lock.layers.get(self.layer.key)
        locked = LockedLayer(
            layer=self.layer,
            template_hash=self._new_hash(before),
            files=_files(before, recorded),
        )
        texts = {
            entry.path: entry.generated
            for entry in self.entries
            if entry.generated is not None
            and (entry.is_written or entry.status == "identical")
        }
        return lock.with_layer(locked.with_texts(texts))

    def _new_hash(self, before: LockedLayer | None) -> str:
        """The template that the files are of; the one of before while one is held back."""
        is_held_back = any(e.status in ("skip", "unresolved") for e in self.entries)
        return before.template_hash if before and is_held_back else self.template_hash


def _files(locked: LockedLayer | None, paths: Set[str]) -> dict[str, LockedFile]:
    """The files of `locked` that are among `paths`."""
    files = locked.files.items() if locked else ()
    return {path: file for path, file in files if path in paths}


_OTHER_GENERATION = "its header names another state of the template than the lock"


def make_plan(
    root: Path, layer: Layer, templates: Catalogue, *, with_export: bool = True
) -> Plan:
    """The plan that generates `layer` under `root`.

    Args:
        root: The project's root.
        layer: The layer.
        templates: The templates.
        with_export: Whether the package's `__init__.py` gets the class's name.

    Raises:
        UsageError: If a file lies outside the root or belongs to another layer, or if the
            package's `__init__.py` cannot take the name.
        TemplateError: If the template does not render.
    """
    lock = read_lock(root)
    template = templates.load(layer.template, layer.source)
    layer = replace(layer, options=template.complete(layer.options))
    texts = render_template(template, layer)
    locked = lock.layers.get(layer.key)
    bases = {path: file.text for path, file in locked.files.items()} if locked else {}
    entries = [_entry(root, layer, lock, path, texts[path]) for path in texts]
    for path in sorted(bases.keys() - texts.keys()):
        entries += obsolete_entry(root, layer, path, bases[path])
    if with_export and "." in layer.import_path:
        entries.append(_export_entry(root, layer))
    return Plan(root, layer, template.content_hash(), entries, lock)


def _entry(root: Path, layer: Layer, lock: Lock, path: str, new: str) -> Entry:
    """The entry of a file that the template writes."""
    owner = lock.owner(path)
    if owner is not None and owner.key != layer.key:
        raise UsageError(
            f"{path} belongs to {owner.class_name}; choose another file with --module NAME"
        )
    locked = lock.layers.get(layer.key)
    base = locked.files[path].text if locked and path in locked.files else None
    entry = Entry(path, "create", None, new, generated=new, base=base)
    file = read_file(inside(root, path))
    if file is None:
        return entry
    entry = replace(entry, old=file.text, newline=file.newline)
    if file.text == new:
        return replace(entry, status="identical")
    note = edit_note(layer, file.text, base)
    if base is not None and is_other_generation(file.text, base):
        entry = replace(entry, base=None)
        note = f"{note}; {_OTHER_GENERATION}" if note else ""
    if not note:
        return replace(entry, status="update")
    can_merge = entry.base is not None and file.is_utf8
    note = note if file.is_utf8 else f"{note}; it is not UTF-8"
    return replace(entry, status="conflict", note=note, can_merge=can_merge)


def is_other_generation(text: str, other: str) -> bool:
    """Whether the headers of two texts say that they were generated from different things.

    Where `other` is the lock's, one of the file and the lock was restored without the
    other. Then the text that the file was edited from is not known, and a merge would undo
    what the template brought since.
    """
    header, recorded = read_header(text), read_header(other)
    if header is None or recorded is None:
        return False
    return header.source != recorded.source


def obsolete_entry(root: Path, layer: Layer, path: str, base: str) -> list[Entry]:
    """The entry of a file that the template no longer writes; none if it is gone."""
    file = read_file(inside(root, path))
    if file is None:
        return []
    note = edit_note(layer, file.text, base)
    why = "the template no longer writes it"
    if not note:
        return [Entry(path, "remove", file.text, None, why, base=base)]
    note = f"{why}; {note}: it is yours now"
    return [Entry(path, "release", file.text, file.text, note, base=base)]


def edit_note(layer: Layer, text: str, base: str | None) -> str:
    """How `text` departs from what was generated; empty if it is as generated.

    Args:
        layer: The layer that it was generated for.
        text: The text of the file.
        base: The text as generated, from the lock; without it, or where the file was
            generated at another time, the header answers.
    """
    if text == base:
        return ""
    if base is not None and not is_other_generation(text, base):
        counts = counts_text(*line_counts(base, text))
        return f"edited since it was generated: {counts}"
    header = read_header(text)
    if header is None:
        return "not generated by torchshard"
    if header.class_name != layer.class_name:
        return f"generated for {header.class_name}"
    return "edited since it was generated" if header.is_edited else ""


def _export_entry(root: Path, layer: Layer) -> Entry:
    path = f"{layer.package}/__init__.py"
    old = read_text(inside(root, path), keep_newlines=True) or ""
    try:
        new = add_export(old, layer.module, layer.class_name)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return Entry(path, "identical" if old == new else "update", old, new)


def plan_update(
    root: Path, templates: Catalogue, names: Sequence[str] = ()
) -> list[Plan]:
    """The plans that bring the layers `names`, or all, up to date; each file by a merge.

    What cannot be merged is still a conflict in them.

    Raises:
        UsageError: If a name is not that of a generated layer.
        TemplateError: If a template does not render.
    """
    lock = read_lock(root)
    found = [lock.find(name) for name in names] if names else lock.layers.values()
    layers = {locked.layer.key: locked.layer for locked in found}
    plans = [
        make_plan(root, layer, templates, with_export=False)
        for layer in layers.values()
    ]
    return [plan.answered_all("merge") for plan in plans]
