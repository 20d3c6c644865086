"""Whose templates may run. A template is code, as a `conftest.py` is: Jinja can call what it
likes, and hooks are programs. Bundled ones came with torchshard; any other runs only if the
person who runs the command says so, and says it outside the tree.

For one command: `--trust`. For good: the environment variable `TORCHSHARD_TRUST`, a list of
folders. Nothing inside a project counts, neither its lock nor its settings, since a project
that someone else made would vouch for itself.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UntrustedError

if TYPE_CHECKING:
    from .template import Template

VARIABLE = "TORCHSHARD_TRUST"


def _trust(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.obj = ctx.obj.trusting()


trust_option = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Run templates that are not bundled, and their hooks: they are code.",
)
"""`--trust`, for every command that renders; the catalogue in `ctx.obj` then trusts all."""


def is_trusted_folder(folder: Path) -> bool:
    """Whether `folder` lies in one that the environment says to trust."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    trusted = [Path(name).resolve() for name in named if Path(name).is_absolute()]
    return any(folder.resolve().is_relative_to(one) for one in trusted)


def untrusted(what: str) -> UntrustedError:
    """The error for a template that may not run; `what` says which, as a sentence."""
    return UntrustedError(
        f"{what}, and was not run.\n"
        "  A template is code: Jinja can run anything, and hooks are programs. Read it, "
        "then\n"
        "  trust it for this command:  --trust\n"
        f"  trust its project for good: export {VARIABLE}=/path/of/the/project"
    )


def require_trust(template: "Template") -> None:
    """Accept `template` for rendering.

    Raises:
        UntrustedError: If nobody said that its code may run.
    """
    if template.is_trusted:
        return
    short_names = template.short_names()
    files = ", ".join(short_names[path] for path in template.overridden)
    raise untrusted(
        f"template '{template.name}' has files of the project's own ({files})"
        if files
        else f"template '{template.name}' comes from {template.origin}"
    )
