"""How every command ends: its errors as messages, as JSON, and as an exit code."""

import codecs
import io
import sys
from typing import Any

import click

from ..errors import CliError
from .show import OWES_JSON, error_json

ERRORS = "torchshard.printable"
"""How what a terminal cannot show is printed all the same."""
INTERRUPTED = 130
"""The exit code of Ctrl-C: 128 and the number of the signal, as shells have it."""


def _printable(error: UnicodeError) -> tuple[str | bytes, int]:
    """A byte of a file name that is no text, as it came; any other letter escaped."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    code = ord(letter) - 0xDC00  # where Python puts a byte that is no text
    shown = bytes([code]) if 0x80 <= code <= 0xFF else letter.encode("unicode_escape")
    return shown, error.start + 1


codecs.register_error(ERRORS, _printable)


class Group(click.Group):
    """The one place where an error becomes a message and an exit code.

    With `--json` on the command line, an error is a JSON object on stdout too, unless the
    command had printed its own JSON already.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether JSON was asked for, before anything can fail."""
        ctx.meta[OWES_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except CliError as error:
            _echo_json(ctx, str(error), error.exit_code)
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:  # click would end in 1, as if something were wrong
            _echo_json(ctx, "interrupted", INTERRUPTED)
            click.echo("\nInterrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except click.ClickException as error:
            _echo_json(ctx, error.format_message(), error.exit_code)
            raise

    def main(self, *args: Any, **keywords: Any) -> Any:
        """Run the command line; click itself ends it where the reader of a pipe is gone."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=ERRORS)
        try:
            return super().main(*args, **keywords)
        except OSError as error:
            what = f"use {error.filename}" if error.filename else "write the output"
            click.echo(f"Error: cannot {what}: {error.strerror or error}", err=True)
            sys.exit(1)


def _echo_json(ctx: click.Context, message: str, exit_code: int) -> None:
    if ctx.meta[OWES_JSON]:
        click.echo(error_json(message, exit_code))
