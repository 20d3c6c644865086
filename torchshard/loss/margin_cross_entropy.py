"""Margin softmax over cosines of features and class centres: the functions and their checks."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.agreement import expect_alike
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.errors import ShapeError
from torchshard.layout import Ranges, balanced_ranges
from torchshard.loss.criterion import (
    Criterion,
    Reduction,
    expect_criterion,
    expect_target,
)
from torchshard.loss.head_arguments import (
    HeadOptions,
    class_ranges,
    compute_dtype,
    expect_classes,
)
from torchshard.loss.head_losses import loss_of_head
from torchshard.loss.margin import TargetMargin
from torchshard.loss.rows import wide
from torchshard.tensor.sharded import Sharding, mark


def parallel_margin_cross_entropy(
    input: Tensor,
    centres: Tensor,
    target: Tensor,
    margin: TargetMargin,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    sample_rate: float = 1.0,
    sparse: bool = False,
    chunk_bytes: int | None = None,
    ranges: Ranges | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Compute the cross-entropy of scaled cosines, with a margin for the target's.

    With x and W scaled to length 1, the logits of a row are s x W^T, the target's s phi(x W^T)
    (`TargetMargin`). Gradients are exact: the margin and both norms are differentiated. Logits
    exist for a chunk of classes at a time, as in `parallel_linear_cross_entropy`.

        input       (N, F)          whole
        centres     (C / R, F)      shard of the classes
        target      (N,)            whole
        loss        () or (N,)      whole

        forward     one all-gather of the rows' statistics
        backward    one all-reduce of the input's gradient

    Args:
        input: Features, the same on every rank, of any length but 0.
        centres: This rank's class centres, of any length.
        target: Class indices.
        margin: The margin, and the scale s.
        reduction: `"none"`, `"mean"` or `"sum"`.
        ignore_index: Target value whose rows count for nothing.
        sample_rate: Share of each rank's classes that take part: all that are a target, the
            others drawn at random for every call (Partial FC, arXiv:2203.15565).
        sparse: Whether the gradient of sampled centres is a sparse tensor.
        chunk_bytes: As in `parallel_linear_cross_entropy`.
        ranges: As in `parallel_linear_cross_entropy`.
        group: The ranks; None is the model group.

    Returns:
        The loss, the same on every rank.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If an option is out of its range, or if dtypes differ.

    Example:
        >>> import torch, torchshard as ts
        >>> x, centres = torch.eye(3)[:2], torch.eye(3)
        >>> arc = ts.loss.Margin(added=0.5, scale=8.0)
        >>> parallel_margin_cross_entropy(x, centres, torch.tensor([0, 1]), arc)
        tensor(0.0018)
    """
    group = resolve_group(group)
    ranges = ranges or class_ranges(centres, group)
    criterion = Criterion(ignore_index, reduction)
    given = {"input": input, "target": target, "options": (criterion, sample_rate)}
    expect_alike("parallel_margin_cross_entropy", given, group)
    input = ops.enter(input, group)
    return margin_cross_entropy_of_shard(
        input,
        centres,
        target,
        margin,
        criterion=criterion,
        sample_rate=sample_rate,
        sparse=sparse,
        chunk_bytes=chunk_bytes,
        ranges=ranges,
        group=group,
    )


def margin_cross_entropy_of_shard(
    input: Tensor,
    centres: Tensor,
    target: Tensor,
    margin: TargetMargin,
    *,
    criterion: Criterion,
    sample_rate: float,
    sparse: bool,
    chunk_bytes: int | None,
    ranges: Ranges,
    group: ShardGroup,
) -> Tensor:
    """Return the loss, for the `local_forward` of a layer.

    The same as `parallel_margin_cross_entropy`, except that the input has entered sharded
    compute already: its gradient is this rank's partial.
    """
    if input.dim() != 2 or centres.dim() != 2 or input.shape[1:] != centres.shape[1:]:
        raise ShapeError(
            f"input has shape {tuple(input.shape)} and centres {tuple(centres.shape)};"
            " expected (N, F) and (C / R, F)."
        )
    _expect_indices(target)
    sharding = Sharding(1, ranges, group)
    options = HeadOptions(sharding, criterion, margin, sample_rate, sparse, chunk_bytes)
    shape = (len(input), ranges.size)
    expect_classes("centres", centres, target, None, shape, options)
    # Scaled to length in the input's dtype, and only then rounded to autocast's.
    dtype = compute_dtype(input, centres)
    x = (margin.scale * F.normalize(input, dim=-1)).to(dtype)
    return loss_of_head(x, centres, None, target, None, options)[0]


def margin_cross_entropy_of_features(
    input: Tensor,
    centres: Tensor,
    target: Tensor,
    margin: TargetMargin,
    criterion: Criterion,
    group: ShardGroup,
) -> Tensor:
    """Return the loss where the features are divided, for the `local_forward` of a layer.

    Args:
        input: `(N, F / R)`.
        centres: `(C, F / R)`.
        target: Class indices `(N,)`.
        margin: The margin, and the scale.
        criterion: Which rows count, and how they are put together.
        group: The ranks.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If an option is out of its range, or if dtypes differ.
    """
    if input.dim() != 2:
        raise ShapeError(f"input has {input.dim()} dims; expected (N, F / R).")
    _expect_targets(target, (len(input), len(centres)), criterion)
    cosines = cosines_of_features(input, centres, group)
    return _loss_of_cosines(cosines, target, margin, criterion)


def _expect_targets(
    target: Tensor, shape: tuple[int, ...], criterion: Criterion
) -> None:
    """Check the targets against cosines of that whole shape, with all classes here."""
    _expect_indices(target)
    sharding = Sharding(1, balanced_ranges(shape[1], 1), ShardGroup())
    expect_criterion(criterion, None, shape[1])
    expect_target(target, torch.Size(shape), criterion, sharding)


def _expect_indices(target: Tensor) -> None:
    if target.is_floating_point():
        raise ShapeError("target holds probabilities; a margin needs class indices.")


def cosines_of_shard(
    input: Tensor, centres: Tensor, ranges: Ranges, group: ShardGroup
) -> Tensor:
    """Return the cosines of inputs `(*, F)` with this rank's centres, marked as a shard."""
    dtype = compute_dtype(input, centres)
    products = F.linear(F.normalize(input, dim=-1).to(dtype), centres.to(dtype))
    cosines = products * _inverse_length(centres.square().sum(1)).to(products.dtype)
    return mark(cosines, Sharding(cosines.dim() - 1, ranges, group))


def cosines_of_features(input: Tensor, centres: Tensor, group: ShardGroup) -> Tensor:
    """Return the whole cosines `(*, C)` of inputs and centres by their features' shards.

    Products and squared lengths are partials, which one all-reduce sums.

    Args:
        input: `(*, F / R)`, with `*` for any number of dims.
        centres: `(C, F / R)`.
        group: The ranks.
    """
    input = input.to(compute_dtype(input, centres))
    dtype = wide(input.dtype)
    partials = [
        F.linear(input, centres.to(input.dtype)).to(dtype),
        input.to(dtype).square().sum(-1, keepdim=True),
        centres.to(dtype).square().sum(1),
    ]
    sums = ops.reduce(torch.cat([x.flatten() for x in partials]), group)
    products, inputs, lengths = (
        part.view_as(x)
        for part, x in zip(
            torch.tensor_split(sums, _inner_edges(partials)), partials, strict=True
        )
    )
    return products * _inverse_length(inputs) * _inverse_length(lengths)


def _inner_edges(parts: list[Tensor]) -> list[int]:
    return list(accumulate(x.numel() for x in parts))[:-1]


def _inverse_length(square: Tensor) -> Tensor:
    """Return 1 / length of vectors from its square, as `F.normalize` has it."""
    return square.clamp_min(1e-24).rsqrt()


def margin_cross_entropy(
    cosines: Tensor, target: Tensor, margin: TargetMargin, criterion: Criterion
) -> Tensor:
    """Return the loss of whole cosines `(N, C)`, with the margin at the targets.

    Raises:
        ShapeError: If there is not one class for each row.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If an option is out of its range.
    """
    _expect_targets(target, tuple(cosines.shape), criterion)
    return _loss_of_cosines(cosines, target, margin, criterion)


def _loss_of_cosines(
    cosines: Tensor, target: Tensor, margin: TargetMargin, criterion: Criterion
) -> Tensor:
    ignore_index, target = criterion.ignore_index, target.long()
    columns = torch.where(target == ignore_index, 0, target).unsqueeze(1)
    phi = margin.of(cosines.gather(1, columns))
    return F.cross_entropy(
        margin.scale * cosines.scatter(1, columns, phi),
        target,
        ignore_index=ignore_index,
        reduction=criterion.reduction,
    )
