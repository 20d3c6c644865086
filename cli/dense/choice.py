"""Which parameters to divide first: the division whose trial is worth most.

The rule, as generated files state it: as many parameters as possible are computed with in
shards, and of the divisions that do so, the one with the fewest collectives.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from ..errors import UsageError
from ..naming.names import did_you_mean
from .division import Division, Outcome, Rejected

_SPLITS: dict[type[nn.Module], dict[str, int]] = {
    nn.Linear: {"column": 0, "row": 1},
    nn.Embedding: {"vocabulary": 0, "embedding_dim": 1},
    nn.Conv1d: {"column": 0, "row": 1},
    nn.Conv2d: {"column": 0, "row": 1},
    nn.Conv3d: {"column": 0, "row": 1},
    nn.MultiheadAttention: {"heads": 0},
}
"""How a layer of torch.nn can be divided, each with the dim of its weight that is cut."""
_MOST_TRIALS = 50
_COLLECTIVE_COST = 0.02
_SHARDS_WORTH = 0.05
_GATHERED_WORTH = 0.25

Try = Callable[[Division], Outcome]
Ways: TypeAlias = "tuple[str | int | None, ...]"


@dataclass(frozen=True)
class Chosen:
    """The division that was chosen, and what its trial found."""

    division: Division
    outcome: Outcome


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
    module: nn.Module, asked: Mapping[str, int | None], own_allowed: bool, try_out: Try
) -> Chosen:
    """The best division of `module` in which `asked` is as asked.

    Args:
        module: The dense module.
        asked: For parameters, by dotted name, the dim that is asked for, or None for whole.
        own_allowed: Whether the parameters of its own may be divided.
        try_out: Makes a trial.

    Raises:
        UsageError: If what is asked for cannot be, with the reason.
    """
    items = [*_modules(module), *(_parameters(module) if own_allowed else ())]
    fixed = _fixed(module, items, asked)
    best, reasons = _search(items, fixed, try_out)
    if best is None:
        raise UsageError(
            f"it cannot be divided: {reasons[0] if reasons else 'no trial ran'}"
            + ("; ask for another --shard" if fixed else "")
        )
    return best


def _search(
    items: Sequence[_Item], fixed: Mapping[str, str | int | None], try_out: Try
) -> tuple[Chosen | None, list[str]]:
    """The best of all divisions; of many, the one that item by item leads to."""
    ways: list[Ways] = [
        (fixed[item.path],) if item.path in fixed else (*item.ways, None)
        for item in items
    ]
    search = _Search(items, try_out)
    if math.prod(map(len, ways)) <= _MOST_TRIALS:
        for combination in itertools.product(*ways):
            search.visit(combination)
        return search.best, search.reasons
    current = [choices[-1] for choices in ways]
    search.visit(current)
    for place in [*range(len(items)), *range(len(items))]:
        for way in ways[place]:
            search.visit([*current[:place], way, *current[place + 1 :]])
        current = list(search.best_ways) or current
    return search.best, search.reasons


class _Search:
    """The trials made, and the best of them."""

    def __init__(self, items: Sequence[_Item], try_out: Try) -> None:
        self.items, self.try_out = items, try_out
        total = sum(item.size for item in items) or 1
        self.sizes = {item.path: item.size / total for item in items}
        self.best: Chosen | None = None
        self.best_ways: Ways = ()
        self.best_worth = -math.inf
        self.reasons: list[str] = []
        self.visited: set[Ways] = set()

    def visit(self, ways: Sequence[str | int | None]) -> None:
        """Try the division in which each item goes its way, unless that was done."""
        if tuple(ways) in self.visited:
            return
        self.visited.add(tuple(ways))
        division = Division()
        for item, way in zip(self.items, ways, strict=True):
            division = item.into(division, way)
        try:
            chosen = Chosen(division, self.try_out(division))
        except Rejected as error:
            self.reasons.append(str(error))
            return
        worth = _worth(chosen, self.sizes)
        if worth > self.best_worth + 1e-9:
            self.best, self.best_ways, self.best_worth = chosen, tuple(ways), worth


def _worth(chosen: Chosen, sizes: Mapping[str, float]) -> float:
    divided = [*chosen.division.modules, *chosen.division.parameters]
    gathered = chosen.outcome.gathered
    worth = sum(
        sizes[path] * (_GATHERED_WORTH if path in gathered else 1.0) for path in divided
    )
    outcome = chosen.outcome
    shards = outcome.num_shards / max(outcome.num_results, 1)
    return worth - _COLLECTIVE_COST * outcome.num_collectives + _SHARDS_WORTH * shards


def _modules(module: nn.Module) -> Iterator[_Item]:
    for path, part in module.named_modules():
        if path and type(part) in _SPLITS:
            size = sum(parameter.numel() for parameter in part.parameters())
            yield _Item(path, tuple(_SPLITS[type(part)]), size)


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


def _fixed(
    module: nn.Module, items: Sequence[_Item], asked: Mapping[str, int | None]
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
        path, way = _way(module, name, place, by_path)
        if path in fixed and fixed[path] != way:
            raise UsageError(f"--shard asks for two ways to divide {path}")
        fixed[path] = way
    return fixed


def _way(
    module: nn.Module, name: str, dim: int | None, items: Mapping[str, _Item]
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
    splits = _SPLITS[type(module.get_submodule(path))]
    for split, cut in splits.items():
        is_weight = leaf == "weight" and cut == dim
        if is_weight or (leaf == "bias" and split == "column"):
            return path, split
    kind = type(module.get_submodule(path)).__name__
    raise UsageError(
        f"--shard {name}={dim}: a {kind} is divided by {', '.join(splits)}"
    )
