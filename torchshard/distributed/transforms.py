"""What torch hands a tensor to without asking it: functions and transforms that know no shards.

A class of `torch.autograd.Function` is given the marked tensor forward, and backward this
rank's part of a gradient without a mark. `torch.func` wraps a tensor in another of its own, and
forward-mode autograd hangs a tangent on it. Each would take the shard for the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torchshard.errors import ShardedOpError

if TYPE_CHECKING:
    from types import FrameType

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def expect_no_transform(what: str, x: Tensor | None = None) -> None:
    """Check that no transform of `torch.func` runs, and no forward-mode autograd.

    Args:
        what: What was called, for the error.
        x: A tensor that it is given; in backward, only that shows a transform.

    Raises:
        ShardedOpError: If one does.
    """
    if torch.compiler.is_compiling():
        return
    is_dual = forward_ad._current_level >= 0
    # How `torch.autograd.grad(is_grads_batched=True)` runs a backward.
    is_wrapped = x is not None and torch._C._functorch.is_legacy_batchedtensor(x)
    if is_dual or is_wrapped or torch._C._are_functorch_transforms_active():
        raise _under_transform(what)


def _under_transform(what: str) -> ShardedOpError:
    return ShardedOpError(
        f"{what} was reached under a transform of torch.func (vmap, grad, jacrev, jvp and their"
        " kin) or forward-mode autograd, which take a shard for the whole tensor. Use"
        " torch.autograd.grad or torch.autograd.functional, a loop in place of vmap, or"
        " torchshard.distributed.gather(x) before the transform."
    )


def expect_asked(name: str) -> None:
    """Check that what calls the operation `name` on a shard, in its dispatch, can take one.

    Raises:
        ShardedOpError: If it is a transform, or a Function of a user's own.
    """
    if torch.compiler.is_compiling():
        return
    expect_no_transform(name)
    if name in ("dim", "size"):  # vmap asks before it wraps
        asker: str = sys._getframe(2).f_globals.get("__name__", "")
        if asker.startswith("torch._functorch"):
            raise _under_transform("A tensor that is spread over ranks")
    # Forward of a Function turns both modes off.
    if not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()):
        _expect_no_own_function(sys._getframe(2))


def _refusing(value: Any, level: int) -> Any:
    if not torch.compiler.is_compiling() and is_marked(value):
        raise _under_transform("A tensor that is spread over ranks")
    return _wrap(value, level)


def watch_transforms() -> None:
    """Have `torch.func.grad` and its kin refuse shards; torch 2.13 has no hook for it."""
    vars(eager_transforms)["_wrap_tensor_for_grad"] = _refusing


def forget_transforms() -> None:
    """Undo `watch_transforms`."""
    vars(eager_transforms)["_wrap_tensor_for_grad"] = _wrap


_wrap: Any = eager_transforms._wrap_tensor_for_grad


def is_marked(value: Any) -> bool:
    """Return whether `value` is a marked tensor, or a parameter that is a shard."""
    return isinstance(value, Tensor) and "sharding" in vars(value)


def _expect_no_own_function(frame: FrameType | None) -> None:
    """Check that no `torch.autograd.Function` but torch's was given a shard to differentiate."""
    while frame is not None:
        if frame.f_code is _APPLY:
            given = tree_leaves(frame.f_locals["args"])
            _expect_plain(frame.f_locals["cls"], given)
        frame = frame.f_back


def _expect_plain(function: type, given: Iterable[Any]) -> None:
    if function.__module__.split(".")[0] in ("torch", "torchshard"):
        return
    tensors = [x for x in given if isinstance(x, Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        is_differentiated = any(x.requires_grad for x in tensors)
    if is_differentiated and any(map(is_marked, tensors)):
        raise ShardedOpError(
            f"{function.__qualname__}, a torch.autograd.Function, was given a tensor that is"
            " spread over ranks. Its backward would get this rank's part of a gradient and"
            " take it for the whole. Call it on torchshard.distributed.gather(x); or, if it"
            " works element by element, on x.to_local(), and mark what it returns with"
            " ShardedTensor.from_local(y, dim)."
        )
