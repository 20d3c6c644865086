"""`torchshard verify`: prove a layer on several ranks, with the cases of its test.

Imports torch inside the functions that run, and nowhere else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from ..naming.numbers import Number, Seconds
from ..proof.cases import load_cases, load_class
from ..proof.proof import Proof, count_steps, prove
from ..screen.show import plural
from ..screen.show_proof import show_proof

if TYPE_CHECKING:
    from torchshard.testing import Case

_TIMEOUT_S = 600.0


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
    metavar="N,N",
    show_default=True,
    help="Numbers of ranks to prove the layer on.",
)
@click.option(
    "--case",
    "number",
    type=Number(1),
    metavar="N",
    help="Check that case alone, counted from 1. Default: all.",
)
@click.option(
    "--seed",
    type=Number(0),
    metavar="N",
    help="Draw other inputs and initial values. Default: those of the cases, 0.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, min_open=True),
    metavar="SECONDS",
    default=_TIMEOUT_S,
    show_default=True,
    help="How long the ranks may take, for each number of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
def verify(
    target: str,
    cases_file: Path | None,
    ranks: str,
    number: int | None,
    seed: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Prove that a sharded layer equals its dense twin, on 1 to 4 ranks.

    MODULE is a module that can be imported from here, or a path ending in .py. Runs every
    case in the list CASES of its test: values, gradients, a step, state both ways, copies,
    autocast, torch.compile and the number of collectives. Where one fails, it names the
    command that shows this case alone.

    \b
    Examples:
      torchshard verify parallel_embedding:ParallelEmbedding
      torchshard verify my_package/heads.py:Head --cases checks/heads.py --seed 1
      torchshard verify parallel_embedding:ParallelEmbedding --ranks 3 --case 2
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    world_sizes = _world_sizes(ranks)
    layer = load_class(target)
    source, listed = load_cases(layer, cases_file)
    numbers = _numbers(number, source, listed)
    cases = [_seeded(listed[n - 1], seed) for n in numbers]
    _raise_if_unpicklable(source, cases)
    proof = Proof(
        layer=layer.__name__,
        dense=_dense_name(cases),
        source=source.name,
        numbers=numbers,
        command=_command(target, cases_file, timeout_s),
        seed=seed,
    )
    with _progress(count_steps(world_sizes, cases)) as advance:
        for size in world_sizes:
            prove(proof, size, cases, timeout_s, partial(advance, size))
    show_proof(proof, as_json)


def _world_sizes(ranks: str) -> list[int]:
    try:
        sizes = [int(size) for size in ranks.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"--ranks {ranks} is not a list of numbers of ranks, such as 1,2,3,4"
        )
    return sorted(set(sizes))


def _numbers(number: int | None, source: Path, cases: Sequence[Case]) -> list[int]:
    """The numbers of the cases to check."""
    if number is None:
        return list(range(1, len(cases) + 1))
    if number > len(cases):
        listed = "".join(f"\n  {n}  {case}" for n, case in enumerate(cases, 1))
        raise UsageError(
            f"--case {number}: {source.name} has {plural(len(cases), 'case')} of"
            f" {_name(cases[0])}:{listed}"
        )
    return [number]


def _name(case: Case) -> str:
    return getattr(case.layer, "__name__", repr(case.layer))


def _seeded(case: Case, seed: int | None) -> Case:
    return case if seed is None else replace(case, seed=seed)


def _raise_if_unpicklable(source: Path, cases: Sequence[Case]) -> None:
    """Refuse what no other process can be handed, such as a lambda.

    Raises:
        UsageError: If a case does not pickle.
    """
    for case in cases:
        try:
            pickle.dumps(case)
        except Exception as error:  # pickling calls people's own code
            raise UsageError(
                f"{source.name}: {case} cannot be sent to the ranks: {error}."
                " Use classes and functions from the top level of a module"
            ) from error


def _dense_name(cases: Sequence[Case]) -> str:
    return " and ".join(sorted({_twin(case) for case in cases}))


def _twin(case: Case) -> str:
    if case.dense is None:
        return "itself on one rank"
    module = getattr(case.dense, "__module__", "")
    name = getattr(case.dense, "__name__", repr(case.dense))
    return f"torch.nn.{name}" if module.startswith("torch.nn") else name


def _command(target: str, cases_file: Path | None, timeout_s: float) -> list[str]:
    cases = ["--cases", str(cases_file)] if cases_file else []
    limit = [] if timeout_s == _TIMEOUT_S else ["--timeout", f"{timeout_s:g}"]
    return ["torchshard", "verify", target, *cases, *limit]


@contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal, nothing elsewhere; gives what moves it by one check."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting the ranks", total=num_steps)

        def advance(world_size: int, number: int, check: str) -> None:
            doing = f"{plural(world_size, 'rank')}, case {number}, {check}"
            progress.update(task, advance=1, description=doing)

        yield advance
