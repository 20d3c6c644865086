"""ShardedGradient: the gradient of a divided parameter, as code outside torch reads it.

It is the shard, but one number made of all its elements is the whole gradient's: a norm, a sum
of squares, whether one is not finite. That is what loops over `parameter.grad` want of it,
`torch.nn.utils.get_total_norm(grads)` among them, and a shard's number would make each rank clip,
skip and log by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchshard.tensor.asker import asking_module
from torchshard.tensor.compiler import uncompiled
from torchshard.tensor.sharded import (
    ANSWERS_FIRST,
    ShardedTensor,
    Sharding,
    local,
    local_call,
    mark,
)

_NORMS = frozenset(
    """
    norm vector_norm linalg_vector_norm linalg_norm linalg_matrix_norm _foreach_norm
    dot vdot inner dist cosine_similarity
    """.split()
)
_JOINS = frozenset(["cat", "concat", "concatenate", "hstack"])
"""Of several gradients one would be made, divided as none of them is: its rule refuses."""
_FLATTENS = frozenset(["flatten", "ravel", "reshape", "view"])
_OF_ALL_ELEMENTS = frozenset(
    "sum nansum mean nanmean max min amax amin any all var std prod count_nonzero".split()
)
_ELEMENTWISE = frozenset(
    """
    detach clone contiguous to type float double half bfloat16 cpu cuda coalesce
    abs absolute square sqrt pow neg mul multiply div divide true_divide sub add
    isnan isinf isfinite logical_not bitwise_not log log10 log2
    eq ne gt ge lt le
    """.split()
)
"""What keeps the elements where they are, beside numbers and gradients divided alike."""
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class ShardedGradient(Tensor):
    """A divided parameter's gradient: this rank's shard, whose norm is the whole's.

    Attributes:
        sharding: The parameter's: the sharded dim, who holds what of it, and the group.
    """

    sharding: Sharding

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind in ANSWERS_FIRST for kind in types):
            return NotImplemented
        if any(issubclass(kind, ShardedTensor) for kind in types):
            args, kwargs = tree_map(_marked, args), tree_map(_marked, kwargs)
            return ShardedTensor.__torch_function__(func, (), args, kwargs)
        name = getattr(func, "__name__", "")
        if _is_of_the_whole(name, args, kwargs) and not torch.compiler.is_compiling():
            args, kwargs = tree_map(_marked, args), tree_map(_marked, kwargs)
            return ShardedTensor.__torch_function__(func, (), args, kwargs)
        result = local_call(func, args, kwargs)
        if name in _FLATTENS and _is_dense(args[0]) and result.dim() == 1:
            flat = _marked(args[0]).flatten()
            return known_as_gradient(local(flat), flat.sharding)
        if isinstance(result, Tensor) and (name in _ELEMENTWISE or func == _DATA):
            sharding = _common_sharding([*args, *kwargs.values()])
            return known_as_gradient(result, sharding) if sharding else result
        return result


uncompiled(ShardedGradient)


def _is_of_the_whole(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function goes by the rules of marked tensors, and not by the shard."""
    if name in _OF_ALL_ELEMENTS:
        is_of_all = len(args) == 1 and not kwargs.keys() & {"dim", "axis", "out"}
        return is_of_all and _is_dense(args[0])
    if name in _JOINS:
        return not asking_module().startswith("torchshard")
    return name in _NORMS


def _is_dense(value: Any) -> bool:
    return isinstance(value, ShardedGradient) and not value.is_sparse


def _common_sharding(values: list[Any]) -> Sharding | None:
    """Return how the gradients among `values` are divided; None beside other tensors."""
    shardings = [
        value.sharding for value in values if isinstance(value, ShardedGradient)
    ]
    others = [x for x in values if isinstance(x, Tensor) and x.dim()]
    is_common = len(others) == len(shardings) and shardings.count(shardings[0]) == len(
        shardings
    )
    return shardings[0] if is_common else None


def known_as_gradient(grad: Tensor, sharding: Sharding) -> Tensor:
    """Return the gradient of a parameter that is divided so; marked, to be differentiated.

    It shares the gradient's storage. A sparse one has none that could be shared, and is the
    same object.
    """
    if grad.requires_grad:
        return mark(grad, sharding)
    if grad.is_sparse:
        grad.__class__ = ShardedGradient  # undone by `known_as_plain`
        shard = cast(ShardedGradient, grad)
    else:
        shard = torch.Tensor._make_subclass(ShardedGradient, grad, False)
    shard.sharding = sharding
    return shard


def known_as_plain(grad: Tensor) -> Tensor:
    """Return the gradient for who keeps parameters, and takes it for the shard that it is."""
    if isinstance(grad, ShardedTensor):
        return grad.to_local()
    if not isinstance(grad, ShardedGradient):
        return grad
    if not grad.is_sparse:
        return torch.Tensor._make_subclass(Tensor, grad, False)
    grad.__class__ = Tensor  # type: ignore[assignment]
    return grad


def hook_of_gradient(
    hook: Callable[..., Any], sharding: Sharding
) -> Callable[..., Any]:
    """Return the hook that gives `hook` the gradient of what is divided so."""

    def on_gradient(grad: Tensor) -> Any:
        result = hook(known_as_gradient(grad, sharding))
        return known_as_plain(result) if isinstance(result, Tensor) else result

    return on_gradient


def _marked(value: Any) -> Any:
    if not isinstance(value, ShardedGradient):
        return value
    sharding = value.sharding
    with torch._C.DisableTorchFunctionSubclass():
        if not value.is_sparse:
            return mark(value.as_subclass(Tensor), sharding)
        values = value.coalesce().values()
    if sharding.dim:
        return mark(values, sharding)
    return ShardedTensor.from_local(values, 0, group=sharding.group)
