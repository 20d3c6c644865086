"""`torchshard check`: drift between the generated files and the templates."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ..errors import TemplateError, UntrustedError
from ..plan.states import FileState, State, check_files
from ..project.alone import settle
from ..project.target import find_root, resolved
from ..screen.show import echo_json, plural, shown_path, status_word, to_json
from ..template.catalogue import Catalogue
from ..template.trust import trust_option


@click.command(short_help="Compare generated files with their templates.")
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
      untrusted, unavailable   its template did not run, so nothing is known of it

    Exit code 0 if nothing drifted, 1 if something did; else 4 if a template is not
    trusted, 3 if one cannot be found.

    \b
    Examples:
      torchshard check
      torchshard check layer_zoo/parallel_linear.py --strict
      torchshard check --json --trust
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    root = find_root(Path())
    settle(root)
    templates: Catalogue = ctx.obj.in_project(root)
    states = check_files(root, templates, [_relative(root, path) for path in paths])
    if as_json:
        echo_json(_states_json(root, states))
    else:
        click.echo("\n".join(_state_lines(root, states)))
    ctx.exit(_exit_code({state.state for state in states}, strict))


def _exit_code(found: set[State], strict: bool) -> int:
    """Drift counts most, then what could not be judged."""
    allowed = {"ok"} if strict else {"ok", "edited"}
    unjudged = {"untrusted": UntrustedError, "unavailable": TemplateError}
    if found - allowed - unjudged.keys():
        return 1
    codes = [error.exit_code for state, error in unjudged.items() if state in found]
    return codes[0] if codes else 0


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
