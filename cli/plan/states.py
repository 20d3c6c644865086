"""How the files on disk stand to the templates.

A pure function of the tree and of the installed templates: everything is rendered every
time and compared whole; no versions, dates or hashes are trusted instead. It is the plan
of an update, read as what is and not as what to do.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import UnavailableError, UntrustedError, UsageError
from ..project.header import read_header
from ..project.layer import Layer
from ..project.lock import LOCK_PATH, Lock, LockedLayer, read_lock
from ..project.target import inside
from ..template.catalogue import Catalogue
from .entry import Entry, counts_text, line_counts
from .plan import Plan, is_other_generation, plan_update

State = Literal[
    "ok",
    "edited",
    "outdated",
    "missing",
    "obsolete",
    "conflict",
    "untrusted",
    "unavailable",
]


@dataclass(frozen=True)
class FileState:
    """How one generated file stands.

    Attributes:
        path: Posix path relative to the root.
        state: `outdated` if its template gives another text now, whether or not it was
            edited too; `edited` if only its text changed; `obsolete` if the template no
            longer writes it; `conflict` if it holds conflict markers. `untrusted` and
            `unavailable` if the template was not run, so that nothing is known.
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
    lock = read_lock(root)
    states = [
        state for key in lock.layers for state in _states(root, templates, lock, key)
    ]
    unknown = set(paths) - {state.path for state in states}
    if unknown:
        raise UsageError(
            f"{min(unknown)} is not in {LOCK_PATH}, so it was not generated here"
        )
    return [state for state in states if not paths or state.path in paths]


def _states(
    root: Path, templates: Catalogue, lock: Lock, key: str
) -> Iterator[FileState]:
    """The states of one layer's files."""
    try:
        (plan,) = plan_update(root, templates, [key])
    except UntrustedError as error:
        yield from _unjudged(root, lock.layers[key], "untrusted", str(error))
    except UnavailableError as error:
        yield from _unjudged(root, lock.layers[key], "unavailable", str(error))
    else:
        name = lock.short_name(plan.layer)
        for entry in plan.entries:
            state = _state(plan, entry, name)
            is_short = bool(state.remedy) and templates.trusts_all
            yield (
                replace(state, remedy=f"{state.remedy} --trust") if is_short else state
            )


def _unjudged(
    root: Path, locked: LockedLayer, state: State, error: str
) -> Iterator[FileState]:
    """The states of files whose template did not run, for the reason `error` begins with."""
    remedy = "torchshard check --trust" if state == "untrusted" else ""
    for path in locked.files:
        if inside(root, path).exists():
            note = error.splitlines()[0]
            yield FileState(path, state, locked.layer.key, note, remedy)
        else:
            yield FileState(path, "missing", locked.layer.key)


def _state(plan: Plan, entry: Entry, name: str) -> FileState:
    """What an update would do to a file, as what it stands like now."""
    state = _state_word(entry)
    is_ours = state in ("missing", "obsolete", "outdated")
    remedy = f"torchshard update {name}" if is_ours else ""
    if state == "outdated" and entry.status == "conflict":
        remedy = f"torchshard {_new_layer_command(plan.layer)} --diff"
    return FileState(entry.path, state, plan.layer.key, _note(entry, state), remedy)


def _state_word(entry: Entry) -> State:
    match entry.status:
        case "identical":
            return "ok"
        case "create":
            return "missing"
        case "remove" | "release":
            return "obsolete"
        case "unresolved":
            return "conflict"
        case "edited":
            return "edited"
        case "conflict":
            return "outdated" if _is_behind(entry) else "edited"
        case _:
            return "outdated"


def _is_behind(entry: Entry) -> bool:
    """Whether the template has something new for a file that nothing can be merged into."""
    old, base, generated = entry.old or "", entry.base, entry.generated or ""
    return is_other_generation(old, generated) if base is None else base != generated


def _note(entry: Entry, state: State) -> str:
    """What changed, on either side."""
    old, base, generated = entry.old, entry.base, entry.generated
    if old is None or base is None or generated is None:
        return entry.note
    if state == "edited":
        return _counts(base, old)
    if state != "outdated":
        return entry.note
    notes = [f"{_what_changed(base, generated)}: {_counts(base, generated)}"]
    if entry.can_merge:
        notes.append(f"edited since it was generated: {_counts(base, old)}")
    elif entry.note:
        notes.append(entry.note)
    if entry.num_conflicts:
        notes.append("both changed the same lines")
    return ", ".join(notes)


def _counts(before: str, after: str) -> str:
    return counts_text(*line_counts(before, after))


def _what_changed(base: str, new: str) -> str:
    """Why `new` is rendered now where `base` was, as their headers tell."""
    before, after = read_header(base), read_header(new)
    if before and after and before.template_hash == after.template_hash:
        return "options changed"
    return "template changed"


def _new_layer_command(layer: Layer) -> str:
    into = "" if layer.package == "." else f" --into {shlex.quote(layer.package)}"
    return f"new-layer {layer.class_name}{into}"
