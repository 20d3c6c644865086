"""Batch, instance and group norm: channels, groups, the batch or positions may be divided.

divided             result
channels            batch and instance norm: local; whole running moments are gathered
whole groups        local; channels of a single group share its moments
the batch           batch norm shares its moments in training; the others are local
positions           batch and group norm share their moments; instance norm: an error
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.errors import ShapeError
from torchshard.tensor.norms import normalised, own_part, plain, scaled, shared_moments
from torchshard.tensor.operands import Division, Labels, Units, division, part
from torchshard.tensor.reductions import wide
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    local_call,
    mixes,
    rule,
    whole_shape,
)

_CHANNEL_NORM: dict[str, Any] = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "training": None,
    "momentum": 0.1,
    "eps": 1e-5,
}
_TORCH_ORDER = "input", "weight", "bias", "running_mean", "running_var"
"""How torch.batch_norm and torch.instance_norm begin; those of F begin otherwise."""


class _ChannelNorm(NamedTuple):
    """The arguments of a batch norm or an instance norm."""

    x: Tensor
    running: tuple[Tensor | None, Tensor | None]
    affine: tuple[Tensor | None, Tensor | None]
    training: bool
    momentum: float
    eps: float


def _channel_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _ChannelNorm:
    values: Sequence[Any] = args
    if func not in (F.batch_norm, F.instance_norm):
        kwargs = dict(zip(_TORCH_ORDER, args, strict=False)) | kwargs
        rest = args[len(_TORCH_ORDER) :]
        kwargs = dict(zip(("training", "momentum", "eps"), rest, strict=False)) | kwargs
        values = ()
    is_instance = func.__name__ == "instance_norm"
    if is_instance and "use_input_stats" in kwargs:
        kwargs = {**kwargs, "training": kwargs["use_input_stats"]}
    x, mean, var, weight, bias, training, momentum, eps = bound(
        values, kwargs, **_CHANNEL_NORM
    )
    training = is_instance if training is None else training
    return _ChannelNorm(x, (mean, var), (weight, bias), training, momentum, eps)


@rule(["batch_norm", "instance_norm"])
def _batch_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Normalise each channel, dim 1, by moments of the input or by running ones."""
    name, given = func.__name__, _channel_norm(func, args, kwargs)
    x, labels = given.x, ("batch", "channel", *range(given.x.dim() - 2))
    if x.dim() < 2:
        raise ShapeError(
            f"{name}: the input's shape is {tuple(whole_shape(x))}. Expected a batch and"
            " channels, and then positions."
        )
    operands = (x, *given.running, *given.affine)
    divided = division(name, operands, (labels, *[("channel",)] * 4))
    if divided.label == "channel" or not given.training:
        return _by_channel(name, given, labels, divided)
    if name == "batch_norm":
        return _over_ranks(given, labels, divided)
    divided.expect_not(name, dict.fromkeys(labels[2:], "normalises over it"))
    if given.running[0] is not None:
        raise mixes(name, divided.sharding, "averages over it for the running moments")
    return _by_channel(name, given, labels, divided)


def _by_channel(
    name: str, given: _ChannelNorm, labels: Labels, divided: Division
) -> Tensor:
    """Normalise this rank's part alone, and bring whole running moments up to date."""
    if divided.label == "channel" or name == "instance_norm":
        divided.expect_some(name)
    call = F.batch_norm if name == "batch_norm" else F.instance_norm
    x = part(name, given.x, labels, divided)
    running = [own_part(name, value, ("channel",), divided) for value in given.running]
    affine = [own_part(name, value, ("channel",), divided) for value in given.affine]
    values = (x, *running, *affine, given.training, given.momentum, given.eps)
    result = local_call(call, values, {})
    if given.training:
        pairs = zip(given.running, running, strict=True)
        _write_whole([pair for pair in pairs if _is_whole(pair[0])], divided.sharding)
    return divided.marked(result, labels)


def _is_whole(x: Tensor | None) -> bool:
    return x is not None and not isinstance(x, ShardedTensor)


@torch.no_grad()
def _write_whole(pairs: list[Any], sharding: Sharding) -> None:
    """Write what the ranks hold of each buffer into the whole one: one all-gather."""
    if not pairs:
        return
    own = torch.stack([own for _, own in pairs])
    rows = collectives.all_gather(own, 1, sharding.ranges, sharding.group)
    for (buffer, _), row in zip(pairs, rows, strict=True):
        buffer.copy_(row)


def _over_ranks(given: _ChannelNorm, labels: Labels, divided: Division) -> Tensor:
    """Normalise by the moments of a batch, or of positions, that the ranks share."""
    name, x = "batch_norm", cast(ShardedTensor, given.x)
    divided.expect_once(name)
    num_averaged = whole_shape(x).numel() // max(whole_shape(x)[1], 1)
    if num_averaged < 2:
        raise ShapeError(
            f"{name}: in training each channel needs more than 1 value; the input has"
            f" shape {tuple(whole_shape(x))}."
        )
    dims = [dim for dim in range(x.dim()) if dim != 1]
    local = x.to_local().to(wide(x.dtype))
    mean, variance = shared_moments(local, dims, x.sharding)
    y = (local - mean) * (variance + given.eps).rsqrt()
    unbiased = variance * num_averaged / (num_averaged - 1)
    for running, new in zip(given.running, (mean, unbiased), strict=True):
        if running is not None:
            with torch.no_grad():
                running.lerp_(new.flatten().to(running.dtype), given.momentum)
    affine = [own_part(name, value, ("channel",), divided) for value in given.affine]
    y = scaled(y, *_before_positions(affine, x.dim() - 2))
    return divided.marked(y.to(x.dtype), labels)


def _before_positions(
    values: Sequence[Tensor | None], num_positions: int
) -> list[Tensor | None]:
    """Return weight and bias of the channels, shaped to stand beside a whole input."""
    shape = (-1, *[1] * num_positions)
    return [None if value is None else value.reshape(shape) for value in values]


_GROUP_NORM: dict[str, Any] = {
    "input": None,
    "num_groups": None,
    "weight": None,
    "bias": None,
    "eps": 1e-5,
}


@rule(["group_norm"])
def _group_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Normalise groups of channels, dim 1; a single group may lie on several ranks."""
    x, num_groups, *affine, eps = bound(args, kwargs, **_GROUP_NORM)
    size = whole_shape(x)[1] // num_groups
    channels: Hashable = "channel" if num_groups == 1 else Units("group", size)
    labels = ("batch", channels, *range(x.dim() - 2))
    divided = division("group_norm", (x, *affine), (labels, (channels,), (channels,)))
    if divided.label in ("batch", "group"):
        x = part("group_norm", x, labels, divided)
        own = [own_part("group_norm", value, (channels,), divided) for value in affine]
        return divided.marked(local_call(_own_groups, (x, size, *own, eps), {}), labels)
    dtype = local_call(
        _own_groups, (plain(x).new_empty(1, 1), 1, None, None, eps), {}
    ).dtype
    if isinstance(x, ShardedTensor):
        divided.expect_once("group_norm")
        local = x.to_local()
        groups = local.reshape(
            local.shape[0], num_groups, local.shape[1] // num_groups, *local.shape[2:]
        )
        dims = list(range(2, groups.dim()))
        y = normalised(groups, dims, eps, x.sharding.at(x.sharding.dim + 1))
        y = y.flatten(1, 2)
    else:
        y = _own_groups(x.to(wide(x.dtype)), size, None, None, eps)
        y = part("group_norm", y, labels, divided)
    own = [own_part("group_norm", value, (channels,), divided) for value in affine]
    y = scaled(y, *_before_positions(own, x.dim() - 2))
    return divided.marked(y.to(dtype), labels)


def _own_groups(
    x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise groups of `size` channels: torch's own, for a rank with none too."""
    num_groups = max(x.shape[1] // size, 1)
    return torch.group_norm(x, num_groups, weight, bias, eps)
