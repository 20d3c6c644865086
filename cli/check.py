"""`torchshard check`: drift between the generated files and the templates."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from .alone import settle
from .catalogue import Catalogue
from .show import echo_json, plural, shown_path, status_word, to_json
from .states import FileState, check_files
from .target import find_root, resolved
from .trust import trust_option


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Fail on edited files too.")
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_context
def check(
    ctx: click.Context, paths: tuple[Path, ...], strict: bool, as_json: bool
) -> None:
    """Compare generated files (PATHS, or all) with their templates.

    \b
      ok        as the template gives it now
      edited    by you, and the template has nothing new; allowed
      outdated  the template gives another text now
      missing   the template writes it, and it is not there
      obsolete  the template no longer writes it
      conflict  it holds conflict markers of an update

    Exit code 0 if nothing drifted, 1 if something did.
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    root = find_root(Path())
    settle(root)
    templates: Catalogue = ctx.obj.in_project(root)
    states = check_files(root, templates, [_relative(root, path) for path in paths])
    if as_json:
        echo_json(_states_json(root, states))
    else:
        click.echo("\n".join(_state_lines(root, states)))
    allowed = ("ok",) if strict else ("ok", "edited")
    ctx.exit(1 if any(state.state not in allowed for state in states) else 0)


def _relative(root: Path, path: Path) -> str:
    file = resolved(path.parent) / path.name
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(path)


def _state_lines(root: Path, states: Sequence[FileState]) -> Iterator[str]:
    """A line for each file, and one with the totals."""
    paths = {state.path: shown_path(root, state.path) for state in states}
    width = max(map(len, paths.values()), default=0)
    for state in states:
        allowed = "(allowed; --strict fails on this)" if state.state == "edited" else ""
        run = f"run: {state.remedy}" if state.remedy else ""
        parts = [f"{paths[state.path]:{width}}", state.note, allowed, run]
        line = "  ".join(part for part in parts if part).rstrip()
        yield f"{status_word(state.state, 8)}  {line}"
    counts = Counter(state.state for state in states if state.state != "ok")
    totals = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    yield totals or f"{plural(len(states), 'file')} as generated"


def _states_json(root: Path, states: Sequence[FileState]) -> str:
    """The states for programs; paths are relative to `root`."""
    return to_json({"root": str(root), "files": [vars(state) for state in states]})
