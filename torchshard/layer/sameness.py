"""What the ranks compare before a layer's forward, under TORCHSHARD_DEBUG=1.

The layer itself: its class and place in the model, what it was built with, its parameters'
sizes and which are frozen, the values of those that every rank holds whole. What it is given.
And once for each model, at its first forward, all of its modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn
from torchshard import owners
from torchshard.distributed.agreement import (
    expect_alike,
    from_all_ranks,
    is_debugging,
)
from torchshard.distributed.running import named, running_modules
from torchshard.layer.local_state import LocalState
from torchshard.tensor import ShardedTensor

if TYPE_CHECKING:
    from torchshard.layer.base import ParallelLayer

_compared_models: WeakSet[nn.Module] = WeakSet()


def expect_same_forward(
    layer: ParallelLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Check that all ranks of the layer's group run this layer, on the same inputs.

    Raises:
        GroupError: On every rank, if not; it says what differs on which.
    """
    if not is_debugging(layer.group):
        return
    given = _named_arguments(layer, args, kwargs)
    if not layer.axes and not any(isinstance(x, ShardedTensor) for x in given.values()):
        return  # all that the ranks do here is their own
    modules = running_modules()
    root = modules[0] if modules else layer
    what = named(layer, root)
    pooled = [
        name
        for name, x in given.items()
        if layer.takes_own_samples(name) and not isinstance(x, ShardedTensor)
    ]
    expect_alike(what, {**given, **_own_facts(layer)}, layer.group, pooled=pooled)
    if any(from_all_ranks(root not in _compared_models, layer.group)):
        _compared_models.add(root)
        expect_alike("the model", _structure(root), layer.group)


def _named_arguments(
    layer: ParallelLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    known = "dense_forward" if "dense_forward" in dir(layer) else "local_forward"
    parameters = inspect.signature(getattr(layer, known)).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _own_facts(layer: ParallelLayer) -> dict[str, Any]:
    """Return what the layer was built with, and of its parameters what all ranks share."""
    asked = inspect.signature(type(layer)).parameters
    options = {
        name: value
        for name, value in vars(layer).items()
        if name in asked and isinstance(value, bool | int | float | str | tuple)
    }
    facts: dict[str, Any] = {"training": layer.training}
    facts |= {f"option {name}": value for name, value in options.items()}
    for name, spec in layer.specs.items():
        tensor = layer.tensor_of(name)
        fact: Any = tensor
        if spec.ranges is not None:
            grad = ", wants grad" if tensor.requires_grad else ", frozen"
            fact = (
                f"{spec.shape} in shards of {spec.ranges.lengths} along dim"
                f" {spec.sharded_dim}, {tensor.dtype}{grad}"
            )
        facts[f"parameter {name}"] = fact
    return facts


def _structure(root: nn.Module) -> dict[str, str]:
    """Return of each module its class, and the whole shapes of its parameters."""
    return {
        f"module {path!r}" if path else "the class": _in_words(module)
        for path, module in root.named_modules()
    }


def _in_words(module: nn.Module) -> str:
    words = [type(module).__qualname__]
    specs = module.specs if isinstance(module, LocalState) else {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            frozen = "" if parameter.requires_grad else ", frozen"
            spec = specs.get(name)
            shape = _whole_shape(parameter) if spec is None else spec.shape
            words.append(f"{name} {shape}, {parameter.dtype}{frozen}")
    return "; ".join(words)


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    found = owners.shard_owner_of(parameter)
    return tuple(parameter.shape) if found is None else found[0].specs[found[1]].shape
