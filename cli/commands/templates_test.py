"""`torchshard templates test`: every choice of a template, rendered and tested."""

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import CliError, UsageError
from ..screen.show import echo_json, plural
from ..template.catalogue import Catalogue
from ..template.template import Template
from ..template.trial import Outcome, Variant, try_variant, variants
from ..template.trust import require_trust, trust_option
from .completion import complete_template


class TrialError(CliError, AssertionError):
    """Something that a template generates is not right."""


class _WithRest(click.Command):
    """A command that keeps what follows `--` for another program, in `ctx.meta`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the rest away before anything is made of it."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_REST] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST_ARGUMENTS]"]


_REST = "torchshard.rest"


@click.command(
    "test", cls=_WithRest, short_help="Render every choice, and run its tests."
)
@click.argument("name", required=False, shell_complete=complete_template)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_context
def templates_test(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Render every choice of the template NAME, and run the tests of each.

    Without NAME all templates in .torchshard/templates are tried. Each rendering must be
    valid Python without left-overs, clean for ruff where that is installed, and its own
    tests must pass. What follows `--` goes to pytest.

    \b
    Examples:
      torchshard templates test mine --trust
      torchshard templates test linear -- -x -k compiles
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    if importlib.util.find_spec("pytest") is None:
        raise UsageError("pytest is not installed; install it: pip install pytest")
    outcomes = {
        template.name: _try(template, ctx.meta[_REST])
        for template in _chosen(ctx.obj, name)
    }
    _report(outcomes, as_json)


def _chosen(catalogue: Catalogue, name: str | None) -> list[Template]:
    """The templates to try; all of them may run."""
    names = catalogue.own_names()
    if name is None and not names:
        raise UsageError(
            "this project has no templates of its own; name one: "
            "torchshard templates test NAME  (see: torchshard templates list)"
        )
    chosen = [catalogue.pick(name)] if name else [catalogue.load(one) for one in names]
    for template in chosen:
        require_trust(template)
        if template.needs_reading:
            raise UsageError(
                f"template '{template.name}' renders what `torchshard new-layer NAME "
                "--from MODULE:CLASS` reads; generate a layer and run its test"
            )
    return chosen


def _try(template: Template, pytest_arguments: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for variant in _with_progress(template, list(variants(template))):
        with tempfile.TemporaryDirectory(prefix="torchshard-") as folder:
            outcomes.append(
                try_variant(template, variant, Path(folder), pytest_arguments)
            )
    return outcomes


def _with_progress(template: Template, chosen: list[Variant]) -> Iterator[Variant]:
    """The variants, with a bar on a terminal that says which one it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    with Progress(
        text,
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(template.name, total=len(chosen))
        for variant in chosen:
            progress.update(task, description=f"{template.name}: {variant.choice}")
            yield variant
            progress.advance(task)


def _report(outcomes: dict[str, list[Outcome]], as_json: bool) -> None:
    """Print the table, then all that is wrong.

    Raises:
        TrialError: If something is.
    """
    tried = [one for found in outcomes.values() for one in found]
    wrong = [one for one in tried if one.problems]
    if as_json:
        fields = {name: [vars(one) for one in all_] for name, all_ in outcomes.items()}
        echo_json(json.dumps(fields, indent=2))
    else:
        _show_table(outcomes)
        for one in wrong:
            click.echo(f"\n{one.choice}:")
            click.echo("\n".join(one.problems))
    if wrong:
        raise TrialError(f"{len(wrong)} of {plural(len(tried), 'rendering')} failed")
    if not as_json:
        click.echo(f"{plural(len(tried), 'rendering')} passed")


def _show_table(outcomes: dict[str, list[Outcome]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("template", "choice", "files", "ruff", "tests", "seconds", ""):
        justify: Any = "right" if title in ("files", "seconds") else "left"
        table.add_column(title, justify=justify, no_wrap=True)
    for name, found in outcomes.items():
        for one in found:
            mark = "[red]failed" if one.problems else "[green]ok"
            cells = (name, one.choice, str(one.files), one.ruff, one.tests)
            table.add_row(*cells, f"{one.seconds:.1f}", mark)
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
