"""Initialisers: a shard's first values are its part of torch's own draw."""

from itertools import product

import pytest
import torch
from torch import nn
from torchshard import initializer
from torchshard.initializer import (
    Constant,
    Given,
    Initializer,
    Normal,
    Part,
    Uniform,
    ZeroRow,
    fan_in_uniform,
    kaiming_uniform,
    xavier_normal,
    xavier_uniform,
)
from torchshard.layout import Axis, Segment, balanced_ranges, ranges_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(7, 9), (5, 3, 4), (37, 11), (3, 41), (6,), (2, 1, 33), (1, 1)]
DRAWS = [
    (Uniform(0.7), lambda x: x.uniform_(-0.7, 0.7)),
    (Normal(0.1, 1.3), lambda x: x.normal_(0.1, 1.3)),
]


def splits(length, size):
    yield balanced_ranges(length, size)
    if length % 2 == 0:
        axes = {"x": Axis(length // 2)}
        yield ranges_of([Segment("x"), Segment("x")], axes, size)


def taken(whole, dim, bounds):
    index = [i for start, stop in bounds for i in range(start, stop)]
    return whole.index_select(dim, torch.tensor(index, dtype=torch.long))


@pytest.mark.parametrize("chunk", [16, 48, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_are_parts_of_torchs_own_draw(monkeypatch, dtype, chunk):
    """T39, T41: bit for bit at any size, dim and split, and the generator ends alike."""
    monkeypatch.setattr(initializer, "_CHUNK", chunk)
    for shape, (init, draw) in product(SHAPES, DRAWS):
        torch.manual_seed(11)
        whole = draw(torch.empty(shape, dtype=dtype))
        state = torch.get_rng_state()
        for dim, size in product(range(len(shape)), (1, 2, 3, 4)):
            for ranges in splits(shape[dim], size):
                for bounds in ranges.per_rank:
                    expected = taken(whole, dim, bounds)
                    shard = torch.full_like(expected, float("nan"))
                    torch.manual_seed(11)
                    init.fill(shard, Part(shape, dim, bounds))
                    case = (shape, dim, size, bounds, init)
                    assert torch.equal(shard, expected), case
                    assert torch.equal(torch.get_rng_state(), state), case


def test_a_strided_shard_is_filled_in_place():
    """The shard may lie in memory in any way; what is between its elements stays."""
    torch.manual_seed(0)
    whole = torch.empty(4, 6).normal_()
    wide = torch.zeros(4, 6)
    torch.manual_seed(0)
    Normal().fill(wide[:, ::2], Part((4, 6), 1, ((0, 3),)))
    assert torch.equal(wide[:, ::2], whole[:, :3])
    assert torch.equal(wide[:, 1::2], torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("shape", "dim"), [((0, 4), 0), ((4, 0), 1), ((3, 0), 0), ((2, 0, 3), 2)]
)
def test_empty_tensors_draw_nothing(shape, dim):
    """A dim of size 0 leaves the generator as it was, as in torch."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for init in (Uniform(1.0), Normal(), Constant(1.0, after=Normal())):
        init.fill(torch.empty(shape), Part(shape, dim, ((0, shape[dim]),)))
    assert torch.equal(torch.get_rng_state(), state)


def test_constants_may_keep_the_stream_in_step():
    """`after` draws what torch draws and then overwrites."""
    torch.manual_seed(0)
    torch.empty(5, 4).uniform_()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    shard = torch.empty(2, 4)
    Constant(3.0).fill(shard, Part((5, 4), 0, ((1, 3),)))
    assert torch.equal(torch.get_rng_state(), before)
    Constant(2.0, after=Uniform(1.0)).fill(shard, Part((5, 4), 0, ((1, 3),)))
    assert torch.equal(shard, torch.full((2, 4), 2.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert not Constant(1.0).is_random
    assert Uniform(1.0).is_random


@pytest.mark.parametrize("index", [0, 3, 6])
def test_the_padding_row_is_zero_on_the_rank_that_holds_it(index):
    """T32: whichever dim is sharded, packed or not, the whole has zeros at the row alone."""
    torch.manual_seed(0)
    whole = torch.empty(8, 6).normal_()
    whole[index] = 0
    for dim, size in product((0, 1), (1, 2, 3)):
        for ranges in splits((8, 6)[dim], size):
            for bounds in ranges.per_rank:
                expected = taken(whole, dim, bounds)
                shard = torch.empty_like(expected)
                torch.manual_seed(0)
                ZeroRow(Normal(), index).fill(shard, Part((8, 6), dim, bounds))
                assert torch.equal(shard, expected)


def test_given_values_are_cut():
    """Each rank takes its ranges of the caller's whole tensor, cast to its dtype."""
    whole = torch.arange(24.0).reshape(4, 6)
    for dim, size in product((0, 1), (1, 2, 3, 5)):
        for ranges in splits((4, 6)[dim], size):
            for bounds in ranges.per_rank:
                expected = taken(whole, dim, bounds).half()
                shard = torch.empty_like(expected)
                Given(whole).fill(shard, Part((4, 6), dim, bounds))
                assert torch.equal(shard, expected)
    assert Given(whole).is_random


def drawn(init, shape):
    torch.manual_seed(4)
    x = torch.empty(shape)
    init.fill(x, Part(shape, 0, ((0, shape[0]),)))
    return x


def by_torch(function, shape, **options):
    torch.manual_seed(4)
    return function(torch.empty(shape), **options)


def test_named_bounds_are_those_of_torch_init():
    """T39: the fans are the whole tensor's, and each bound equals torch's to the bit."""
    shape = (30, 20)
    for init, expected in [
        (kaiming_uniform(20), by_torch(nn.init.kaiming_uniform_, shape, a=5**0.5)),
        (xavier_uniform(20, 30), by_torch(nn.init.xavier_uniform_, shape)),
        (xavier_normal(20, 30), by_torch(nn.init.xavier_normal_, shape)),
        (Normal(0, 0.02), by_torch(nn.init.normal_, shape, std=0.02)),
    ]:
        assert torch.equal(drawn(init, shape), expected)
    torch.manual_seed(4)
    layer = nn.Linear(20, 30)
    torch.manual_seed(4)
    weight, bias = torch.empty(30, 20), torch.empty(30)
    kaiming_uniform(20).fill(weight, Part((30, 20), 0, ((0, 30),)))
    fan_in_uniform(20).fill(bias, Part((30,), 0, ((0, 30),)))
    assert torch.equal(weight, layer.weight)
    assert torch.equal(bias, layer.bias)
    assert fan_in_uniform(0) == Uniform(0.0)


def test_initializer_is_abstract():
    """A subclass says how to fill."""
    with pytest.raises(TypeError, match="abstract"):
        Initializer()
