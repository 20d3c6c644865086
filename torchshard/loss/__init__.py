"""Losses of logits whose classes are divided over ranks.

What a caller gets: a function with its checks for each loss, `cross_entropy` of logits,
`linear_cross_entropy` of a classifier's input and weight, `margin_cross_entropy` of features
and class centres with a `margin`; and `accuracy`. What is asked of them is in `criterion`.

What computes: `rows` is what ranks know of each row, and the one exchange. `row_losses` has the
forward and backward of logits. `head_losses` has those of a classifier whose logits never
exist: `head` the logits of a chunk of classes, `head_gradients` the gradients as they come,
`head_arguments` options and checks, `sampling` the classes that take part.
"""

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
