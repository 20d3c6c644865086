"""ShardedGradient: the gradient of a divided parameter, as code outside torch reads it.

It has the shard's shape, as the parameter has, and works elementwise as a shard does, but what is
computed of it is the whole's: a norm, a sum of squares, whether one element is not finite, a mean
along a dim. That is what loops over `parameter.grad` want of it; a shard's number would make each
rank clip, skip and log by another. So is what is made like a parameter, `torch.zeros_like(weight)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torchshard.distributed.transforms import is_marked
from torchshard.tensor.asker import INIT, KEEPERS, asking_module
from torchshard.tensor.attributes import OF_THE_SHARD, getter
from torchshard.tensor.compiler import uncompiled
from torchshard.tensor.elementwise import in_place, noise, pointwise
from torchshard.tensor.filling import FILLS, filled, initialised
from torchshard.tensor.sharded import (
    ANSWERS_FIRST,
    RULES,
    ShardedTensor,
    Sharding,
    local,
    local_call,
    mark,
)

_RESHAPES = frozenset("flatten ravel reshape view view_as reshape_as".split())
_KEPT = frozenset("detach clone type to to_dense cpu cuda coalesce pin_memory".split())
LIKES = frozenset("zeros_like ones_like empty_like full_like".split())
_FANS = frozenset(["size", "__len__", "numel", "nelement"])
_NORMS = frozenset("norm vector_norm linalg_vector_norm _foreach_norm".split())
"""What has a rule for the values of a sparse gradient."""
_SHAPE, _DATA = getter("shape"), getter("data")
_VIEWS = list(map(getter, ("T", "mT", "H", "mH", "real", "imag")))


class ShardedGradient(Tensor):
    """A divided parameter's gradient: this rank's shard, which knows what it is a part of.

    Its shape and storage are the shard's. Elementwise functions work on the shard, beside
    numbers, beside gradients divided alike and beside what has the shard's own shape; a view
    that keeps the divided dim keeps the knowledge. All else is computed of the whole, by the
    rules of `ShardedTensor`.

    What is made by `zeros_like` and its kin is one from the first function that writes into it.
    Until then it may be a buffer, into which a collective puts another rank's shard.

    Attributes:
        sharding: The parameter's: the sharded dim, who holds what of it, and the group.
        is_fresh: Whether it was made by `zeros_like` or its kin, and not written into.
    """

    sharding: Sharding
    is_fresh = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind in ANSWERS_FIRST and kind is not cls for kind in types):
            return NotImplemented
        if torch.compiler.is_compiling():
            return local_call(func, args, kwargs)
        name = func.__name__
        if name == "__get__":
            return _attribute(func, args[0])
        if name in _FANS and asking_module() == INIT:
            return _by_rule(func, args, kwargs)
        if name.startswith("_foreach_") and name.endswith("_"):
            _written(args[0])
        if name in OF_THE_SHARD - _KEPT or name == "__set__":
            return local_call(func, args, kwargs)
        tensors = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
        if RULES.get(name) in (in_place, noise) or name in FILLS:
            _written(args[:1])
        if getattr(func, "__module__", None) == INIT:
            return initialised(func, args, kwargs)
        if name in FILLS and asking_module() == INIT:
            return filled(func, args, kwargs)
        if RULES.get(name) in (pointwise, in_place) or name in _KEPT:
            return _elementwise(func, args, kwargs, tensors)
        is_fresh = all(
            getattr(x, "is_fresh", True) for x in tree_leaves((args, kwargs))
        )
        if is_fresh or asking_module().startswith(KEEPERS):
            return local_call(func, args, kwargs)
        if name not in _NORMS and any(map(_is_sparse, tensors)):
            return local_call(func, args, kwargs)
        if name == "__setitem__" and _is_one_element(*args[:2]):
            return local_call(func, args, kwargs)
        if name in ("equal", "allclose") and _is_beside_its_like(tensors):
            return local_call(func, args, kwargs)
        if name in _RESHAPES and isinstance(args[0], ShardedGradient):
            return _reshaped(func, args, kwargs)
        return _by_rule(func, args, kwargs)

    def to_local(self) -> Tensor:
        """Return the shard as a plain tensor. The caller now minds who holds what."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor: who reads it has another rank's parameters."""
        plain: Any = self.to_local()
        return plain.__reduce_ex__(protocol)


uncompiled(ShardedGradient)
ANSWERS_FIRST.add(ShardedGradient)


def _by_rule(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `func` on the gradients marked; noise like a gradient is one again."""
    args, kwargs = tree_map(gradient_marked, args), tree_map(gradient_marked, kwargs)
    result = ShardedTensor.__torch_function__(func, (), args, kwargs)
    return _known_again(result) if RULES.get(func.__name__) is noise else result


def _written(tensors: Iterable[Any]) -> None:
    for x in tensors:
        if isinstance(x, ShardedGradient) and x.is_fresh:
            x.is_fresh = False


def _known_again(result: Any) -> Any:
    if not isinstance(result, ShardedTensor):
        return result
    return known_as_gradient(result.to_local(), result.sharding)


def _attribute(func: Callable[..., Any], grad: ShardedGradient) -> Any:
    """Attributes are the shard's, but for who counts fans; views know what they are views of."""
    if func in _VIEWS or (func == _SHAPE and asking_module() == INIT):
        return _by_rule(func, (grad,), {})
    value = local_call(func, (grad,), {})
    return known_as_gradient(value, grad.sharding) if func == _DATA else value


def _elementwise(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> Any:
    """Compute on the shards, if what is beside them has a shard's shape, or goes with any.

    Who has a shard's shape is taken for a shard: what is kept of gradients and made like them.
    """
    grad = next(x for x in tensors if isinstance(x, ShardedGradient))
    back = grad.sharding.dim - grad.dim()
    if not all(_goes_beside(x, grad.sharding, back) for x in tensors):
        result = _by_rule(func, args, kwargs)
        is_written = RULES.get(func.__name__) is in_place
        return args[0] if is_written else _known_again(result)
    result = local_call(func, args, kwargs)
    if not isinstance(result, Tensor) or result is args[0]:
        return result
    known = known_as_gradient(result, grad.sharding.at(result.dim() + back))
    is_like = func.__name__ in LIKES
    if is_like or all(getattr(x, "is_fresh", not x.dim()) for x in tensors):
        known.is_fresh = True  # type: ignore[attr-defined]
    return known


def made_like(value: Tensor, sharding: Sharding) -> Tensor:
    """Return what `zeros_like` or its kin made of what is divided so."""
    known = known_as_gradient(value, sharding)
    known.is_fresh = True  # type: ignore[attr-defined]
    return known


def _goes_beside(x: Tensor, sharding: Sharding, back: int) -> bool:
    if isinstance(x, ShardedTensor):
        return False
    if isinstance(x, ShardedGradient):
        return x.sharding.at(x.sharding.dim - x.dim()) == sharding.at(back)
    return x.dim() < -back or x.shape[back] in (1, sharding.length)


def _reshaped(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return a view by the shard's sizes, known as a gradient where it keeps the divided dim.

    One that flattens it is divided as the flattened whole; of others nobody knows.
    """
    grad: ShardedGradient = args[0]
    result: Tensor = local_call(func, args, kwargs)
    sharding, before, after = grad.sharding, grad.shape, result.shape
    dim, back = sharding.dim, sharding.dim - grad.dim()
    if after[: dim + 1] == before[: dim + 1]:
        return known_as_gradient(result, sharding)
    if len(after) >= -back and after[back:] == before[back:]:
        return known_as_gradient(result, sharding.at(result.dim() + back))
    if result.dim() == 1:
        flat = gradient_marked(grad).flatten()
        return known_as_gradient(local(flat), flat.sharding)
    return result


def _is_beside_its_like(tensors: list[Tensor]) -> bool:
    """Return whether a plain tensor of the shard's shape is among them, compared on each rank."""
    shapes = {local_call(_SHAPE, (x,), {}) for x in tensors}
    return len(shapes) == 1 and any(not is_marked(x) for x in tensors)


def _is_one_element(x: Tensor, index: Any) -> bool:
    """Return whether `index` names one element, of the shard: so tests put infinities in one."""
    items = index if isinstance(index, tuple) else (index,)
    return len(items) == x.dim() and all(isinstance(item, int) for item in items)


def _is_sparse(x: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.is_sparse


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


def gradient_marked(value: Any) -> Any:
    """Return a gradient as a `ShardedTensor`; anything else as it is."""
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
