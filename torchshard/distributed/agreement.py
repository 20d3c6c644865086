"""Checks between ranks, switched on by the environment variable TORCHSHARD_DEBUG=1.

They turn a hang or a silently wrong number into an error on every rank, for one or two more
collectives each. Off, they cost one look at the environment; compiled graphs leave them out.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import GroupError


def expect_same_call(name: str, x: Tensor, group: ShardGroup) -> None:
    """Check that every rank is about to run the collective `name`, on the same shape.

    Raises:
        GroupError: On every rank, if one of them has another collective, shape or dtype.
    """
    if not _is_debugging(group):
        return
    calls = from_all_ranks(f"{name} of {tuple(x.shape)}, {x.dtype}", group)
    if len(set(calls)) > 1:
        listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        raise GroupError(
            f"The ranks' next collectives differ: {listed}. Expected the same on all: give"
            " all ranks inputs of one shape and dtype, and let all take the same branches."
        )


def expect_whole(name: str, x: Tensor, group: ShardGroup) -> None:
    """Check that `x` is whole, the same on every rank, before `name` takes it for that.

    Raises:
        GroupError: On every rank, if the values of one of them differ from rank 0's.
    """
    if not _is_debugging(group):
        return
    expect_same_call(name, x, group)
    first = x.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, group=group.process_group, group_src=0)
    both_nan = (x != x) & (first != first)
    same = from_all_ranks(bool(((x == first) | both_nan).all()), group)
    if not all(same):
        ranks = ", ".join(str(rank) for rank, equal in enumerate(same) if not equal)
        raise GroupError(
            f"{name} takes a whole tensor, the same on every rank, but on rank {ranks} it"
            " differs from rank 0's. Give the ranks of a model group the same batch, and"
            " seed them alike."
        )


def _is_debugging(group: ShardGroup) -> bool:
    if group.size == 1 or torch.compiler.is_compiling():
        return False
    return os.environ.get("TORCHSHARD_DEBUG") == "1"


def from_all_ranks(value: Any, group: ShardGroup) -> list[Any]:
    """Return the value of every rank, by rank."""
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values
