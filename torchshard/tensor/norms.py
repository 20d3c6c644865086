"""Layer and RMS norm; moments of tensors that are divided where they are normalised.

Where a mean is taken over dims that are whole, a norm is local. Over a divided dim the ranks
share their moments, in one collective: each rank's mean and its squares about it, so that no
large mean cancels. A whole input whose weight is divided is normalised whole, without one.

    divided                        result
    a dim that is normalised       moments shared, then weight and bias; a shard of that dim
    another dim of the input       local; weight and bias get the sum of the ranks' gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed import ops
from torchshard.errors import ShapeError
from torchshard.layout import ranges_of_lengths
from torchshard.tensor.operands import Division, Labels, division, part
from torchshard.tensor.reductions import wide
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    local_call,
    rule,
    whole_shape,
)

_LAYER_NORM: dict[str, Any] = {
    "input": None,
    "normalized_shape": None,
    "weight": None,
    "bias": None,
    "eps": 1e-5,
}
_RMS_NORM = {key: None for key in _LAYER_NORM if key != "bias"}


@rule(["layer_norm", "rms_norm"])
def _layer_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Normalise the last dims, with a weight and a bias of their shape."""
    name = func.__name__
    names = _RMS_NORM if name == "rms_norm" else _LAYER_NORM
    x, shape, *affine, eps = bound(args, kwargs, **names)
    call: Callable[..., Tensor] = F.rms_norm if name == "rms_norm" else F.layer_norm
    labels: Labels = tuple(range(x.dim()))
    inner = labels[x.dim() - len(shape) :]
    no_affine = (None,) * len(affine)
    divided = division(name, (x, *affine), (labels, *[inner] * len(affine)))
    if divided.label not in inner:
        own = [own_part(name, value, inner, divided) for value in affine]
        own_x = part(name, x, labels, divided)
        return divided.marked(local_call(call, (own_x, shape, *own, eps), {}), labels)
    _expect_ends(name, x, shape)
    example = plain(x).new_empty(1), (1,), *no_affine, eps
    dtype = local_call(call, example, {}).dtype
    if isinstance(x, ShardedTensor):
        divided.expect_once(name)
        moments = _squares if name == "rms_norm" else shared_moments
        dims = list(range(x.dim() - len(shape), x.dim()))
        y = normalised(x.to_local(), dims, eps, x.sharding, moments)
    else:
        y = call(x.to(wide(x.dtype)), shape, *no_affine, eps)
        y = part(name, y, labels, divided)
    own = [own_part(name, value, inner, divided) for value in affine]
    return divided.marked(scaled(y, *own).to(dtype), labels)


def _expect_ends(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Check that the last dims of the whole `x` are of the given sizes.

    Raises:
        ShapeError: If they are not.
    """
    sizes = tuple(whole_shape(x))
    if sizes[x.dim() - len(shape) :] != tuple(shape):
        raise ShapeError(
            f"{name}: the input's shape {sizes} does not end in normalized_shape="
            f"{list(shape)}. Expected the sizes of the whole tensor."
        )


def own_part(
    name: str, value: Tensor | None, labels: Labels, divided: Division
) -> Tensor | None:
    """Return what of a weight or a bias takes part here, as a plain tensor."""
    if value is None:
        return None
    return plain(part(name, value, labels, divided))


def plain(x: Tensor) -> Tensor:
    """Return the shard of a tensor that is one, else the tensor."""
    return x.to_local() if isinstance(x, ShardedTensor) else x


def scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return y * weight + bias, either of them optional."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def normalised(
    x: Tensor,
    dims: list[int],
    eps: float | None,
    sharding: Sharding,
    moments: Callable[..., tuple[Tensor | int, Tensor]] | None = None,
) -> Tensor:
    """Return the shard `x` normalised by the moments of the whole, in the dtype of sums."""
    x = x.to(wide(x.dtype))
    mean, variance = (moments or shared_moments)(x, dims, sharding)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return (x - mean) * (variance + eps).rsqrt()


def _squares(x: Tensor, dims: list[int], sharding: Sharding) -> tuple[int, Tensor]:
    """Return 0 and the mean square of the whole over `dims`; one all-reduce."""
    num_others = prod([x.shape[dim] for dim in dims if dim != sharding.dim])
    total = ops.total(x.square().sum(dims, True), sharding.group)
    return 0, total / max(num_others * sharding.ranges.size, 1)


def shared_moments(
    x: Tensor,
    dims: list[int],
    sharding: Sharding,
    *,
    grad: ops.GatherGrad = "shards",
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the whole over `dims`, which are kept; one all-gather.

    Args:
        x: This rank's part, plain, in the dtype to sum in.
        dims: What is averaged over, the divided dim `sharding.dim` among them.
        sharding: How that dim is divided; every index by one rank.
        grad: Who reads them: compute on shards, or on whole tensors.
    """
    group, lengths = sharding.group, sharding.ranges.lengths
    num_others = prod([x.shape[dim] for dim in dims if dim != sharding.dim])
    own_mean = x.sum(dims, True) / max(num_others * sharding.length, 1)
    squares = (x - own_mean).square().sum(dims, True)
    each = ranges_of_lengths([1] * group.size)
    own = torch.stack([own_mean, squares]).unsqueeze(0)
    rows = ops.gather(own, 0, grad=grad, ranges=each, group=group)
    means, sums = rows.unbind(1)
    share = x.new_tensor(lengths).div_(max(sharding.ranges.size, 1))
    share = share.reshape(-1, *[1] * x.dim())
    mean = (means * share).sum(0)
    within = sums.sum(0) / max(num_others * sharding.ranges.size, 1)
    return mean, within + ((means - mean).square() * share).sum(0)
