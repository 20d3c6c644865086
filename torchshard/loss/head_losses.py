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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchshard.loss.head import Chunk, Head, HeadOptions
from torchshard.loss.rows import (
    Part,
    exchanged,
    finite,
    soft_sums,
    weight_of_p,
    wide,
)
from torchshard.row_updates import RowUpdate, row_update_of


class HeadLosses(torch.autograd.Function):
    """Loss and logsumexp of each row, `(1, rows)`.

    Takes what `Head` is made of, and among it the weights h of the targets, `(1, rows)`,
    which are None for probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
        places: Tensor | None,
        hard: Tensor | None,
        probabilities: Tensor | None,
        own_weight: Tensor | None,
        sampled: Tensor | None,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and logsumexp of each row, after the one exchange."""
        ctx.set_materialize_grads(False)
        given = (x, weight, bias, own, places, probabilities, own_weight, sampled)
        with _as_given(x):
            part, kept = _local_part(Head(*given, options))
        rows = exchanged(part, options.group)
        ctx.options, ctx.update = options, row_update_of(weight)
        ctx.save_for_backward(
            *given, kept, hard, rows.base, rows.exp_sum, rows.total(hard)
        )
        return rows.loss(hard), rows.logsumexp

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
        saved = ctx.saved_tensors
        x, weight, bias, own, places, probabilities, own_weight, sampled = saved[:8]
        head = Head(
            x,
            weight,
            bias,
            own,
            places,
            probabilities,
            own_weight,
            sampled,
            ctx.options,
        )
        kept, hard, base, exp_sum, total = saved[8:]
        scale = weight_of_p(total, grad, grad_lse) / exp_sum
        grad = torch.zeros_like(base) if grad is None else grad
        onehot = None if hard is None else -hard * grad
        upstream = _Upstream(base, scale, grad, onehot)
        grads = _Gradients(head, ctx.needs_input_grad, ctx.update)
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


class _Upstream(NamedTuple):
    """What the logits' gradient of a row is made of: scale exp(x - base) - g u + onehot."""

    base: Tensor
    scale: Tensor
    grad: Tensor
    onehot: Tensor | None

    def turned(self, chunk: Chunk) -> Tensor:
        """Return the gradient of the chunk's logits, or cosines, in their place."""
        result = chunk.logits.sub_(self.base).exp_().mul_(self.scale)
        if chunk.soft is not None:
            result.sub_(chunk.soft * self.grad)
        if self.onehot is not None and chunk.mine is not None and chunk.at is not None:
            result.scatter_add_(0, chunk.at, torch.where(chunk.mine, self.onehot, 0))
            if chunk.slope is not None:
                moved = result.gather(0, chunk.at) * chunk.slope
                result.scatter_(0, chunk.at, moved)
        return result


class _Gradients:
    """The gradients of a head, as they come chunk by chunk."""

    def __init__(
        self, head: Head, needs: tuple[bool, ...], update: RowUpdate | None
    ) -> None:
        self._head, self._update = head, update if needs[1] else None
        x, bias = head.x, head.bias
        self._x = torch.zeros_like(x, dtype=wide(x.dtype)) if needs[0] else None
        self._weight = None
        if self._update is not None:
            self._update.begin()
        elif needs[1]:
            self._weight = self._room_for_weight()
        self._bias = torch.zeros_like(bias) if bias is not None and needs[2] else None

    def _room_for_weight(self) -> Tensor:
        weight, sampled = self._head.weight, self._head.sampled
        if sampled is None:
            return torch.empty_like(weight)
        if self._head.options.sparse:
            return weight.new_empty((len(sampled), *weight.shape[1:]))
        return torch.zeros_like(weight)

    def add(self, chunk: Chunk, grad_logits: Tensor) -> None:
        """Add what the gradient of a chunk's logits, `(c, rows)`, gives."""
        x = self._head.x
        flat = grad_logits.view(len(chunk.weight), len(x))
        if self._bias is not None:
            bias = flat.sum(1).reshape(self._bias[chunk.rows].shape)
            self._bias[chunk.rows] = bias.to(self._bias.dtype)
        flat = flat.to(x.dtype)
        if self._x is not None and self._x.dtype == x.dtype:
            self._x.addmm_(flat.t(), chunk.weight)
        elif self._x is not None:
            self._x += flat.t() @ chunk.weight
        self._add_weight(chunk, flat)

    def _add_weight(self, chunk: Chunk, flat: Tensor) -> None:
        """Write, or hand on, the gradient of a chunk's rows of the weight."""
        head = self._head
        if self._update is None and self._weight is None:
            return
        place = chunk.place if head.options.sparse else chunk.rows
        if self._weight is not None and _takes_product(self._weight, chunk, head):
            room = self._weight[place].flatten(0, -2)
            torch.mm(flat, head.x, out=room)
            return
        grad = flat @ head.x
        if chunk.norms is not None:
            along = (chunk.weight * grad).sum(1, keepdim=True)
            grad = grad.sub_(chunk.weight * along).div_(chunk.norms)
        grad = grad.view(-1, *head.weight.shape[1:]).to(head.weight.dtype)
        if self._update is not None:
            self._update.step(chunk.rows, grad)
        elif self._weight is not None:
            self._weight[place] = grad

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias."""
        if self._update is not None:
            self._update.end()
        x = None if self._x is None else self._x.to(self._head.x.dtype)
        return x, self._weight_gradient(), self._bias

    def _weight_gradient(self) -> Tensor | None:
        sampled, shape = self._head.sampled, self._head.weight.shape
        if self._weight is None or sampled is None or not self._head.options.sparse:
            return self._weight
        return torch.sparse_coo_tensor(
            sampled.unsqueeze(0),
            self._weight,
            shape,
            check_invariants=False,
            is_coalesced=True,
        )


def _takes_product(room: Tensor, chunk: Chunk, head: Head) -> bool:
    """Return whether the chunk's product can be written where its gradient belongs."""
    is_plain = chunk.norms is None and isinstance(chunk.rows, slice)
    return is_plain and room.dtype == head.x.dtype and room.is_contiguous()
