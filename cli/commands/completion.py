"""`torchshard completion`: the script for a shell, and what completes to what.

Completing reads `cookiecutter.json` and the lock; it renders and imports nothing else.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
)

from ..errors import CliError
from ..project.layer_name import complete_layer
from ..template.catalogue import Catalogue, bundled_templates
from ..template.options import value_text
from ..template.template import Template

VARIABLE = "_TORCHSHARD_COMPLETE"
"""What click looks for in the environment of a program called torchshard."""


@click.command(short_help="Print what lets bash, zsh or fish complete words.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL, one of bash, zsh and fish, complete words.

    Commands, options, the names of templates and layers, and `--set key=value` complete.

    \b
    Examples, which install it. For bash 4.4 or later:
      echo 'source <(torchshard completion bash)' >> ~/.bashrc
    For zsh, below `compinit`:
      echo 'source <(torchshard completion zsh)' >> ~/.zshrc
    For fish:
      torchshard completion fish > ~/.config/fish/completions/torchshard.fish
    Then start a new shell.
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    scripts = get_completion_class(shell)
    assert scripts is not None  # click knows the three
    command = ctx.find_root().command
    click.echo(scripts(command, {}, "torchshard", VARIABLE).source())


class _Bash(BashComplete):
    """click's completion for bash, where `key=value` is one word.

    bash takes it for three, and replaces the last of them alone.
    """

    _before = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that one."""
        words, incomplete = super().get_completion_args()
        joined = _joined([*words, incomplete])
        if len(joined) <= len(words):
            self._before = joined[-1][: joined[-1].rindex("=") + 1]
        return joined[:-1], joined[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        """The line that the script reads."""
        return f"{item.type},{item.value.removeprefix(self._before)}"


add_completion_class(_Bash)


def _joined(words: Sequence[str]) -> list[str]:
    """`words`, where those that bash split at `=` are whole again."""
    joined: list[str] = []
    for word in words:
        is_rest = word == "=" or (joined and joined[-1].endswith("="))
        if joined and is_rest:
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def complete_template(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Templates by name; files and folders where a path is begun."""
    if any(mark in incomplete for mark in "/\\."):
        return [CompletionItem(incomplete, type="file")]
    found = [CompletionItem(one.name, help=one.title) for one in _templates()]
    return _begun(found, incomplete)


def complete_setting(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """`key=value` of the template that is named, or that NAME leads to."""
    template = _named_template(ctx)
    options = template.options.values() if template else ()
    found = [
        CompletionItem(f"{option.name}={value_text(value)}", help=option.help)
        for option in options
        for value in option.listed or (option.default,)
    ]
    return _begun(found, incomplete)


def complete_class(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Layers that were generated here, and the class that each template is made for."""
    names = complete_layer(ctx, param, incomplete)
    found = {name: CompletionItem(name) for name in names}
    for one in _templates():
        found.setdefault(one.class_name, CompletionItem(one.class_name, help=one.title))
    return _begun(found.values(), incomplete)


def _begun(
    items: Iterable[CompletionItem[str]], incomplete: str
) -> list[CompletionItem[str]]:
    return [item for item in items if item.value.startswith(incomplete)]


def _templates() -> list[Template]:
    """All templates here; none where one of them is broken, as there is no place to say so."""
    try:
        return _catalogue().all()
    except CliError:
        return []


def _catalogue() -> Catalogue:
    return Catalogue(bundled_templates()).in_project(Path())


def _named_template(ctx: click.Context) -> Template | None:
    name = ctx.params.get("template")
    # While the value of an option is missing, click leaves NAME among the rest.
    class_name = ctx.params.get("name") or next(iter(ctx.args), "")
    try:
        if name:
            return _catalogue().load(name)
        return _catalogue().infer(class_name)
    except CliError:
        return None
