"""The gradients of a classifier, as backward makes them chunk by chunk. No autograd here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchshard.loss.head import Chunk, Head
from torchshard.loss.rows import wide
from torchshard.row_updates import RowUpdate


class Upstream(NamedTuple):
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


class HeadGradients:
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
