"""A classifier's weight, and the logits of a chunk of its classes at a time.

Logits of a chunk lie class first, `(c, rows)`: K x N rows for N inputs and K outputs a class,
with the targets' places in the chunk beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torchshard.loss.head_arguments import HeadOptions
from torchshard.loss.margin import TargetMargin
from torchshard.loss.rows import SoftWeights, wide

_CPU_CHUNK_BYTES = 4 << 20
"""A chunk's logits by default: they are written and read a few times, best in a cache."""

_DEVICE_CHUNK_BYTES = 128 << 20
"""The same on a device, where a matrix product should be large."""


@dataclass(frozen=True)
class Chunk:
    """Some of this rank's classes.

    Attributes:
        place: Where they are among the classes that take part.
        rows: Where they are in the weight.
        logits: `(c, rows)`, in float32 or wider, with the margin.
        weight: `(c K, F)`, with a margin of length 1.
        norms: `(c K, 1)`, the weight's lengths, if there is a margin.
        mine: `(1, rows)`, whether a row's target is in this chunk; None for probabilities.
        at: `(1, rows)`, the target's place in it, 0 if it is not.
        slope: `(1, rows)`, the margin's derivative at the target's cosine.
        soft: u, `(c, 1)` or `(c, rows)` or one number; None if targets are not spread.
    """

    place: slice
    rows: slice | Tensor
    logits: Tensor
    weight: Tensor
    norms: Tensor | None
    mine: Tensor | None
    at: Tensor | None
    slope: Tensor | None
    soft: Tensor | float | None


class Head(NamedTuple):
    """The tensors of a classifier and of its targets.

    Attributes:
        x: Input, `(N, F)`; with a margin of length s, the scale.
        weight: This rank's classes, `(C / R, d1, ..., F)`; K is the product of the d.
        bias: `(C / R, d1, ...)`, or None.
        own: `(1, rows)`, whether this rank has the row's target; None for probabilities.
        places: `(1, rows)`, its place among this rank's classes that take part.
        hard: `(1, rows)`, the weight h of the target; None for probabilities.
        probabilities: `(N, C / R, K)`, this rank's part of soft targets, or None.
        own_weight: `(1, C / R, 1)`, the weights of this rank's classes, or None.
        sampled: The rows of the weight that take part, ascending; None for all.
        options: What is computed.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    own: Tensor | None
    places: Tensor | None
    hard: Tensor | None
    probabilities: Tensor | None
    own_weight: Tensor | None
    sampled: Tensor | None
    options: HeadOptions

    @property
    def num_classes(self) -> int:
        """Number of this rank's classes that take part."""
        return len(self.weight if self.sampled is None else self.sampled)

    @property
    def soft(self) -> SoftWeights | None:
        """How targets are spread over this rank's classes, or None."""
        smoothing = self.options.criterion.label_smoothing
        if self.probabilities is None and not smoothing:
            return None
        num_classes = self.options.sharding.ranges.size
        return SoftWeights(self.probabilities, self.own_weight, smoothing, num_classes)

    @property
    def num_rows(self) -> int:
        """Number of rows of the loss, K x N."""
        return self.x.shape[0] * self.weight[:1].shape[1:-1].numel()

    def chunks(self) -> list[tuple[int, int]]:
        """Return the bounds of chunks of about equal size whose logits fit the budget."""
        in_cache = self.x.device.type == "cpu" and not torch.compiler.is_compiling()
        default = _CPU_CHUNK_BYTES if in_cache else _DEVICE_CHUNK_BYTES
        budget = self.options.chunk_bytes or default
        most = max(1, budget // max(1, self.num_rows * wide(self.x.dtype).itemsize))
        num = max(1, -(-self.num_classes // most))
        edges = [place * self.num_classes // num for place in range(num + 1)]
        return list(pairwise(edges)) if self.num_classes else []

    def chunk(self, start: int, stop: int, kept: Tensor | None = None) -> Chunk:
        """Return classes `start ... stop - 1`; `kept` are their logits, where known."""
        sampled, margin = self.sampled, self.options.margin
        rows = slice(start, stop) if sampled is None else sampled[start:stop]
        weight, norms = self.weight.detach()[rows].flatten(0, -2), None
        if margin is not None:
            norms = torch.linalg.vector_norm(
                weight, dim=1, keepdim=True, dtype=wide(weight.dtype)
            ).clamp_min(1e-12)
            weight = weight / norms
        weight = weight.to(self.x.dtype)
        mine, at = self._targets(start, stop)
        logits = self._logits(weight, rows, stop - start) if kept is None else kept
        slope = None
        if margin is not None and mine is not None and at is not None:
            slope = _put_margin(logits, margin, mine, at)
        soft = self._soft(start, stop, logits.dtype)
        place = slice(start, stop)
        return Chunk(place, rows, logits, weight, norms, mine, at, slope, soft)

    def _targets(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        if self.own is None or self.places is None:
            return None, None
        mine = self.own & (self.places >= start) & (self.places < stop)
        at = torch.where(mine, self.places - start, 0)
        return mine, at

    def _logits(self, weight: Tensor, rows: slice | Tensor, num_classes: int) -> Tensor:
        logits = weight @ self.x.t()
        if self.bias is not None:
            logits += self.bias.detach()[rows].reshape(-1, 1).to(logits.dtype)
        return logits.view(num_classes, self.num_rows).to(wide(logits.dtype))

    def _soft(self, start: int, stop: int, dtype: torch.dtype) -> Tensor | float | None:
        weights = self.soft
        if weights is None:
            return None
        index = (slice(None), slice(start, stop), slice(None))
        block = weights.block(index, dtype)
        if not isinstance(block, Tensor):
            return block
        return block.permute(1, 2, 0).reshape(stop - start, -1)


def _put_margin(
    logits: Tensor, margin: TargetMargin, mine: Tensor, at: Tensor
) -> Tensor:
    """Put the margin into the targets' logits, s times their cosines; return its slope."""
    plain = logits.gather(0, at)
    cosine = plain / margin.scale
    logits.scatter_(0, at, torch.where(mine, margin.scale * margin.of(cosine), plain))
    return torch.where(mine, margin.slope(cosine), 1)
