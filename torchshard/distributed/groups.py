"""Who shards with whom: M data-parallel x N model-parallel ranks on one `DeviceMesh`.

Every layer holds a `ShardGroup`, resolved once when it is built. Nothing initialised means
a group of one, so that each layer works in a notebook and equals its torch.nn twin there.
The only module with state: the mesh that `init_process_group` made or adopted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchshard.distributed.transforms import forget_transforms, watch_transforms
from torchshard.errors import GroupError


class ShardGroup:
    """The ranks that hold the shards of one layer, and the place of this process in it.

    Copies of a layer share its group. A pickled layer finds the model group of the process
    that loads it, which must have the same size and rank: the layer's weights are one shard.

    Attributes:
        process_group: The torch.distributed group, or None for a group of one.
        size: Number of ranks in the group.
        rank: Rank of this process in the group, never in the world.

    Raises:
        GroupError: If this process is not a member, or if it is no group at all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise GroupError(
                f"group={process_group!r} is not a process group that this rank is in."
                " Expected a ShardGroup, a torch.distributed group with this rank among its"
                " members (mesh.get_group(dim) of a DeviceMesh), or None."
            )
        self.process_group = process_group
        self.size = 1 if process_group is None else process_group.size()
        self.rank = 0 if process_group is None else process_group.rank()
        if self.size > 1:
            watch_transforms()

    def __copy__(self) -> ShardGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.size, self.rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardGroup):
            return NotImplemented
        return self.process_group is other.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    def __repr__(self) -> str:
        return f"ShardGroup(size={self.size}, rank={self.rank})"


GroupLike: TypeAlias = "ShardGroup | dist.ProcessGroup | None"

_mesh: DeviceMesh | None = None
_model_group = ShardGroup()
_at_destroy: list[Callable[[], None]] = []


def _restored(size: int, rank: int) -> ShardGroup:
    if size == 1:
        return ShardGroup()
    group = model_group()
    if (group.size, group.rank) != (size, rank):
        raise GroupError(
            f"The layer was pickled as rank {rank} of {size}, but this process is rank"
            f" {group.rank} of {group.size} in its model group. Load it on the same rank of"
            " a group of the same size, or load a collected state dict instead."
        )
    return group


def model_group() -> ShardGroup:
    """Return the model group of this process: a group of one until one is initialised."""
    return _model_group


def resolve_group(group: GroupLike) -> ShardGroup:
    """Return `group` as a `ShardGroup`; None is the model group."""
    if isinstance(group, ShardGroup):
        return group
    return model_group() if group is None else ShardGroup(group)


def init_process_group(
    group_size: int = -1,
    *,
    mesh: DeviceMesh | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh | None:
    """Arrange the world as data-parallel groups of model-parallel ranks.

    Ranks `0 ... group_size - 1` form the first model group, and so on. Starts
    torch.distributed from torchrun's environment if it is not running; outside torchrun the
    process stays a group of one.

    Args:
        group_size: Ranks that shard one model; -1 means all of them.
        mesh: A mesh of the caller's own to adopt, with a dim named "model" and, if the model
            is replicated, one named "data". `group_size` is then read from it.
        backend: Backend for torch.distributed if it is to be started: NCCL where there is
            CUDA, otherwise gloo.
        timeout: How long a collective may wait for another rank.

    Returns:
        The mesh, with dims "data" and "model"; None for a group of one without a launcher.

    Raises:
        GroupError: If `group_size` does not divide the world, if the mesh has no "model"
            dim, or if several ranks are asked for outside a launcher.
    """
    global _mesh, _model_group
    if mesh is not None:
        _mesh = _adopted(mesh)
    elif _started(group_size, backend, timeout):
        _mesh = _arranged(group_size)
    _model_group = ShardGroup(get_group())
    return _mesh


def _adopted(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if "model" not in names:
        raise GroupError(
            f"mesh has the dims {list(names)}, none of them named 'model'."
            " Expected mesh_dim_names=('data', 'model') or ('model',)."
        )
    return mesh


def _started(group_size: int, backend: str | None, timeout: timedelta | None) -> bool:
    if dist.is_initialized():
        return True
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        default = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend or default, timeout=timeout)
        return True
    if group_size in (-1, 1):
        return False
    raise GroupError(
        f"group_size={group_size} needs {group_size} processes, but this one was not"
        " started by a launcher. Run it with: torchrun --nproc-per-node"
        f" {group_size} SCRIPT"
    )


def _arranged(group_size: int) -> DeviceMesh:
    world = dist.get_world_size()
    size = world if group_size == -1 else group_size
    if size < 1 or world % size:
        raise GroupError(
            f"group_size={group_size} does not divide the world of {world} ranks."
            " Expected a divisor, or -1 for the whole world."
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(
        device, (world // size, size), mesh_dim_names=("data", "model")
    )


def destroy_process_group() -> None:
    """Forget the groups and shut torch.distributed down, if it is running."""
    global _mesh, _model_group
    _mesh, _model_group = None, ShardGroup()
    forget_transforms()
    while _at_destroy:
        _at_destroy.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


def at_destroy(forget: Callable[[], None]) -> None:
    """Have `destroy_process_group` call `forget`, once, and undo what was set up for groups."""
    _at_destroy.append(forget)


def is_initialized() -> bool:
    """Return whether a mesh is in use; if not, every layer is a group of one."""
    return _mesh is not None


def get_mesh() -> DeviceMesh | None:
    """Return the mesh in use, with dims "data" and "model", or None."""
    return _mesh


def get_group() -> dist.ProcessGroup | None:
    """Return torch.distributed's group of the ranks that share this model, or None."""
    return None if _mesh is None else _mesh.get_group("model")


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the same shard, or None."""
    if _mesh is None or "data" not in (_mesh.mesh_dim_names or ()):
        return None
    return _mesh.get_group("data")


def is_main_process() -> bool:
    """Return whether this is rank 0 of the world, the one to print and to write files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def get_rank() -> int:
    """Return the rank of this process in its model group."""
    return model_group().rank


def get_world_size() -> int:
    """Return the number of ranks in the model group."""
    return model_group().size


def get_group_size() -> int:
    """Return the number of ranks in the model group (TorchShard's name for it)."""
    return model_group().size
