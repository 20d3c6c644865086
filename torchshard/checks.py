"""Checks of arguments that are the same on every rank, made before the first collective.

A rank that raises alone leaves the others waiting, so only whole values are checked here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchshard.errors import ShardedOpError, TargetError


def expect_indices(
    indices: Tensor, size: int, name: str, ignore_index: int | None = None
) -> None:
    """Check that every index lies in `0 ... size - 1` or equals `ignore_index`.

    On the CPU it raises at once. On a device, and inside a compiled graph, it becomes a
    device-side assertion, since looking at the values would stall the stream.

    Raises:
        TargetError: If an index is out of range.
        ShardedOpError: If `indices` is sharded: a rank would check its own alone.
    """
    if getattr(indices, "sharding", None) is not None:
        raise ShardedOpError(
            f"{name} is sharded, and all of its indices are needed on every rank. Call"
            " torchshard.distributed.gather on it first."
        )
    indices = indices.long()  # in uint8, -100 is 156
    bad = (indices < 0) | (indices >= size)
    if ignore_index is not None:
        bad = bad & (indices != ignore_index)
    if torch.compiler.is_compiling() or indices.device.type != "cpu":
        torch._assert_async(~bad.any(), f"{name} holds an index outside 0..{size - 1}")
    elif bad.any():
        raise TargetError(
            f"{name} holds {int(indices[bad][0])}, which is out of range. Expected indices"
            f" from 0 to {size - 1}" + _or_ignored(ignore_index) + "."
        )


def _or_ignored(ignore_index: int | None) -> str:
    return "" if ignore_index is None else f", or ignore_index={ignore_index}"
