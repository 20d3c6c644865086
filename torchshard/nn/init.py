"""Mirror of torch.nn.init: set shards to what an initialiser gives on the whole tensor.

Every function takes what torch's of the same name takes, a layer's parameter or any other
tensor, and gives a shard its part of the whole tensor's values, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.groups import model_group
from torchshard.errors import StateError
from torchshard.owners import owner_of, owner_of_data
from torchshard.tensor.filling import fill_as_whole
from torchshard.tensor.parameter import ShardedParameter

calculate_gain = torch.nn.init.calculate_gain


def _mirrored(init_method: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return `init_method` for shards, whole parameters and tensors that no layer has."""

    @wraps(init_method)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if owner_of(tensor) is None:
            init_method(tensor, *args, **kwargs)
            return tensor
        named = inspect.signature(init_method).bind(tensor, *args, **kwargs).arguments
        options = {key: value for key, value in named.items() if key != "tensor"}
        return shard_init_helper_(init_method, tensor, **options)

    return fill


uniform_ = _mirrored(torch.nn.init.uniform_)
normal_ = _mirrored(torch.nn.init.normal_)
trunc_normal_ = _mirrored(torch.nn.init.trunc_normal_)
constant_ = _mirrored(torch.nn.init.constant_)
ones_ = _mirrored(torch.nn.init.ones_)
zeros_ = _mirrored(torch.nn.init.zeros_)
eye_ = _mirrored(torch.nn.init.eye_)
dirac_ = _mirrored(torch.nn.init.dirac_)
xavier_uniform_ = _mirrored(torch.nn.init.xavier_uniform_)
xavier_normal_ = _mirrored(torch.nn.init.xavier_normal_)
kaiming_uniform_ = _mirrored(torch.nn.init.kaiming_uniform_)
kaiming_normal_ = _mirrored(torch.nn.init.kaiming_normal_)
orthogonal_ = _mirrored(torch.nn.init.orthogonal_)
sparse_ = _mirrored(torch.nn.init.sparse_)

__all__ = [
    "calculate_gain",
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "shard_init_helper_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


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
        tensor: The parameter or buffer of a sharded layer, or a parameter's `.data`, not
            another view. In a group of one, any tensor.
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
    if tensor.is_meta:
        return tensor
    if isinstance(tensor, ShardedParameter):
        fill_as_whole(init_method, tensor.to_local(), tensor.sharding, **kwargs)
        return tensor
    place = owner_of(tensor) or owner_of_data(tensor)
    if place is None:
        _expect_group_of_one(tensor)
        init_method(tensor, **kwargs)
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
            f" place among the {size} ranks is unknown. Pass a layer's parameter"
            " (layer.weight, not a view), and a tensor that is equal on all ranks to"
            " torch.nn.init."
        )
