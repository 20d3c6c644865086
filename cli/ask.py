"""The question about each conflict, on a terminal. Enter and the end of input mean no."""

import sys

import click

from .errors import ConflictError
from .plan import Entry, Plan, Status
from .show import plural, shown_path


def is_interactive() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_about_conflicts(plan: Plan) -> Plan:
    """`plan` with every conflict settled by the person at the terminal.

    Raises:
        ConflictError: If the person quits.
    """
    answers: dict[str, Status] = {}
    for number, entry in enumerate(plan.conflicts):
        answer = _ask(plan, entry)
        if answer == "a":
            rest = [conflict.path for conflict in plan.conflicts[number:]]
            answers |= dict.fromkeys(rest, "overwrite")
            break
        answers[entry.path] = "overwrite" if answer == "y" else "skip"
    return plan.answered(answers)


def _ask(plan: Plan, entry: Entry) -> str:
    """The letter that decides about `entry`."""
    path = shown_path(plan.root, entry.path)
    while True:
        click.echo(f"{path} [y]es [n]o [d]iff [a]ll [q]uit (n): ", nl=False)
        line = sys.stdin.readline()
        answer = line.strip().lower()[:1] or "n"
        if not line:
            click.echo()
        if answer == "q":
            raise ConflictError("quit; nothing was written")
        if answer == "d":
            click.echo(entry.diff(), nl=False)
        elif answer in "yna":
            return answer


def conflict_error(plan: Plan, command: str) -> ConflictError:
    """The error where nobody can be asked."""
    count = len(plan.conflicts)
    return ConflictError(
        f"{plural(count, 'file')} would be overwritten; nothing was written.\n"
        f"  see it:     {command} --diff\n"
        f"  keep yours: --skip      take the template's: --force"
    )
