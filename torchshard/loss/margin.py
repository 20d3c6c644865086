"""Margins: what a margin softmax does to the cosine of a row's own class.

    phi(cos t) = cos(m1 t + m2) - m3

SphereFace has m1 alone (arXiv:1704.08063), ArcFace m2 (arXiv:1801.07698), CosFace m3
(arXiv:1801.09414); ArcFace's paper combines them, in its equation 4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.errors import LayoutError


class TargetMargin(ABC):
    """Base of margins: phi, which takes the place of the target's cosine, and the scale.

    phi is a function of the cosine alone, with numbers for its constants: backward computes
    it again, for a chunk of classes at a time, and gives no gradient to anything else.

    Attributes:
        scale: s, which multiplies all cosines.

    Example:
        >>> class Parabola(TargetMargin):
        ...     def __init__(self, bend, scale):
        ...         self.bend, self.scale = bend, scale
        ...
        ...     def of(self, cosine):
        ...         return 1 - self.bend * self.angle(cosine) ** 2
        >>> Parabola(0.6, 8.0).of(torch.zeros(1))
        tensor([-0.4804])
    """

    scale: float

    @abstractmethod
    def of(self, cosine: Tensor) -> Tensor:
        """Return phi of the targets' cosines, elementwise."""

    def slope(self, cosine: Tensor) -> Tensor:
        """Return the derivative of phi; a margin that has a formula for it may be faster."""
        pullback: Any = torch.func.vjp(self.of, cosine)[1]
        (slope,) = pullback(torch.ones_like(cosine))
        return cast(Tensor, slope)

    def angle(self, cosine: Tensor) -> Tensor:
        """Return t, whose derivative is finite, also at 1 and -1."""
        eps = torch.finfo(cosine.dtype).eps
        return cosine.clamp(-1 + eps, 1 - eps).acos()


@dataclass(frozen=True)
class Margin(TargetMargin):
    """The margin of the target's class, and the scale of all logits.

    Where m1 t + m2 would pass half a turn, phi would rise again. There it is continued by
    cos t - m2 sin m2 - m3, as ArcFace's authors do, or, with an m1 other than 1, by the
    continuous cos t - 1 - cos t0 - m3, with t0 the angle where that begins.

    Args:
        multiplied: m1, the factor of the angle.
        added: m2, added to the angle, in radians.
        subtracted: m3, taken off the cosine.
        scale: s, which multiplies all cosines.
        easy: Whether to leave a target alone whose cosine is not positive.

    Raises:
        LayoutError: If `multiplied` is less than 1, `added` not in 0 to pi, or `scale` not
            positive.
    """

    multiplied: float = 1.0
    added: float = 0.0
    subtracted: float = 0.0
    scale: float = 64.0
    easy: bool = False

    def __post_init__(self) -> None:
        if self.multiplied < 1 or not 0 <= self.added < math.pi or self.scale <= 0:
            raise LayoutError(
                f"multiplied={self.multiplied}, added={self.added}, scale={self.scale}:"
                " expected a factor of at least 1, an angle from 0 to less than pi, and a"
                " positive scale."
            )

    def of(self, cosine: Tensor) -> Tensor:
        """Return phi of the targets' cosines. Its gradient is finite, also at 1 and -1."""
        angle = self.angle(cosine)
        moved = (self.multiplied * angle + self.added).cos()
        phi = torch.where(self._turns(angle), moved, cosine - self._slack)
        phi = phi - self.subtracted
        return torch.where(cosine > 0, phi, cosine) if self.easy else phi

    def slope(self, cosine: Tensor) -> Tensor:
        """Return the derivative of phi: m1 sin(m1 t + m2) / sin t, or 1 where it is continued."""
        angle = self.angle(cosine)
        moved = (self.multiplied * angle + self.added).sin() / angle.sin()
        slope = torch.where(self._turns(angle), self.multiplied * moved, 1)
        return torch.where(cosine > 0, slope, 1) if self.easy else slope

    @property
    def _last(self) -> float:
        return (math.pi - self.added) / self.multiplied

    def _turns(self, angle: Tensor) -> Tensor:
        return angle <= self._last

    @property
    def _slack(self) -> float:
        if self.multiplied == 1:
            return self.added * math.sin(self.added)
        return 1 + math.cos(self._last)
