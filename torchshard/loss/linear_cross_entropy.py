"""A class-parallel classifier and its cross-entropy in one: the functions and their checks."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.errors import LayoutError, ShapeError
from torchshard.layout import Ranges
from torchshard.loss.criterion import (
    Criterion,
    Reduction,
    expect_criterion,
    expect_target,
    own_class_weights,
    own_target,
    reduced,
    target_weights,
)
from torchshard.loss.cross_entropy import as_rows
from torchshard.loss.head import HeadOptions
from torchshard.loss.head_losses import HeadLosses
from torchshard.loss.row_losses import own_targets
from torchshard.loss.rows import wide
from torchshard.owners import owner_of
from torchshard.tensor.sharded import Sharding


@overload
def parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    return_lse: Literal[False] = False,
    chunk_bytes: int | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor: ...


@overload
def parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    return_lse: Literal[True],
    chunk_bytes: int | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> tuple[Tensor, Tensor]: ...


def parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    return_lse: bool = False,
    chunk_bytes: int | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute torch's `linear_cross_entropy` with a weight of which this is the rank's shard.

    Equal to `cross_entropy(linear(input, weight, bias), target)`, but the logits never exist:
    they are computed for a chunk of classes at a time, forward and again backward.
    `torchshard.optim.step_in_backward` spares the weight's gradient as well.

        input           (N, F) or (F,)              whole
        linear_weight   (C / R, d1, ..., F)         shard of the classes
        linear_bias     (C / R, d1, ...)            shard of the classes
        target          (N, d1, ...) or ()          whole; or probabilities (N, C, d1, ...)
        loss            () or (N, d1, ...)          whole

        forward     one all-gather of the rows' statistics
        backward    one all-reduce of the input's gradient

    Args:
        input: Input of the classifier, the same on every rank.
        linear_weight: This rank's rows of the classifier's weight.
        target: Class indices, or probabilities, whole or sharded on their class dim.
        linear_bias: This rank's part of the bias.
        weight: Weight of each class, `(C,)`, whole.
        reduction: `"none"`, `"mean"` (weighted by the targets' class weights) or `"sum"`.
        ignore_index: Target value whose rows count for nothing; None is -100.
        label_smoothing: Share of the target spread evenly over all classes, 0 to 1.
        lse_square_scale: As in `parallel_cross_entropy`.
        return_lse: Whether to return the rows' logsumexp as well; it is differentiable.
        chunk_bytes: Memory for the logits of a chunk, in float32. By default 4 MiB on a CPU,
            128 MiB on a device.
        ranges: Who holds which classes. By default those of the layer whose parameter
            `linear_weight` is; or else the ranks exchange their sizes first.
        group: The ranks; None is the model group.

    Returns:
        The loss, the same on every rank. With `return_lse` a pair: the loss, and the
        logsumexp of each row.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If an option is out of its range, if dtypes differ, or if class weights or
            probabilities require grad.
        RuntimeError: In backward, if it is to be differentiated again.

    Example:
        >>> x, weight = torch.ones(2, 3), torch.zeros(10, 3)
        >>> parallel_linear_cross_entropy(x, weight, torch.tensor([1, 9]))
        tensor(2.3026)
    """
    group = resolve_group(group)
    ranges = ranges or class_ranges(linear_weight, group)
    if input.requires_grad:
        input = ops.copy(input, group)
    ignore_index = -100 if ignore_index is None else ignore_index
    loss, lse = linear_cross_entropy_of_shard(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        criterion=Criterion(ignore_index, reduction, label_smoothing, lse_square_scale),
        chunk_bytes=chunk_bytes,
        ranges=ranges,
        group=group,
    )
    return (loss, lse) if return_lse else loss


def class_ranges(weight: Tensor, group: ShardGroup) -> Ranges:
    """Return who holds which classes of the weight of which this is the rank's shard."""
    place = owner_of(weight)
    if place is not None and place[0].group == group:
        ranges = place[0].ranges_of(place[1])
        if ranges is not None:
            return ranges
    return ops.exchanged_ranges(weight, 0, group)


def linear_cross_entropy_of_shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *,
    criterion: Criterion,
    chunk_bytes: int | None,
    ranges: Ranges,
    group: ShardGroup,
) -> tuple[Tensor, Tensor]:
    """Return loss and logsumexp, for the `local_forward` of a layer.

    The same as `parallel_linear_cross_entropy`, except that the input has entered sharded
    compute already: its gradient is this rank's partial.
    """
    sharding = Sharding(0 if input.dim() == 1 else 1, ranges, group)
    _check(
        *(input, linear_weight, target, linear_bias, weight),
        *(criterion, sharding, chunk_bytes),
    )
    input = input.to(compute_dtype(input, linear_weight))
    rows = input.reshape(-1, input.shape[-1])
    outputs = linear_weight.shape[1:-1]
    columns = hard = own = places = probabilities = None
    if target.is_floating_point():
        probabilities = as_rows(own_target(target, sharding))
    else:
        columns = _class_first(target.long(), len(rows), outputs.numel())
        own, places = own_targets(columns, sharding)
        hard = (1 - criterion.label_smoothing) * target_weights(
            columns, weight, criterion.ignore_index, wide(rows.dtype)
        )
    own_weight = own_class_weights(weight, sharding, wide(rows.dtype))
    options = HeadOptions(
        group, ranges.size, criterion.label_smoothing, chunk_bytes=chunk_bytes
    )
    given = (rows, linear_weight, linear_bias, own, places, hard)
    row_loss, lse = HeadLosses.apply(*given, probabilities, own_weight, None, options)
    shape = (*input.shape[:-1], *outputs)
    return summed_up(row_loss, lse, columns, weight, criterion, shape, input.dtype)


def summed_up(
    row_loss: Tensor,
    lse: Tensor,
    columns: Tensor | None,
    weight: Tensor | None,
    criterion: Criterion,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return loss and logsumexp, reduced, from rows that lie `(1, K N)`.

    Args:
        row_loss: Loss of each row.
        lse: Logsumexp of each row.
        columns: Target classes; None for probabilities.
        weight: Weight of each class, whole.
        criterion: How to reduce.
        shape: Shape of the rows, `(N, d1, ...)` or `()`.
        dtype: That of the logits, and of the results outside autocast.
    """
    class_first = (math.prod(shape[1:]), shape[0] if shape else 1)

    def back(x: Tensor) -> Tensor:
        return x.view(class_first).t().reshape(shape)

    row_loss, lse = back(row_loss), back(lse)
    columns = None if columns is None else back(columns)
    return reduced(row_loss, lse, columns, weight, criterion, dtype)


def _class_first(target: Tensor, num: int, outputs: int) -> Tensor:
    """Return targets `(N, d1, ...)` as `(1, K N)`, in the order of a head's rows."""
    return target.reshape(num, outputs).t().reshape(1, -1)


def compute_dtype(input: Tensor, linear_weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's, or that of both.

    Raises:
        LayoutError: If they differ, without autocast.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if input.dtype != linear_weight.dtype:
        raise LayoutError(
            f"input is {input.dtype} and linear_weight {linear_weight.dtype}. Expected one"
            " dtype, or torch.autocast."
        )
    return input.dtype


def expect_own_classes(name: str, weight: Tensor, sharding: Sharding) -> None:
    """Check that `weight`, the argument of that name, has the classes of this rank.

    Raises:
        ShapeError: If it has more or fewer, or if they are not one range.
    """
    ranges, group = sharding.ranges, sharding.group
    if len(weight) != sharding.length or not ranges.is_contiguous:
        raise ShapeError(
            f"{name} has {len(weight)} classes; rank {group.rank} of {group.size} holds"
            f" {sharding.length} of the {ranges.size}."
        )


def expect_chunk_bytes(chunk_bytes: int | None) -> None:
    """Check the memory for a chunk's logits.

    Raises:
        LayoutError: If it is not positive.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise LayoutError(f"chunk_bytes={chunk_bytes}; expected at least 1, or None.")


def _check(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    criterion: Criterion,
    sharding: Sharding,
    chunk_bytes: int | None,
) -> None:
    """Check everything before the collective; all but the shards is alike on every rank."""
    num_classes, outputs = sharding.ranges.size, linear_weight.shape[1:-1]
    if input.dim() not in (1, 2) or input.shape[-1] != linear_weight.shape[-1]:
        raise ShapeError(
            f"input has shape {tuple(input.shape)}; expected (N, {linear_weight.shape[-1]})"
            f" or ({linear_weight.shape[-1]},), as linear_weight has shape"
            f" {tuple(linear_weight.shape)}."
        )
    if input.dim() == 1 and outputs:
        raise ShapeError(
            f"input has shape {tuple(input.shape)}; a weight of shape"
            f" {tuple(linear_weight.shape)} needs (N, {linear_weight.shape[-1]})."
        )
    expect_own_classes("linear_weight", linear_weight, sharding)
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise ShapeError(
            f"linear_bias has shape {tuple(linear_bias.shape)}; expected"
            f" {tuple(linear_weight.shape[:-1])}, one for each row of linear_weight."
        )
    expect_criterion(criterion, weight, num_classes)
    expect_chunk_bytes(chunk_bytes)
    if target.requires_grad:
        raise LayoutError(
            "target requires grad, and linear_cross_entropy has no gradient for it. Pass"
            " target.detach(), or use parallel_cross_entropy, which has one."
        )
    shape = torch.Size((*input.shape[:-1], num_classes, *outputs))
    expect_target(target, shape, criterion, sharding)
