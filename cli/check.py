"""`torchshard check`: how the files on disk stand to the templates.

A pure function of the tree and of the installed templates: everything is rendered every
time and compared whole; no versions, dates or hashes are trusted instead.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .apply import apply_plan
from .catalogue import Catalogue
from .errors import UsageError
from .header import read_header
from .layer import Layer
from .lock import LOCK_PATH, Lock, LockedLayer, read_lock
from .plan import counts_text, edit_note, line_counts, make_plan, read_text
from .render import render_layer
from .target import inside

State = Literal["ok", "edited", "outdated", "missing"]


@dataclass(frozen=True)
class FileState:
    """How one generated file stands.

    Attributes:
        path: Posix path relative to the root.
        state: `outdated` if its template gives another text now, whether or not it was
            edited too; `edited` if only its text changed.
        layer: Key of the layer that it belongs to.
        note: What changed.
        remedy: The command that mends it; empty where it takes a person.
    """

    path: str
    state: State
    layer: str
    note: str = ""
    remedy: str = ""


def check_files(
    root: Path, templates: Catalogue, paths: Sequence[str] = ()
) -> list[FileState]:
    """The state of every generated file under `root`, or of `paths` alone.

    Raises:
        UsageError: If one of `paths` is not a generated file.
        TemplateError: If a template does not render.
    """
    states = list(_all_states(root, read_lock(root), templates))
    unknown = set(paths) - {state.path for state in states}
    if unknown:
        raise UsageError(
            f"{min(unknown)} is not in {LOCK_PATH}, so it was not generated here"
        )
    return [state for state in states if not paths or state.path in paths]


def _all_states(root: Path, lock: Lock, templates: Catalogue) -> Iterator[FileState]:
    for locked in lock.layers.values():
        rendered = render_layer(locked.layer, templates)
        for path in {**rendered, **locked.files}:
            yield _state(root, locked, path, rendered.get(path))


def _state(root: Path, locked: LockedLayer, path: str, new: str | None) -> FileState:
    key = locked.layer.key
    remedy = f"torchshard {_command(locked.layer)}"
    text = read_text(inside(root, path))
    base = locked.files[path].text if path in locked.files else None
    if new is None:
        return FileState(path, "outdated", key, "the template no longer writes it")
    if text == new:
        return FileState(path, "ok", key)
    if text is None:
        return FileState(path, "missing", key, remedy=remedy)
    edited = edit_note(locked.layer, text, base)
    if base == new:
        added, removed = line_counts(base, text)
        return FileState(path, "edited", key, counts_text(added, removed))
    if base is None:
        return FileState(path, "edited", key, edited)
    changed = f"{_what_changed(base, new)}: {counts_text(*line_counts(base, new))}"
    if edited:
        return FileState(
            path, "outdated", key, f"{changed}, {edited}", f"{remedy} --diff"
        )
    return FileState(path, "outdated", key, changed, remedy)


def _what_changed(base: str, new: str) -> str:
    """Why `new` is rendered now where `base` was, as their headers tell."""
    before, after = read_header(base), read_header(new)
    if before and after and before.template_hash == after.template_hash:
        return "options changed"
    return "template changed"


def _command(layer: Layer) -> str:
    into = "" if layer.package == "." else f" --into {shlex.quote(layer.package)}"
    return f"new-layer {layer.class_name}{into}"


def fix_files(root: Path, templates: Catalogue) -> list[str]:
    """Write again every file that is missing, or outdated and not edited.

    Returns:
        The paths that were written, relative to `root`.
    """
    written = []
    for locked in read_lock(root).layers.values():
        plan = make_plan(root, locked.layer, templates).answered_all("skip")
        apply_plan(plan)
        written += [entry.path for entry in plan.written]
    return written
