"""Which parameters to divide first: the division whose trial is worth most.

The rule, as generated files state it: as many parameters as possible are computed with in
shards, and of the divisions that do so, the one with the fewest collectives.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torchshard as ts
from torch import nn
from torchshard.conversion_plan import classes_by_dense

from ..errors import UsageError
from ..naming.names import did_you_mean
from .division import Division, Outcome, Rejected

_MOST_TRIALS = 50
_COLLECTIVE_COST = 0.02
_SHARDS_WORTH = 0.05

Try = Callable[[Division, ts.ShardGroup], Outcome]
Ways: TypeAlias = "tuple[str | int | None, ...]"


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


@dataclass(frozen=True)
class _Item:
    """Something that may be divided: its path, what it could be, and its elements."""

    path: str
    ways: tuple[str | int, ...]
    size: int

    def into(self, division: Division, way: str | int | None) -> Division:
        if way is None:
            return division
        if isinstance(way, str):
            return replace(division, modules={**division.modules, self.path: way})
        return replace(division, parameters={**division.parameters, self.path: way})


def choose(
    module: nn.Module,
    asked: Mapping[str, int | None],
    own_allowed: bool,
    groups: Sequence[ts.ShardGroup],
    try_out: Try,
) -> Chosen:
    """The best division of `module` in which `asked` is as asked.

    Args:
        module: The dense module.
        asked: For parameters, by dotted name, the dim that is asked for, or None for whole.
        own_allowed: Whether the parameters of its own may be divided.
        groups: Those in which it has to run; trials are compared in the first.
        try_out: Makes a trial.

    Raises:
        UsageError: If what is asked for cannot be, with the reason.
        Rejected: If it does not even run undivided.
    """
    items = [*_modules(module), *(_parameters(module) if own_allowed else ())]
    fixed = _fixed(module, items, asked, groups[0])
    search = _Search(items, groups, try_out)
    search.run(
        [
            (fixed[item.path],) if item.path in fixed else (*item.ways, None)
            for item in items
        ]
    )
    if search.best is None and fixed:
        raise UsageError(
            f"it cannot be divided: {search.problem}; ask for another --shard"
        )
    if search.best is None:
        raise Rejected(search.problem)
    return Chosen(search.best, search.reasons(fixed))


class _Search:
    """The trials made, and the best of them."""

    def __init__(
        self, items: Sequence[_Item], groups: Sequence[ts.ShardGroup], try_out: Try
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
            self.problem = self.problem or str(error)
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

    def reasons(self, fixed: Container[str]) -> dict[str, str]:
        """Why each item that stays whole, unasked, cannot be divided beside the others."""
        found = {}
        for place, (item, way) in enumerate(
            zip(self.items, self.best_ways, strict=True)
        ):
            if way is None and item.path not in fixed:
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


def _modules(module: nn.Module) -> Iterator[_Item]:
    for path, part in module.named_modules():
        size = sum(parameter.numel() for parameter in part.parameters())
        splits = splits_of(part)
        if path and size and splits:
            yield _Item(path, splits, size)


def splits_of(part: nn.Module) -> tuple[str, ...]:
    """How the sharded class of a layer of torch.nn can be divided; empty if it has none."""
    layer_class = classes_by_dense().get(type(part))
    return tuple(layer_class.splits) if layer_class else ()


def split_cutting(part: nn.Module, name: str, dim: int, group: ts.ShardGroup) -> str:
    """The split of a layer of torch.nn that cuts its parameter `name` along `dim`.

    Raises:
        UsageError: If none does, with those that it has.
    """
    for split in splits_of(part):
        layer = ts.parallelize(copy.deepcopy(part), {"": split}, group=group)
        assert isinstance(layer, ts.ParallelLayer)
        if layer.ranges_of(name) and layer.specs[name].sharded_dim == dim:
            return split
    raise UsageError(
        f"--shard {name}={dim}: a {type(part).__name__} is divided by"
        f" {', '.join(splits_of(part))}"
    )


def _parameters(module: nn.Module) -> Iterator[_Item]:
    inside = {
        id(parameter) for child in module.children() for parameter in child.parameters()
    }
    for name, parameter in module.named_parameters(recurse=False):
        ways = tuple(dim for dim, size in enumerate(parameter.shape) if size > 1)
        if ways and id(parameter) not in inside:
            yield _Item(name, ways, parameter.numel())


def parsed_shards(texts: Sequence[str]) -> dict[str, int | None]:
    """What `--shard weight=0` and `--shard bias=whole` ask for.

    Raises:
        UsageError: If one has another form, or names a parameter twice.
    """
    asked: dict[str, int | None] = {}
    for text in texts:
        match = re.fullmatch(r"([\w.]+)=(-?\d+|whole)", text)
        if match is None:
            raise UsageError(
                f"--shard {text} is not of the form PARAMETER=DIM, such as weight=0, or"
                " PARAMETER=whole"
            )
        if match[1] in asked:
            raise UsageError(f"--shard {match[1]} is given twice")
        asked[match[1]] = None if match[2] == "whole" else int(match[2])
    return asked


def split_asked(
    part: nn.Module, asked: Mapping[str, int | None], group: ts.ShardGroup
) -> str:
    """The split of a layer of torch.nn that does what is asked for; empty for whole.

    Raises:
        UsageError: If none does.
    """
    items = [_Item("", splits_of(part), 1)]
    return str(_fixed(part, items, asked, group)[""] or "")


def _fixed(
    module: nn.Module,
    items: Sequence[_Item],
    asked: Mapping[str, int | None],
    group: ts.ShardGroup,
) -> dict[str, str | int | None]:
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
    by_path = {item.path: item for item in items}
    fixed: dict[str, str | int | None] = {}
    for name, dim in asked.items():
        if name not in shapes:
            raise UsageError(
                f"--shard {name}: there is no parameter '{name}'."
                f"{did_you_mean(name, shapes)} It has {', '.join(shapes) or 'none'}"
            )
        if dim is not None and not -len(shapes[name]) <= dim < len(shapes[name]):
            raise UsageError(
                f"--shard {name}={dim}: its shape {shapes[name]} has no dim {dim}"
            )
        place = None if dim is None else dim % len(shapes[name])
        path, way = _way(module, name, place, by_path, group)
        if path in fixed and fixed[path] != way:
            raise UsageError(f"--shard asks for two ways to divide {path}")
        fixed[path] = way
    return fixed


def _way(
    module: nn.Module,
    name: str,
    dim: int | None,
    items: Mapping[str, _Item],
    group: ts.ShardGroup,
) -> tuple[str, str | int | None]:
    """The item that the parameter belongs to, and the way that cuts that dim of it."""
    if name in items:
        return name, dim
    path, _, leaf = name.rpartition(".")
    if path not in items:
        kind = type(module.get_submodule(path)).__name__
        raise UsageError(
            f"--shard {name}: a parameter of {path or 'it'} ({kind}) stays whole; no rule"
            " divides it"
        )
    if dim is None:
        return path, None
    return path, split_cutting(module.get_submodule(path), leaf, dim, group)
