"""Plans, states and templates as text for people and as JSON for programs."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from .check import FileState
from .plan import Plan, counts_text
from .template import Template

OWES_JSON = "torchshard.owes_json"
"""Key in click's `meta`: whether JSON was asked for and none was printed yet."""
_COLOURS = {
    "create": "green",
    "update": "green",
    "fixed": "green",
    "overwrite": "yellow",
    "edited": "yellow",
    "conflict": "red",
    "outdated": "red",
    "missing": "red",
}


def shown_path(root: Path, path: str) -> str:
    """`path` under `root` as one would type it here; absolute if that is elsewhere."""
    here = Path.cwd()
    file = root / path
    if file.is_relative_to(here) or here.is_relative_to(root):
        return os.path.relpath(file, here)
    return str(file)


def plan_lines(plan: Plan) -> Iterator[str]:
    """A line for each file: what happens to it and by how many lines."""
    paths = {entry.path: shown_path(plan.root, entry.path) for entry in plan.entries}
    width = max(map(len, paths.values()))
    for entry in plan.entries:
        counts = counts_text(*entry.line_counts) if entry.is_written else ""
        detail = f"({entry.note})" if entry.note else counts
        line = f"{paths[entry.path]:{width}}  {detail}".rstrip()
        yield f"  {_status(entry.status, 9)}  {line}"


def _status(word: str, width: int) -> str:
    return click.style(f"{word:{width}}", fg=_COLOURS.get(word))


def plan_diff(plan: Plan) -> str:
    """The unified diff of every file that the plan changes or would like to."""
    return "".join(entry.diff() for entry in plan.entries if entry.old != entry.new)


def next_step(plan: Plan) -> str:
    """How many files were written or kept, and what to run now."""
    kept = sum(entry.status == "skip" for entry in plan.entries)
    also_kept = f", {kept} kept" if kept else ""
    if not plan.written:
        return f"nothing to write{also_kept}"
    tests = [e.path for e in plan.entries if Path(e.path).name.startswith("test_")]
    paths = " ".join(shlex.quote(shown_path(plan.root, path)) for path in tests)
    following = f" Next: pytest {paths}" if tests else ""
    return f"{plural(len(plan.written), 'file')} written{also_kept}.{following}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plan_json(plan: Plan, *, is_dry_run: bool, with_diff: bool) -> str:
    """The plan for programs; paths are relative to `root`."""
    files = []
    for entry in plan.entries:
        added, removed = entry.line_counts
        file: dict[str, Any] = {"path": entry.path, "status": entry.status}
        file |= {"added": added, "removed": removed, "note": entry.note}
        files.append(file | ({"diff": entry.diff()} if with_diff else {}))
    is_written = not is_dry_run and not plan.conflicts
    return _json(
        {
            "layer": plan.layer.class_name,
            "import": plan.layer.import_path,
            "template": plan.layer.template,
            "template_hash": plan.template_hash,
            "options": dict(plan.layer.options),
            "root": str(plan.root),
            "files": files,
            "written": is_written,
        }
    )


def state_lines(
    root: Path, states: Sequence[FileState], fixed: Sequence[str] = ()
) -> Iterator[str]:
    """A line for each file that was fixed, one for each file, and one with the totals."""
    for path in fixed:
        yield f"{_status('fixed', 8)}  {shown_path(root, path)}"
    paths = {state.path: shown_path(root, state.path) for state in states}
    width = max(map(len, paths.values()), default=0)
    for state in states:
        allowed = "(allowed; --strict fails on this)" if state.state == "edited" else ""
        run = f"run: {state.remedy}" if state.remedy else ""
        parts = [f"{paths[state.path]:{width}}", state.note, allowed, run]
        line = "  ".join(part for part in parts if part).rstrip()
        yield f"{_status(state.state, 8)}  {line}"
    counts = Counter(state.state for state in states if state.state != "ok")
    totals = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    yield totals or f"{plural(len(states), 'file')} as generated"


def states_json(
    root: Path, states: Sequence[FileState], fixed: Sequence[str] = ()
) -> str:
    """The states for programs; paths are relative to `root`."""
    files = [vars(state) for state in states]
    return _json({"root": str(root), "fixed": list(fixed), "files": files})


def template_lines(template: Template) -> Iterator[str]:
    """All that a person needs to know to use a template."""
    yield f"{template.name}: {template.title}"
    rows = [("class_name", "str", "(from the command line)")]
    for option in template.options.values():
        default = json.dumps(option.default) if option.default == "" else option.default
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        rows.append((option.name, f"{option.kind}  [{shown}]", option.help))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, kind, text in rows:
        yield f"  {name:{widths[0]}}  {kind:{widths[1]}}  {text}".rstrip()
    if template.patterns:
        yield f"fits:   {', '.join(template.patterns)}"
    yield f"writes: {', '.join(template.outputs())}"


def template_json(template: Template) -> str:
    """One template for programs."""
    return _json(_template_fields(template))


def templates_lines(templates: Sequence[Template]) -> Iterator[str]:
    """A line for each template."""
    width = max((len(template.name) for template in templates), default=0)
    for template in templates:
        yield f"{template.name:{width}}  {template.title}".rstrip()


def templates_json(templates: Sequence[Template]) -> str:
    """All templates for programs."""
    return _json([_template_fields(template) for template in templates])


def _template_fields(template: Template) -> dict[str, Any]:
    options = [vars(option) for option in template.options.values()]
    return {
        "name": template.name,
        "title": template.title,
        "names": list(template.patterns),
        "options": options,
        "writes": template.outputs(),
    }


def error_json(message: str, exit_code: int) -> str:
    """An error for programs."""
    return _json({"error": message, "exit_code": exit_code})


def echo_json(text: str) -> None:
    """Print the JSON of a command, of which there is one, also if an error follows."""
    click.echo(text)
    click.get_current_context().meta[OWES_JSON] = False


def _json(fields: object) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False)
