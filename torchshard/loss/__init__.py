"""Losses of logits whose classes are divided over ranks."""

from torchshard.loss.criterion import Criterion, Reduction
from torchshard.loss.cross_entropy import parallel_cross_entropy
from torchshard.loss.linear_cross_entropy import (
    linear_cross_entropy_of_shard,
    parallel_linear_cross_entropy,
)
from torchshard.loss.margin import Margin
from torchshard.loss.step_in_backward import step_in_backward

__all__ = [
    "Criterion",
    "Margin",
    "Reduction",
    "linear_cross_entropy_of_shard",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "step_in_backward",
]
