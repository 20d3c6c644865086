"""`torchshard verify`: prove a layer on several ranks, with the cases of its test.

Imports torch inside the functions that run, and nowhere else. The proof itself is
`torchshard.testing.check_layer`; here it is launched and shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cases import load_cases, load_class
from .errors import CliError, UsageError
from .show import echo_json, plural

if TYPE_CHECKING:
    from torchshard.testing import Case

_COMPILE_RANKS = 2
"""One world size is enough to see that a layer compiles; it takes seconds."""


_TRACEBACK = "Traceback (most recent call last):"


class VerifyError(CliError, AssertionError):
    """The layer differs from its dense twin on some number of ranks."""


@dataclass
class Proof:
    """What the checks of one layer gave, by number of ranks.

    Attributes:
        layer: The layer's class name.
        dense: What it was compared with.
        source: The file that holds the cases.
        num_cases: How many cases there are.
        worst: For each number of ranks, the worst difference of each check.
        failures: For each number of ranks on which a check failed, what it said.
    """

    layer: str
    dense: str
    source: str
    num_cases: int
    worst: dict[int, dict[str, float]]
    failures: dict[int, str]

    @property
    def sizes_by_failure(self) -> dict[str, list[int]]:
        """The numbers of ranks on which each distinct failure was seen."""
        sizes: dict[str, list[int]] = {}
        for size, failure in self.failures.items():
            sizes.setdefault(_last_line(failure), []).append(size)
        return sizes


@click.command(short_help="Prove that a sharded layer equals its dense twin.")
@click.argument("target", metavar="MODULE:CLASS")
@click.option(
    "--cases",
    "cases_file",
    type=click.Path(path_type=Path),
    help="File with the list CASES. Default: the test of the module.",
)
@click.option(
    "--ranks",
    default="1,2,3,4",
    show_default=True,
    help="Numbers of ranks to prove the layer on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
def verify(target: str, cases_file: Path | None, ranks: str, as_json: bool) -> None:
    """Prove that a sharded layer equals its dense twin, on 1 to 4 ranks.

    Runs every case in the list CASES of the layer's test: values, gradients, a step, state
    both ways, copies, autocast, torch.compile and the number of collectives.

    \b
    Example:
      torchshard verify parallel_embedding:ParallelEmbedding
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    world_sizes = _world_sizes(ranks)
    layer = load_class(target)
    source, cases = load_cases(layer, cases_file)
    proof = Proof(
        layer=layer.__name__,
        dense=_dense_name(layer, cases),
        source=source.name,
        num_cases=len(cases),
        worst={},
        failures={},
    )
    for world_size in world_sizes:
        doing = f"{plural(len(cases), 'case')} on {plural(world_size, 'rank')}"
        with _progress(doing):
            _prove(proof, world_size, cases)
    _show(proof, as_json)


def _progress(text: str) -> AbstractContextManager[Any]:
    """Show `text` beside a spinner on a terminal; nothing elsewhere."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def _world_sizes(ranks: str) -> list[int]:
    try:
        sizes = [int(size) for size in ranks.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"--ranks {ranks} is not a list of numbers of ranks, such as 1,2,3,4"
        )
    return sizes


def _dense_name(layer: type, cases: Sequence[Case]) -> str:
    names = {_twin(case) for case in cases}
    return " and ".join(sorted(names))


def _twin(case: Case) -> str:
    if case.dense is None:
        return "itself on one rank"
    module = getattr(case.dense, "__module__", "")
    name = getattr(case.dense, "__name__", repr(case.dense))
    return f"torch.nn.{name}" if module.startswith("torch.nn") else name


def _prove(proof: Proof, world_size: int, cases: Sequence[Case]) -> None:
    from torchshard.errors import RankError
    from torchshard.testing import check_cases, run_ranks

    try:
        per_rank = run_ranks(check_cases, world_size, cases, timeout_s=600)
        if world_size == _COMPILE_RANKS:
            per_rank += run_ranks(
                check_cases, world_size, cases[:1], True, timeout_s=600
            )
    except RankError as error:
        proof.failures[world_size] = _what_it_said(str(error))
        return
    worst: dict[str, float] = {}
    for checked in _flat(per_rank):
        worst[checked.name] = max(worst.get(checked.name, 0.0), checked.difference)
    proof.worst[world_size] = worst


def _flat(per_rank: Sequence[Any]) -> Iterator[Any]:
    return (checked for cases in per_rank for case in cases for checked in case)


def _what_it_said(error: str) -> str:
    """Return the check's own words where a check failed, or all of it where a rank did."""
    _, found, words = error.rpartition("torchshard.errors.CheckError: ")
    return words.strip() if found else error


def _last_line(failure: str) -> str:
    """The error that a traceback ends in, without its module; all where there is none."""
    if _TRACEBACK not in failure:
        return failure
    lines = failure.rpartition(_TRACEBACK)[2].strip("\n").splitlines()
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    said = "\n".join(lines[starts[0] :] if starts else lines[-1:])
    name, colon, words = said.partition(": ")
    return f"{name.rpartition('.')[2]}{colon}{words}"


def _ranks(sizes: Sequence[int]) -> str:
    """`1 rank`, `1, 2 and 4 ranks`."""
    if len(sizes) == 1:
        return plural(sizes[0], "rank")
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"


def _show_tracebacks(proof: Proof) -> None:
    """Print, on stderr, the traceback of each distinct failure that has one."""
    for sizes in proof.sizes_by_failure.values():
        failure = proof.failures[sizes[0]]
        if _TRACEBACK in failure:
            click.echo(f"{failure.rstrip()}\n", err=True)


def _show(proof: Proof, as_json: bool) -> None:
    if as_json:
        echo_json(json.dumps(vars(proof), indent=2))
    elif proof.worst:
        _show_table(proof)
    if proof.failures:
        if not as_json:
            _show_tracebacks(proof)
        said = "\n".join(
            f"  {_ranks(sizes)}: {words}"
            for words, sizes in proof.sizes_by_failure.items()
        )
        raise VerifyError(f"{proof.layer} does not equal {proof.dense}:\n{said}")
    if not as_json:
        sizes = ", ".join(map(str, proof.worst))
        ranks = "rank" if sizes == "1" else "ranks"
        click.echo(f"{proof.layer} equals {proof.dense} on {sizes} {ranks}.")


def _show_table(proof: Proof) -> None:
    """Print the worst difference of each check, a column for each number of ranks."""
    from rich.console import Console
    from rich.table import Table

    click.echo(f"{proof.layer}: {plural(proof.num_cases, 'case')} of {proof.source}")
    table = Table(box=None, pad_edge=False)
    table.add_column("worst difference")
    for world_size in proof.worst:
        table.add_column(plural(world_size, "rank"), justify="right")
    checks = list(
        dict.fromkeys(name for worst in proof.worst.values() for name in worst)
    )
    for name in checks:
        cells = [_cell(worst.get(name)) for worst in proof.worst.values()]
        table.add_row(name, *cells)
    Console().print(table)


def _cell(difference: float | None) -> str:
    if difference is None:
        return "-"
    return "exact" if difference == 0.0 else f"{difference:.1e}"
