"""The question about each conflict, on a terminal. Enter and the end of input mean no."""

import sys

import click

from ..errors import ConflictError
from ..plan.entry import Answer, Entry
from ..plan.plan import Plan
from .show import plural, shown_path

_ANSWERS: dict[str, Answer] = {"y": "overwrite", "n": "skip", "m": "merge"}


def is_interactive() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_about_conflicts(plan: Plan) -> Plan:
    """`plan` with every conflict settled by the person at the terminal.

    Raises:
        ConflictError: If the person quits.
    """
    answers: dict[str, Answer] = {}
    for number, entry in enumerate(plan.conflicts):
        answer = _ask(plan, entry)
        if answer == "a":
            rest = [conflict.path for conflict in plan.conflicts[number:]]
            answers |= dict.fromkeys(rest, _ANSWERS["y"])
            break
        answers[entry.path] = _ANSWERS[answer]
    return plan.answered(answers)


def _ask(plan: Plan, entry: Entry) -> str:
    """The letter that decides about `entry`."""
    path = shown_path(plan.root, entry.path)
    while True:
        click.echo(f"{path} [y]es [n]o [d]iff [m]erge [a]ll [q]uit (n): ", nl=False)
        line = sys.stdin.readline()
        answer = line.strip().lower()[:1] or "n"
        if not line:
            click.echo()
        if answer == "q":
            raise ConflictError("quit; nothing was written")
        if answer == "d":
            click.echo(entry.diff(), nl=False)
        elif answer == "m" and not entry.can_merge:
            click.echo(f"{path} cannot be merged: {entry.note}")
        elif answer in ("y", "n", "m", "a"):
            return answer


def conflict_error(plan: Plan, command: str) -> ConflictError:
    """The error where nobody can be asked."""
    count = len(plan.conflicts)
    can_merge = all(entry.can_merge for entry in plan.conflicts)
    return ConflictError(
        f"{plural(count, 'file')} would be overwritten; nothing was written.\n"
        f"  see it:     {command} --diff\n"
        f"  keep yours: --skip      take the template's: --force"
        + ("      combine: --merge" if can_merge else "")
    )
