"""Cross-entropy over a sharded class dim: one collective forward, none backward.

Rank r sends one packet a row: its maximum m_r, its sum s_r of exp(x - m_r), the target's
logit t if it owns the target, and with label smoothing the sum q_r of w (x - m_r). From
all packets every rank has

    M = max m_r,    S = sum of s_r exp(m_r - M),    -log p_target = log S + (M - t)

and the gradient of its own logits, p - onehot with p = exp(x - M - log S), is local. M - t is
formed before log S is added, since for large logits log S + M - t in another order cancels.
Memory: the logits are kept for backward and never written to; backward makes one buffer of
their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction
from torchshard.checks import expect_indices
from torchshard.distributed import collectives
from torchshard.errors import LayoutError, ShapeError
from torchshard.tensor.sharded import ShardedTensor, Sharding, mixes, rule, whole_shape

Reduction: TypeAlias = Literal["none", "mean", "sum"]

_BLOCK = 1 << 16
"""Logits whose statistics are taken at once: 256 KiB of float32, which a core's cache holds."""


class _Options(NamedTuple):
    sharding: Sharding
    ignore_index: int
    reduction: Reduction
    label_smoothing: float


class _Packet(NamedTuple):
    """What all ranks know of each row, with the class dim kept at size 1."""

    highest: Tensor
    log_sum: Tensor
    target_logit: Tensor
    smooth: Tensor | None


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits whose classes are sharded.

    Args:
        input: Logits, `(N, C)`, `(N, C, d1, ...)` or `(C,)`, sharded on the class dim. Whole
            logits, a plain tensor, go to torch's own function.
        target: Class indices, `(N,)`, `(N, d1, ...)` or `()`, the same on every rank.
        weight: Weight of each class, `(C,)`, whole.
        size_average: torch's older name for a mean; leave it None.
        ignore_index: Target value whose rows count for nothing.
        reduce: torch's older name for a reduction; leave it None.
        reduction: `"none"`, `"mean"` (weighted by the targets' class weights) or `"sum"`.
        label_smoothing: Share of the target spread evenly over all classes, 0 to 1.

    Returns:
        The loss, the same on every rank: of the target's shape for `"none"`, else a scalar.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If `reduction` or `label_smoothing` is out of its range, or if `weight`
            requires grad.
        ShardedOpError: If another dim than the class dim is sharded, if it is packed, or if
            the targets are probabilities.
    """
    if size_average is not None or reduce is not None:
        older = _Reduction.legacy_get_string(size_average, reduce)
        reduction = cast(Reduction, older)
    if not isinstance(input, ShardedTensor):
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    options = _Options(input.sharding, ignore_index, reduction, label_smoothing)
    _check(input, target, weight, options)
    local = input.to_local()
    loss = cast(Tensor, _CrossEntropy.apply(local, target, weight, options))
    autocast = torch.is_autocast_enabled(local.device.type)
    return loss if autocast else loss.to(local.dtype)


@rule(["cross_entropy"])
def _cross_entropy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """`F.cross_entropy`, and through it `nn.CrossEntropyLoss`, on a sharded class dim."""
    return parallel_cross_entropy(*args, **kwargs)


def _check(
    input: ShardedTensor, target: Tensor, weight: Tensor | None, options: _Options
) -> None:
    """Check everything before the collective; all of it is alike on every rank."""
    sharding, shape = options.sharding, whole_shape(input)
    class_dim = 0 if len(shape) == 1 else 1
    if sharding.dim != class_dim or not sharding.ranges.is_contiguous:
        raise mixes(
            "cross_entropy", sharding, f"needs the classes, dim {class_dim}, sharded"
        )
    if target.is_floating_point():
        raise mixes("cross_entropy", sharding, "has no rule for probability targets")
    rows = (*shape[:class_dim], *shape[class_dim + 1 :])
    if target.shape != rows:
        raise ShapeError(
            f"target has shape {tuple(target.shape)}; logits of whole shape"
            f" {tuple(shape)} need {rows}."
        )
    if weight is not None and weight.shape != (sharding.ranges.size,):
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}; expected one weight for each of the"
            f" {sharding.ranges.size} classes, whole on every rank."
        )
    if weight is not None and weight.requires_grad:
        raise LayoutError(
            "weight requires grad, and cross-entropy has no gradient for it. Pass"
            " weight.detach()."
        )
    if options.reduction not in ("none", "mean", "sum"):
        raise LayoutError(
            f"reduction={options.reduction!r} is unknown. Expected none, mean or sum."
        )
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise LayoutError(
            f"label_smoothing={options.label_smoothing} is out of range. Expected 0 to 1."
        )
    expect_indices(target, sharding.ranges.size, "target", options.ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, options: _Options
    ) -> Tensor:
        class_dim = options.sharding.dim
        columns = target.long().unsqueeze(class_dim)
        packet = _exchanged(x, columns, weight, options)
        live = columns != options.ignore_index
        row_weight = _row_weight(columns, live, weight, packet.log_sum)
        smoothing = options.label_smoothing
        nll = packet.log_sum + (packet.highest - packet.target_logit)
        loss = (1 - smoothing) * row_weight * nll
        if packet.smooth is not None:
            loss = loss + smoothing / options.sharding.ranges.size * packet.smooth
        loss = torch.where(live, loss, 0).squeeze(class_dim)
        ctx.options = options
        ctx.save_for_backward(
            x, columns, weight, row_weight, packet.highest, packet.log_sum
        )
        if options.reduction == "mean":
            return loss.sum() / row_weight.sum()
        return loss.sum() if options.reduction == "sum" else loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, columns, weight, row_weight, highest, log_sum = ctx.saved_tensors
        options: _Options = ctx.options
        if options.reduction == "none":
            grad = grad.unsqueeze(options.sharding.dim)
        elif options.reduction == "mean":
            grad = grad / row_weight.sum()
        scale = torch.where(columns != options.ignore_index, grad, 0)
        return (
            _grad_logits(
                x, columns, weight, scale, row_weight, highest, log_sum, options
            ),
            None,
            None,
            None,
        )


def _exchanged(
    x: Tensor, columns: Tensor, weight: Tensor | None, options: _Options
) -> _Packet:
    """Return the rows' statistics over all ranks: the loss' one collective."""
    sharding = options.sharding
    dim, ranges, group = sharding.dim, sharding.ranges, sharding.group
    own, places = _own_targets(columns, sharding)
    own_weight = None if weight is None else _own_weight(weight, x, sharding)
    statistics = _local_statistics(x, dim, own_weight, bool(options.label_smoothing))
    rows = [*statistics[:2], _picked(x, dim, own, places), *statistics[2:]]
    packets = collectives.stack(torch.stack(rows), group)
    all_highest, all_sums = packets[:, 0], packets[:, 1]
    most = all_highest.amax(0)
    base = torch.where(most == float("-inf"), 0, most)
    log_sum = (all_sums * (all_highest - base).exp()).sum(0).log()
    smooth = None
    if options.label_smoothing:
        shares = _weight_sums(weight, x, ranges.lengths)
        shares = shares.reshape(-1, *[1] * (all_highest.dim() - 1))
        lifted = torch.where(shares != 0, shares * (base - all_highest), 0)
        smooth = shares.sum() * log_sum + (lifted - packets[:, 3]).sum(0)
    return _Packet(base, log_sum, packets[:, 2].sum(0), smooth)


def _local_statistics(
    x: Tensor, dim: int, own_weight: Tensor | None, is_smoothed: bool
) -> list[Tensor]:
    """Return this shard's maximum, sum of exp(x - maximum) and, smoothed, sum of w (x - maximum).

    In fp32 or better. The rows are taken in blocks that fit a cache, so that no second tensor
    of the logits' size exists and each block is read from memory once.
    """
    if x.shape[dim] == 0:
        nothing = x.sum(dim, keepdim=True).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        return [nothing + float("-inf"), nothing, *([nothing] if is_smoothed else [])]
    if dim == 0 or torch.compiler.is_compiling():
        return _block_statistics(x, dim, own_weight, is_smoothed)
    num_rows = max(1, _BLOCK // max(1, x[:1].numel()))
    blocks = [
        _block_statistics(block, dim, own_weight, is_smoothed)
        for block in x.split(num_rows)
    ]
    return (
        blocks[0]
        if len(blocks) == 1
        else [torch.cat(s) for s in zip(*blocks, strict=True)]
    )


def _block_statistics(
    x: Tensor, dim: int, own_weight: Tensor | None, is_smoothed: bool
) -> list[Tensor]:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    highest = x.amax(dim, keepdim=True)
    shifted = x - torch.where(highest == float("-inf"), 0, highest)
    smooth = []
    if is_smoothed:
        weighted = shifted if own_weight is None else shifted * own_weight
        smooth = [weighted.sum(dim, keepdim=True)]
    return [highest, shifted.exp_().sum(dim, keepdim=True), *smooth]


def _own_targets(columns: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """Return which targets this rank owns, and their places in its shard (0 for others)."""
    first = sharding.ranges.offset(sharding.group.rank)
    own = (columns >= first) & (columns < first + sharding.length)
    return own, torch.where(own, columns - first, 0)


def _picked(x: Tensor, dim: int, own: Tensor, places: Tensor) -> Tensor:
    """Return the target's logit of each row, 0 where another rank owns it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True).to(dtype)
    return torch.where(own, x.gather(dim, places).to(dtype), 0)


def _own_weight(weight: Tensor, x: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's class weights, shaped to multiply its logits."""
    own = collectives.own_shard(weight, 0, sharding.ranges, sharding.group)
    shape = [1] * x.dim()
    shape[sharding.dim] = -1
    return own.to(torch.promote_types(x.dtype, torch.float32)).reshape(shape)


def _weight_sums(weight: Tensor | None, x: Tensor, lengths: list[int]) -> Tensor:
    """Return each rank's sum of class weights; every rank knows the whole `weight`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if weight is None:
        return torch.tensor(lengths, dtype=dtype, device=x.device)
    return torch.stack([part.sum() for part in weight.to(dtype).split(lengths)])


def _row_weight(
    columns: Tensor, live: Tensor, weight: Tensor | None, like: Tensor
) -> Tensor:
    """Return the class weight of each row's target, 0 for ignored rows."""
    if weight is None:
        return live.to(like.dtype)
    return torch.where(live, weight[torch.where(live, columns, 0)].to(like.dtype), 0)


def _grad_logits(
    x: Tensor,
    columns: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    row_weight: Tensor,
    highest: Tensor,
    log_sum: Tensor,
    options: _Options,
) -> Tensor:
    """Return scale * (p * mass - (1 - e) w_t onehot - e/C w), with e the smoothing.

    `mass` is what the targets of a row sum to: (1 - e) w_t + e/C sum of w.
    """
    sharding, smoothing = options.sharding, options.label_smoothing
    spread = smoothing / sharding.ranges.size
    hard = (1 - smoothing) * row_weight * scale
    mass = hard
    if smoothing:
        lengths = sharding.ranges.lengths
        mass = hard + spread * scale * _weight_sums(weight, x, lengths).sum()
    grad = ((x - highest).sub_(log_sum)).exp_().mul_(mass)
    if smoothing and weight is None:
        grad.sub_(spread * scale)
    elif smoothing and weight is not None:
        grad.addcmul_(scale, _own_weight(weight, x, sharding), value=-spread)
    own, places = _own_targets(columns, sharding)
    if x.shape[sharding.dim]:
        grad.scatter_add_(sharding.dim, places, torch.where(own, -hard, 0))
    return grad.to(x.dtype)
