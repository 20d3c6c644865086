"""MarginHead: a classifier by cosines and its loss, with a margin for the target's class."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torchshard.distributed.groups import GroupLike, ShardGroup
from torchshard.errors import LayoutError
from torchshard.initializer import Normal
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Axis, Layout, Shard, Whole, balanced_ranges
from torchshard.loss import (
    Criterion,
    Reduction,
    TargetMargin,
    cosines_of_features,
    cosines_of_shard,
    margin_cross_entropy_of_features,
    margin_cross_entropy_of_shard,
)
from torchshard.loss.criterion import expect_criterion
from torchshard.splits import Dim, Split, Splits


class MarginHead(ParallelLayer):
    """Base of heads with a margin softmax: a subclass says its margin, and nothing else.

    With x and W scaled to length 1, logits are s cos t = s x W^T, the target's s phi(cos t), as
    the margin says. Over R ranks, on rank r, with C classes and F features:

                    "classes"               "features"
        input       (N, F) whole            (N, F / R) shard, or whole
        weight_r    (C / R, F)              (C, F / R)
        target      (N,) whole              (N,) whole
        loss        () or (N,) whole        () or (N,) whole

        forward     one all-gather of       one all-reduce of
                    row statistics          products and lengths
        backward    one all-reduce of dx    local

    Without a target, `forward` returns the scaled cosines with all class centres: divided by
    classes a ShardedTensor.

    Args:
        in_features: F.
        num_classes: C.
        margin: phi, and the scale s.
        dim: 1, -1 or "classes"; 0 or "features"; None for no split.
        reduction: `"none"`, `"mean"` or `"sum"`.
        ignore_index: Target value whose rows count for nothing.
        sample_rate: Share of each rank's classes that take part in a step: those of the
            batch, the others at random (Partial FC, arXiv:2203.15565).
        sparse: Whether the weight's gradient is then a sparse tensor.
        chunk_bytes: Memory for a chunk's logits; None for a default by device.
        group: The ranks; None is the model group.
        device: As for torch.nn layers.
        dtype: As for torch.nn layers.

    Raises:
        LayoutError: If `dim` or `reduction` is none of these, or classes are to be sampled
            where the features are divided.

    Example:
        >>> import torch, torchshard as ts
        >>> class ParallelNormFace(ts.MarginHead):
        ...     def __init__(self, in_features, num_classes, scale=16.0, dim=1):
        ...         margin = ts.loss.Margin(scale=scale)
        ...         super().__init__(in_features, num_classes, margin, dim)
        >>> head = ParallelNormFace(8, 10)
        >>> head(torch.randn(2, 8), torch.tensor([1, 9])).shape
        torch.Size([])
    """

    splits: ClassVar[Splits] = {
        "classes": Split("the classes", (1, -1)),
        "features": Split("the features", (0,)),
    }
    weight: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: TargetMargin,
        dim: Dim = 1,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        sample_rate: float = 1.0,
        sparse: bool = False,
        chunk_bytes: int | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, dim)
        self.in_features = in_features
        self.num_classes = num_classes
        self.margin = margin
        self.criterion = Criterion(ignore_index, reduction)
        self.sample_rate = sample_rate
        self.sparse = sparse
        self.chunk_bytes = chunk_bytes
        expect_criterion(self.criterion, None, num_classes)
        axes: dict[str, Axis] = {}
        weight: Whole | Shard = Whole()
        input: Layout = Whole(-1, in_features)
        if self.split == "classes":
            axes, weight = {"class": Axis(num_classes)}, Shard(0, "class")
        elif self.split == "features":
            self._expect_all_classes()
            axes = {"feature": Axis(in_features)}
            weight = input = Shard(-1, "feature")
        # Rows of about length 1: the gradient of a direction goes with 1 / length.
        init = Normal(0.0, in_features**-0.5)
        shape = (num_classes, in_features)
        self.declare(
            axes=axes,
            parameters={"weight": ParameterSpec(shape, weight, init)},
            inputs={"input": input, "target": Whole()},
            output=Whole(),
            device=device,
            dtype=dtype,
        )

    def _expect_all_classes(self) -> None:
        if self.sample_rate != 1:
            raise LayoutError(
                f"sample_rate={self.sample_rate} with dim={self.dim}: where the features are"
                " divided, all classes take part. Use dim=1, or sample_rate=1.0."
            )

    def local_forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the loss, or without a target the scaled cosines of this rank's classes."""
        if self.split == "features":
            return self._forward_of_features(input, target)
        group = self.group if self.split == "classes" else ShardGroup()
        ranges = self.ranges_of("weight") or balanced_ranges(self.num_classes, 1)
        if target is None:
            cosines = cosines_of_shard(input, self.weight, ranges, group)
            return self.margin.scale * cosines
        return margin_cross_entropy_of_shard(
            input,
            self.weight,
            target,
            self.margin,
            criterion=self.criterion,
            sample_rate=self.sample_rate,
            sparse=self.sparse,
            chunk_bytes=self.chunk_bytes,
            ranges=ranges,
            group=group,
        )

    def _forward_of_features(self, input: Tensor, target: Tensor | None) -> Tensor:
        weight, margin, group = self.weight, self.margin, self.group
        if target is None:
            return margin.scale * cosines_of_features(input, weight, group)
        return margin_cross_entropy_of_features(
            input, weight, target, margin, self.criterion, group
        )
