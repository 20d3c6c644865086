"""Functional forms: what torch.nn.functional computes, on shards."""

from torchshard.nn.layers import parallel_embedding, parallel_linear
from torchshard.tensor.cross_entropy import Reduction, parallel_cross_entropy

__all__ = [
    "Reduction",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_linear",
]
