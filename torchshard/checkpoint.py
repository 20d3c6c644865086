"""Shards as `torch.distributed.checkpoint` understands them.

Parameters stay plain local tensors; only here do they become DTensors. Each carries the list
of chunks that its rank holds, since balanced, packed and overlapping ranges are not the
equal chunks that a DTensor placement alone describes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torchshard import layout
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import StateError
from torchshard.layer.local_state import is_dtensor
from torchshard.layout import Ranges
from torchshard.state import sharded_entries

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sharded_state_dict(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return `model`'s state with each shard as a DTensor, for `torch.distributed.checkpoint`.

    The DTensors share the parameters' memory: `dcp.load` into this dict loads the model in
    place, from a checkpoint that any number of ranks wrote, a dense model's included.

    Example:
        Save with `dcp.save(sharded_state_dict(model), checkpoint_id=folder)` and load, on
        any number of ranks, with `dcp.load(sharded_state_dict(model), checkpoint_id=folder)`.
    """
    state = model.state_dict(prefix=prefix)
    meshes: dict[ShardGroup, DeviceMesh] = {}
    for key, layer, name in sharded_entries(model, prefix):
        group = layer.group
        if key not in state:
            raise StateError(
                f"{key} is not in the model's state_dict: {type(layer).__name__} holds {name!r}"
                " as a plain attribute. Expected a parameter: put nn.Parameter(x) in its place."
            )
        if group.size > 1:
            if is_dtensor(state[key]):
                raise StateError(
                    f"{key} is a DTensor: fully_shard has cut this rank's shard once more, which"
                    " no list of chunks describes. Save torchshard.collect_state_dict(model)."
                )
            if group not in meshes:
                meshes[group] = _mesh(group, state[key])
            mesh = meshes[group]
            dim = cast(layout.Shard, layer.specs[name].layout).dim % state[key].dim()
            ranges = cast(Ranges, layer.ranges_of(name))
            state[key] = _as_dtensor(state[key], dim, ranges, group, mesh)
    return state


def _mesh(group: ShardGroup, tensor: Tensor) -> DeviceMesh:
    return DeviceMesh.from_group(
        cast(ProcessGroup, group.process_group), tensor.device.type
    )


def _as_dtensor(
    shard: Tensor, dim: int, ranges: Ranges, group: ShardGroup, mesh: DeviceMesh
) -> DTensor:
    """Return `shard` as a DTensor whose chunks are this rank's ranges of `dim`."""
    # Here, not above: half a second, which only a checkpoint is worth.
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

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
    whole = shard.new_empty(shape, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    # Not DTensor.from_local, which views the chunks as one tensor: only some can be.
    spec = DTensorSpec(mesh, (Shard(dim),), meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call] # torch's


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
