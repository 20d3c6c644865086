"""Attention of divided operands: as of whole tensors, or an error before any collective."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules, same_on_operands
from sharded_cases import marked, randoms
from torchshard.distributed import groups
from torchshard.errors import ShardedOpError
from torchshard.layout import Axis, balanced_ranges, covering, ranges_of
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

_ = None


def attend(query, key, value, mask=None, **options):
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


def of(**options):
    return lambda *operands: attend(*operands, **options)


HEADS, BATCH = (1, 1, 1), (0, 0, 0)
QKV = [(4, 5, 3, 2), (4, 5, 6, 2), (4, 5, 6, 4)]
GROUPED = [(2, 8, 3, 2), (2, 4, 5, 2), (2, 4, 5, 3)]
ATTENTIONS = {
    "attention": (
        of(scale=0.3),
        QKV,
        {HEADS, BATCH, (2, _, _), (_, _, 3), (1, _, _), (_, 1, 1)},
    ),
    "causal": (of(is_causal=True), QKV, {HEADS, BATCH, (_, _, 3)}),
    "one mask for all heads": (
        attend,
        [*QKV, (3, 6)],
        {(*HEADS, _), (*BATCH, _), (2, _, _, 0)},
    ),
    "a mask a head": (
        attend,
        [(2, 5, 3, 2), (2, 5, 6, 2), (2, 5, 6, 4), (5, 3, 6)],
        {(*HEADS, 0), (*HEADS, _), (_, _, _, 0), (2, _, _, 1), (*BATCH, _)},
    ),
    "grouped": (
        of(enable_gqa=True),
        GROUPED,
        {HEADS, (_, 1, 1), (1, 1, _), (1, _, _), BATCH, (2, _, _)},
        {(0, 1): 2},
    ),
    "grouped, with masks": (
        of(enable_gqa=True),
        [*GROUPED, (2, 8, 3, 5)],
        {(*HEADS, 1), (*HEADS, _), (*BATCH, 0)},
        {(0, 1): 2, (3, 1): 2},
    ),
    "grouped and cut": (
        of(enable_gqa=True),
        [(6, 3, 2), (2, 5, 2), (2, 5, 3)],
        {(0, _, _)},
    ),
    "one key head": (
        of(enable_gqa=True),
        [(5, 3, 2), (1, 5, 2), (1, 5, 3), (5, 3, 5)],
        {(0, _, _, _), (0, _, _, 0)},
    ),
}


def attentions_hold():
    expect_rules(ATTENTIONS)
    size = groups.get_world_size()
    heads = Axis(6)
    ways = [
        (1, ranges_of("heads", {"heads": axis}, size))
        for axis in (heads, covering(heads, 3), covering(heads, 3))
    ]
    tensors = [
        randoms(shape, seed).requires_grad_()
        for seed, shape in enumerate([(2, 6, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)])
    ]
    same_on_operands(of(enable_gqa=True), tensors, ways, "heads that serve ranks")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_attention_of_divided_operands(world_size):
    """Heads, grouped ones, the batch, queries and value features; a head on two ranks too."""
    run_ranks(attentions_hold, world_size)


def compiles():
    expect_compiled(ATTENTIONS, "a mask a head", (*HEADS, 0))
    expect_compiled(ATTENTIONS, "grouped", HEADS)
    expect_compiled(ATTENTIONS, "one key head", (0, _, _, _))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def drops_on_its_own():
    torch.manual_seed(3)
    ones = torch.ones(2, 4, 9, 9, dtype=torch.float64)
    query = ShardedTensor.from_local(ones[:, :2], 1)
    y = attend(query, ones, ones, dropout_p=0.5)
    after = torch.rand(3)
    return y.to_local(), after


def test_dropout_is_drawn_by_each_rank():
    """From its own stream: masks differ between the ranks, and the default stream does not."""
    (first, after), (second, same) = run_ranks(drops_on_its_own, 2)
    assert not torch.equal(first, second)
    assert torch.equal(after, same)


def says_why_it_cannot():
    query, key, value = (randoms((2, 4, 6, 4), seed) for seed in range(3))

    def divided(x, dim, size=4):
        return marked(x, dim, balanced_ranges(size, 2))

    refused = {
        "attends over it": lambda: attend(query, divided(key, 2, 6), value),
        "multiplies queries and keys over it": lambda: attend(
            divided(query, 3), divided(key, 3), value
        ),
        "is causal by the place": lambda: attend(
            divided(query, 2, 6), key, value, is_causal=True
        ),
        "drops weights for all of it": lambda: attend(
            query, key, divided(value, 3), dropout_p=0.1
        ),
        "needs the key and value heads": lambda: attend(
            divided(randoms((2, 6, 6, 4), 1), 1, 6),
            *(divided(x[:, :3], 0, 2) for x in (key, value)),
            enable_gqa=True,
        ),
        "with `serves`": lambda: attend(
            divided(randoms((2, 6, 6, 4), 1), 1, 6),
            *(divided(x[:, :3], 1, 3) for x in (key, value)),
            enable_gqa=True,
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ShardedOpError, match=message):
            call()


def test_what_is_refused_says_why():
    """Divided keys, and queries whose key head lies on another rank."""
    run_ranks(says_why_it_cannot, 2)
