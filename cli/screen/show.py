"""Plans, states and templates as text for people and as JSON for programs."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ..plan.entry import Entry, Status, counts_text
from ..plan.plan import Plan

OWES_JSON = "torchshard.owes_json"
"""Key in click's `meta`: whether JSON was asked for and none was printed yet."""
_COLOURS = {
    "create": "green",
    "update": "green",
    "merged": "green",
    "edited": "yellow",
    "keep": "yellow",
    "overwrite": "yellow",
    "release": "yellow",
    "remove": "yellow",
    "conflict": "red",
    "missing": "red",
    "obsolete": "red",
    "outdated": "red",
    "untrusted": "red",
    "unavailable": "red",
}
# A merge that left markers, and a file that still holds some, are both a conflict to people.
_WORDS: dict[Status, str] = {"marked": "conflict", "unresolved": "conflict"}


def shown_path(root: Path, path: str) -> str:
    """`path` under `root` as one would type it here; absolute if that is elsewhere."""
    here = Path.cwd()
    file = root / path
    if file.is_relative_to(here) or here.is_relative_to(root):
        return os.path.relpath(file, here)
    return str(file)


def plan_lines(root: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each file: what happens to it and by how many lines."""
    paths = {entry.path: shown_path(root, entry.path) for entry in entries}
    width = max(map(len, paths.values()), default=0)
    for entry in entries:
        line = f"{paths[entry.path]:{width}}  {_detail(entry)}".rstrip()
        yield f"  {status_word(_WORDS.get(entry.status, entry.status), 9)}  {line}"


def _detail(entry: Entry) -> str:
    if entry.status in ("merged", "marked"):
        return entry.note
    counts = counts_text(*entry.line_counts) if entry.is_written else ""
    return f"({entry.note})" if entry.note else counts


def status_word(word: str, width: int) -> str:
    """`word`, as wide as that and in its colour."""
    return click.style(f"{word:{width}}", fg=_COLOURS.get(word))


def plan_diff(entries: Sequence[Entry]) -> str:
    """The unified diff of every file that the plan changes or would like to."""
    return "".join(entry.diff() for entry in entries if entry.old != entry.new)


def next_step(plan: Plan) -> str:
    """How many files were written or kept, and what to run now."""
    done = done_line(plan.entries)
    tests = [
        entry.path
        for entry in plan.entries
        if Path(entry.path).name.startswith("test_") and entry.new is not None
    ]
    paths = " ".join(shlex.quote(shown_path(plan.root, path)) for path in tests)
    # A package that is not installed is found from here by `python -m` alone.
    pytest = "python -m pytest" if "." in plan.layer.import_path else "pytest"
    return f"{done}. Next: {pytest} {paths}" if tests and plan.written else done


def done_line(entries: Sequence[Entry]) -> str:
    """How many files were written, removed and kept."""
    kept = sum(entry.status in ("skip", "keep", "release") for entry in entries)
    removed = sum(entry.status == "remove" for entry in entries)
    written = sum(entry.is_written for entry in entries)
    parts = [f"{plural(written, 'file')} written"] * bool(written)
    parts += [f"{plural(removed, 'file')} removed"] * bool(removed)
    parts = parts or ["nothing to write"]
    return ", ".join(parts + [f"{kept} kept"] * bool(kept))


def left_lines(plan: Plan) -> Iterator[str]:
    """What the first sharded form of a dense class leaves to a person, in words."""
    for place, remark in enumerate(plan.layer.reading.get("remarks", [])):
        yield f"{'Left to you:' if place == 0 else '':12} {remark}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plan_json(plan: Plan, *, is_dry_run: bool, with_diff: bool) -> str:
    """The plan for programs; paths are relative to `root`."""
    is_written = not is_dry_run and not plan.conflicts
    root = str(plan.root)
    return to_json(
        {**_plan_fields(plan, with_diff), "root": root, "written": is_written}
    )


def plans_json(
    root: Path, plans: Sequence[Plan], *, is_dry_run: bool, with_diff: bool
) -> str:
    """The plans of several layers for programs; paths are relative to `root`."""
    layers = [_plan_fields(plan, with_diff) for plan in plans]
    return to_json({"root": str(root), "layers": layers, "written": not is_dry_run})


def _plan_fields(plan: Plan, with_diff: bool) -> dict[str, Any]:
    remarks = plan.layer.reading.get("remarks")
    return {
        "layer": plan.layer.class_name,
        "import": plan.layer.import_path,
        "template": plan.layer.template,
        "template_hash": plan.template_hash,
        "options": dict(plan.layer.options),
        "files": [_entry_fields(entry, with_diff) for entry in plan.entries],
        **({} if remarks is None else {"left": remarks}),
    }


def _entry_fields(entry: Entry, with_diff: bool) -> dict[str, Any]:
    added, removed = entry.line_counts
    fields: dict[str, Any] = {"path": entry.path, "status": entry.status}
    fields |= {"added": added, "removed": removed, "note": entry.note}
    return fields | ({"diff": entry.diff()} if with_diff else {})


def error_json(message: str, exit_code: int) -> str:
    """An error for programs."""
    return to_json({"error": message, "exit_code": exit_code})


def echo_json(text: str) -> None:
    """Print the JSON of a command, of which there is one, also if an error follows."""
    click.echo(text)
    click.get_current_context().meta[OWES_JSON] = False


def to_json(fields: object) -> str:
    """JSON for programs."""
    return json.dumps(fields, indent=2, ensure_ascii=False)
