"""What a layer's checks gave on some numbers of ranks, and the launch that gives it.

Imports torch inside the function that launches, and nowhere else. The proof itself is
`torchshard.testing.check_cases`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchshard.errors import RankError
    from torchshard.testing import Case
    from torchshard.testing.check import Step

COMPILED_RANKS = 2
"""One world size is enough to see that a layer compiles; it takes seconds."""
TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Failure:
    """What went wrong on some number of ranks.

    Attributes:
        said: The check's own words, or all that a failing rank said.
        case: Number of the case that was checked; None before the first.
        check: Name of the check.
    """

    said: str
    case: int | None = None
    check: str = ""


@dataclass
class Proof:
    """What the checks of one layer gave, by number of ranks.

    Attributes:
        layer: The layer's class name.
        dense: What it was compared with.
        source: The file that holds the cases.
        numbers: The numbers of the cases that were checked, in the source's order.
        command: What proves the layer again, without the options that choose what.
        seed: The seed that was asked for.
        worst: For each number of ranks, the worst difference of each check that passed.
        failures: For each number of ranks on which a check failed, what it said.
    """

    layer: str
    dense: str
    source: str
    numbers: Sequence[int] = (1,)
    command: Sequence[str] = ()
    seed: int | None = None
    worst: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)

    @property
    def checks(self) -> list[str]:
        """The names of the checks that were made, in order."""
        names = [name for worst in self.worst.values() for name in worst]
        names += [failure.check for failure in self.failures.values() if failure.check]
        return list(dict.fromkeys(names))

    @property
    def sizes_by_failure(self) -> dict[str, list[int]]:
        """The numbers of ranks on which each distinct failure was seen."""
        sizes: dict[str, list[int]] = {}
        for size, failure in self.failures.items():
            sizes.setdefault(last_line(failure.said), []).append(size)
        return sizes

    def result(self, check: str, world_size: int) -> str:
        """How a check ended: passed, failed, stopped by another's failure, or not run."""
        failure = self.failures.get(world_size)
        if failure and failure.check == check:
            return "failed"
        if check not in self.worst[world_size]:
            return "not run"
        return "stopped" if failure else "passed"

    def command_for(self, world_size: int) -> str:
        """The command that shows the failure on that many ranks, and nothing else."""
        words = [*self.command, "--ranks", str(world_size)]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        number = self.failures[world_size].case
        return shlex.join(words if number is None else [*words, "--case", str(number)])


def last_line(failure: str) -> str:
    """The error that a traceback ends in, without its module; all where there is none."""
    if TRACEBACK not in failure:
        return failure
    lines = failure.rpartition(TRACEBACK)[2].strip("\n").splitlines()
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    said = "\n".join(lines[starts[0] :] if starts else lines[-1:])
    name, colon, words = said.partition(": ")
    return f"{name.rpartition('.')[2]}{colon}{words}"


class Listener:
    """Hears where each rank stands, and keeps what it has to show.

    Args:
        numbers: The numbers of the cases, as people count them.
        on_step: Called with the number of the case and the check that rank 0 begins.
    """

    def __init__(self, numbers: Sequence[int], on_step: Callable[[int, str], None]):
        self.worst: dict[str, float] = {}
        self._numbers = numbers
        self._on_step = on_step
        self._at: dict[int, Step] = {}

    def __call__(self, rank: int, step: Step) -> None:
        """Hear that `rank` is at `step`."""
        self._at[rank] = step
        if step.difference is not None:
            before = self.worst.get(step.check, 0.0)
            self.worst[step.check] = max(before, step.difference)
        elif rank == 0:
            self._on_step(self._numbers[step.case - 1], step.check)

    def failure(self, error: RankError) -> Failure:
        """What went wrong, where the rank stands that failed first, or the slowest."""
        said = _what_it_said(str(error))
        step = self._at.get(-1 if error.rank is None else error.rank)
        if error.rank is None and self._at:
            step = min(self._at.values(), key=lambda step: step.case)
        if step is None:
            return Failure(said)
        return Failure(said, self._numbers[step.case - 1], step.check)


def _what_it_said(error: str) -> str:
    """Return the check's own words where a check failed, or all of it where a rank did."""
    _, found, words = error.rpartition("torchshard.errors.CheckError: ")
    return words.strip() if found else error


def prove(
    proof: Proof,
    world_size: int,
    cases: Sequence[Case],
    timeout_s: float,
    on_step: Callable[[int, str], None],
) -> None:
    """Check the cases on that many ranks, and note in `proof` what they gave."""
    from torchshard.errors import RankError
    from torchshard.testing import check_cases, run_ranks

    listener = Listener(proof.numbers, on_step)
    proof.worst[world_size] = listener.worst
    try:
        for arguments in _launches(world_size, cases):
            run_ranks(
                check_cases,
                world_size,
                *arguments,
                timeout_s=timeout_s,
                on_told=listener,
            )
    except RankError as error:
        proof.failures[world_size] = listener.failure(error)


def count_steps(world_sizes: Sequence[int], cases: Sequence[Case]) -> int:
    """How many checks rank 0 makes on all those numbers of ranks."""
    from torchshard.testing.check import num_steps

    return sum(
        num_steps(len(some), compiled=compiled)
        for world_size in world_sizes
        for some, compiled in _launches(world_size, cases)
    )


def _launches(world_size: int, cases: Sequence[Case]) -> Iterator[tuple[Any, bool]]:
    """The arguments of `check_cases`: all cases, and the first one compiled too."""
    yield cases, False
    if world_size == COMPILED_RANKS:
        yield cases[:1], True
