"""The loss of each row of logits, with its gradient: one collective forward, none backward.

Forward shares the rows' statistics (`rows.py`). Backward is local. With q the softmax over
this rank's classes alone, s its share s_r exp(m_r - M) / S of the row, so that p = s q, h the
weight of the target, u the weights of soft targets and g the row's upstream gradient,

    dx = g ((h + sum of u) p - u - h onehot)

The logits are kept for backward and never written to. Beyond them there is one buffer of their
size, which becomes their gradient: on a CPU, where an exponential costs more than reading
memory, it holds q from forward on; elsewhere, and of half precision, q is computed again.
With `inplace=True` there is none. Half precision is computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.groups import ShardGroup
from torchshard.loss.criterion import own_targets
from torchshard.loss.rows import (
    WHOLE,
    Index,
    SoftWeights,
    added,
    blocks,
    exchanged,
    local_part,
    own_softmax,
    part_of,
    scratch_of,
    weight_of_p,
    wide,
)
from torchshard.tensor.sharded import Sharding


class RowOptions(NamedTuple):
    """How the logits are spread, and what is wanted of them.

    Attributes:
        sharding: How the logits are spread.
        label_smoothing: Share of the target spread evenly over all classes.
        inplace: Whether backward may write over the logits.
        trains: Whether a backward is to be expected.
    """

    sharding: Sharding
    label_smoothing: float
    inplace: bool
    trains: bool


class _Saved(NamedTuple):
    """What backward reads: `share` is this rank's of the row, `total` the row's h + sum of u."""

    x: Tensor
    probabilities: Tensor | None
    columns: Tensor | None
    hard: Tensor | None
    own_weight: Tensor | None
    base: Tensor
    exp_sum: Tensor
    share: Tensor
    total: Tensor


_Grads: TypeAlias = "tuple[Tensor | None, Tensor | None]"


class RowLosses(torch.autograd.Function):
    """Loss and logsumexp of each row, `(N, 1, D)`.

    Takes logits and, or None, probabilities `(N, C / R, D)`, target classes and the weights
    h of the targets `(N, 1, D)`, and the weights of this rank's classes `(1, C / R, 1)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probabilities: Tensor | None,
        columns: Tensor | None,
        hard: Tensor | None,
        own_weight: Tensor | None,
        options: RowOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and logsumexp of each row, after the one exchange."""
        ctx.set_materialize_grads(False)
        sharding = options.sharding
        soft = _soft_weights(probabilities, own_weight, options)
        target_logit = None
        if columns is not None:
            target_logit = picked(x, *own_targets(columns, sharding))
        # Not among the saved tensors: the first backward turns it into the gradient, and a
        # second one computes it again.
        ctx.room = torch.empty_like(x) if _keeps_softmax(x, options) else None
        part = local_part(x, target_logit, soft, ctx.room)
        rows = exchanged(part, sharding.group)
        share = part.exp_sum * (part.highest - rows.base).exp() / rows.exp_sum
        ctx.options, ctx.is_spent = options, False
        saved = (x, probabilities, columns, hard, own_weight)
        total = rows.total(hard)
        ctx.save_for_backward(*saved, rows.base, rows.exp_sum, share, total)
        return rows.loss(hard), rows.logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of logits and probabilities; no collective."""
        if ctx.is_spent:
            raise RuntimeError(
                "cross_entropy(..., inplace=True): the first backward wrote the gradient"
                " over the logits, so there cannot be a second. Use inplace=False."
            )
        saved, options = _Saved(*ctx.saved_tensors), cast(RowOptions, ctx.options)
        if torch.is_grad_enabled():
            grads = _differentiable_grads(saved, grad, grad_lse, options)
        else:
            ctx.is_spent = options.inplace and ctx.needs_input_grad[0]
            room, ctx.room = ctx.room, None
            needs = ctx.needs_input_grad
            grads = _grads(saved, grad, grad_lse, needs, options, room)
        return (*grads, None, None, None, None)


def _soft_weights(
    probabilities: Tensor | None, own_weight: Tensor | None, options: RowOptions
) -> SoftWeights | None:
    if probabilities is None and not options.label_smoothing:
        return None
    num_classes = options.sharding.ranges.size
    return SoftWeights(probabilities, own_weight, options.label_smoothing, num_classes)


def picked(x: Tensor, own: Tensor, places: Tensor) -> Tensor:
    """Return the target's logit of each row, 0 where another rank owns it."""
    if x.shape[1] == 0:
        return x.sum(1, keepdim=True).to(wide(x.dtype))
    return torch.where(own, x.gather(1, places).to(wide(x.dtype)), 0)


def _keeps_softmax(x: Tensor, options: RowOptions) -> bool:
    is_cheaper = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return (
        is_cheaper
        and options.trains
        and not options.inplace
        and x.dtype == wide(x.dtype)
    )


def _grads(
    saved: _Saved,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    needs: tuple[bool, ...],
    options: RowOptions,
    room: Tensor | None,
) -> _Grads:
    grad_probabilities = None
    if needs[1] and grad is not None:
        grad_probabilities = _grad_probabilities(saved, grad, options)
    if not needs[0]:
        return None, grad_probabilities
    upstream = _upstream(saved, grad, grad_lse, options)
    return _grad_logits(saved.x, upstream, options, room), grad_probabilities


class _Upstream(NamedTuple):
    """What a row's gradient is made of: scale q - g u + onehot.

    Attributes:
        scale: (g (h + sum of u) + g_lse) times this rank's share.
        empty: Where this rank has no share, and q may be nan; None if nowhere.
        grad: g, or None.
        soft: u, or None.
        places: Where the target is among this rank's classes.
        onehot: -g h, 0 where another rank has the target; None for probabilities.
    """

    scale: Tensor
    empty: Tensor | None
    grad: Tensor | None
    soft: SoftWeights | None
    places: Tensor | None
    onehot: Tensor | None

    def turned(self, q: Tensor, index: Index) -> Tensor:
        """Return the gradient of a block of rows, in the place of its q."""
        block = q.mul_(self.scale[index])
        if self.empty is not None:
            block.masked_fill_(self.empty[index], 0)
        if self.soft is not None and self.grad is not None:
            block.sub_(self.soft.block(index, block.dtype) * self.grad[index])
        if self.onehot is not None and self.places is not None:
            block.scatter_add_(1, self.places[index], self.onehot[index])
        return block


def _upstream(
    saved: _Saved, grad: Tensor | None, grad_lse: Tensor | None, options: RowOptions
) -> _Upstream:
    soft = _soft_weights(saved.probabilities, saved.own_weight, options)
    places = onehot = None
    if saved.columns is not None and saved.hard is not None and grad is not None:
        own, places = own_targets(saved.columns, options.sharding)
        onehot = torch.where(own, -saved.hard * grad, 0)
    scale = weight_of_p(saved.total, grad, grad_lse) * saved.share
    empty = saved.share == 0
    can_look = scale.device.type == "cpu" and not torch.compiler.is_compiling()
    has_empty = not can_look or bool(empty.any())
    return _Upstream(scale, empty if has_empty else None, grad, soft, places, onehot)


def _grad_logits(
    x: Tensor, upstream: _Upstream, options: RowOptions, room: Tensor | None
) -> Tensor:
    """Return the logits' gradient, block by block; in `room`, which holds q, if given."""
    if not x.shape[1]:
        return torch.empty_like(x)
    if room is not None:
        for index in blocks(x) if upstream.soft else [WHOLE]:
            upstream.turned(room[index], index)
        return room
    if torch.compiler.is_compiling():
        return upstream.turned(own_softmax(x), WHOLE).to(x.dtype)
    writable = options.inplace and not _overlaps_itself(x)
    out = x.detach() if writable else torch.empty_like(x)
    # A softmax into its own argument, or into a narrower dtype, is nothing torch promises.
    if not options.inplace and out.dtype == wide(x.dtype):
        for index in blocks(x):
            upstream.turned(own_softmax(x[index], out[index]), index)
    else:
        scratch = scratch_of(x)
        for index in blocks(x):
            room = part_of(scratch, x[index])
            out[index] = upstream.turned(own_softmax(x[index], room), index)
    return out


def _overlaps_itself(x: Tensor) -> bool:
    """Return whether places of `x` may be one in memory, as after `expand` or `unfold`."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _grad_probabilities(saved: _Saved, grad: Tensor, options: RowOptions) -> Tensor:
    """Return -g w (1 - e) log p."""
    log_p = saved.x - saved.base - saved.exp_sum.log()
    result = log_p.mul_((options.label_smoothing - 1) * grad)
    if saved.own_weight is not None:
        result.mul_(saved.own_weight)
    assert saved.probabilities is not None
    return result.to(saved.probabilities.dtype)


class _LogExpSum(torch.autograd.Function):
    """log S as a function of this rank's logits, its value being known: no collective.

    Its gradient is p, which is a function of log S: it can be differentiated ever again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, exp_sum: Tensor, group: ShardGroup
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, base, exp_sum)
        return exp_sum.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, base, exp_sum = ctx.saved_tensors
        log_p = _log_probabilities(x, base, exp_sum, ctx.group)
        return (ops.copy(grad, ctx.group) * log_p.exp()).to(x.dtype), None, None, None


def _log_probabilities(
    x: Tensor, base: Tensor, exp_sum: Tensor, group: ShardGroup
) -> Tensor:
    log_sum = cast(Tensor, _LogExpSum.apply(x, base, exp_sum, group))
    return x - base - ops.copy(log_sum, group)


def _differentiable_grads(
    saved: _Saved, grad: Tensor | None, grad_lse: Tensor | None, options: RowOptions
) -> _Grads:
    """Return the gradients as autograd may differentiate them again.

    What is whole, the upstream gradients, log S and the sum of u, enters sharded compute:
    `ops.copy` and `ops.total` sum its gradient over the ranks.
    """
    group, probabilities = options.sharding.group, saved.probabilities
    soft = _soft_weights(probabilities, saved.own_weight, options)
    log_p = _log_probabilities(saved.x, saved.base, saved.exp_sum, group)
    p = log_p.exp()
    result = torch.zeros_like(p)
    grad_probabilities = None
    if grad_lse is not None:
        result = result + ops.copy(grad_lse, group) * p
    if grad is not None:
        grad = ops.copy(grad, group)
        mass = None
        if soft is not None:
            weights = (soft.block(WHOLE, p.dtype) + torch.zeros_like(p)).expand_as(p)
            mass = ops.total(weights.sum(1, keepdim=True), group)
            result = result - weights * grad
        if saved.columns is not None and saved.hard is not None and p.shape[1]:
            own, places = own_targets(saved.columns, options.sharding)
            hard = torch.where(own, -saved.hard * grad, 0)
            result = result.scatter_add(1, places, hard)
        result = result + grad * added(saved.hard, mass) * p
        if probabilities is not None:
            grad_probabilities = log_p * ((options.label_smoothing - 1) * grad)
            if saved.own_weight is not None:
                grad_probabilities = grad_probabilities * saved.own_weight
            grad_probabilities = grad_probabilities.to(probabilities.dtype)
    return result.to(saved.x.dtype), grad_probabilities
