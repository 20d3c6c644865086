"""What all ranks know of each row of logits: the losses' one exchange. No autograd here.

Rank r knows of a row, from its own classes, the maximum m_r, the sum s_r of exp(x - m_r), the
target's logit t_r (0 if another rank owns the target) and, for targets that are spread over
the classes with weights u, the sums of u (x - m_r) and of u. Put together:

    M = max m_r    S = sum of s_r exp(m_r - M)    t = sum of t_r    log p_target = (t - M) - log S
    sum of u log p = sum of [u (x - m_r)]_r + [u]_r (m_r - M - log S)

t - M is formed before log S is taken off: for large logits another order cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.groups import ShardGroup

_CPU_BLOCK = 1 << 18
"""Logits worked on at once on a CPU: a megabyte of float32, which its caches hold."""

_DEVICE_BLOCK = 1 << 24
"""The same on a device: 64 MiB of float32, few launches and little scratch."""

_GATHERED_BYTES = 1 << 20
"""Largest result for which one all-gather is preferred to two all-reduces; see `exchanged`."""


class Part(NamedTuple):
    """What one rank's classes say of each row; `None` for what the options do not ask.

    Attributes:
        highest: The largest logit; -inf without classes.
        exp_sum: The sum of exp(x - highest).
        target_logit: The target's logit; 0 if another rank owns it.
        soft: The sum of u (x - highest).
        mass: The sum of u.
    """

    highest: Tensor
    exp_sum: Tensor
    target_logit: Tensor | None
    soft: Tensor | None = None
    mass: Tensor | None = None

    def relative_to(self, base: Tensor) -> list[Tensor]:
        """Return the sums with `base` in the place of the own maximum: now they add up."""
        drop = self.highest - base
        sums = [self.exp_sum * drop.exp()]
        if self.target_logit is not None:
            sums.append(self.target_logit)
        if self.soft is not None and self.mass is not None:
            lowered = torch.where(self.mass != 0, self.mass * drop, 0)
            sums += [self.soft + lowered, self.mass]
        return sums


@dataclass(frozen=True)
class Rows:
    """What all ranks together say of each row.

    Attributes:
        base: The largest logit; 0 where all are -inf, to subtract from.
        exp_sum: The sum of exp(x - base).
        target_logit: The target's logit.
        soft: The sum of u (x - base).
        mass: The sum of u.
    """

    base: Tensor
    exp_sum: Tensor
    target_logit: Tensor | None
    soft: Tensor | None
    mass: Tensor | None

    @property
    def logsumexp(self) -> Tensor:
        """The log of the sum of exp(x)."""
        return self.exp_sum.log() + self.base

    def loss(self, hard: Tensor | None) -> Tensor:
        """Return -h log p of the target, h being `hard`, and the sum of -u log p."""
        log_sum, terms = self.exp_sum.log(), []
        if hard is not None and self.target_logit is not None:
            terms.append(hard * (log_sum + (self.base - self.target_logit)))
        if self.soft is not None and self.mass is not None:
            spread = torch.where(self.mass != 0, self.mass * log_sum, 0)
            terms.append(spread - self.soft)
        return added(*terms)

    def total(self, hard: Tensor | None) -> Tensor:
        """Return what the targets of a row sum to: h and the sum of u."""
        return added(hard, self.mass)


@dataclass(frozen=True)
class SoftWeights:
    """The weights u by which a row's target is spread over this rank's classes.

    u = w ((1 - e) p + e / C), with p the target's probabilities, 0 for class indices, w the
    class weights, 1 by default, e the label smoothing and C the number of classes.

    Attributes:
        probabilities: p, `(N, C / R, D)`, or None.
        weight: w, `(1, C / R, 1)`, or None.
        smoothing: e.
        num_classes: C, over all ranks.
    """

    probabilities: Tensor | None
    weight: Tensor | None
    smoothing: float
    num_classes: int

    def block(self, index: Index, dtype: torch.dtype) -> Tensor | float:
        """Return u of the rows at `index`, to broadcast with their logits."""
        even: Tensor | float = self.smoothing / self.num_classes
        if self.probabilities is not None:
            even = even + (1 - self.smoothing) * self.probabilities[index].to(dtype)
        return even if self.weight is None else self.weight[:, index[1]] * even


Index = tuple[slice, slice, slice]
WHOLE: Index = (slice(None), slice(None), slice(None))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def as_rows(x: Tensor) -> Tensor:
    """Return logits of any shape as `(N, C, D)`: D is 1, or the product of the dims behind C."""
    if x.dim() == 1:
        return x.reshape(1, -1, 1)
    return x.unsqueeze(2) if x.dim() == 2 else x.flatten(2)


def blocks(x: Tensor) -> Iterator[Index]:
    """Yield index tuples that cut `x`, `(N, C, D)`, into blocks of whole rows.

    A compiler fuses by itself, and takes all at once.
    """
    num_rows, num_classes, inner = x.shape
    if torch.compiler.is_compiling():
        yield WHOLE
        return
    size = _CPU_BLOCK if x.device.type == "cpu" else _DEVICE_BLOCK
    rows = max(1, size // max(1, num_classes))
    inner_step = min(rows, max(1, inner))
    step = max(1, rows // max(1, inner))
    for start in range(0, num_rows, step):
        for first in range(0, inner, inner_step):
            yield (
                slice(start, start + step),
                slice(None),
                slice(first, first + inner_step),
            )


def local_part(
    x: Tensor,
    target_logit: Tensor | None,
    soft: SoftWeights | None,
    room: Tensor | None = None,
) -> Part:
    """Return what the logits `x`, `(N, C / R, D)`, of this rank's classes say of each row.

    Each block of rows is read from memory once, and no second tensor of their size is made.

    Args:
        x: The logits.
        target_logit: The target's logit of each row; None for probabilities.
        soft: How targets are spread over the classes, or None.
        room: A tensor like `x` to keep the softmax over this rank's classes in, or None.
    """
    num_rows, num_classes, inner = x.shape
    # Maximum, largest q, and the soft sums: of a block of rows at a time, put together here.
    shape = (4 if soft else 2, num_rows, 1, inner)
    sums = x.new_zeros(shape, dtype=wide(x.dtype))
    if num_classes == 0:
        sums[0] = float("-inf")
    elif torch.compiler.is_compiling():
        sums = torch.stack(_block_sums(x, WHOLE, soft, None))
    else:
        scratch = scratch_of(x) if room is None else room
        for index in blocks(x):
            out = part_of(scratch, x[index]) if room is None else room[index]
            for row, value in zip(sums, _block_sums(x, index, soft, out), strict=True):
                row[index] = value
    highest, largest_q, *spread = sums.unbind()
    # The largest q is exp(0) / exp_sum; of nothing but -inf it is nan, and exp_sum 0.
    exp_sum = torch.where(highest == float("-inf"), 0, largest_q.reciprocal())
    return Part(highest, exp_sum, target_logit, *spread)


def _block_sums(
    x: Tensor, index: Index, soft: SoftWeights | None, out: Tensor | None
) -> list[Tensor]:
    """Return maximum, largest q and, if asked for, the two soft sums of a block of rows."""
    block = x[index]
    highest = block.amax(1, keepdim=True).to(wide(x.dtype))
    sums = [highest, own_softmax(block, out).amax(1, keepdim=True)]
    if soft is None:
        return sums
    shifted = block - finite(highest)
    return sums + soft_sums(shifted, soft.block(index, shifted.dtype), 1)


def scratch_of(x: Tensor) -> Tensor:
    """Return room for the softmax of a block: fresh memory for each would cost more than it."""
    first = next(blocks(x), WHOLE)
    return torch.empty_like(x[first], dtype=wide(x.dtype))


def part_of(scratch: Tensor, block: Tensor) -> Tensor:
    """Return the part of `scratch` that `block`, perhaps the last and smaller, takes."""
    return scratch[: block.shape[0], :, : block.shape[2]]


def own_softmax(block: Tensor, out: Tensor | None = None) -> Tensor:
    """Return q, the softmax over this rank's classes, dim 1, in float32 or wider.

    In `out`, if that is given. On a CPU torch's kernel for the last dim is twice as fast as
    maximum, `exp` and sum, good to 1e-5 of each probability; other dims have another kernel.
    """
    dtype = wide(block.dtype)
    if block.shape[2] != 1:
        return torch.softmax(block, 1, dtype, out=out)
    flat = None if out is None else out.squeeze(2)
    return torch.softmax(block.squeeze(2), 1, dtype, out=flat).unsqueeze(2)


def soft_sums(shifted: Tensor, weights: Tensor | float, dim: int) -> list[Tensor]:
    """Return the sums over the classes, `dim`, of u (x - m) and of u.

    A class without weight counts for nothing, also where its logit is -inf.
    """
    if not isinstance(weights, Tensor):
        spread = weights * shifted.sum(dim, keepdim=True)
        return [spread, torch.full_like(spread, weights * shifted.shape[dim])]
    spread = torch.where(weights == 0, 0, weights * shifted).sum(dim, keepdim=True)
    return [spread, weights.expand_as(shifted).sum(dim, keepdim=True)]


def exchanged(part: Part, group: ShardGroup) -> Rows:
    """Return the rows' statistics over all ranks, in one all-gather or two all-reduces.

    With P ranks and a packet of B bytes a rank, the all-gather sends (P - 1) B a rank, the
    all-reduces of the maxima and of the sums together 2 (P - 1) / P B: the same for two
    ranks, P / 2 times less for more, at the price of a second round. So one all-gather, unless
    there are more than two ranks and its result of P B bytes is larger than 1 MiB, where
    the time to move it outweighs a round.
    """
    packet = torch.stack([field for field in part if field is not None])
    if group.size <= 2 or group.size * packet.nbytes <= _GATHERED_BYTES:
        parts = _like(part, collectives.stack(packet, group).unbind(1))
        base = finite(parts.highest.amax(0))
        sums = [value.sum(0) for value in parts.relative_to(base)]
    else:
        base = finite(collectives.all_reduce(part.highest, group, "max"))
        own = torch.stack(part.relative_to(base))
        sums = list(collectives.all_reduce(own, group).unbind())
    whole = _like(part, [base, *sums])
    return Rows(base, whole.exp_sum, whole.target_logit, whole.soft, whole.mass)


def _like(part: Part, fields: Iterable[Tensor]) -> Part:
    """Return the `fields` in the places that `part` has filled."""
    given = iter(fields)
    return Part(
        *[cast(Tensor, field if field is None else next(given)) for field in part]
    )


def added(*terms: Tensor | None) -> Tensor:
    """Return the sum of the terms that are there; one is."""
    first, *others = [term for term in terms if term is not None]
    for term in others:
        first = first + term
    return first


def weight_of_p(total: Tensor, grad: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """Return what multiplies p in the logits' gradient: g (h + sum of u) + g_lse.

    Args:
        total: h + sum of u.
        grad: g, of the row's loss.
        grad_lse: g_lse, of its logsumexp.
    """
    if grad is None and grad_lse is None:
        return torch.zeros_like(total)
    return added(None if grad is None else grad * total, grad_lse)


def finite(highest: Tensor) -> Tensor:
    """Return maxima to subtract: 0 where all logits are -inf."""
    return torch.where(highest == float("-inf"), 0, highest)
