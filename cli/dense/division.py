"""A division of a dense class over ranks, and what a trial of it found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torchshard as ts
from torch import Tensor, nn
from torchshard.conversion_plan import classes_by_dense

Way: TypeAlias = "str | int | None"
"""How something is divided: a split's name, a parameter's dim, or not at all."""


class Rejected(Exception):
    """The class cannot be divided in that way; the text says why."""


@dataclass(frozen=True)
class Division:
    """How a class is divided.

    Attributes:
        modules: For each submodule of torch.nn that is divided, by path, the split.
        parameters: For each parameter of its own that is divided, the dim.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)

    def present(self, dense: nn.Module) -> dict[str, str]:
        """Those of `modules` that `dense`, built in some way, has."""
        paths = {path for path, _ in dense.named_modules()}
        return {path: split for path, split in self.modules.items() if path in paths}


@dataclass
class Outcome:
    """What a trial found.

    Attributes:
        num_collectives: How many the forwards and their backwards take, all samples together.
        num_results: How many tensors the operations gave.
        num_shards: How many of those were shards.
    """

    num_collectives: int = 0
    num_results: int = 0
    num_shards: int = 0

    def note(self, result: Any) -> Any:
        """Count the result of an operation, and return it."""
        self.num_results += isinstance(result, Tensor)
        self.num_shards += isinstance(result, ts.ShardedTensor)
        return result


@dataclass(frozen=True)
class Item:
    """Something that may be divided: a submodule, or a parameter of the class' own.

    Attributes:
        path: Its dotted name.
        ways: The splits of a submodule, the dims of a parameter.
        size: How many elements it has.
    """

    path: str
    ways: tuple[str | int, ...]
    size: int

    def into(self, division: Division, way: Way) -> Division:
        """`division`, with this divided that way."""
        if way is None:
            return division
        if isinstance(way, str):
            return replace(division, modules={**division.modules, self.path: way})
        return replace(division, parameters={**division.parameters, self.path: way})


def items_of(module: nn.Module, *, own_allowed: bool) -> list[Item]:
    """What of `module` may be divided; its own parameters only where that is allowed."""
    return [*_modules(module), *(_parameters(module) if own_allowed else ())]


def _modules(module: nn.Module) -> Iterator[Item]:
    for path, part in module.named_modules():
        size = sum(parameter.numel() for parameter in part.parameters())
        splits = splits_of(part)
        if path and size and splits:
            yield Item(path, splits, size)


def splits_of(part: nn.Module) -> tuple[str, ...]:
    """How the sharded class of a layer of torch.nn can be divided; empty if it has none."""
    layer_class = classes_by_dense().get(type(part))
    return tuple(layer_class.splits) if layer_class else ()


def _parameters(module: nn.Module) -> Iterator[Item]:
    inside = {
        id(parameter) for child in module.children() for parameter in child.parameters()
    }
    for name, parameter in module.named_parameters(recurse=False):
        ways = tuple(dim for dim, size in enumerate(parameter.shape) if size > 1)
        if ways and id(parameter) not in inside:
            yield Item(name, ways, parameter.numel())
