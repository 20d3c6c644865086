"""Functional forms of the layers, with weights that the caller holds.

`parallel_linear` and `parallel_embedding` compute what the layers of those names compute. A
model is built from the layers, which also initialise, save and load their weights and do
without the exchange of sizes.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torchshard.distributed import ops
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.errors import ShapeError
from torchshard.layout import balanced_ranges
from torchshard.owners import owner_of
from torchshard.splits import Dim, split_named


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: Dim = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Compute `input @ weight.T + bias` with a weight of which this is the rank's shard.

        dim         input                       weight                bias          output
        None        (*, in)                     (out, in)             (out,)        (*, out)
        1 or -1     (*, in)                     (out / R, in)         (out / R,)    (*, out / R)
        0           (*, in), or (*, in / R)     (out, in / R)         (out,)        (*, out)

    `dim=1` returns a ShardedTensor. With `dim=0` the input is a whole tensor or a
    ShardedTensor. The ranks exchange their sizes first, in one small all-gather, unless the
    weight is a layer's parameter.

    Args:
        input: As the table says; `*` stands for any number of dims.
        weight: The whole weight (`dim=None`), or this rank's shard: sizes are as even as they
            can be, the first ranks one more.
        bias: Of the size in the table; added once.
        dim: None for no split, 1, -1 or "column" to divide the output features, 0 or "row" the
            input features.
        group: The ranks; None is the model group.

    Raises:
        LayoutError: If `dim` is another value.
        ShapeError: On all ranks, if the ranks' shards are not those of an even split, or if
            the last dim of `input` does not fit.

    Example:
        >>> import torch
        >>> parallel_linear(torch.ones(2, 3), torch.ones(4, 3), dim=1)[0]
        tensor([3., 3., 3., 3.])
    """
    from torchshard import nn

    layer_class: Any = nn.ParallelLinear
    split, group = split_named(layer_class.splits, dim), resolve_group(group)
    if split == "whole" or group.size == 1:
        return F.linear(input, weight, bias)
    out_features, in_features = weight.shape
    if split == "column":
        out_features = _whole_size("weight", weight, 0, group)
    else:
        in_features = _whole_size("weight", weight, 1, group)
    layer = layer_class(
        in_features, out_features, bias is not None, dim, group=group, device="meta"
    )
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    output: Tensor = functional_call(layer, tensors, (input,))
    return output


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: Dim = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Look rows up in a table of which `weight` is this rank's shard.

        dim         input    weight                  output
        None        (*)      (rows, columns)         (*, columns)
        0           (*)      (rows / R, columns)     (*, columns)
        1 or -1     (*)      (rows, columns / R)     (*, columns / R), a ShardedTensor

    The ranks exchange their sizes first, as for `parallel_linear`.

    Args:
        input: Row numbers of the whole table, the same on every rank.
        weight: The whole table (`dim=None`), or this rank's shard of an even split.
        padding_idx: Row of the whole table that gets no gradient; negative from the end.
        max_norm: Largest norm of a row; rows looked up are scaled down in place.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether to divide a row's gradient by how often it occurs.
        sparse: Whether the gradient of `weight` is a sparse tensor.
        num_embeddings: Number of rows of the whole table, if it is to be checked.
        dim: None for no split, 0 or "vocabulary" to divide the rows, 1, -1 or "embedding_dim"
            the columns.
        group: The ranks; None is the model group.

    Raises:
        LayoutError: If `dim` is another value, or `padding_idx` is out of range.
        ShapeError: On all ranks, if the shards are not those of an even split, or do not
            have `num_embeddings` rows together.
        TargetError: If a row number is out of range.

    Example:
        >>> import torch
        >>> parallel_embedding(torch.tensor([2]), torch.eye(3), dim=0)
        tensor([[0., 0., 1.]])
    """
    from torchshard import nn

    layer_class: Any = nn.ParallelEmbedding
    split, group = split_named(layer_class.splits, dim), resolve_group(group)
    rows, columns = weight.shape
    if split == "vocabulary":
        rows = _whole_size("weight", weight, 0, group)
    elif split == "embedding_dim":
        columns = _whole_size("weight", weight, 1, group)
    if num_embeddings not in (None, rows):
        raise ShapeError(
            f"num_embeddings={num_embeddings}, but the ranks' tables have {rows} rows."
            " Expected the number of rows of the whole table."
        )
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if split == "whole" or group.size == 1:
        return F.embedding(input, weight, *options)
    layer = layer_class(rows, columns, *options, dim=dim, group=group, device="meta")
    output: Tensor = functional_call(layer, {"weight": weight}, (input,))
    return output


def _whole_size(name: str, shard: Tensor, dim: int, group: ShardGroup) -> int:
    """Return the size of the whole tensor's `dim`, of which `shard` is this rank's part."""
    place = owner_of(shard)
    if place is not None and place[0].group == group:
        return place[0].specs[place[1]].shape[dim]
    ranges = ops.exchanged_ranges(shard, dim, group)
    even = balanced_ranges(ranges.size, group.size)
    if ranges != even:
        raise ShapeError(
            f"The ranks' shards of {name} have sizes {ranges.lengths} in dim {dim}. Expected"
            f" {even.lengths}: as even as they can be, the first ranks one more, which is"
            f" what torchshard.distributed.scatter({name}, dim={dim}) gives."
        )
    return ranges.size
