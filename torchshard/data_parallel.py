"""Sharded parameters under torch's DistributedDataParallel.

The wrapper makes parameters equal on all its ranks and averages their gradients. Shards are
different on every rank of a model group, so the wrapper must leave them alone, which it does
for names that are set on the model before it is wrapped. What remains to be done for a shard,
where M data-parallel groups each hold it, is the mean of its gradient over those M replicas:
`replicas`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard import owners
from torchshard.errors import GroupError
from torchshard.replicas import average_over_replicas, managed_by

if TYPE_CHECKING:
    from torchshard.layer import ParallelLayer


def register_ddp_parameters_to_ignore(model: nn.Module) -> list[str]:
    """Have DistributedDataParallel leave the shards of `model` alone, wherever they are nested.

    Call it on the module that is wrapped, before it is wrapped. With several data-parallel
    groups (`init_process_group(group_size)` smaller than the world) each shard's gradient is
    averaged over its replicas in those groups when a backward through the model ends. Shards over a group of
    the caller's own, whose replicas only the caller knows, are left to the caller.

    Names that the model already wants ignored stay so.

    Returns:
        The names of the shards.
    """
    before: Iterable[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    shards = [
        (name, tensor)
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
        if owners.is_sharded(tensor)
    ]
    names = sorted({*before, *(name for name, _ in shards)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    if shards:
        average_over_replicas(model)
    return [name for name, _ in shards]


def expect_ignored_shards(layer: ParallelLayer) -> None:
    """Check that a wrapper around `layer` does not treat its shards as replicas.

    Raises:
        GroupError: If the active DistributedDataParallel spans ranks of the layer's group and
            was not told to ignore its shards: it has already overwritten them.
    """
    if layer.group.size == 1 or torch.compiler.is_compiling():
        return
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    if not spans_shards(wrapper.process_group, layer):
        return
    managed = managed_by(wrapper)
    for name in layer.specs:
        is_shard = layer.ranges_of(name) is not None
        if is_shard and id(layer.tensor_of(name)) in managed:
            raise GroupError(
                f"DistributedDataParallel treats {type(layer).__name__}.{name}, a shard, as"
                " equal on all ranks, and has overwritten it with rank 0's. Call"
                " torchshard.register_ddp_parameters_to_ignore(model) before wrapping the"
                " model, and load its weights again."
            )


def spans_shards(process_group: dist.ProcessGroup, layer: owners.Owner) -> bool:
    """Return whether several ranks of `process_group` hold different shards of `layer`."""
    ranks = set(dist.get_process_group_ranks(process_group))
    own = dist.get_process_group_ranks(layer.group.process_group)
    return len(ranks.intersection(own)) > 1
