"""The loss of each row straight from a classifier's input: the logits never exist whole.

Classes are the outer loop. Forward computes chunk after chunk of this rank's logits and adds
each to the rows' statistics, which the ranks then exchange, once. Backward computes a chunk's
logits again, turns them into their gradient where they lie, and writes the chunk's part of
the weight gradient once, or hands it to an optimizer (`row_updates.py`), and then this
gradient never exists either. The input's gradient adds up over the chunks; it is this
rank's partial.

With N rows, F features and chunks of c classes it takes c (N + F) numbers of memory, and four
matrix products where logits that are kept take three. If one chunk holds all of this rank's
classes, its logits are kept and three do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torchshard.loss.criterion import reduced, targets_of
from torchshard.loss.head import Chunk, Head
from torchshard.loss.head_arguments import HeadOptions
from torchshard.loss.head_gradients import HeadGradients, Upstream
from torchshard.loss.rows import (
    Part,
    exchanged,
    finite,
    soft_sums,
    weight_of_p,
    wide,
)
from torchshard.loss.sampling import sampled
from torchshard.row_updates import row_update_of


def loss_of_head(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: HeadOptions,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the rows' logsumexp, reduced, of arguments that are checked.

    Args:
        input: `(N, F)` or `(F,)`, in the dtype of the matrix products, and in sharded compute
            already; with a margin of length s, the scale.
        weight: This rank's classes, `(C / R, d1, ..., F)`.
        bias: `(C / R, d1, ...)`, or None.
        target: Class indices `(N, d1, ...)`, or probabilities.
        class_weight: Weight of each class, whole, or None.
        options: What is computed.
    """
    x, outputs = input.reshape(-1, input.shape[-1]), weight.shape[1:-1]
    shape, num_outputs = (*input.shape[:-1], *outputs), outputs.numel()

    def class_first(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.reshape(len(x), num_outputs).t().reshape(1, -1)

    def back(value: Tensor) -> Tensor:
        return value.view(num_outputs, len(x)).t().reshape(shape)

    criterion, sharding = options.criterion, options.sharding
    targets = targets_of(target, class_weight, criterion, sharding, wide(x.dtype))
    columns, hard = class_first(targets.columns), class_first(targets.hard)
    sample = sampled(columns, sharding, options.sample_rate)
    row_loss, lse = HeadLosses.apply(
        *(x, weight, bias, sample.own, sample.places, hard),
        *(targets.probabilities, targets.own_weight, sample.rows, options),
    )
    rows = (back(row_loss), back(lse), targets.columns)
    return reduced(*rows, class_weight, criterion, x.dtype)


class HeadLosses(torch.autograd.Function):
    """Loss and logsumexp of each row, `(1, rows)`. Takes the fields of a `Head`."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        """Return loss and logsumexp of each row, after the one exchange."""
        ctx.set_materialize_grads(False)
        head = Head(*fields)
        with _as_given(head.x):
            part, kept = _local_part(head)
        rows = exchanged(part, head.options.sharding.group)
        ctx.options, ctx.update = head.options, row_update_of(head.weight)
        ctx.save_for_backward(
            *head[:-1], kept, rows.base, rows.exp_sum, rows.total(head.hard)
        )
        return rows.loss(head.hard), rows.logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of input (this rank's partial), weight and bias."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy cannot be differentiated twice, since its logits are"
                " gone. Use parallel_linear and parallel_cross_entropy, which can be."
            )
        *tensors, kept, base, exp_sum, total = ctx.saved_tensors
        head = Head._make([*tensors, ctx.options])
        scale = weight_of_p(total, grad, grad_lse) / exp_sum
        grad = torch.zeros_like(base) if grad is None else grad
        onehot = None if head.hard is None else -head.hard * grad
        upstream = Upstream(base, scale, grad, onehot)
        grads = HeadGradients(head, ctx.needs_input_grad, ctx.update)
        with _as_given(head.x):
            for start, stop in head.chunks():
                logits = None if kept is None else kept.clone()
                chunk = head.chunk(start, stop, logits)
                grads.add(chunk, upstream.turned(chunk))
        return (*grads.finished(), *[None] * 7)


def _as_given(x: Tensor) -> AbstractContextManager[Any]:
    """Compute in the dtype of `x`: autocast may be on forward and off backward, or reversed.

    The logits of backward have to be those of forward, or p no longer sums to 1.
    """
    return torch.autocast(x.device.type, enabled=False)


def _local_part(head: Head) -> tuple[Part, Tensor | None]:
    """Return what this rank's classes say of each row, and their logits if kept."""
    nothing = head.x.new_zeros((1, head.num_rows), dtype=wide(head.x.dtype))
    part = Part(
        highest=nothing - float("inf"),
        exp_sum=nothing,
        target_logit=None if head.own is None else nothing,
        soft=None if head.soft is None else nothing,
        mass=None if head.soft is None else nothing,
    )
    chunks = head.chunks()
    kept = None
    for start, stop in chunks:
        chunk = head.chunk(start, stop)
        if len(chunks) == 1 and chunk.slope is None:
            kept = chunk.logits.clone()
        part = _joined(part, chunk)
    return part, kept


def _joined(part: Part, chunk: Chunk) -> Part:
    """Return `part` with the classes of `chunk`, whose logits are used up."""
    logits, target_logit = chunk.logits, part.target_logit
    if target_logit is not None and chunk.mine is not None and chunk.at is not None:
        target_logit = torch.where(chunk.mine, logits.gather(0, chunk.at), target_logit)
    highest = torch.maximum(part.highest, logits.amax(0, keepdim=True))
    base = finite(highest)
    before = part._replace(target_logit=None).relative_to(base)
    shifted = logits.sub_(base)
    spread = [] if chunk.soft is None else soft_sums(shifted, chunk.soft, 0)
    sums = [shifted.exp_().sum(0, keepdim=True), *spread]
    exp_sum, *soft = [one + other for one, other in zip(before, sums, strict=True)]
    return Part(highest, exp_sum, target_logit, *soft)
