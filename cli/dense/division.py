"""A division of a dense class over ranks, and what a trial of it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torchshard as ts
from torch import Tensor

from .carry import Change, Place

Shapes: TypeAlias = "dict[tuple[str, Place], list[torch.Size | None]]"


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


@dataclass
class Outcome:
    """What a trial found.

    Attributes:
        changes: For each method, what is done to the operations at those places.
        num_collectives: How many the forwards and their backwards take, all samples together.
        num_results: How many tensors the operations gave.
        num_shards: How many of those were shards.
        gathered: The parameters of its own that are gathered before they are used.
        storages: Where the shards of those lie in memory.
        shapes: What each operation gave, in turn: the whole shapes.
    """

    changes: dict[str, dict[Place, Change]] = field(default_factory=dict)
    num_collectives: int = 0
    num_results: int = 0
    num_shards: int = 0
    gathered: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)

    def note(self, result: Any) -> Any:
        """Count the result of an operation, and return it."""
        self.num_results += isinstance(result, Tensor)
        self.num_shards += isinstance(result, ts.ShardedTensor)
        return result
