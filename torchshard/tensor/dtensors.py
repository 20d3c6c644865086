"""Shards as DTensors, the form in which `torch.distributed.checkpoint` takes and gives state.

Each carries the list of chunks that its rank holds, since balanced, packed and overlapping
ranges are not the equal chunks that a DTensor's placement alone describes.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torchshard.distributed.groups import ShardGroup, at_destroy
from torchshard.layout import Ranges
from torchshard.tensor.sharded import Sharding, mark, whole

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed.tensor import DTensor

Form: TypeAlias = Literal["local", "chunks", "whole"]

_meshes: dict[tuple[ShardGroup, str], DeviceMesh] = {}


def wanted_form() -> Form:
    """Return the form in which state is wanted by who reads it now: it is on the stack.

    Chunks for `torch.distributed.checkpoint`, whole tensors if its `StateDictOptions` say
    `full_state_dict`, and the local ones for anyone else.
    """
    frame: FrameType | None = sys._getframe(1)
    form: Form = "local"
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CHECKPOINT):
            form = "chunks"
            options = frame.f_locals.get("info")
            if getattr(options, "full_state_dict", False):
                return "whole"
        frame = frame.f_back
    return form


_CHECKPOINT = "torch.distributed.checkpoint"


def in_form(shard: Tensor, sharding: Sharding, form: Form) -> Tensor:
    """Return a plain tensor that is laid out as `sharding` says in another form."""
    if form == "local" or sharding.group.size == 1:
        return shard
    if form == "whole":
        return whole(mark(shard, sharding))
    return as_dtensor(shard, sharding)


def as_dtensor(shard: Tensor, sharding: Sharding) -> DTensor:
    """Return `shard` as a DTensor whose chunks are this rank's ranges of the sharded dim.

    It shares the shard's memory.
    """
    # Here, not above: half a second, which only a checkpoint is worth.
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    dim, ranges, group = sharding.dim, sharding.ranges, sharding.group
    chunks, offsets, place = [], [], 0
    for start, stop in _chunk_bounds(ranges, group.rank):
        chunks.append(shard.narrow(dim, place, stop - start))
        offsets.append(tuple(start if d == dim else 0 for d in range(shard.dim())))
        place += stop - start
    local = LocalShardsWrapper(chunks, offsets)
    if not chunks:
        # torch describes no chunks as one, 0 x 0, whatever the number of dims (torch 2.13).
        local.storage_metadata().chunks.clear()
    shape = list(shard.shape)
    shape[dim] = ranges.size
    like = shard.new_empty(shape, device="meta")
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    # Not DTensor.from_local, which views the chunks as one tensor: only some can be.
    spec = DTensorSpec(_mesh(group, shard), (Shard(dim),), meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call] # torch's


def _mesh(group: ShardGroup, tensor: Tensor) -> DeviceMesh:
    place = (group, tensor.device.type)
    if place not in _meshes:
        if not _meshes:
            at_destroy(_meshes.clear)
        process_group = cast(ProcessGroup, group.process_group)
        _meshes[place] = DeviceMesh.from_group(process_group, tensor.device.type)
    return _meshes[place]


def _chunk_bounds(ranges: Ranges, rank: int) -> list[tuple[int, int]]:
    """Return the ranges of `rank`, cut wherever a range of any rank begins or ends.

    Chunks of different ranks are then equal or disjoint; equal ones are written once.
    """
    cuts = {bound for part in ranges.per_rank for pair in part for bound in pair}
    bounds = []
    for start, stop in ranges.per_rank[rank]:
        edges = sorted(cut for cut in cuts if start <= cut <= stop)
        bounds += list(itertools.pairwise(edges))
    return bounds


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor, without importing what only a checkpoint is worth."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def without_dtensor(value: Tensor, dim: int, own_shape: tuple[int, ...]) -> Tensor:
    """Return a DTensor as a plain tensor: whole, or the shard if it is a list of chunks.

    Args:
        value: A DTensor; any other tensor is returned as it is.
        dim: The sharded dim, along which the chunks lie.
        own_shape: The shape of this rank's shard.
    """
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    sharded = cast("DTensor", value)
    with torch.no_grad():
        local = sharded.to_local()
    if not isinstance(local, LocalShardsWrapper):
        return sharded.full_tensor()
    chunks = local.local_shards()
    if not chunks:
        return torch.empty(own_shape, dtype=value.dtype, device=value.device)
    return torch.cat(chunks, dim)
