"""A checkpoint inside another: what it is given is marked again when it runs again.

A checkpoint keeps its inputs as autograd keeps tensors, and those that an outer checkpoint makes
again come back as plain tensors: the inner forward would see this rank's shard alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torchshard.distributed.groups import at_destroy
from torchshard.distributed.transforms import is_marked

_module: Any = torch_checkpoint
_reentrant: Any = torch_checkpoint.CheckpointFunction
_FORWARD = _reentrant.forward
_GENERATOR = _module._checkpoint_without_reentrant_generator


def keep_marks_of_inputs() -> None:
    """Let checkpoints of both kinds mark their inputs, until `torchshard.destroy_process_group`."""
    if _reentrant.forward is _forward:
        return
    _reentrant.forward = staticmethod(_forward)
    _module._checkpoint_without_reentrant_generator = _generator
    at_destroy(_restore)


def _restore() -> None:
    _reentrant.forward = staticmethod(_FORWARD)
    _module._checkpoint_without_reentrant_generator = _GENERATOR


def _forward(ctx: Any, function: Callable[..., Any], keep: bool, *args: Any) -> Any:
    return _FORWARD(ctx, _marking(function, args), keep, *args)


def _generator(function: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
    """Take the options, whose number differs between versions of torch, and the arguments."""
    return _GENERATOR(_marking(function, given), *given, **kwargs)


def _marking(function: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
    """Return `function` for arguments like the last of those given, which may be unmarked."""
    shardings = [value.sharding if is_marked(value) else None for value in given]
    if not any(shardings):
        return function

    def marking(*args: Any, **kwargs: Any) -> Any:
        last = shardings[len(shardings) - len(args) :]
        return function(*map(_marked, args, last), **kwargs)

    return marking


def _marked(value: Any, sharding: Any) -> Any:
    from torchshard.tensor.sharded import mark

    if sharding is None or is_marked(value):
        return value
    with torch.enable_grad():  # the mark is an alias, and gradients go through it
        return mark(value, sharding)
