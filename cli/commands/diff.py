"""`torchshard diff`: what the user and what the template changed since a file was generated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ..plan.entry import Entry, diff_texts
from ..plan.merge import BEFORE, NOW, YOURS
from ..plan.plan import plan_update
from ..project.alone import settle
from ..project.layer_name import complete_layer
from ..project.target import find_root
from ..screen.show import echo_json, to_json
from ..template.catalogue import Catalogue
from ..template.trust import trust_option


@dataclass(frozen=True)
class Difference:
    """What happened to one file since it was generated, as unified diffs.

    Attributes:
        path: Posix path relative to the root.
        yours: What the user changed. Empty if nothing, or if the text as it was generated
            is not known.
        template: What the template changed since; without that text, what it would change
            in the file.
    """

    path: str
    yours: str
    template: str


@click.command(short_help="Show what you and the templates changed since.")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_layer)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_context
def diff(ctx: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """Show what changed since the files of the layers NAME, or of all, were generated.

    One unified diff from the generated text to yours, and one to what the template gives
    now. Exit code 0 if there is nothing to show, 1 if there is.

    \b
    Examples:
      torchshard diff
      torchshard diff ParallelLinear --json
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    root = find_root(Path())
    settle(root)
    found = differences(root, ctx.obj.in_project(root), names)
    if as_json:
        echo_json(to_json({"root": str(root), "files": [vars(one) for one in found]}))
    else:
        click.echo("".join(one.yours + one.template for one in found), nl=False)
    ctx.exit(1 if found else 0)


def differences(
    root: Path, templates: Catalogue, names: Sequence[str] = ()
) -> list[Difference]:
    """The files of the layers `names`, or of all, that anyone changed since.

    Raises:
        UsageError: If a name is not that of a generated layer.
        TemplateError: If a template does not render.
    """
    plans = plan_update(root, templates, names)
    found = [_difference(entry) for plan in plans for entry in plan.entries]
    return [one for one in found if one.yours or one.template]


def _difference(entry: Entry) -> Difference:
    path, old, base, generated = entry.path, entry.old, entry.base, entry.generated
    now = f"{path} ({NOW})"
    if old == generated:
        return Difference(path, "", "")
    if base is None:
        return Difference(
            path, "", diff_texts(old, generated, f"{path} ({YOURS})", now)
        )
    before = f"{path} ({BEFORE})"
    yours = diff_texts(base, old, before, f"{path} ({YOURS})")
    return Difference(path, yours, diff_texts(base, generated, before, now))
