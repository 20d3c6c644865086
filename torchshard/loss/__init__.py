"""Losses of logits whose classes are divided over ranks."""

from torchshard.loss.accuracy import parallel_accuracy, parallel_topk
from torchshard.loss.criterion import Criterion, Reduction, named_reduction
from torchshard.loss.cross_entropy import parallel_cross_entropy
from torchshard.loss.linear_cross_entropy import (
    linear_cross_entropy_of_shard,
    parallel_linear_cross_entropy,
)
from torchshard.loss.margin import Margin, TargetMargin
from torchshard.loss.margin_cross_entropy import (
    cosines_of_features,
    cosines_of_shard,
    margin_cross_entropy,
    margin_cross_entropy_of_features,
    margin_cross_entropy_of_shard,
    parallel_margin_cross_entropy,
)

__all__ = [
    "Criterion",
    "Margin",
    "Reduction",
    "TargetMargin",
    "cosines_of_features",
    "cosines_of_shard",
    "linear_cross_entropy_of_shard",
    "margin_cross_entropy",
    "margin_cross_entropy_of_features",
    "margin_cross_entropy_of_shard",
    "named_reduction",
    "parallel_accuracy",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "parallel_margin_cross_entropy",
    "parallel_topk",
]
