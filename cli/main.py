"""The commands, in click. What they do lives in the modules beside; so does all logic."""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from .commands.check import check
from .commands.completion import (
    complete_class,
    complete_setting,
    complete_template,
    completion,
)
from .commands.destroy import destroy
from .commands.diff import diff
from .commands.doctor import doctor
from .commands.templates_command import templates
from .commands.update import raise_if_unsettled, update
from .commands.verify import verify
from .errors import UsageError
from .plan.apply import apply_plan
from .plan.entry import Answer
from .plan.new_layer import Request, plan_new_layer
from .plan.plan import Plan
from .project.alone import alone_in, settle
from .project.target import find_target
from .screen import show
from .screen.ask import ask_about_conflicts, conflict_error, is_interactive
from .screen.group import Group
from .screen.interview import confirm, interview, require_terminal
from .template.catalogue import Catalogue, bundled_templates
from .template.trust import trust_option


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"torchshard {version('torchshard')}")
    except PackageNotFoundError:
        click.echo("torchshard, a checkout that is not installed")
    ctx.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Slice PyTorch layers over ranks; generate, check and prove new ones.

    \b
    Examples:
      torchshard new-layer ParallelEmbedding
      torchshard verify parallel_embedding:ParallelEmbedding
      torchshard check
      torchshard doctor
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    ctx.color = False if os.environ.get("NO_COLOR") else None
    ctx.obj = Catalogue(ctx.obj or bundled_templates()).in_project(Path())


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")


class _Folder(click.Path):
    """A folder; no text at all, which a lost shell variable leaves, is not this one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if value == "":
            raise UsageError("--into is empty; a folder is expected")
        return super().convert(value, param, ctx)


@main.command("new-layer", short_help="Generate a sharded layer and its test.")
@click.argument("name", required=False, shell_complete=complete_class)
@click.option(
    "-t",
    "--template",
    shell_complete=complete_template,
    help="Template to use, by name, path or URL; inferred from NAME unless given.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_setting,
    help="Set an option of the template (repeatable).",
)
@click.option(
    "--from",
    "dense",
    metavar="MODULE:CLASS",
    help="Read a module of torch.nn's kind, and start from its sharded form.",
)
@click.option(
    "--shard",
    "shards",
    multiple=True,
    metavar="PARAM=DIM",
    help="With --from: divide that dim, or 'whole' for none (repeatable).",
)
@click.option(
    "--into",
    type=_Folder(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder for the layer: a package, or any other. Default: this one.",
)
@click.option("--module", help="Name of the new module. Default: NAME in snake_case.")
@click.option("--dry-run", is_flag=True, help="Show the plan; write nothing.")
@click.option("--diff", "with_diff", is_flag=True, help="Show the plan as a diff too.")
@click.option("--skip", is_flag=True, help="Keep files that were edited.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited.")
@click.option("--merge", is_flag=True, help="Join your edits and the template's text.")
@click.option(
    "--allow-shadow",
    is_flag=True,
    help="Allow the name of a torch.nn class or builtin.",
)
@click.option(
    "-i", "--interactive", is_flag=True, help="Ask for what is not given, then write."
)
@trust_option
@_json_option
@click.pass_obj
def new_layer(
    templates: Catalogue,
    name: str | None,
    template: str | None,
    settings: tuple[str, ...],
    dense: str | None,
    shards: tuple[str, ...],
    into: Path,
    module: str | None,
    dry_run: bool,
    with_diff: bool,
    skip: bool,
    force: bool,
    merge: bool,
    allow_shadow: bool,
    interactive: bool,
    as_json: bool,
) -> None:
    """Generate the sharded layer NAME, its test and its entry in the package.

    On a terminal, without NAME or with -i, the options are asked for.

    \b
    Examples:
      torchshard new-layer ParallelEmbedding
      torchshard new-layer ParallelEmbedding --set split=vocabulary --into my_package
      torchshard new-layer ParallelGate -t blank --dry-run --diff
      torchshard new-layer ParallelGate --from my_model:Gate
      torchshard new-layer -i
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    if skip + force + merge > 1:
        raise click.UsageError("--skip, --force and --merge exclude each other")
    request = Request(
        class_name=name or "",
        templates=templates,
        template=template,
        settings=settings,
        into=into,
        module=module,
        allow_shadow=allow_shadow,
        dense=dense,
        shards=shards,
    )
    is_asked = interactive or name is None
    if is_asked:
        require_terminal(needs_name=name is None, is_plain=as_json)
        request = interview(request)
    answers: dict[Answer, bool] = {"skip": skip, "overwrite": force, "merge": merge}
    answer = next((name for name, is_given in answers.items() if is_given), None)
    root = find_target(into).root
    settle(root)
    with nullcontext() if dry_run else alone_in(root):
        _generate(request, answer, dry_run, with_diff, as_json, is_asked)


def _generate(
    request: Request,
    answer: Answer | None,
    dry_run: bool,
    with_diff: bool,
    as_json: bool,
    is_asked: bool,
) -> None:
    """Plan, show, ask and apply; `answer` settles every conflict unless it is None."""
    plan = plan_new_layer(request)
    if answer:
        plan = plan.answered_all(answer)
    if not as_json:
        _show_plan(plan, with_diff=with_diff)
        if plan.conflicts and not dry_run and is_interactive():
            plan = ask_about_conflicts(plan)
    if not dry_run and not plan.conflicts:
        if is_asked:
            confirm(plan, _typed_command(request))
        apply_plan(plan)
    if as_json:
        show.echo_json(show.plan_json(plan, is_dry_run=dry_run, with_diff=with_diff))
    elif not plan.conflicts or dry_run:
        click.echo("dry run: nothing written" if dry_run else show.next_step(plan))
        for line in show.left_lines(plan):
            click.echo(line)
    if plan.conflicts and not dry_run:
        raise conflict_error(plan, _typed_command(request))
    if not dry_run:
        raise_if_unsettled([plan])


def _show_plan(plan: Plan, *, with_diff: bool) -> None:
    change = "" if plan.layer.reading else "; -t to change"
    reason = f"   ({plan.reason}{change})" if plan.reason else ""
    click.echo(f"template {plan.layer.template}{reason}")
    for line in show.plan_lines(plan.root, plan.entries):
        click.echo(line)
    if with_diff:
        click.echo(show.plan_diff(plan.entries), nl=False)


def _typed_command(request: Request) -> str:
    """What was typed, without the options that only say how to show it."""
    words = ["torchshard", "new-layer", request.class_name]
    words += ["-t", request.template] if request.template else []
    for setting in request.settings:
        words += ["--set", setting]
    words += ["--from", request.dense] if request.dense else []
    for shard in request.shards:
        words += ["--shard", shard]
    words += ["--into", str(request.into)] if request.into != Path() else []
    words += ["--module", request.module] if request.module else []
    words += ["--allow-shadow"] if request.allow_shadow else []
    words += ["--trust"] if request.templates.trusts_all else []
    return shlex.join(words)


main.add_command(check)
main.add_command(completion)
main.add_command(destroy)
main.add_command(diff)
main.add_command(doctor)
main.add_command(templates)
main.add_command(update)
main.add_command(verify)
