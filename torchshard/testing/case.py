"""Case: one configuration of a sharded layer, and the dense layer that it must equal.

A case says how to build both layers and what to feed them, in values that pickle, so that it
can be written next to the layer and run on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchshard.distributed import ops
from torchshard.distributed.groups import ShardGroup, model_group
from torchshard.layout import balanced_ranges
from torchshard.tensor import ShardedTensor


class RandomInput(ABC):
    """An input that every rank draws alike, whole."""

    @abstractmethod
    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return the whole input."""


@dataclass(frozen=True)
class Floats(RandomInput):
    """Standard normal numbers of the given shape, whose gradient is checked.

    Args:
        shape: Shape of the whole input.
        shard: The dim along which the layer gets it sharded, marked as such; None hands it
            over whole.
        unit: How many indices of that dim stay together.
    """

    shape: tuple[int, ...]
    shard: int | None = None
    unit: int = 1

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return the whole input, a leaf that requires grad."""
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()


@dataclass(frozen=True)
class Integers(RandomInput):
    """Integers from 0 to `high - 1` of the given shape: ids, or class indices."""

    high: int
    shape: tuple[int, ...]

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return the whole input."""
        return torch.randint(self.high, self.shape, generator=generator)


@dataclass(frozen=True)
class Case:
    """One configuration to check.

    Args:
        layer: The sharded layer's class.
        dense: The class that it equals, or None for the layer itself in a group of one.
        args: Constructor arguments of both.
        options: Constructor keywords of both.
        sharding: Constructor keywords of the sharded layer alone, such as `dim`.
        inputs: Arguments of `forward`: `Floats`, `Integers`, or values that are passed on.
        keywords: Keyword arguments of `forward`, likewise.
        collectives: How many collectives forward and backward take on more than one rank;
            None leaves them uncounted.
        seed: Which random inputs, values and cotangents; each seed gives others.
    """

    layer: Callable[..., nn.Module]
    dense: Callable[..., nn.Module] | None = None
    args: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    sharding: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[Any] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    collectives: tuple[int, int] | None = None
    seed: int = 0

    def __str__(self) -> str:
        given = [_brief(arg) for arg in self.args]
        named = {**self.options, **self.sharding}.items()
        given += [f"{key}={_brief(value)}" for key, value in named]
        fed = [_brief(x) for x in self.inputs]
        fed += [f"{key}={_brief(value)}" for key, value in self.keywords.items()]
        name = getattr(self.layer, "__name__", repr(self.layer))
        return f"{name}({', '.join(given)}) of ({', '.join(fed)})"

    def seed_for(self, use: int) -> int:
        """Return a seed for one of up to 1000 uses, so that no two draw the same numbers."""
        return 1000 * self.seed + use

    def build(self, **extra: Any) -> nn.Module:
        """Return the sharded layer."""
        return self.layer(*self.args, **self.options, **self.sharding, **extra)

    def build_dense(self) -> nn.Module:
        """Return the dense layer."""
        if self.dense is not None:
            return self.dense(*self.args, **self.options)
        return self.build(group=ShardGroup())

    def draw(self, dtype: torch.dtype) -> Feed:
        """Return one set of inputs, the same at every call and on every rank."""
        generator = torch.Generator().manual_seed(self.seed_for(20))
        args = [_drawn(x, generator, dtype) for x in self.inputs]
        named = {
            key: _drawn(value, generator, dtype) for key, value in self.keywords.items()
        }
        return Feed(self, args, named)


@dataclass
class Feed:
    """Whole inputs of a case, drawn."""

    case: Case
    args: list[Any]
    keywords: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors."""
        values = [*self.args, *self.keywords.values()]
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def leaves(self) -> list[Tensor]:
        """The inputs whose gradient is checked."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def into(self, layer: nn.Module) -> Any:
        """Return `layer`'s output for the inputs, whole."""
        return layer(*self.args, **self.keywords)

    def into_sharded(self, layer: Callable[..., Any]) -> Any:
        """Return `layer`'s output, with the inputs sharded that the case wants so."""
        args = [
            _handed(spec, value)
            for spec, value in zip(self.case.inputs, self.args, strict=True)
        ]
        named = {
            key: _handed(self.case.keywords[key], value)
            for key, value in self.keywords.items()
        }
        return layer(*args, **named)


def _drawn(value: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    if isinstance(value, RandomInput):
        return value.draw(generator, dtype)
    if isinstance(value, Tensor):
        return value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
    return value


def _handed(spec: Any, value: Any) -> Any:
    if isinstance(spec, Floats) and spec.shard is not None:
        group = model_group()
        num_units = value.shape[spec.shard] // spec.unit
        ranges = balanced_ranges(num_units, group.size).scaled(spec.unit)
        shard = ops.scatter(value, spec.shard, ranges=ranges)
        return ShardedTensor.from_local(shard, spec.shard, ranges=ranges)
    return value


def _brief(value: Any) -> str:
    if isinstance(value, RandomInput):
        return "x".join(map(str, value.shape))  # type: ignore[attr-defined]
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    return repr(value)
