"""Losses of logits whose classes are divided over ranks."""

from torchshard.loss.cross_entropy import Criterion, Reduction, parallel_cross_entropy

__all__ = ["Criterion", "Reduction", "parallel_cross_entropy"]
