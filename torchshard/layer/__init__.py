"""The base classes of sharded layers."""

from torchshard.layer.attention import AttentionLayer
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layer.features import FeatureLayer
from torchshard.layer.marked import MarkedLayer
from torchshard.layer.table import TableLayer

__all__ = [
    "AttentionLayer",
    "FeatureLayer",
    "MarkedLayer",
    "ParallelLayer",
    "ParameterSpec",
    "TableLayer",
]
