"""Which parameters to divide first: the division whose trial is worth most.

The rule, as generated files state it: as many parameters as possible are computed with in
shards, and of the divisions that do so, the one with the fewest collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torchshard as ts

from ..errors import UsageError
from .division import Division, Item, Outcome, Rejected, Way

_MOST_TRIALS = 50
_COLLECTIVE_COST = 0.02
_SHARDS_WORTH = 0.05

Try = Callable[[Division, ts.ShardGroup], Outcome]
Ways: TypeAlias = "tuple[Way, ...]"


@dataclass(frozen=True)
class Chosen:
    """The division that was chosen.

    Attributes:
        division: It.
        reasons: For each submodule and parameter that stays whole because it cannot be
            divided, why.
    """

    division: Division
    reasons: Mapping[str, str]


def choose(
    items: Sequence[Item],
    asked: Mapping[str, Way],
    groups: Sequence[ts.ShardGroup],
    try_out: Try,
) -> Chosen:
    """The best division in which `asked` is as asked.

    Args:
        items: What may be divided.
        asked: For some of them, by path, the way that is asked for.
        groups: Those in which it has to run; trials are compared in the first.
        try_out: Makes a trial.

    Raises:
        UsageError: If what is asked for cannot be, with the reason.
        Rejected: If it does not even run undivided.
    """
    search = _Search(items, groups, try_out)
    search.run(
        [
            (asked[item.path],) if item.path in asked else (*item.ways, None)
            for item in items
        ]
    )
    if search.best is None and asked:
        raise UsageError(
            f"it cannot be divided: {search.problem}; ask for another --shard"
        )
    if search.best is None:
        raise Rejected(search.problem)
    return Chosen(search.best, search.reasons(asked))


class _Search:
    """The trials made, and the best of them."""

    def __init__(
        self, items: Sequence[Item], groups: Sequence[ts.ShardGroup], try_out: Try
    ) -> None:
        self.items, self.groups, self.try_out = items, groups, try_out
        total = sum(item.size for item in items) or 1
        self.sizes = {item.path: item.size / total for item in items}
        self.best: Division | None = None
        self.best_ways: Ways = ()
        self.best_worth = -math.inf
        self.problem = ""
        self.visited: set[Ways] = set()

    def run(self, ways: Sequence[Ways]) -> None:
        """Visit all divisions; of many, those that item by item lead to the best."""
        if math.prod(map(len, ways)) <= _MOST_TRIALS:
            for combination in itertools.product(*ways):
                self.visit(combination)
            return
        current: Ways = tuple(choices[-1] for choices in ways)
        self.visit(current)
        for place in [*range(len(ways)), *range(len(ways))]:
            for way in ways[place]:
                self.visit((*current[:place], way, *current[place + 1 :]))
            current = self.best_ways or current

    def visit(self, ways: Ways) -> None:
        """Try the division in which each item goes its way, unless that was done."""
        if ways in self.visited:
            return
        self.visited.add(ways)
        division = self._division(ways)
        try:
            outcome = self.try_out(division, self.groups[0])
            worth = self._worth(division, outcome)
            if worth <= self.best_worth + 1e-9:
                return
            for group in self.groups[1:]:
                self.try_out(division, group)
        except Rejected as error:
            if not self.problem or not (division.modules or division.parameters):
                self.problem = str(error)
            return
        self.best, self.best_ways, self.best_worth = division, ways, worth

    def _division(self, ways: Ways) -> Division:
        division = Division()
        for item, way in zip(self.items, ways, strict=True):
            division = item.into(division, way)
        return division

    def _worth(self, division: Division, outcome: Outcome) -> float:
        worth = sum(
            self.sizes[path] for path in (*division.modules, *division.parameters)
        )
        shards = outcome.num_shards / max(outcome.num_results, 1)
        return (
            worth - _COLLECTIVE_COST * outcome.num_collectives + _SHARDS_WORTH * shards
        )

    def reasons(self, asked: Container[str]) -> dict[str, str]:
        """Why each item that stays whole, unasked, cannot be divided beside the others."""
        found = {}
        for place, (item, way) in enumerate(
            zip(self.items, self.best_ways, strict=True)
        ):
            if way is None and item.path not in asked:
                before, after = self.best_ways[:place], self.best_ways[place + 1 :]
                reasons = [
                    self._reason((*before, other, *after)) for other in item.ways
                ]
                if all(reasons):
                    found[item.path] = reasons[0]
        return found

    def _reason(self, ways: Ways) -> str:
        """Why a division is rejected; empty if it is not."""
        try:
            for group in self.groups:
                self.try_out(self._division(ways), group)
        except Rejected as error:
            return str(error).partition(". ")[0]
        return ""
