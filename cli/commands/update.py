"""`torchshard update`: the template's changes join the user's, file by file.

The text of each file as it was generated is in the lock, so no old template is rendered
again, and neither git nor a clean working tree is asked for.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from ..errors import ConflictError, UsageError
from ..plan.apply import apply_plan
from ..plan.plan import Plan, plan_update
from ..project.alone import alone_in, settle
from ..project.layer_name import complete_layer
from ..project.target import find_root
from ..screen import show
from ..template.catalogue import Catalogue
from ..template.trust import trust_option


@click.command(short_help="Take the changes of the templates, your edits kept.")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_layer)
@click.option("--all", "is_all", is_flag=True, help="Update every generated layer.")
@click.option("--dry-run", is_flag=True, help="Show the plan; write nothing.")
@click.option("--diff", "with_diff", is_flag=True, help="Show the plan as a diff too.")
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_obj
def update(
    templates: Catalogue,
    names: tuple[str, ...],
    is_all: bool,
    dry_run: bool,
    with_diff: bool,
    as_json: bool,
) -> None:
    """Take the changes of the templates into the files of the layers NAME.

    A file that was not edited takes the template's text, and one that is missing comes
    back. One that was edited keeps the edits; where the template changed the same lines,
    both stand in the file, between conflict markers. A file that the template no longer
    writes is removed, or kept and yours from now on if it was edited.

    Exit code 0 if all is up to date now, 1 if a file needs you; 0 for a dry run.

    \b
    Examples:
      torchshard update ParallelLinear
      torchshard update --all --dry-run --diff
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    if bool(names) == is_all:
        raise UsageError("name the layers to update, or pass --all")
    root = find_root(Path())
    settle(root)
    with nullcontext() if dry_run else alone_in(root):
        plans = plan_update(root, templates.in_project(root), names)
        _run(root, plans, dry_run, with_diff, as_json)


def _run(
    root: Path, plans: Sequence[Plan], dry_run: bool, with_diff: bool, as_json: bool
) -> None:
    """Show the plans and apply them; what cannot be merged stays as it is."""
    entries = [entry for plan in plans for entry in plan.entries]
    shown = [entry for entry in entries if entry.status != "identical"]
    if not as_json:
        click.echo(
            "".join(f"{line}\n" for line in show.plan_lines(root, shown)), nl=False
        )
        click.echo(show.plan_diff(shown) if with_diff else "", nl=False)
    if plans and not dry_run:
        apply_plan(*(plan.answered_all("skip") for plan in plans))
    if as_json:
        show.echo_json(
            show.plans_json(root, plans, is_dry_run=dry_run, with_diff=with_diff)
        )
    else:
        click.echo("dry run: nothing written" if dry_run else show.done_line(entries))
    if not dry_run:
        raise_if_unsettled(plans)


def raise_if_unsettled(plans: Sequence[Plan]) -> None:
    """Say how many files are left to a person.

    Raises:
        ConflictError: If there are any.
    """
    unsettled = [entry for plan in plans for entry in plan.unsettled]
    if not unsettled:
        return
    needs = "needs" if len(unsettled) == 1 else "need"
    raise ConflictError(f"{show.plural(len(unsettled), 'file')} {needs} you")
