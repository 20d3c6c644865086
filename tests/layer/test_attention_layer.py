"""AttentionLayer carries attention that is not torch.nn's: grouped queries, with their weights."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.testing import Case, Floats, check_layer, run_ranks

LEARNED_MASK = Floats((5, 5))


class GroupedQueryAttention(nn.Module):
    """Few key/value heads, each read by several query heads; one packed projection."""

    def __init__(self, size, num_heads, num_kv_heads, head_dim):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = nn.Parameter(nn.Linear(size, rows, bias=False).weight.detach())
        width = num_heads * head_dim
        self.out = nn.Parameter(nn.Linear(width, size, bias=False).weight.detach())

    def forward(self, x, mask=None, need_weights=False):
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        parts = F.linear(x, self.qkv).split([query, key, key], -1)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in parts)
        k, v = (p.repeat_interleave(len(q[0]) // len(p[0]), 1) for p in (k, v))
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        scores = scores if mask is None else scores + mask.to(q.dtype)
        weights = scores.softmax(-1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return F.linear(y, self.out), weights.mean(1) if need_weights else None


class ParallelGroupedQueryAttention(ts.AttentionLayer):
    def __init__(self, size, num_heads, num_kv_heads, head_dim, *, group=None):
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, group=group)
        q, kv = ts.Segment("head", head_dim), ts.Segment("kv_head", head_dim)
        width, rows = num_heads * head_dim, (num_heads + 2 * num_kv_heads) * head_dim
        self.declare(
            axes=self.head_axes,
            parameters={
                "qkv": ts.ParameterSpec(
                    (rows, size), ts.Shard(0, [q, kv, kv]), ts.kaiming_uniform(size)
                ),
                "out": ts.ParameterSpec(
                    (size, width), ts.Shard(1, q), ts.kaiming_uniform(width)
                ),
            },
            inputs={"x": ts.Whole(-1, size)},
            output=(ts.Partial(), ts.Whole()),
        )

    def local_forward(self, x, mask=None, need_weights=False):
        query = self.num_own("head") * self.head_dim
        key = self.num_own("kv_head") * self.head_dim
        parts = F.linear(x, self.shared("qkv")).split([query, key, key], -1)
        q, k, v = map(self.by_head, parts)
        mask = self.own_mask(q, k, mask)
        if need_weights:
            y, weights = self.attend_with_weights(q, k, v, mask)
        else:
            y, weights = self.attend(q, k, v, mask), None
        return F.linear(self.side_by_side(y), self.out), weights


def grouped(*sizes, **keywords):
    return Case(
        ParallelGroupedQueryAttention,
        GroupedQueryAttention,
        args=(7, *sizes),
        inputs=[Floats((2, 5, 7))],
        keywords=keywords,
    )


CASES = [
    grouped(6, 3, 2),
    grouped(6, 2, 2, mask=LEARNED_MASK),
    grouped(8, 1, 3, need_weights=True),
    # fewer heads than ranks
    grouped(2, 1, 4, mask=LEARNED_MASK),
    grouped(2, 2, 2, mask=LEARNED_MASK, need_weights=True),
]


def equal_dense():
    for case in CASES:
        check_layer(case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_grouped_queries_equal_the_dense_layer(world_size):
    """Key/value heads that ranks share, uneven heads, no head, a learned mask, weights."""
    run_ranks(equal_dense, world_size)


def dropped():
    torch.manual_seed(2)
    layer = ParallelGroupedQueryAttention(4, 4, 2, 2)
    layer.dropout = 0.5
    heads = layer.num_own("head")
    q, k = torch.zeros(1, heads, 64, 2), torch.zeros(1, layer.num_own("kv_head"), 64, 2)
    fused = layer.attend(q, k, k + 1)
    _, weights = layer.attend_with_weights(q, k, k + 1, average=False)
    return fused, weights, torch.rand(())


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_drops_for_its_own_heads(world_size):
    """Masks of dropout differ between the heads of different ranks; the common stream does not."""
    results = run_ranks(dropped, world_size)
    fused = [one[0] for one in results]
    assert not any(torch.equal(fused[0], other) for other in fused[1:])
    weights, common = results[0][1], results[0][2]
    assert weights.shape == (1, 4, 64, 64)
    per_head = weights.unbind(1)
    assert not any(torch.equal(per_head[0], other) for other in per_head[1:])
    for _, other_weights, other_common in results[1:]:
        assert torch.equal(other_weights, weights)
        assert torch.equal(other_common, common)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ParallelGroupedQueryAttention(7, 6, 4, 2),
            "num_kv_heads=4 does not divide num_heads=6. Expected key/value heads that serve"
            " equally many query heads.",
        ),
        (
            lambda: ts.nn.ParallelMultiheadAttention(12, 5),
            "num_heads=5 does not divide embed_dim=12. Expected heads of equal size.",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(build, message):
    """What was given, what was expected."""
    with pytest.raises(ts.errors.LayoutError) as error:
        build()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            {"attn_mask": torch.zeros(4, 5)},
            r"attn_mask has shape \(4, 5\); expected \(5, 4\) or \(12, 5, 4\).",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 5)},
            r"key_padding_mask has shape \(2, 5\); expected \(2, 4\).",
        ),
    ],
)
def test_masks_of_another_shape_are_refused(masks, message):
    """A mask that would broadcast to something is no less wrong."""
    layer = ts.nn.ParallelMultiheadAttention(12, 6)
    query, key = torch.ones(5, 2, 12), torch.ones(4, 2, 12)
    with pytest.raises(ts.errors.ShapeError, match=message):
        layer(query, key, key, **masks)
