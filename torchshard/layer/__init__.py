"""The base classes of sharded layers."""

from torchshard.layer.attention import AttentionLayer
from torchshard.layer.base import ParallelLayer
from torchshard.layer.class_loss import ClassLoss
from torchshard.layer.declaration import ParameterSpec
from torchshard.layer.features import FeatureLayer
from torchshard.layer.margin_head import MarginHead
from torchshard.layer.marked import MarkedLayer
from torchshard.layer.table import TableLayer

__all__ = [
    "AttentionLayer",
    "ClassLoss",
    "FeatureLayer",
    "MarginHead",
    "MarkedLayer",
    "ParallelLayer",
    "ParameterSpec",
    "TableLayer",
]
