"""What optimizers may not do with shards: hooks before a step.

torch has no hook for an optimizer that is built, only one before the step of every optimizer of
the process. It is set when the first layer that several ranks share is made, copied or
unpickled, and taken back by `torchshard.destroy_process_group`; a process without such a layer
never has it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torchshard.data_parallel import spans_shards
from torchshard.distributed.groups import ShardGroup, at_destroy
from torchshard.errors import GroupError
from torchshard.optimizer_state import divide_state
from torchshard.optimizer_trial import expect_right_on_shards, keep_state_known
from torchshard.owners import shard_owner_of

_hooks: list[RemovableHandle] = []


def watch_steps(group: ShardGroup) -> None:
    """Check every optimizer's step from now on, if `group` has several ranks."""
    if group.size == 1 or _hooks:
        return
    checks = (
        expect_no_shards,
        expect_elementwise,
        divide_state,
        expect_right_on_shards,
        keep_state_known,
    )
    _hooks.extend(register_optimizer_step_pre_hook(check) for check in checks)
    at_destroy(_forget)


def _forget() -> None:
    while _hooks:
        _hooks.pop().remove()


def expect_no_shards(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a step of torch's ZeroRedundancyOptimizer that would overwrite shards.

    torch's class has no place for a check when it is built. Over the data-parallel group,
    whose ranks hold the same shard, it is right.

    Raises:
        GroupError: If the optimizer would send a shard to another rank of its group.
    """
    if torch.compiler.is_compiling():
        return
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            place = shard_owner_of(tensor)
            if place is not None and spans_shards(optimizer.process_group, place[0]):
                layer, name = place
                over = dist.get_process_group_ranks(optimizer.process_group)
                raise GroupError(
                    f"torch's ZeroRedundancyOptimizer over the ranks {sorted(over)} would"
                    f" overwrite {type(layer).__name__}.{name}, a shard, with another"
                    " rank's. Nothing has been changed yet. Use"
                    " torchshard.optim.ZeroRedundancyOptimizer(model, optimizer_class),"
                    " which takes the same arguments and leaves shards where they are."
                )


_WHOLE_TENSOR_OPTIMIZERS = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "LBFGS", "Muon")
    if name in dir(torch.optim)  # Muon came with torch 2.9
)


def expect_elementwise(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a step that torch would work out from a whole tensor, and here from a shard.

    Row sums, orthogonalised updates and line searches of a shard are not those of the
    tensor, and ranks would drift apart.

    Raises:
        GroupError: If such an optimizer was given a shard.
    """
    if not isinstance(optimizer, _WHOLE_TENSOR_OPTIMIZERS):
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            place = shard_owner_of(tensor)
            if place is not None:
                layer, name = place
                raise GroupError(
                    f"torch.optim.{type(optimizer).__name__} works on whole tensors, and was"
                    f" given {type(layer).__name__}.{name}, of which this rank holds a"
                    " shard. Nothing has been changed yet. Use an optimizer that works"
                    " element by element, such as SGD, Adam or AdamW, for shards."
                )
