"""Mirror of torch.nn.init: set shards to what an initialiser gives on the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.groups import model_group
from torchshard.errors import StateError
from torchshard.owners import owner_of

__all__ = ["shard_init_helper_"]


@torch.no_grad()
def shard_init_helper_(
    init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any
) -> Tensor:
    """Set a layer's parameter to its shard of what `init_method` gives on the whole tensor.

    Fans and values are those of the whole tensor: with the same seed they are the dense
    layer's, and the CPU's random stream stands afterwards where the dense layer leaves it.
    Seed all ranks alike. A parameter that every rank holds whole becomes rank 0's.

    The whole tensor exists on the CPU while the function runs, since `init_method` may be
    any function. A layer's own first values take no such room.

    Args:
        init_method: A function of `torch.nn.init`, or one that fills a tensor in place.
        tensor: The parameter or buffer of a sharded layer: `layer.weight` itself, neither
            `.data` nor a view. In a group of one, any tensor.
        kwargs: More arguments of `init_method`.

    Returns:
        `tensor`.

    Raises:
        StateError: If `tensor` belongs to no sharded layer and the group has several ranks.

    Example:
        >>> import torchshard as ts
        >>> layer = ts.nn.ParallelLinear(4, 6, dim=1)
        >>> shard_init_helper_(torch.nn.init.constant_, layer.bias, val=0.5)[0].item()
        0.5
    """
    place = owner_of(tensor)
    if place is None:
        _expect_group_of_one(tensor)
        init_method(tensor, **kwargs)
        return tensor
    if tensor.is_meta:
        return tensor
    layer, name = place
    whole = torch.empty(layer.specs[name].shape, dtype=tensor.dtype)
    init_method(whole, **kwargs)
    own = layer.own_state(name, name, whole).to(tensor.device)
    if layer.ranges_of(name) is None:
        own = collectives.broadcast(own, layer.group)
    return tensor.copy_(own)


def _expect_group_of_one(tensor: Tensor) -> None:
    size = model_group().size
    if size > 1:
        raise StateError(
            f"The tensor of shape {tuple(tensor.shape)} belongs to no sharded layer, so its"
            f" place among the {size} ranks is unknown. Pass a layer's parameter itself"
            " (layer.weight, not layer.weight.data or a view), and a tensor that is equal"
            " on all ranks to torch.nn.init."
        )
