"""Sharded parameters under torch's DistributedDataParallel.

The wrapper makes parameters equal on all its ranks and averages their gradients. Shards are
different on every rank of a model group, so the wrapper must leave them alone, which it does
for names that are set on the model before it is wrapped. What remains to be done for a shard,
where M data-parallel groups each hold it, is the mean of its gradient over those M replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary
from torchshard import owners
from torchshard.distributed.groups import get_data_parallel_group, model_group
from torchshard.errors import GroupError

if TYPE_CHECKING:
    from torchshard.layer import ParallelLayer

_averaged = WeakIdKeyDictionary()
_managed: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()


def register_ddp_parameters_to_ignore(model: nn.Module) -> list[str]:
    """Have DistributedDataParallel leave the shards of `model` alone, wherever they are nested.

    Call it on the module that is wrapped, before it is wrapped. With several data-parallel
    groups (`init_process_group(group_size)` smaller than the world) each shard's gradient is
    averaged over its replicas in those groups, after every backward. Shards over a group of
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
    for _, tensor in shards:
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            _average_over_replicas(tensor)
    return [name for name, _ in shards]


def _average_over_replicas(parameter: nn.Parameter) -> None:
    """Average the parameter's gradient over the data-parallel groups, once each backward.

    With accumulation it averages what is averaged already, which changes nothing.
    """
    group = get_data_parallel_group()
    if group is None or group.size() == 1 or parameter in _averaged:
        return
    place = owners.owner_of(parameter)
    if place is None or place[0].group != model_group():
        return

    def average(parameter: Tensor) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(group.size())

    parameter.register_post_accumulate_grad_hook(average)
    _averaged[parameter] = True


def expect_ignored_shards(layer: ParallelLayer) -> None:
    """Check that a wrapper around `layer` does not treat its shards as replicas.

    Shards that it ignores are averaged over their replicas from now on, if they were not.

    Raises:
        GroupError: If the active DistributedDataParallel spans ranks of the layer's group and
            was not told to ignore its shards: it has already overwritten them.
    """
    if layer.group.size == 1 or torch.compiler.is_compiling():
        return
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    managed, spans = _managed_by(wrapper), spans_shards(wrapper.process_group, layer)
    for name in layer.specs:
        tensor = layer.tensor_of(name)
        if layer.ranges_of(name) is None:
            continue
        if id(tensor) not in managed:
            # Registered, but since then copied, unfrozen or assigned by load_state_dict.
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                _average_over_replicas(tensor)
        elif spans:
            raise GroupError(
                f"DistributedDataParallel treats {type(layer).__name__}.{name}, a shard, as"
                " equal on all ranks, and has overwritten it with rank 0's. Call"
                " torchshard.register_ddp_parameters_to_ignore(model) before wrapping the"
                " model, and load its weights again."
            )


def _managed_by(wrapper: DistributedDataParallel) -> set[int]:
    """Return the parameters that the wrapper averages, by id; it keeps them all alive."""
    if wrapper not in _managed:
        _managed[wrapper] = {id(parameter) for parameter in wrapper._module_parameters}
    return _managed[wrapper]


def spans_shards(process_group: dist.ProcessGroup, layer: owners.Owner) -> bool:
    """Return whether several ranks of `process_group` hold different shards of `layer`."""
    ranks = set(dist.get_process_group_ranks(process_group))
    own = dist.get_process_group_ranks(layer.group.process_group)
    return len(ranks.intersection(own)) > 1
