"""What is asked of a loss: targets and options, their checks, and how rows are put together."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import _reduction as legacy
from torchshard.checks import expect_indices
from torchshard.distributed import collectives, ops
from torchshard.errors import LayoutError, ShapeError
from torchshard.loss.rows import as_rows
from torchshard.tensor.sharded import ShardedTensor, Sharding, mixes, whole_shape

Reduction: TypeAlias = Literal["none", "mean", "sum"]


class Criterion(NamedTuple):
    """What the loss of a row is, and how rows are put together.

    Attributes:
        ignore_index: Target value whose rows count for nothing.
        reduction: `"none"`, `"mean"` or `"sum"`.
        label_smoothing: Share of the target spread evenly over all classes.
        lse_square_scale: Factor of the squared logsumexp that is added (z-loss).
    """

    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0


def named_reduction(
    reduction: Reduction, size_average: bool | None, reduce: bool | None
) -> Reduction:
    """Return `reduction`, or what torch's older names for it say where one is given."""
    if size_average is None and reduce is None:
        return reduction
    return cast(Reduction, legacy.legacy_get_string(size_average, reduce))


def expect_criterion(
    criterion: Criterion, weight: Tensor | None, num_classes: int
) -> None:
    """Check the options, and the class weights against the number of classes.

    Raises:
        ShapeError: If there is not one weight for each class.
        LayoutError: If an option is out of its range, or if `weight` requires grad.
    """
    if weight is not None and weight.shape != (num_classes,):
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}; expected one weight for each of the"
            f" {num_classes} classes, whole on every rank."
        )
    if weight is not None and weight.requires_grad:
        raise LayoutError(
            "weight requires grad, and cross-entropy has no gradient for it. Pass"
            " weight.detach()."
        )
    if criterion.reduction not in ("none", "mean", "sum"):
        raise LayoutError(
            f"reduction={criterion.reduction!r} is unknown. Expected none, mean or sum."
        )
    if not 0.0 <= criterion.label_smoothing <= 1.0:
        raise LayoutError(
            f"label_smoothing={criterion.label_smoothing} is out of range. Expected 0 to 1."
        )


def expect_target(
    target: Tensor, shape: torch.Size, criterion: Criterion, sharding: Sharding
) -> None:
    """Check the target against logits of the whole `shape`.

    Raises:
        ShapeError: If its shape does not fit.
        TargetError: If it is neither a class nor `ignore_index`.
        LayoutError: If it is probabilities, and `ignore_index` a class.
    """
    if target.is_floating_point():
        _expect_probabilities(target, shape, criterion, sharding)
        return
    rows = shape[1:] if len(shape) == 1 else (shape[0], *shape[2:])
    if target.shape != rows:
        raise ShapeError(
            f"target has shape {tuple(target.shape)}; logits of whole shape"
            f" {tuple(shape)} need {tuple(rows)}."
        )
    expect_indices(target, sharding.ranges.size, "target", criterion.ignore_index)


def _expect_probabilities(
    target: Tensor, shape: torch.Size, criterion: Criterion, sharding: Sharding
) -> None:
    if whole_shape(target) != shape:
        raise ShapeError(
            f"target has shape {tuple(whole_shape(target))}; probabilities for logits of"
            f" whole shape {tuple(shape)} need the same shape."
        )
    if isinstance(target, ShardedTensor) and target.sharding != sharding:
        raise mixes(
            "cross_entropy",
            target.sharding,
            "needs the target sharded as the logits are",
        )
    if criterion.ignore_index >= 0:
        raise LayoutError(
            f"ignore_index={criterion.ignore_index} is not supported for probabilities."
            " Leave it out, or give class indices."
        )


class Targets(NamedTuple):
    """The targets of each row, and what of them this rank's classes need.

    Attributes:
        columns: Target classes, of the rows' shape; None for probabilities.
        hard: h, the weight of the target's class in its row, likewise; 0 for ignored rows.
        probabilities: `(N, C / R, D)`, of this rank's classes; None for indices.
        own_weight: `(1, C / R, 1)`, the weights of this rank's classes, or None.
    """

    columns: Tensor | None
    hard: Tensor | None
    probabilities: Tensor | None
    own_weight: Tensor | None


def targets_of(
    target: Tensor,
    weight: Tensor | None,
    criterion: Criterion,
    sharding: Sharding,
    dtype: torch.dtype,
) -> Targets:
    """Return the targets, class indices or probabilities, as the losses take them."""
    own_weight = _own_class_weights(weight, sharding, dtype)
    if target.is_floating_point():
        return Targets(None, None, as_rows(_own_target(target, sharding)), own_weight)
    columns = target.long()
    weights = target_weights(columns, weight, criterion.ignore_index, dtype)
    hard = (1 - criterion.label_smoothing) * weights
    return Targets(columns, hard, None, own_weight)


def _own_target(target: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's part of the probabilities, which are whole or sharded."""
    if isinstance(target, ShardedTensor):
        return target.to_local()
    return ops.scatter(
        target, sharding.dim, grad="whole", ranges=sharding.ranges, group=sharding.group
    )


def _own_class_weights(
    weight: Tensor | None, sharding: Sharding, dtype: torch.dtype
) -> Tensor | None:
    """Return the weights of this rank's classes, `(1, C / R, 1)`."""
    if weight is None:
        return None
    own = collectives.own_shard(weight, 0, sharding.ranges, sharding.group)
    return own.to(dtype).reshape(1, -1, 1)


def own_targets(columns: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """Return which targets this rank owns, and their places in its shard (0 for others)."""
    first = sharding.ranges.offset(sharding.group.rank)
    own = (columns >= first) & (columns < first + sharding.length)
    return own, torch.where(own, columns - first, 0)


def target_weights(
    columns: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the class weight of each row's target, 0 for ignored rows."""
    live = columns != ignore_index
    if weight is None:
        return live.to(dtype)
    return torch.where(live, weight[torch.where(live, columns, 0)].to(dtype), 0)


def reduced(
    row_loss: Tensor,
    lse: Tensor,
    columns: Tensor | None,
    weight: Tensor | None,
    criterion: Criterion,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the loss, put together as `reduction` says, and the rows' logsumexp.

    A mean divides the cross-entropy by the targets' class weights, the z-loss by the number
    of rows that are not ignored. Rows that are ignored count for nothing, whatever they hold.

    Args:
        row_loss: Cross-entropy of each row, in float32 or wider.
        lse: Logsumexp of each row, likewise.
        columns: Target class of each row; None for probabilities.
        weight: Weight of each class, whole.
        criterion: How to reduce.
        dtype: That of the logits, and of the results outside autocast.
    """
    loss = _put_together(row_loss, lse, columns, weight, criterion)
    if torch.is_autocast_enabled(row_loss.device.type):
        return loss, lse
    return loss.to(dtype), lse.to(dtype)


def _put_together(
    row_loss: Tensor,
    lse: Tensor,
    columns: Tensor | None,
    weight: Tensor | None,
    criterion: Criterion,
) -> Tensor:
    z_loss = None
    if criterion.lse_square_scale:
        z_loss = criterion.lse_square_scale * lse.square()
    if columns is not None:
        live = columns != criterion.ignore_index
        row_loss = torch.where(live, row_loss, 0)
        z_loss = None if z_loss is None else torch.where(live, z_loss, 0)
    if criterion.reduction == "none":
        return row_loss if z_loss is None else row_loss + z_loss
    loss = (
        row_loss.sum()
        if z_loss is None
        else torch.stack([row_loss.sum(), z_loss.sum()])
    )
    if criterion.reduction == "mean":
        loss = loss / _denominators(row_loss, columns, weight, criterion, loss.dim())
    return loss if z_loss is None else loss.sum()


def _denominators(
    row_loss: Tensor,
    columns: Tensor | None,
    weight: Tensor | None,
    criterion: Criterion,
    num_dims: int,
) -> Tensor | int:
    """Return what a mean divides by: for the cross-entropy and, if asked for, the z-loss."""
    if columns is None:
        return row_loss.numel()
    ignore_index, dtype = criterion.ignore_index, row_loss.dtype
    weights = target_weights(columns, weight, ignore_index, dtype).sum()
    if num_dims == 0:
        return weights
    return torch.stack([weights, (columns != ignore_index).to(dtype).sum()])
