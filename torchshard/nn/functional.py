"""Functional forms: what torch.nn.functional computes, on shards."""

from torchshard.tensor.cross_entropy import parallel_cross_entropy

__all__ = ["parallel_cross_entropy"]
