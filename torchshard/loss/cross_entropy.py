"""Cross-entropy over a sharded class dim, with the arguments of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed.agreement import expect_alike
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import LayoutError
from torchshard.layout import balanced_ranges
from torchshard.loss.criterion import (
    Criterion,
    Reduction,
    expect_criterion,
    expect_target,
    named_reduction,
    reduced,
    targets_of,
)
from torchshard.loss.row_losses import RowLosses, RowOptions
from torchshard.loss.rows import as_rows, wide
from torchshard.tensor import sample_losses
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    mixes,
    recalled,
    rule,
    whole_shape,
)


@overload
def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    lse_square_scale: float = 0.0,
    return_lse: Literal[False] = False,
    inplace: bool = False,
) -> Tensor: ...


@overload
def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    lse_square_scale: float = 0.0,
    return_lse: Literal[True],
    inplace: bool = False,
) -> tuple[Tensor, Tensor]: ...


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    lse_square_scale: float = 0.0,
    return_lse: bool = False,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `torch.nn.functional.cross_entropy` of logits whose classes are sharded.

    One collective forward, whatever the options (see `torchshard.loss.rows.exchanged`), none
    backward.

    Args:
        input: Logits, `(N, C)`, `(N, C, d1, ...)` or `(C,)`, sharded on the class dim, or
            whole, a plain tensor.
        target: Class indices, `(N,)`, `(N, d1, ...)` or `()`, the same on every rank; or
            probabilities of the logits' shape, whole or sharded as the logits are.
        weight: Weight of each class, `(C,)`, whole.
        size_average: torch's older name for a mean; leave it None.
        ignore_index: Target value whose rows count for nothing.
        reduce: torch's older name for a reduction; leave it None.
        reduction: `"none"`, `"mean"` (weighted by the targets' class weights) or `"sum"`.
        label_smoothing: Share of the target spread evenly over all classes, 0 to 1.
        lse_square_scale: Factor of the square of each row's logsumexp, which is added to its
            loss, without class weights (the z-loss of PaLM, arXiv:2204.02311, section 5).
        return_lse: Whether to return the rows' logsumexp as well; it is differentiable.
        inplace: Whether backward may put the logits' gradient where the logits are. Backward
            then needs no memory; afterwards the logits are gone.

    Returns:
        The loss, the same on every rank: of the target's rows' shape for `"none"`, else a
        scalar. With `return_lse` a pair: the loss, and the logsumexp of each row.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If `reduction` or `label_smoothing` is out of its range, if `weight`
            requires grad, if `ignore_index` is a class and the targets are probabilities, if
            the logits are integers, or are a parameter and `inplace`.
        ShardedOpError: If another dim than the class dim is sharded, or if it is packed.
    """
    reduction = named_reduction(reduction, size_average, reduce)
    input = recalled(input)
    ours = lse_square_scale or return_lse or inplace
    if not (
        ours or isinstance(input, ShardedTensor) or isinstance(target, ShardedTensor)
    ):
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    criterion = Criterion(ignore_index, reduction, label_smoothing, lse_square_scale)
    sharding = class_sharding(input)
    given = {"input": input, "target": target, "weight": weight, "options": criterion}
    expect_alike("parallel_cross_entropy", given, sharding.group)
    _check(input, target, weight, criterion, sharding, inplace)
    local = input.to_local() if isinstance(input, ShardedTensor) else input
    row_loss, lse, columns = _row_losses(
        local, target, weight, criterion, sharding, inplace
    )
    loss, lse = reduced(row_loss, lse, columns, weight, criterion, local.dtype)
    return (loss, lse) if return_lse else loss


@rule(["cross_entropy"])
def _cross_entropy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`F.cross_entropy`, and through it `nn.CrossEntropyLoss`, on a sharded dim."""
    x = args[0]
    if not isinstance(x, ShardedTensor) or x.sharding.dim != min(x.dim() - 1, 1):
        return sample_losses.cross_entropy(func, args, kwargs)
    return parallel_cross_entropy(*args, **kwargs)


def class_sharding(input: Tensor) -> Sharding:
    """Return how the classes are spread; a plain tensor has them all."""
    if isinstance(input, ShardedTensor):
        return input.sharding
    dim = 0 if input.dim() == 1 else 1
    return Sharding(dim, balanced_ranges(input.shape[dim], 1), ShardGroup())


def _check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    criterion: Criterion,
    sharding: Sharding,
    inplace: bool,
) -> None:
    """Check everything before the collective; all of it is alike on every rank."""
    expect_class_dim("cross_entropy", input, sharding)
    if not input.is_floating_point():
        raise LayoutError(f"input holds {input.dtype}; logits are floating-point.")
    if inplace and isinstance(input, torch.nn.Parameter):
        raise LayoutError(
            "inplace=True would make the parameter `input` its own gradient. Use it for"
            " logits that a layer computed."
        )
    expect_criterion(criterion, weight, sharding.ranges.size)
    expect_target(target, whole_shape(input), criterion, sharding)


def expect_class_dim(name: str, input: Tensor, sharding: Sharding) -> None:
    """Check that it is the classes that are sharded, and each rank has a range of them.

    Raises:
        ShardedOpError: If not; `name` is the function that needs it.
    """
    class_dim = 0 if input.dim() == 1 else 1
    if sharding.dim != class_dim or not sharding.ranges.is_contiguous:
        raise mixes(name, sharding, f"needs the classes, dim {class_dim}, sharded")


def _row_losses(
    local: Tensor,
    target: Tensor,
    weight: Tensor | None,
    criterion: Criterion,
    sharding: Sharding,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return loss and logsumexp of each row, and the target classes if those are indices."""
    x = as_rows(local)
    targets = targets_of(target, weight, criterion, sharding, wide(x.dtype))
    trains = torch.is_grad_enabled() and x.requires_grad
    options = RowOptions(sharding, criterion.label_smoothing, inplace, trains)

    def placed(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.reshape(x.shape[0], 1, x.shape[2])

    row_loss, lse = RowLosses.apply(
        x,
        targets.probabilities,
        placed(targets.columns),
        placed(targets.hard),
        targets.own_weight,
        options,
    )
    shape = (*local.shape[: sharding.dim], *local.shape[sharding.dim + 1 :])
    return row_loss.reshape(shape), lse.reshape(shape), targets.columns
