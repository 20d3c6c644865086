"""`torchshard templates`: show what can be generated, and make templates of one's own."""

from collections.abc import Iterable
from pathlib import Path

import click

from ..errors import UsageError
from ..project.alone import alone_in
from ..screen.show import plural, shown_path
from ..screen.show_templates import (
    divisions_of,
    template_json,
    template_lines,
    templates_json,
    templates_lines,
)
from ..template.catalogue import OWN, Catalogue
from ..template.new_template import (
    check_template_name,
    copied_files,
    overriding_file,
    write_folder,
    write_override,
)
from ..template.template import BUNDLED
from .completion import complete_template
from .templates_test import templates_test


@click.group()
def templates() -> None:
    """Show what can be generated, and make templates of your own.

    \b
    Examples:
      torchshard templates list
      torchshard templates show embedding
      torchshard templates new mine --from linear
      torchshard templates override linear module.py
      torchshard templates test mine --trust
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")


@templates.command("list", short_help="List the templates there are.")
@_json_option
@click.pass_obj
def templates_list(catalogue: Catalogue, as_json: bool) -> None:
    """List the templates: bundled ones, and those in .torchshard/templates.

    \b
    Examples:
      torchshard templates list
      torchshard templates list --json
    """  # noqa: D301  # as above
    found = catalogue.all()
    if as_json:
        click.echo(templates_json(found))
    else:
        _echo_all(templates_lines(found))


@templates.command("show", short_help="Describe a template and its options.")
@click.argument("name", shell_complete=complete_template)
@_json_option
@click.pass_obj
def templates_show(catalogue: Catalogue, name: str, as_json: bool) -> None:
    """Describe the template NAME, or the one at a path or URL, and its options.

    \b
    Examples:
      torchshard templates show embedding
      torchshard templates show ./templates/mine
      torchshard templates show https://example.org/mine.git
    """  # noqa: D301  # as above
    template = catalogue.read(name)
    divisions = divisions_of(template)
    if as_json:
        click.echo(template_json(template, divisions))
    else:
        _echo_all(template_lines(template, divisions))


@templates.command("new", short_help="Copy a template, to make it yours.")
@click.argument("name")
@click.option(
    "--from",
    "base",
    required=True,
    metavar="BASE",
    shell_complete=complete_template,
    help="Template to copy: a name, or a path or URL.",
)
@click.pass_obj
def templates_new(catalogue: Catalogue, name: str, base: str) -> None:
    """Copy a template into .torchshard/templates/NAME, to edit it.

    The partials that it imports come with it, so it can move to a repository of its own.

    \b
    Examples:
      torchshard templates new mine --from linear
      torchshard templates new mine --from https://example.org/theirs.git
    """  # noqa: D301  # as above
    check_template_name(name, catalogue)
    template = catalogue.read(base)
    if template.needs_reading:
        raise UsageError(
            f"template '{base}' is rendered by `torchshard new-layer --from` alone, so a "
            f"copy would be by nothing; change files of it: torchshard templates "
            f"override {base} FILE"
        )
    files = copied_files(template, name)
    folder = _own(catalogue) / name
    with alone_in(_root(catalogue)):
        write_folder(folder, {path: file.content for path, file in files.items()})
    for path in sorted(files):
        click.echo(f"  create  {shown_path(folder, path)}")
    click.echo(
        f"{plural(len(files), 'file')} written. Edit them. "
        f"Next: torchshard templates test {name} --trust"
    )


@templates.command("override", short_help="Replace one file of a template.")
@click.argument("name", shell_complete=complete_template)
@click.argument("file")
@click.pass_obj
def templates_override(catalogue: Catalogue, name: str, file: str) -> None:
    """Copy the one FILE of the bundled template NAME, to have yours in its place.

    `torchshard templates show NAME` lists the files. All else stays torchshard's, and
    follows its changes.

    \b
    Examples:
      torchshard templates override linear module.py
      torchshard templates override linear layer_test.j2
    """  # noqa: D301  # as above
    template = catalogue.load(name)
    if template.origin != BUNDLED:
        raise UsageError(f"'{name}' is your own template; edit it in {OWN}/{name}")
    path = overriding_file(template, file)
    with alone_in(_root(catalogue)):
        write_override(_own(catalogue), f"{name}/{path}", template.files[path].content)
    click.echo(f"  create  {shown_path(_own(catalogue) / name, path)}")
    click.echo(
        f"1 file written. Edit it. Next: torchshard templates test {name} --trust"
    )


templates.add_command(templates_test)


def _own(catalogue: Catalogue) -> Path:
    """The folder of the project's own templates, whether or not it is there."""
    return catalogue.own or _root(catalogue) / OWN


def _root(catalogue: Catalogue) -> Path:
    """The project's root: where its templates are, or else its lock, or else here."""
    if catalogue.own:
        return catalogue.own.parent.parent
    here = catalogue.root
    return next(
        (one for one in (here, *here.parents) if (one / ".torchshard").is_dir()), here
    )


def _echo_all(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
