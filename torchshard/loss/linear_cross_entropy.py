"""A class-parallel classifier and its cross-entropy in one: the functions and their checks."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.agreement import expect_alike
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.errors import LayoutError, ShapeError
from torchshard.layout import Ranges
from torchshard.loss.criterion import Criterion, Reduction
from torchshard.loss.head_arguments import (
    HeadOptions,
    class_ranges,
    compute_dtype,
    expect_classes,
)
from torchshard.loss.head_losses import loss_of_head
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
        >>> import torch
        >>> x, weight = torch.ones(2, 3), torch.zeros(10, 3)
        >>> parallel_linear_cross_entropy(x, weight, torch.tensor([1, 9]))
        tensor(2.3026)
    """
    group = resolve_group(group)
    ranges = ranges or class_ranges(linear_weight, group)
    ignore_index = -100 if ignore_index is None else ignore_index
    criterion = Criterion(ignore_index, reduction, label_smoothing, lse_square_scale)
    given = {"input": input, "target": target, "weight": weight, "options": criterion}
    expect_alike("parallel_linear_cross_entropy", given, group)
    input = ops.enter(input, group)
    loss, lse = linear_cross_entropy_of_shard(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        criterion=criterion,
        chunk_bytes=chunk_bytes,
        ranges=ranges,
        group=group,
    )
    return (loss, lse) if return_lse else loss


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
    options = HeadOptions(sharding, criterion, chunk_bytes=chunk_bytes)
    _check(input, linear_weight, linear_bias, target)
    shape = (*input.shape[:-1], ranges.size, *linear_weight.shape[1:-1])
    expect_classes("linear_weight", linear_weight, target, weight, shape, options)
    input = input.to(compute_dtype(input, linear_weight))
    return loss_of_head(input, linear_weight, linear_bias, target, weight, options)


def _check(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor
) -> None:
    """Check what the input and the shard are to each other, alike on every rank."""
    if input.dim() not in (1, 2) or input.shape[-1] != linear_weight.shape[-1]:
        raise ShapeError(
            f"input has shape {tuple(input.shape)}; expected (N, {linear_weight.shape[-1]})"
            f" or ({linear_weight.shape[-1]},), as linear_weight has shape"
            f" {tuple(linear_weight.shape)}."
        )
    if input.dim() == 1 and linear_weight.dim() > 2:
        raise ShapeError(
            f"input has shape {tuple(input.shape)}; a weight of shape"
            f" {tuple(linear_weight.shape)} needs (N, {linear_weight.shape[-1]})."
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise ShapeError(
            f"linear_bias has shape {tuple(linear_bias.shape)}; expected"
            f" {tuple(linear_weight.shape[:-1])}, one for each row of linear_weight."
        )
    if target.requires_grad:
        raise LayoutError(
            "target requires grad, and linear_cross_entropy has no gradient for it. Pass"
            " target.detach(), or use parallel_cross_entropy, which has one."
        )
