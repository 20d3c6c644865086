"""What a layer says of a parameter: its whole shape, its layout, its first values, its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torchshard.errors import LayoutError
from torchshard.initializer import Initializer
from torchshard.layout import Ranges, Shard, Whole

Gradient: TypeAlias = Literal["sharded", "overlapping", "whole", "partial"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter or buffer of a layer.

    Args:
        shape: Shape of the whole tensor.
        layout: `Whole()`, or `Shard(dim, segments)`.
        init: Its initialiser, which sees the fans of the whole tensor.
        grad: What each rank's own gradient is, where the forward reads the parameter as it
            is. Of a shard, `"sharded"`, or `"overlapping"` where several ranks hold an index;
            the layout says which. Of a whole parameter, `"whole"` where all ranks compute
            the same with it, a bias after the reduce, and `"partial"` inside sharded compute.
            A partial or overlapping one is read through `ParallelLayer.shared`, which sums.

    Attributes:
        ranges: Who holds what of the sharded dim, once the layer has declared it.
    """

    shape: tuple[int, ...]
    layout: Whole | Shard
    init: Initializer
    grad: Gradient | None = None
    ranges: Ranges | None = None

    @property
    def sharded_dim(self) -> int:
        """The sharded dim, counted from the front; 0 of a whole parameter."""
        if not isinstance(self.layout, Shard):
            return 0
        return self.layout.dim % len(self.shape)

    def own_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of `rank`."""
        shape = list(self.shape)
        if self.ranges is not None:
            shape[self.sharded_dim] = self.ranges.length(rank)
        return tuple(shape)

    def placed(self, name: str, ranges: Ranges | None) -> ParameterSpec:
        """Return the declaration with its ranges, and the gradient that follows from them.

        Raises:
            LayoutError: If the segments do not add up to the shape, or the gradient is not
                one that the layout can have.
        """
        if ranges is not None and isinstance(self.layout, Shard):
            dim, num_dims = self.layout.dim, len(self.shape)
            if not -num_dims <= dim < num_dims or ranges.size != self.shape[dim]:
                raise LayoutError(
                    f"{name} is declared with shape {self.shape}, but the segments of its"
                    f" dim {dim} add up to {ranges.size}."
                )
        fitting: tuple[Gradient, ...] = ("whole", "partial")
        if ranges is not None:
            fitting = ("overlapping",) if ranges.overlaps else ("sharded",)
        if self.grad not in (None, *fitting):
            raise LayoutError(
                f"{name} is declared with grad={self.grad!r}, but its layout"
                f" {self.layout} gives {' or '.join(map(repr, fitting))}."
            )
        return replace(self, ranges=ranges, grad=self.grad or fitting[0])
