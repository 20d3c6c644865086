"""AttentionLayer: what every layer with attention heads does alike when they are divided.

Attention is local to a head. What has to know about the other ranks is little: which heads
this one has, which key/value heads those read, a mask for each head, dropout, and weights
that are averaged over all heads. The projections before and after are the layer's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.groups import GroupLike
from torchshard.distributed.random import shard_rng
from torchshard.errors import LayoutError, ShapeError
from torchshard.layer.base import ParallelLayer
from torchshard.layout import Axis, covering, ranges_of
from torchshard.splits import Split, Splits
from torchshard.tensor import Sharding, mark
from torchshard.tensor.sharded import asked


class AttentionLayer(ParallelLayer):
    """Base of layers that attend with many heads, each rank computing some of them.

    Over R ranks, on rank r, with H query heads of size D and K key/value heads, each of which
    serves H / K query heads:

        q_r         (N, H / R, L, D)                axis "head"
        k_r, v_r    (N, heads that q_r reads, S, D) axis "kv_head": neighbours may share one
        weights_r   (N, H / R, L, S)
        y_r         (N, H / R, L, D)

        forward     y_r = softmax(q_r @ k_r.T / sqrt(D) + mask_r) @ v_r     no collective
        backward    local

    A subclass declares `axes=self.head_axes` and its projections, brings what they give into
    heads (`by_head`), attends, and lays the heads side by side again. A rank may hold no head.

    Args:
        num_heads: Number of query heads, H.
        head_dim: Size of a head, D.
        num_kv_heads: Number of key/value heads, K, which divides H; None means H.
        dropout: Share of attention weights dropped in training, differently on each rank.
        batch_first: Whether sequences are (N, L, E) rather than (L, N, E).
        group: The ranks; None is the model group.

    Raises:
        LayoutError: If `num_kv_heads` does not divide `num_heads`.

    Example:
        >>> import torch, torchshard as ts
        >>> from torch.nn.functional import linear
        >>> class ParallelSelfAttention(ts.AttentionLayer):
        ...     def __init__(self, size, num_heads, *, group=None):
        ...         super().__init__(num_heads, size // num_heads, group=group)
        ...         heads, init = ts.Segment("head", self.head_dim), ts.kaiming_uniform(size)
        ...         rows, columns = ts.Shard(0, [heads] * 3), ts.Shard(1, heads)
        ...         self.declare(
        ...             axes=self.head_axes,
        ...             parameters={
        ...                 "qkv": ts.ParameterSpec((3 * size, size), rows, init),
        ...                 "out": ts.ParameterSpec((size, size), columns, init),
        ...             },
        ...             inputs={"input": ts.Whole(-1, size)},
        ...             output=ts.Partial(),
        ...         )
        ...
        ...     def local_forward(self, input):
        ...         parts = linear(input, self.qkv).chunk(3, -1)
        ...         y = self.attend(*map(self.by_head, parts), is_causal=True)
        ...         return linear(self.side_by_side(y), self.out)
        >>> ParallelSelfAttention(8, 4)(torch.ones(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    splits: ClassVar[Splits] = {"heads": Split("the heads")}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        group: GroupLike = None,
    ) -> None:
        super().__init__(group)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.head_axes = {"head": Axis(num_heads)}
        if num_kv_heads is not None:
            if num_kv_heads < 1 or num_heads % num_kv_heads:
                raise LayoutError(
                    f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}."
                    " Expected key/value heads that serve equally many query heads."
                )
            ratio = num_heads // num_kv_heads
            self.head_axes["kv_head"] = covering(self.head_axes["head"], ratio)

    @staticmethod
    def projected(
        inputs: Sequence[Tensor],
        weights: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return `x @ weight.T + bias` for each of query, key and value.

        Args:
            inputs: (*, features) each. If all are one tensor, one product gives them all.
            weights: One weight that packs an equal block for each input, or one for each.
            bias: Packed alike, in either case.
        """
        count, first = len(inputs), inputs[0]
        if isinstance(weights, Tensor):
            if all(x is first for x in inputs):
                return F.linear(first, weights, bias).chunk(count, -1)
            weights = weights.chunk(count)
        biases = [None] * count if bias is None else bias.chunk(count)
        return tuple(map(F.linear, inputs, weights, biases))

    def by_head(self, x: Tensor) -> Tensor:
        """Return `x`, (N, L, heads * D), as (N, heads, L, D).

        Without `batch_first` it is (L, N, heads * D); without a batch, N becomes 1.
        """
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        heads = x.shape[-1] // self.head_dim
        return x.reshape(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def side_by_side(self, y: Tensor, batched: bool = True) -> Tensor:
        """Return `y`, (N, heads, L, D), as (N, L, heads * D), or as `by_head` took it."""
        batch, heads, length, size = y.shape
        y = y.transpose(1, 2).reshape(batch, length, heads * size)
        if not batched:
            return y.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1)

    def own_mask(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | None:
        """Return both masks of torch.nn.MultiheadAttention as what is added to the scores.

        A mask can be learned: each rank reads it for its own heads, and its gradient is
        summed.

        Args:
            q: (N, H / R, L, D).
            k: (N, heads, S, D).
            attn_mask: (L, S) or (N * H, L, S); True for pairs to ignore, or floats added.
            key_padding_mask: (N, S), or (S,) of one sequence; likewise, for keys to ignore.

        Raises:
            ShapeError: If a mask has another shape.
        """
        batch, source = len(k), k.shape[2]
        mask = None
        if attn_mask is not None:
            whole = ops.copy(attn_mask, self.group)
            own = self._own_heads_of(whole, batch, q.shape[2], source)
            mask = _additive(own, q.dtype)
        if key_padding_mask is not None:
            rows = ops.copy(key_padding_mask, self.group)
            rows = rows.reshape(-1, rows.shape[-1])
            if rows.shape != (batch, source):
                raise ShapeError(
                    f"key_padding_mask has shape {tuple(key_padding_mask.shape)};"
                    f" expected {(batch, source)}."
                )
            padding = _additive(rows, q.dtype).reshape(batch, 1, 1, source)
            mask = padding if mask is None else mask + padding
        return mask

    def _own_heads_of(
        self, attn_mask: Tensor, batch: int, length: int, source: int
    ) -> Tensor:
        """Return `attn_mask` for this rank's heads, as it broadcasts to (N, H / R, L, S)."""
        per_head = (batch * self.num_heads, length, source)
        if attn_mask.shape == (length, source):
            return attn_mask
        if attn_mask.shape != per_head:
            raise ShapeError(
                f"attn_mask has shape {tuple(attn_mask.shape)}; expected"
                f" {(length, source)} or {per_head}."
            )
        start, stop = self.own("head")
        heads = attn_mask.reshape(batch, self.num_heads, length, source)
        return heads[:, start:stop]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend without forming the attention weights; return (N, H / R, L, D).

        Args:
            q: (N, H / R, L, D).
            k: (N, heads that those read, S, D).
            v: As `k`.
            mask: Added to the scores; broadcasts to (N, H / R, L, S).
            is_causal: Whether query i reads keys 0 ... i alone; then without `mask`.
        """
        if not q.shape[1]:
            # torch's fused kernels (2.13) leave a mask out of the graph of no heads, and a
            # learned one's backward is a collective.
            return self._weighed(q, k, v, mask)[0]
        dropout = self.dropout if self.training else 0.0
        k, v = self._served(k), self._served(v)
        if dropout and torch.compiler.is_compiling():
            if is_causal:
                kept = torch.ones(q.shape[-2], k.shape[-2], device=q.device).tril()
                mask = _additive(kept == 0, q.dtype)
            return self._weighed(q, k, v, mask)[0]
        with shard_rng(self.group, q.device) if dropout else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)

    def attend_with_weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        average: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Attend as `attend` does, and return the attention weights, whole, as well.

        Args:
            q: (N, H / R, L, D).
            k: (N, heads that those read, S, D).
            v: As `k`.
            mask: Added to the scores; broadcasts to (N, H / R, L, S).
            average: Whether the weights are averaged over all heads, (N, L, S), in one
                all-reduce, or given of each, (N, H, L, S), in one all-gather.
        """
        y, weights = self._weighed(q, self._served(k), self._served(v), mask)
        if average:
            return y, ops.reduce(weights.sum(1) / self.num_heads, self.group)
        ranges = ranges_of("head", self.axes, self.group.size)
        return y, ops.gather(weights, 1, ranges=ranges, group=self.group)

    def _weighed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = q / math.sqrt(self.head_dim) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if self.dropout and self.training:
            ranges = ranges_of("head", self.axes, self.group.size)
            marked = mark(weights, Sharding(1, ranges, self.group))
            dropped = asked(F.dropout, marked, self.dropout)
            weights = dropped.to_local() if self.group.size > 1 else dropped
        return weights @ v, weights

    def _served(self, x: Tensor) -> Tensor:
        """Return key or value heads as this rank's query heads read them, one for each."""
        if self.num_kv_heads == self.num_heads:
            return x
        ratio = self.num_heads // self.num_kv_heads
        start, stop = self.own("head")
        heads = torch.arange(start, stop, device=x.device) // ratio
        return x.index_select(1, heads - start // ratio)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `mask` as floats to add to the scores: -inf where a boolean one is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(mask, float("-inf"))
