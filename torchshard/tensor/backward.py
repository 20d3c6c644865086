"""Backward that starts or ends at a shard, and keeps the rules for what it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchshard.distributed import ops
from torchshard.distributed.transforms import is_marked
from torchshard.tensor.asker import KEEPERS, asking_module
from torchshard.tensor.gradient import known_as_gradient
from torchshard.tensor.sharded import ShardedTensor, local, mark, rule


@rule(["backward", "grad"])
def run_backward(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`x.backward`, `torch.autograd.backward` and `torch.autograd.grad`.

    Gradients that are given may be those of the whole tensors or of this rank's shards. What
    runs inside, a checkpoint's forward among it, finds the rules as forward did: backward
    starts at plain aliases of the outputs and ends at the graph's edges to the inputs.
    """
    outputs, *rest = args
    if rest and func is torch.Tensor.backward:
        rest[0] = _own_gradients(outputs, rest[0])
    for name in ("gradient", "grad_tensors", "grad_outputs"):
        if name in kwargs:
            kwargs = {**kwargs, name: _own_gradients(outputs, kwargs[name])}
    inputs = rest[0] if func is torch.autograd.grad else kwargs.get("inputs")
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        edges = [_edge(x) for x in inputs]
        if func is torch.autograd.grad:
            rest[0] = edges
        else:
            kwargs = {**kwargs, "inputs": edges}
    with torch.enable_grad():  # also of a backward inside another
        outputs = tree_map(local, outputs)
    grads = func(outputs, *rest, **kwargs)
    if grads is None:
        return None
    pairs = zip(cast(list[Tensor], inputs), grads, strict=True)
    return tuple(grad if grad is None else _marked_like(grad, x) for x, grad in pairs)


def _edge(x: Any) -> Any:
    """Return where gradients of a marked `x` arrive; anything else as it is."""
    if not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(x)


def _marked_like(grad: Tensor, x: Any) -> Tensor:
    """Return the gradient as that of a shard, or of a parameter for code outside torch."""
    if is_marked(grad) or not is_marked(x):
        return grad
    if isinstance(x, ShardedTensor):
        return mark(grad, x.sharding)
    keeps = asking_module().startswith(KEEPERS)
    return grad if keeps else known_as_gradient(grad, x.sharding)


def _own_gradients(outputs: Any, grads: Any) -> Any:
    """Return the gradients, one or several, of this rank's part of the outputs."""
    if grads is None or isinstance(outputs, Tensor):
        return _own_part(grads, outputs)
    grads = [grads] if isinstance(grads, Tensor) else grads
    return [_own_part(*pair) for pair in zip(grads, outputs, strict=True)]


def _own_part(value: Any, x: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.to_local()
    if not isinstance(value, Tensor) or not isinstance(x, ShardedTensor):
        return value
    sharding = x.sharding
    if value.shape[sharding.dim] != sharding.ranges.size:
        return value
    return ops.scatter(
        value, sharding.dim, ranges=sharding.ranges, group=sharding.group
    )
