"""Differentiable moves between whole tensors, shards and partials.

A tensor is *whole* (the same on every rank), a *shard* (a part of one dim) or a *partial*
(the ranks' sum is meant). All ranks of a group compute one logical loss, so the gradient of
a whole tensor is whole and must not be summed again, and each op's backward is another op:

    op                      input -> output     forward           backward
    copy                    whole -> to shards  identity          all-reduce
    reduce                  partial -> whole    all-reduce        identity
    total                   partial -> to shards    all-reduce    all-reduce
    scatter                 whole -> shard      own slice         all-gather
    gather                  shard -> whole      all-gather        own slice
    all_gather              shard -> to shards  all-gather        reduce-scatter
    reduce_scatter          partial -> shard    reduce-scatter    all-gather
    sum_over_holders        shard -> to shards  identity          sum over an index's holders
    all_to_all              shard -> shard      all-to-all        all-to-all
    enter_model_parallel    local batch -> whole    all-gather    own slice x R
    leave_model_parallel    whole -> local batch    own slice     all-gather / R

"to shards" means that compute which differs between the ranks reads the tensor next. Every
rank must reach every backward in the same order, also with an empty shard. Group ranks
everywhere; a group of one returns its argument. Double backward works through all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary
from torchshard.distributed import collectives
from torchshard.distributed.agreement import expect_whole
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.distributed.moves import move
from torchshard.errors import LayoutError, ShapeError
from torchshard.layout import Ranges, balanced_ranges, ranges_of_lengths

_scattered = WeakIdKeyDictionary()
"""What `scatter` cut along the last dim, and how."""

GatherGrad: TypeAlias = Literal["whole", "shards", "batch"]
ScatterGrad: TypeAlias = Literal["whole", "batch"]
_Op = TypeVar("_Op", bound=Callable[..., Tensor])


def _for_plain(op: _Op) -> _Op:
    """Let a tensor that knows its own sharding answer to `op` itself."""

    @wraps(op)
    def checked(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(x):
            return handle_torch_function(checked, (x,), x, *args, **kwargs)
        return op(x, *args, **kwargs)

    return cast(_Op, checked)


@_for_plain
def copy(x: Tensor, group: GroupLike = None) -> Tensor:
    """Hand a whole tensor to sharded compute: its gradient is summed over the ranks.

    Activations *and* parameters need it wherever a whole tensor meets a shard.
    """
    group = resolve_group(group)
    if group.size == 1:
        return x
    expect_whole("copy", x, group)
    return move("copy", x, group)


def enter(x: Tensor, group: ShardGroup) -> Tensor:
    """Do what `copy` does for a tensor that may want no gradient, which is then as it is.

    The caller's `agreement.expect_alike` has checked that `x` is whole.
    """
    if group.size == 1 or not x.requires_grad:
        return x
    return move("copy", x, group)


@_for_plain
def reduce(x: Tensor, group: GroupLike = None) -> Tensor:
    """Return the sum of the ranks' partials `x`, whole. `x` is left alone."""
    group = resolve_group(group)
    return x if group.size == 1 else move("reduce", x, group)


@_for_plain
def reduce_(x: Tensor, group: GroupLike = None) -> Tensor:
    """Sum `x` over the ranks in place, without autograd, and return it.

    Raises:
        LayoutError: If `x` takes part in autograd, where a write in place is silently wrong.
    """
    group = resolve_group(group)
    if x.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            "reduce_ was given a tensor that requires grad; writing into it would make its"
            " gradient wrong. Use reduce(x), which returns the sum."
        )
    if group.size == 1:
        return x
    if not x.is_contiguous():
        return x.copy_(collectives.all_reduce(x, group))
    dist.all_reduce(x, group=group.process_group)
    # The collective does not say that it wrote (torch 2.13): a graph that saved `x` must know.
    torch.autograd.graph.increment_version(x)
    return x


@_for_plain
def total(x: Tensor, group: GroupLike = None) -> Tensor:
    """Return the sum of the partials `x` for sharded compute: all-reduce both ways.

    Statistics that shards read: norms, softmax denominators.
    """
    group = resolve_group(group)
    return copy(reduce(x, group), group)


@_for_plain
def scatter(
    x: Tensor,
    dim: int = -1,
    *,
    grad: ScatterGrad | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Return this rank's part of the whole `x` along `dim`.

    What flows back depends on what the part is, so say it:

        grad="whole"    a shard of `x`, for sharded compute. Backward: all-gather.
        grad="batch"    this rank's samples of a pooled batch, whose losses a data-parallel
                        wrapper averages (`leave_model_parallel`). Backward: all-gather / R.

    Without `grad`, a plain tensor that requires grad and is split along the literal dim 0 is a
    pooled batch, as in TorchShard's recipes and as `gather` takes it; everything else is
    split into shards.

    The part is a plain tensor. That it was cut along the last dim is remembered of it, until
    an operation makes another tensor of it: a layer, a loss of torchshard and a shard beside it
    take it for the shard that it is.

    Args:
        x: Whole tensor, of any shape.
        dim: The dim to split.
        grad: How the gradient flows, see above.
        ranges: Who gets what; by default balanced, the first ranks one more.
        group: The ranks; None is the model group.

    Raises:
        ShapeError: If `ranges` describes a dim of another size.
        LayoutError: If `grad` is another word, or `ranges` are of another group.
    """
    if grad is None:
        is_batch = dim == 0 and ranges is None and x.requires_grad
        grad = "batch" if is_batch else "whole"
    if grad not in ("whole", "batch"):
        raise LayoutError(
            f"grad={grad!r} is not a way back. Expected 'whole' or 'batch'."
        )
    group = resolve_group(group)
    ranges = _split_of_whole(x, dim, ranges, group)
    if group.size == 1 and ranges.is_contiguous:
        return x
    expect_whole("scatter", x, group)
    if grad == "batch":
        x = move("scale_grad", x, 1.0 / group.size)
    dim %= x.dim()
    own = move("scatter", x, dim, ranges, group)
    if 0 < dim == x.dim() - 1 and not torch.compiler.is_compiling():
        _scattered[own] = (dim, ranges, group)
    return own


def scattered_as(x: Tensor) -> tuple[int, Ranges, ShardGroup] | None:
    """Return the dim, the ranges and the group if `x` is what `scatter` cut along the last dim.

    A plain tensor, which scripts hand on as the shard that it is: to a loss, to a layer, or
    beside other shards.
    """
    if torch.compiler.is_compiling() or not _scattered:
        return None
    return (
        cast(tuple[int, Ranges, ShardGroup], _scattered[x]) if x in _scattered else None
    )


def gather(
    x: Tensor,
    dim: int = -1,
    *,
    grad: GatherGrad | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Return the whole tensor of which the ranks hold the parts `x`.

    What flows back depends on who reads the result and what `x` was, so say it:

        grad="whole"    `x` is a shard; compute that is the same on all ranks reads the
                        result. Backward: own slice.
        grad="shards"   `x` is a shard; sharded compute reads the result. Backward:
                        reduce-scatter.
        grad="batch"    `x` is this rank's batch under data parallelism, pooled for a
                        sharded head (`enter_model_parallel`). Backward: R x own slice, as
                        DistributedDataParallel divides by R.

    Without `grad`, a plain tensor that requires grad and is gathered along the literal dim 0
    is a batch, as in TorchShard's recipes; everything else is a shard for whole compute.

    Args:
        x: This rank's part. Sizes along `dim` may differ between ranks.
        dim: The dim to lay the parts along.
        grad: How the gradient flows, see above.
        ranges: Who holds what; by default the sizes are exchanged first, in one small
            all-gather.
        group: The ranks; None is the model group.

    Raises:
        LayoutError: If `grad` is another word, or `ranges` are of another group.
        ShapeError: If `x` does not have this rank's size of `ranges`.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(gather, (x,), x, dim, grad=grad, group=group)
    if grad is None:
        grad = "batch" if dim == 0 and ranges is None and x.requires_grad else "whole"
    if grad not in ("whole", "shards", "batch"):
        raise LayoutError(
            f"grad={grad!r} is not a way back. Expected 'whole', 'shards' or 'batch'."
        )
    if grad == "batch":
        return enter_model_parallel(x, dim, group=group)
    group = resolve_group(group)
    ranges = _split_of_shards(x, dim, ranges, group)
    if group.size == 1 and ranges.is_contiguous:
        return x
    name = "gather" if grad == "whole" else "all_gather"
    return move(name, x, dim % x.dim(), ranges, group)


def exchanged_ranges(x: Tensor, dim: int, group: ShardGroup) -> Ranges:
    """Return who holds what of shards whose sizes only their ranks know: one all-gather."""
    if group.size == 1:
        return ranges_of_lengths([x.shape[dim]])
    length = torch.tensor([x.shape[dim]], device=x.device)
    return ranges_of_lengths(collectives.stack(length, group).flatten().tolist())


def all_gather(
    x: Tensor, dim: int = -1, *, ranges: Ranges | None = None, group: GroupLike = None
) -> Tensor:
    """Return the whole tensor of the shards `x`, for sharded compute to read."""
    return gather(x, dim, grad="shards", ranges=ranges, group=group)


def _split_of_whole(
    x: Tensor, dim: int, ranges: Ranges | None, group: ShardGroup
) -> Ranges:
    """Return who gets what of `dim` of the whole `x`: `ranges`, or balanced."""
    if ranges is None:
        return balanced_ranges(x.shape[dim], group.size)
    _expect_ranks(ranges, group)
    if ranges.size != x.shape[dim]:
        raise ShapeError(
            f"x has size {x.shape[dim]} in dim {dim}; the split is of {ranges.size}"
            " indices. Pass the whole tensor."
        )
    return ranges


def _split_of_shards(
    x: Tensor, dim: int, ranges: Ranges | None, group: ShardGroup
) -> Ranges:
    """Return who holds what of the dim of which `x` is a shard: `ranges`, or as they say."""
    if ranges is None:
        return exchanged_ranges(x, dim, group)
    _expect_ranks(ranges, group)
    if ranges.length(group.rank) != x.shape[dim]:
        raise ShapeError(
            f"x has size {x.shape[dim]} in dim {dim}; rank {group.rank} holds"
            f" {ranges.length(group.rank)} of the {ranges.size} indices that are split."
            " Pass this rank's shard."
        )
    return ranges


def _expect_ranks(ranges: Ranges, group: ShardGroup) -> None:
    if len(ranges.per_rank) != group.size:
        raise LayoutError(
            f"ranges split a dim over {len(ranges.per_rank)} ranks; the group has"
            f" {group.size}. Make them for the group that holds the shards."
        )


@_for_plain
def reduce_scatter(
    x: Tensor, dim: int = -1, *, ranges: Ranges | None = None, group: GroupLike = None
) -> Tensor:
    """Return this rank's shard along `dim` of the sum of the ranks' partials `x`."""
    group = resolve_group(group)
    ranges = _split_of_whole(x, dim, ranges, group)
    if group.size == 1 and ranges.is_contiguous:
        return x
    return move("reduce_scatter", x, dim % x.dim(), ranges, group)


@_for_plain
def all_to_all(
    x: Tensor,
    split_dim: int,
    join_dim: int,
    *,
    split_ranges: Ranges | None = None,
    join_ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Move the sharding from `join_dim` to `split_dim`: heads to sequence, and back.

    Args:
        x: Shard along `join_dim`, whole along `split_dim`.
        split_dim: The dim that the result is a shard of.
        join_dim: The dim that the result holds whole.
        split_ranges: Who gets what of `split_dim`; balanced by default.
        join_ranges: Who holds what of `join_dim`; by default the sizes are exchanged.
        group: The ranks; None is the model group.

    Raises:
        LayoutError: If the dims are the same, or if ranges overlap or are of another group.
        ShapeError: If `x` does not have the sizes of the ranges.
    """
    group = resolve_group(group)
    if group.size == 1:
        return x
    if x.dim() and split_dim % x.dim() == join_dim % x.dim():
        raise LayoutError(
            f"split_dim={split_dim} and join_dim={join_dim} are the same dim. Expected two:"
            " the one that becomes sharded and the one that becomes whole."
        )
    split_ranges = _split_of_whole(x, split_dim, split_ranges, group)
    join_ranges = _split_of_shards(x, join_dim, join_ranges, group)
    if split_ranges.overlaps or join_ranges.overlaps:
        raise LayoutError(
            "all_to_all was given ranges that overlap; each index needs one holder. Use"
            " all_gather and scatter."
        )
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    place = (split_dim, split_ranges, join_dim, join_ranges, group)
    return move("all_to_all", x, *place)


@_for_plain
def sum_over_holders(
    x: Tensor, dim: int, ranges: Ranges, group: GroupLike = None
) -> Tensor:
    """Hand a shard whose indices several ranks hold to sharded compute.

    The identity forward; backward sums the gradients of all holders of an index.
    """
    group = resolve_group(group)
    if group.size == 1 or not ranges.overlaps:
        return x
    return move("sum_over_holders", x, dim % x.dim(), ranges, group)


@_for_plain
def enter_model_parallel(
    x: Tensor,
    dim: int = 0,
    *,
    grad: Literal["whole", "shards"] = "whole",
    group: GroupLike = None,
) -> Tensor:
    """Pool the batches of the group's ranks: every rank gets all samples, in rank order.

    Backward gives each rank R times its own slice. A data-parallel wrapper divides gradients
    by all R ranks, yet the loss of the pooled batch is already the loss of all of them.

    Args:
        x: This rank's samples. Their number may differ between ranks.
        dim: The batch dim.
        grad: Who reads the pooled batch. `"whole"`: compute that is the same on all ranks, or
            a layer that sums the ranks' gradients itself. `"shards"`: sharded compute, whose
            partial gradients are summed and sliced in one reduce-scatter.
        group: The ranks; None is the model group.
    """
    group = resolve_group(group)
    if group.size == 1:
        return x
    ranges = exchanged_ranges(x, dim, group)
    if x.requires_grad:
        x = move("scale_grad", x, float(group.size))
    return gather(x, dim, grad=grad, ranges=ranges, group=group)


@_for_plain
def leave_model_parallel(
    x: Tensor, dim: int = 0, *, ranges: Ranges | None = None, group: GroupLike = None
) -> Tensor:
    """Return this rank's samples of a pooled batch; the inverse of `enter_model_parallel`.

    Backward gathers the ranks' gradients and divides by R, as each rank now has a loss of its
    own and a data-parallel wrapper averages them.

    Args:
        x: The pooled batch, whole.
        dim: The batch dim.
        ranges: Who gets which samples; balanced by default.
        group: The ranks; None is the model group.
    """
    return scatter(x, dim, grad="batch", ranges=ranges, group=group)
