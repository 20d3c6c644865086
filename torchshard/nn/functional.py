"""Functional forms: what torch.nn.functional computes, on shards."""

from torchshard.tensor.cross_entropy import Reduction, parallel_cross_entropy

__all__ = ["Reduction", "parallel_cross_entropy"]
