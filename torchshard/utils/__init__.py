"""Mirror of torch.utils: data."""

from torchshard.utils import data

__all__ = ["data"]
