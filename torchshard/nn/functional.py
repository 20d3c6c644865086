"""Functional forms: what torch.nn.functional computes, on shards."""

from torchshard.loss import (
    Margin,
    Reduction,
    parallel_accuracy,
    parallel_cross_entropy,
    parallel_linear_cross_entropy,
    parallel_margin_cross_entropy,
    parallel_topk,
)
from torchshard.nn.layers import parallel_embedding, parallel_linear

__all__ = [
    "Margin",
    "Reduction",
    "parallel_accuracy",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_linear",
    "parallel_linear_cross_entropy",
    "parallel_margin_cross_entropy",
    "parallel_topk",
]
