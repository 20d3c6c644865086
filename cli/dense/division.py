"""A division of a dense class over ranks, and what a trial of it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torchshard as ts
from torch import Tensor, nn


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
