"""Activations that know they are shards, and what each operation does to them."""

from torchshard.tensor import (
    attention,
    batched,
    channel_norms,
    convolutions,
    cutting,
    elementwise,
    gating,
    lookups,
    norms,
    products,
    reductions,
    shaping,
)
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    Sharding,
    mark,
    recalled,
    whole,
    whole_shape,
)

__all__ = [
    "RULES",
    "ShardedTensor",
    "Sharding",
    "attention",
    "batched",
    "channel_norms",
    "convolutions",
    "cutting",
    "elementwise",
    "gating",
    "lookups",
    "mark",
    "norms",
    "products",
    "recalled",
    "reductions",
    "shaping",
    "whole",
    "whole_shape",
]
