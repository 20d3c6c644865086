"""Who asks something of a divided parameter: a layer, a part of torch, or anyone else.

It is read from the stack, where a compiled graph has none and everyone is a stranger.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import torch
from torchshard.errors import ShardedOpError
from torchshard.tensor.sharded import is_in_backward

if TYPE_CHECKING:
    from types import FrameType

_PASSED_THROUGH = frozenset(
    [
        "torch.overrides",
        "torch.autograd",
        "torch._tensor",
        "torch.functional",
        "torch.nn.functional",
        "torchshard.tensor.attributes",
        "torchshard.tensor.backward",
        "torchshard.tensor.gradient",
        "torchshard.tensor.parameter",
        "torchshard.tensor.sharded",
        __name__,
    ]
)
KEEPERS = (
    "torch.optim",
    "torch.autograd.graph",
    "torch.distributed",
    "torch.nn.modules.module",
    "torch.nn.parameter",
    "torch.nn.parallel",
    "torch.serialization",
    "torch.storage",
    "torch.multiprocessing",
    "torch.testing",
    "torch.amp",
    "torch.cuda",
    "torch._",
    "torchshard",
)
"""Modules that keep parameters, and work on what this rank holds of them."""
NORM_TAKERS = frozenset(["torch.nn.utils.clip_grad", "torch.amp.grad_scaler"])
INIT = "torch.nn.init"
_WHOLE_ONLY = frozenset(
    """
    trunc_normal_ _no_grad_trunc_normal_ orthogonal_ sparse_ eye_ dirac_
    """.split()
)
"""Functions of `torch.nn.init` that do more than fill a tensor by its fans."""


class _Inside(threading.local):
    """How many layers' forwards, and functions given to `apply`, this thread is inside of."""

    def __init__(self) -> None:
        # Of each thread's own: a compiled graph's guards look for it there.
        self.depth = 0
        self.applied = 0


inside = _Inside()


def counts_fans(asker: str) -> bool:
    """Return whether who asks for a size fills a tensor by it, and wants the whole's.

    `torch.nn.init` does, and a function that was given to `model.apply`.
    """
    is_own = asker.split(".")[0] in ("torch", "torchshard")
    return asker == INIT or (inside.applied > 0 and not is_own)


def asking_module() -> str:
    """Return the name of the module that called a function of torch; empty when compiled.

    Raises:
        ShardedOpError: If it is a function of `torch.nn.init` that needs the whole tensor.
    """
    frame = None if torch.compiler.is_compiling() else calling_frame()
    if frame is None:
        return ""
    name: str = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_name
    if name == INIT and function in _WHOLE_ONLY:
        public = function.removeprefix("_no_grad_")
        raise ShardedOpError(
            f"torch.nn.init.{public} was given a parameter of which this rank holds a shard,"
            f" and works on whole tensors. Call torchshard.nn.init.{public}, with the same"
            " arguments and the same values on one device."
        )
    return name


def calling_frame() -> FrameType | None:
    """Return the frame that called a function of torch on a divided parameter."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
        frame = frame.f_back
    return frame


def runs_a_layer_again() -> bool:
    """Return whether backward runs the forward of a layer again, for a checkpoint in it."""
    if torch.compiler.is_compiling() or not is_in_backward():
        return False
    frame = calling_frame()
    asker = None if frame is None else frame.f_locals.get("self")
    return "local_forward" in dir(type(asker))
