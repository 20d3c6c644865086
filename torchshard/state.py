"""Whole state of a sharded model, in torch.nn's own keys and shapes, and back.

`state_dict()` of a sharded model is local, and `load_state_dict` takes local or whole
tensors. These functions go between the two for a whole model: `collect_state_dict` gathers,
`relocate_state_dict` cuts. Gathering and sending are collective: every rank calls them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchshard.distributed import collectives
from torchshard.distributed.groups import ShardGroup, model_group
from torchshard.errors import GroupError, StateError
from torchshard.layer import ParallelLayer
from torchshard.layout import Shard
from torchshard.owners import Owner
from torchshard.shard_notes import note_shards, without_notes
from torchshard.tensor.dtensors import is_dtensor, without_dtensor


def sharded_entries(
    model: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, ParallelLayer, str]]:
    """Yield (state key, layer, parameter name) of every sharded parameter and buffer.

    A parameter with several keys has an entry for each, also where a plain module shares it.
    """
    owners: dict[int, tuple[ParallelLayer, str]] = {}
    seen = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, ParallelLayer):
            continue
        module.expect_held()
        for name in module.specs:
            if module.ranges_of(name) is not None:
                key = f"{path}.{name}" if path else name
                owners[id(module.tensor_of(name))] = (module, name)
                seen.add(key)
                yield prefix + key, module, name
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if key not in seen and id(parameter) in owners:
            yield prefix + key, *owners[id(parameter)]


def gathered(tensor: Tensor, layer: Owner, name: str) -> Tensor:
    """Return the whole tensor of which `tensor` is laid out as the layer's parameter `name`.

    For the parameter itself, its gradient, or an optimizer's moment of it. Collective.
    """
    ranges, layout = layer.ranges_of(name), layer.specs[name].layout
    if ranges is None or not isinstance(layout, Shard):
        return tensor
    return collectives.all_gather(tensor, layout.dim, ranges, layer.group)


def collect_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None = None,
    prefix: str = "",
    *,
    dst: int | None = None,
) -> dict[str, Any]:
    """Return `model`'s state with every tensor whole, as the dense model would have it.

    Every rank of the model group calls it; under `fully_shard`, whose DTensors are made whole
    too, every rank of the world. Tensors are gathered one at a time.

    Args:
        model: The sharded model.
        state_dict: Its local state; by default `model.state_dict(prefix=prefix)`.
        prefix: What stands before the keys in `state_dict`.
        dst: The rank of the group that gets the state, on the CPU; the others get an empty
            dict. None gives it to all ranks, on the layers' device.

    Returns:
        A new dict. Whole tensors are those of `state_dict`, detached.

    Raises:
        StateError: If a sharded parameter's key is missing from `state_dict`, or is not this
            rank's shard there.
        GroupError: If `dst` is no rank of the group.
    """
    if state_dict is None:
        state_dict = model.state_dict(prefix=prefix)
    owners = {key: (layer, name) for key, layer, name in sharded_entries(model, prefix)}
    missing = sorted(owners.keys() - state_dict.keys())
    if missing:
        raise StateError(
            f"state_dict lacks {missing}, which the model holds in shards. Pass the model's"
            f" own state_dict(prefix={prefix!r}), and the same prefix."
        )
    _expect_shards(state_dict, owners)
    is_destination = _is_destination(dst, group_of(model))
    collected = _like(state_dict)
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            value = value.detach()
        if is_dtensor(value):
            value = _undistributed(value, owners.get(key))
        if key in owners:
            value = gathered(value, *owners[key])
        if is_destination:
            on_cpu = dst is not None and isinstance(value, Tensor)
            collected[key] = value.cpu() if on_cpu else value
    return collected


def _expect_shards(
    state_dict: Mapping[str, Any], owners: Mapping[str, tuple[ParallelLayer, str]]
) -> None:
    for key, (layer, name) in owners.items():
        shape, own_shape = tuple(state_dict[key].shape), layer.own_shape(name)
        if shape != own_shape:
            raise StateError(
                f"{key} has shape {shape} in state_dict. Expected rank {layer.group.rank}'s"
                f" shard {own_shape} of the whole {layer.specs[name].shape}."
            )


def _undistributed(value: Any, owner: tuple[ParallelLayer, str] | None) -> Tensor:
    """Return a DTensor as the layer's shard, or as the whole tensor where no layer has it."""
    if owner is None:
        return cast(Tensor, value.full_tensor())
    layer, name = owner
    dim = layer.specs[name].sharded_dim
    return without_dtensor(value, dim, layer.own_shape(name))


def _is_destination(dst: int | None, group: ShardGroup) -> bool:
    if dst is not None and not 0 <= dst < group.size:
        raise GroupError(
            f"dst={dst} is no rank of the group. Expected 0 to {group.size - 1}, or None for"
            " all of them."
        )
    return dst is None or dst == group.rank


def _like(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an empty state dict that names the same versions of the modules."""
    empty: dict[str, Any] = OrderedDict()
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        empty._metadata = without_notes(metadata)  # type: ignore[attr-defined] # as torch's own has it
    return empty


def group_of(model: nn.Module) -> ShardGroup:
    """Return the group over which `model` is sharded; the model group if it is not."""
    layers = (module for module in model.modules() if isinstance(module, ParallelLayer))
    groups = [layer.group for layer in layers if layer.group.size > 1]
    return groups[0] if groups else model_group()


def relocate_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, prefix: str = ""
) -> dict[str, Any]:
    """Return whole state cut to this rank's shards, ready for `model.load_state_dict`.

    Args:
        model: The sharded model.
        state_dict: Whole state. Where only rank 0 of the group has it, the others pass None
            and every tensor is sent to them, one at a time.
        prefix: What stands before the keys in `state_dict`.

    Raises:
        StateError: If rank 0 passes None too, or a tensor has neither its whole shape nor
            that of this rank's shard. What is sent must be whole.
    """
    group = group_of(model)
    owners = {key: (layer, name) for key, layer, name in sharded_entries(model, prefix)}
    device = _transport_device(model, group)
    if _all_have(state_dict, group, device):
        entries = iter(cast(Mapping[str, Any], state_dict).items())
    else:
        entries = _sent(state_dict or {}, owners, group, device)
    relocated = _like(state_dict or {})
    if not hasattr(relocated, "_metadata"):
        relocated._metadata = {}  # type: ignore[attr-defined] # as torch's own has it
    for key, value in entries:
        if key in owners:
            layer, name = owners[key]
            value = layer.own_state(key, name, value)
        relocated[key] = value
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLayer) and module.group.size > 1:
            note_shards(module, relocated, f"{prefix}{path}." if path else prefix)
    return relocated


def _transport_device(model: nn.Module, group: ShardGroup) -> torch.device:
    """Return where tensors must lie to be sent; a model may still be on the meta device."""
    devices = {tensor.device for tensor in model.parameters() if not tensor.is_meta}
    if group.process_group is not None and not devices:
        nccl = "nccl" in dist.get_backend(group.process_group)
        return torch.device("cuda" if nccl else "cpu")
    return next(iter(devices), torch.device("cpu"))


def _all_have(
    state_dict: Mapping[str, Any] | None, group: ShardGroup, device: torch.device
) -> bool:
    mine = torch.tensor([state_dict is not None], dtype=torch.int32, device=device)
    have = collectives.stack(mine, group).flatten().tolist()
    if not have[0]:
        raise StateError(
            "Rank 0 of the group passed state_dict=None. Expected the whole state on rank 0"
            " at least; the other ranks may pass None."
        )
    return all(have)


def _sent(
    state_dict: Mapping[str, Any],
    owners: Mapping[str, tuple[ParallelLayer, str]],
    group: ShardGroup,
    device: torch.device,
) -> Iterator[tuple[str, Any]]:
    """Yield the items of rank 0's `state_dict`, each sent to the others when asked for."""
    described = [
        {
            key: value.to("meta") if isinstance(value, Tensor) else value
            for key, value in state_dict.items()
        }
    ]
    dist.broadcast_object_list(described, group=group.process_group, group_src=0)
    _expect_whole(described[0], owners)
    for key, value in described[0].items():
        if isinstance(value, Tensor):
            own = (
                state_dict[key]
                if group.rank == 0
                else torch.empty_like(value, device="cpu")
            )
            value = collectives.broadcast(own.detach().to(device), group)
        yield key, value


def _expect_whole(
    described: Mapping[str, Any], owners: Mapping[str, tuple[ParallelLayer, str]]
) -> None:
    """Check, before the first tensor is sent, that rank 0 has no shards of its own in it."""
    for key in sorted(described.keys() & owners.keys()):
        layer, name = owners[key]
        shape, expected = tuple(described[key].shape), layer.specs[name].shape
        if shape != expected:
            raise StateError(
                f"{key} has shape {shape} in rank 0's state dict. Expected the whole"
                f" {expected}, of which each rank is sent its part."
            )
