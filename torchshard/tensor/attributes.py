"""Attributes and facts of a shard: sizes are the whole's, what the storage says is the shard's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.distributed.transforms import is_marked
from torchshard.errors import ShardedOpError
from torchshard.tensor.asker import calling_frame
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    Sharding,
    bound,
    is_in_backward,
    local,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
)


@rule(["__get__"])
def _attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`x.shape` is the whole's; `x.T` and its kin are views; other attributes the shard's."""
    (x,) = cast(tuple[ShardedTensor], args)
    if func == getter("shape"):
        return whole_shape(x)
    if func == getter("T"):
        return RULES["t"](func, args, kwargs)
    if func == getter("mT"):
        return RULES["transpose"](func, (x, -2, -1), {})
    if func in _COMPLEX:
        raise mixes("a complex view", x.sharding, "has no rule for sharded tensors")
    if func == _GRAD_FN and _is_asked_by_a_call():
        raise ShardedOpError(
            "register_backward_hook was called on a module whose output is spread over ranks;"
            " its hook would be given this rank's part of the gradients. Call"
            " register_full_backward_hook, whose hooks are given sharded gradients."
        )
    result = local_call(func, args, kwargs)
    # Inside backward a checkpoint hands `x.grad` on to autograd, which knows no marks.
    if isinstance(result, Tensor) and func in _ALIKE and not is_in_backward():
        return mark(result, x.sharding)
    return result


def _is_asked_by_a_call() -> bool:
    """Return whether a module that was called asks, to register its non-full backward hooks."""
    frame = None if torch.compiler.is_compiling() else calling_frame()
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.modules.module":
        return False
    return frame.f_code.co_name in ("inner", "_call_impl")


def getter(name: str) -> Any:
    """Return the function that `__torch_function__` is given for the attribute `name`."""
    return getattr(torch.Tensor, name).__get__


_COMPLEX = [getter("H"), getter("mH"), getter("real"), getter("imag")]
_GRAD_FN = getter("grad_fn")
_ALIKE = [getter("data"), getter("grad")]


@rule(["size"])
def _size(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    shape = whole_shape(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@rule(["__len__"])
def _len(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    return whole_shape(args[0])[0]


@rule(["__format__"])
def _format(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    return format(repr(args[0]), args[1])


@rule(["__deepcopy__"])
def _deepcopy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Copy a leaf, as torch does; what autograd computed is refused, as by torch."""
    x, memo = args
    if id(x) in memo:
        return cast(Tensor, memo[id(x)])
    with torch._C.DisableTorchFunctionSubclass():
        plain = x.view_as(x) if x.grad_fn is not None else x.detach()
    copied = mark(copy.deepcopy(plain), x.sharding).requires_grad_(x.requires_grad)
    memo[id(x)] = copied
    return copied


@rule(["numel", "nelement"])
def _numel(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    return whole_shape(args[0]).numel()


PLAIN = """
    dim ndimension stride storage_offset is_contiguous is_floating_point is_complex
    is_signed element_size data_ptr untyped_storage get_device __hash__ __delete__
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook is_pinned
    _is_view __reduce_ex__ is_inference is_set_to has_names
    """.split()

_FACTS = """
    size __len__ numel nelement detach __repr__ __format__ __deepcopy__ storage _typed_storage
    share_memory_ is_shared type dtype is_same_size as_subclass _has_compatible_shallow_copy_type
    _backward_hooks _make_subclass is_nonzero requires_grad __setstate__ __dlpack_device__ tolist numpy
    """.split()
_LISTS = [
    name
    for name in dir(torch)
    if name.startswith(("_foreach_", "_fused_")) and "norm" not in name
]
"""What an optimizer calls with all parameters at once."""
OF_THE_SHARD = frozenset([*PLAIN, *_FACTS, *_LISTS])
"""What a divided parameter and its gradient answer for the shard, whoever asks."""


@rule(PLAIN)
def _plain(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Facts about the storage are the shard's; a hook is given the gradient marked."""
    if func is torch.Tensor.register_hook and not torch.compiler.is_compiling():
        x, hook = bound(args, kwargs, self=None, hook=None)
        args, kwargs = (x, _marking(hook, x.sharding)), {}
    return local_call(func, args, kwargs)


def _marking(hook: Callable[..., Any], sharding: Sharding) -> Callable[..., Any]:
    return lambda grad: local(hook(grad if is_marked(grad) else mark(grad, sharding)))


@rule(["__set__"])
def _set_attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """`x.requires_grad = ...`, `x.grad = ...`; not `x.data`, which could be of another size."""
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        raise mixes("assigning .data", args[0].sharding, "could give it another size")
    local_call(func, args, kwargs)
