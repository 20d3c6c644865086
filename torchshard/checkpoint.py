"""A sharded model's state for `torch.distributed.checkpoint`, on any number of ranks."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torchshard.errors import StateError
from torchshard.state import sharded_entries
from torchshard.tensor.dtensors import in_form, is_dtensor
from torchshard.tensor.sharded import Sharding


def sharded_state_dict(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return `model`'s state with each shard as a DTensor, for `torch.distributed.checkpoint`.

    The DTensors share the parameters' memory: `dcp.load` into this dict loads the model in
    place, from a checkpoint that any number of ranks wrote, a dense model's included.

    Example:
        Save with `dcp.save(sharded_state_dict(model), checkpoint_id=folder)` and load, on
        any number of ranks, with `dcp.load(sharded_state_dict(model), checkpoint_id=folder)`.
    """
    state = model.state_dict(prefix=prefix)
    for key, layer, name in sharded_entries(model, prefix):
        if key not in state:
            raise StateError(
                f"{key} is not in the model's state_dict: {type(layer).__name__} holds {name!r}"
                " as a plain attribute. Expected a parameter: put nn.Parameter(x) in its place."
            )
        if layer.group.size > 1 and is_dtensor(state[key]):
            raise StateError(
                f"{key} is a DTensor: fully_shard has cut this rank's shard once more, which"
                " no list of chunks describes. Save torchshard.collect_state_dict(model)."
            )
        sharding = cast(Sharding, layer.sharding_of(name))
        state[key] = in_form(state[key], sharding, "chunks")
    return state
