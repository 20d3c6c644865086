"""Finished sharded layers, each the rendering of a template."""

from .parallel_arc_face import ParallelArcFace
from .parallel_combined_margin import ParallelCombinedMargin
from .parallel_conv1d import ParallelConv1d
from .parallel_conv2d import ParallelConv2d
from .parallel_conv3d import ParallelConv3d
from .parallel_cos_face import ParallelCosFace
from .parallel_cross_entropy_loss import ParallelCrossEntropyLoss
from .parallel_embedding import ParallelEmbedding
from .parallel_group_norm import ParallelGroupNorm
from .parallel_linear import ParallelLinear
from .parallel_linear_cross_entropy_loss import ParallelLinearCrossEntropyLoss
from .parallel_multihead_attention import ParallelMultiheadAttention
from .parallel_scale_shift import ParallelScaleShift

__all__: list[str] = [
    "ParallelArcFace",
    "ParallelCombinedMargin",
    "ParallelConv1d",
    "ParallelConv2d",
    "ParallelConv3d",
    "ParallelCosFace",
    "ParallelCrossEntropyLoss",
    "ParallelEmbedding",
    "ParallelGroupNorm",
    "ParallelLinear",
    "ParallelLinearCrossEntropyLoss",
    "ParallelMultiheadAttention",
    "ParallelScaleShift",
]
