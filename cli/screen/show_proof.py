"""A proof as a table for people, as JSON for programs, and as an error where it failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..errors import CliError
from ..proof.proof import TRACEBACK, Proof
from .show import echo_json, plural, to_json


class VerifyError(CliError, AssertionError):
    """The layer differs from its dense twin on some number of ranks."""


def show_proof(proof: Proof, as_json: bool) -> None:
    """Print the proof.

    Raises:
        VerifyError: If a check failed.
    """
    if as_json:
        echo_json(to_json(_fields(proof)))
    elif proof.checks:
        _show_table(proof)
    if proof.failures:
        if not as_json:
            _show_tracebacks(proof)
        said = "\n".join(
            f"  {ranks_text(sizes)}: {words}\n    again: {proof.command_for(sizes[0])}"
            for words, sizes in proof.sizes_by_failure.items()
        )
        raise VerifyError(f"{proof.layer} does not equal {proof.dense}:\n{said}")
    if not as_json:
        sizes = ", ".join(map(str, proof.worst))
        ranks = "rank" if sizes == "1" else "ranks"
        click.echo(f"{proof.layer} equals {proof.dense} on {sizes} {ranks}.")


def ranks_text(sizes: Sequence[int]) -> str:
    """`1 rank`, `1, 2 and 4 ranks`."""
    if len(sizes) == 1:
        return plural(sizes[0], "rank")
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"


def _fields(proof: Proof) -> dict[str, Any]:
    """The proof for programs."""
    results = [
        {
            "check": check,
            "ranks": size,
            "result": proof.result(check, size),
            "worst_difference": worst.get(check),
        }
        for size, worst in proof.worst.items()
        for check in proof.checks
    ]
    failures = [
        {"ranks": size, **vars(failure), "command": proof.command_for(size)}
        for size, failure in proof.failures.items()
    ]
    return {
        "layer": proof.layer,
        "dense": proof.dense,
        "source": proof.source,
        "cases": list(proof.numbers),
        "seed": proof.seed,
        "results": results,
        "failures": failures,
    }


def _show_table(proof: Proof) -> None:
    """Print the worst difference of each check, a column for each number of ranks."""
    from rich.console import Console
    from rich.table import Table

    click.echo(f"{proof.layer}: {_cases_text(proof.numbers)} of {proof.source}")
    table = Table(box=None, pad_edge=False)
    table.add_column("worst difference")
    for world_size in proof.worst:
        table.add_column(plural(world_size, "rank"), justify="right")
    for check in proof.checks:
        table.add_row(check, *(_cell(proof, check, size) for size in proof.worst))
    Console().print(table)


def _cases_text(numbers: Sequence[int]) -> str:
    """`3 cases`, or `case 2` where one was chosen."""
    is_one_of_many = len(numbers) == 1 and numbers[0] > 1
    return f"case {numbers[0]}" if is_one_of_many else plural(len(numbers), "case")


def _cell(proof: Proof, check: str, world_size: int) -> str:
    if proof.result(check, world_size) == "failed":
        return "[red]FAILED[/red]"
    difference = proof.worst[world_size].get(check)
    if difference is None:
        return "-"
    return "exact" if difference == 0.0 else f"{difference:.1e}"


def _show_tracebacks(proof: Proof) -> None:
    """Print, on stderr, the traceback of each distinct failure that has one."""
    for sizes in proof.sizes_by_failure.values():
        said = proof.failures[sizes[0]].said
        if TRACEBACK in said:
            click.echo(f"{said.rstrip()}\n", err=True)
