"""Whole state of a sharded model, in torch.nn's own keys and shapes, and back.

`state_dict()` of a sharded model is local, and `load_state_dict` takes local or whole
tensors. These functions go between the two for a whole model: `collect_state_dict` gathers,
`relocate_state_dict` cuts. Gathering and sending are collective: every rank calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchshard.distributed import collectives
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import StateError
from torchshard.layer import ParallelLayer
from torchshard.layout import Shard


def sharded_entries(
    model: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, ParallelLayer, str]]:
    """Yield (state key, layer, parameter name) of every sharded parameter and buffer."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLayer):
            for name in module.specs:
                if module.ranges_of(name) is not None:
                    yield (
                        f"{prefix}{path}.{name}" if path else prefix + name,
                        module,
                        name,
                    )


def gathered(tensor: Tensor, layer: ParallelLayer, name: str) -> Tensor:
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

    Every rank of the model group calls it. Tensors are gathered one at a time.

    Args:
        model: The sharded model.
        state_dict: Its local state; by default `model.state_dict(prefix=prefix)`.
        prefix: What stands before the keys in `state_dict`.
        dst: The rank of the group that gets the state, on the CPU; the others get an empty
            dict. None gives it to all ranks, on the layers' device.

    Returns:
        A new dict. Whole tensors are those of `state_dict`, detached.

    Raises:
        StateError: If a sharded parameter's key is missing from `state_dict`.
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
    collected: dict[str, Any] = {}
    for key, value in state_dict.items():
        if key in owners:
            value = gathered(value.detach(), *owners[key])
        if dst is None:
            collected[key] = value
        elif _is_destination(model, dst):
            collected[key] = value.cpu() if isinstance(value, Tensor) else value
    return collected


def _is_destination(model: nn.Module, dst: int) -> bool:
    layers = (module for module in model.modules() if isinstance(module, ParallelLayer))
    layer = next(layers, None)
    return layer is None or layer.group.rank == dst


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
            that of this rank's shard.
    """
    owners = {key: (layer, name) for key, layer, name in sharded_entries(model, prefix)}
    relocated: dict[str, Any] = {}
    for key, value in _entries(model, state_dict):
        if key in owners:
            layer, name = owners[key]
            value = layer.own_state(key, name, value)
        relocated[key] = value
    return relocated


def _entries(
    model: nn.Module, state_dict: Mapping[str, Any] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the items of `state_dict`, or of rank 0's where some rank has none."""
    layers = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    group = layers[0].group if layers else ShardGroup()
    device = next((tensor.device for tensor in model.parameters()), None)
    mine = torch.tensor([state_dict is not None], dtype=torch.int32, device=device)
    have = collectives.stack(mine, group).flatten().tolist()
    if not have[0]:
        raise StateError(
            "Rank 0 of the group passed state_dict=None. Expected the whole state on rank 0"
            " at least; the other ranks may pass None."
        )
    if all(have):
        yield from cast(Mapping[str, Any], state_dict).items()
    else:
        yield from _sent(state_dict or {}, group, device)


def _sent(
    state_dict: Mapping[str, Any], group: ShardGroup, device: torch.device | None
) -> Iterator[tuple[str, Any]]:
    """Yield the items of rank 0's `state_dict`, each sent to the others when asked for."""
    described = [
        {
            key: value.to("meta") if isinstance(value, Tensor) else value
            for key, value in state_dict.items()
        }
    ]
    dist.broadcast_object_list(described, group=group.process_group, group_src=0)
    for key, value in described[0].items():
        if isinstance(value, Tensor):
            own = (
                state_dict[key]
                if group.rank == 0
                else torch.empty_like(value, device="cpu")
            )
            value = collectives.broadcast(own.detach().to(device), group)
        yield key, value
