"""What a loss straight from a classifier's input is given: its options, its dtype, its checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import LayoutError, ShapeError
from torchshard.layout import Ranges
from torchshard.loss.criterion import Criterion, expect_criterion, expect_target
from torchshard.loss.margin import TargetMargin
from torchshard.owners import owner_of
from torchshard.tensor.sharded import Sharding


@dataclass(frozen=True)
class HeadOptions:
    """What is computed of the classes.

    Attributes:
        sharding: How the classes are spread.
        criterion: What the loss of a row is, and how rows are put together.
        margin: The margin of a margin softmax, which takes cosines for logits, or None.
        sample_rate: Share of each rank's classes that take part.
        sparse: Whether the gradient of sampled rows is a sparse tensor.
        chunk_bytes: Memory for the logits of a chunk; None for the default.

    Raises:
        LayoutError: If `sample_rate` or `chunk_bytes` is out of its range.
    """

    sharding: Sharding
    criterion: Criterion
    margin: TargetMargin | None = None
    sample_rate: float = 1.0
    sparse: bool = False
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise LayoutError(
                f"sample_rate={self.sample_rate} is out of range. Expected more than 0, up"
                " to 1."
            )
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise LayoutError(
                f"chunk_bytes={self.chunk_bytes}; expected at least 1, or None."
            )


def class_ranges(weight: Tensor, group: ShardGroup) -> Ranges:
    """Return who holds which classes of the weight of which this is the rank's shard."""
    place = owner_of(weight)
    if place is not None and place[0].group == group:
        ranges = place[0].ranges_of(place[1])
        if ranges is not None:
            return ranges
    return ops.exchanged_ranges(weight, 0, group)


def compute_dtype(input: Tensor, linear_weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's, or that of both.

    Raises:
        LayoutError: If they differ, without autocast.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if input.dtype != linear_weight.dtype:
        raise LayoutError(
            f"input is {input.dtype} and linear_weight {linear_weight.dtype}. Expected one"
            " dtype, or torch.autocast."
        )
    return input.dtype


def expect_classes(
    name: str,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    shape: tuple[int, ...],
    options: HeadOptions,
) -> None:
    """Check the classes, the targets and how rows are put together.

    Args:
        name: The argument that `weight` is, for the error.
        weight: This rank's classes.
        target: Class indices, or probabilities.
        class_weight: Weight of each class, whole, or None.
        shape: That of the whole logits.
        options: What is to be computed.

    Raises:
        ShapeError: If the rank has more or fewer classes, or not one range of them, or if the
            target's or the class weights' shape does not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If an option is out of its range.
    """
    sharding, criterion = options.sharding, options.criterion
    ranges, group = sharding.ranges, sharding.group
    if len(weight) != sharding.length or not ranges.is_contiguous:
        raise ShapeError(
            f"{name} has {len(weight)} classes; rank {group.rank} of {group.size} holds"
            f" {sharding.length} of the {ranges.size}."
        )
    expect_criterion(criterion, class_weight, ranges.size)
    expect_target(target, torch.Size(shape), criterion, sharding)
