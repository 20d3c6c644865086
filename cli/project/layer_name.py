"""The names of generated layers, for the shell to complete."""

from pathlib import Path

import click

from ..errors import CliError
from .lock import read_lock
from .target import find_root


def complete_layer(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    """The names that begin with `incomplete`; none where there is no lock to read."""
    try:
        lock = read_lock(find_root(Path()))
    except CliError:
        return []
    names = [lock.short_name(locked.layer) for locked in lock.layers.values()]
    return [name for name in names if name.startswith(incomplete)]
