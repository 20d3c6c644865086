"""A dim packed in blocks (q, k, v; gate, up) comes apart into shards of the blocks."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import same_on_operands
from sharded_cases import close, marked, randoms, same_as_dense
from torchshard.distributed import groups
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import (
    Axis,
    Ranges,
    Segment,
    balanced_ranges,
    covering,
    ranges_of,
)
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 2, 3, 4]
HEADS, SIZE = 6, 2
WIDTH = HEADS * SIZE

PIECES = {
    "view": lambda x: x.view(2, 3, 3, HEADS, SIZE),
    "view of the batch": lambda x: x.view(-1, 3 * WIDTH),
    "view of blocks": lambda x: x.view(2, 3, 3, -1),
    "unflatten": lambda x: x.unflatten(-1, (3, HEADS, SIZE)),
    "heads first": lambda x: x.reshape(2, 3, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4),
    "unbind": lambda x: x.view(2, 3, 3, HEADS, SIZE).unbind(2),
    "index": lambda x: x.view(2, 3, 3, HEADS, SIZE)[:, :, 1],
    "there and back": lambda x: x.view(2, 3, 3, HEADS, SIZE).flatten(2),
    "back in parts": lambda x: x.view(2, 3, 3, HEADS, SIZE).flatten(3).reshape(6, -1),
    "all in one": lambda x: x.reshape(-1),
    "all in one and back": lambda x: x.reshape(-1).view(2, 3, 3, -1),
    "chunk": lambda x: x.chunk(3, -1),
    "chunk by name": lambda x: torch.chunk(input=x, chunks=3, dim=2),
    "split": lambda x: x.split(WIDTH, -1),
    "split in sizes": lambda x: x.split([WIDTH, 2 * WIDTH], dim=-1),
    "split by name": lambda x: torch.split(x, split_size_or_sections=WIDTH, dim=-1),
    "split_with_sizes": lambda x: x.split_with_sizes([WIDTH] * 3, -1),
    "split twice": lambda x: x.split([WIDTH, 2 * WIDTH], -1)[1].chunk(2, -1),
    "tensor_split": lambda x: x.tensor_split(3, -1),
    "tensor_split at": lambda x: torch.tensor_split(x, (WIDTH,), dim=2),
    "narrow": lambda x: [x.narrow(-1, WIDTH, WIDTH), x.narrow(2, -WIDTH, WIDTH)],
    "slices": lambda x: [x[..., :WIDTH], x[:, :, WIDTH:], x[:, None, 1:, -WIDTH:]],
    "slice of a row": lambda x: [x[1, 0, WIDTH : 2 * WIDTH], x[0, ..., WIDTH:]],
    "nothing of it": lambda x: x[..., WIDTH:WIDTH],
}


def packed_place(size):
    ranges = ranges_of([Segment("head", SIZE)] * 3, {"head": Axis(HEADS)}, size)
    return "packed", (2, 3, 3 * WIDTH), 2, ranges


def pieces_of_packed():
    place = packed_place(groups.get_world_size())
    for label, function in PIECES.items():
        same_as_dense(function, place, label)


@pytest.mark.parametrize("world_size", WORLDS)
def test_views_and_cuts_of_a_packed_dim(world_size):
    """Each block is marked with its own ranges, heads uneven over the ranks included."""
    run_ranks(pieces_of_packed, world_size)


def gate_and_up():
    size = groups.get_world_size()
    ranges = ranges_of([Segment("f"), Segment("f")], {"f": Axis(5)}, size)

    def gated(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    same_as_dense(gated, ("gate and up", (3, 10), 1, ranges), "gated")


@pytest.mark.parametrize("world_size", WORLDS)
def test_gate_and_up_meet_on_the_same_ranks(world_size):
    """The halves of a dim packed in two multiply without a move."""
    run_ranks(gate_and_up, world_size)


def grouped_ranges(size, ratio):
    queries = Axis(HEADS)
    axes = {"q": queries, "kv": covering(queries, ratio)}
    segments = [Segment("q", SIZE), Segment("kv", SIZE), Segment("kv", SIZE)]
    return ranges_of(segments, axes, size)


def grouped_heads():
    size = groups.get_world_size()
    for ratio in (2, 3, 6):
        kv = WIDTH // ratio
        place = ("grouped", (2, WIDTH + 2 * kv), 1, grouped_ranges(size, ratio))
        same_as_dense(lambda x, kv=kv: x.split([WIDTH, kv, kv], -1), place, "split")
        same_as_dense(
            lambda x, kv=kv: x.split([WIDTH, 2 * kv], 1)[1].view(2, 2, -1, SIZE),
            place,
            "key and value heads",
        )


@pytest.mark.parametrize("world_size", WORLDS)
def test_key_and_value_heads_that_several_ranks_hold(world_size):
    """Blocks of a covering axis keep ranges that overlap; gradients are summed once."""
    run_ranks(grouped_heads, world_size)


def attention(x, qkv, bias, out, out_bias):
    """What a user writes for one device."""
    packed = F.linear(x, qkv, bias).view(*x.shape[:2], 3, HEADS, SIZE)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(mixed, out, out_bias)


def attention_of(ranges):
    packed, mixed = ranges
    shapes = [(2, 3, 5), (3 * WIDTH, 5), (3 * WIDTH,), (5, WIDTH), (5,)]
    tensors = [
        randoms(shape, seed).requires_grad_() for seed, shape in enumerate(shapes)
    ]
    return tensors, [None, (0, packed), (0, packed), (1, mixed), None]


def attention_trains():
    size = groups.get_world_size()
    axes = {"head": Axis(HEADS)}
    head = Segment("head", SIZE)
    ranges = ranges_of([head] * 3, axes, size), ranges_of(head, axes, size)
    tensors, ways = attention_of(ranges)
    same_on_operands(attention, tensors, ways, "attention")
    compiled = torch.compile(marked_attention, fullgraph=True, backend="aot_eager")
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    for result, inputs in (
        (compiled(leaves, ways), leaves),
        (attention(*tensors), tensors),
    ):
        close(result.detach(), attention(*tensors).detach(), "compiled")
        result.square().sum().backward()
        grads = [leaf.grad for leaf in inputs]
    for leaf, grad in zip(leaves, grads, strict=True):
        close(leaf.grad, grad, "compiled, gradient")


def marked_attention(leaves, ways):
    return attention(
        *(
            leaf if way is None else marked(leaf, *way)
            for leaf, way in zip(leaves, ways, strict=True)
        )
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_attention_written_for_one_device_trains(world_size):
    """view(B, T, 3, H, D) of a fused projection: 6 heads on 4 ranks equal dense, compiled too."""
    run_ranks(attention_trains, world_size)


def cuts_refused():
    plain = marked(randoms((3, 12), 1), 1, balanced_ranges(12, 2))
    packed = marked(randoms(packed_place(2)[1], 1), *packed_place(2)[2:])
    found = []
    for call in (
        lambda: plain.chunk(3, 1),
        lambda: packed.split(8, -1),
        lambda: packed.narrow(-1, 0, 5),
        lambda: packed[..., 1:],
        lambda: packed[..., ::2],
        lambda: packed[..., 3],
        lambda: packed.tensor_split(2, -1),
        lambda: packed.view(2, 3, 4, -1),
        lambda: packed.unbind(-1),
    ):
        with pytest.raises(ShardedOpError) as error:
            call()
        found.append(str(error.value))
    with pytest.raises(ShapeError) as error:
        packed.split([WIDTH, WIDTH], -1)
    return [*found[:2], str(error.value)]


def test_cuts_elsewhere_name_the_remedy():
    """A dim that is not packed so is not cut, and the error says how to divide it."""
    remedy = (
        "Divide the layer that made it in blocks, one for each piece, so that every rank"
        " holds its share of each. Call torchshard.distributed.gather(x) first for the whole"
        " tensor, or x.to_local() to work on this rank's shard alone."
    )
    assert run_ranks(cuts_refused, 2)[0] == [
        "chunk: dim 1 of this tensor, 12 indices, is spread over 2 ranks, and chunk would cut"
        f" it at [0, 4, 8, 12], across the ranks' parts: it is not packed. {remedy}",
        "split: dim 2 of this tensor, 36 indices, is spread over 2 ranks, and split would cut"
        " it at [0, 8, 16, 24, 32, 36], across the ranks' parts: it has its blocks at"
        f" (0, 12, 24, 36). {remedy}",
        "split: sizes [12, 12] sum to 24. Expected 36, the whole size of dim 2.",
    ]


def test_blocks_do_not_tell_dims_apart():
    """Dims whose ranks hold the same are divided alike, whatever their blocks."""
    packed = ranges_of([Segment("x"), Segment("x")], {"x": Axis(4)}, 2)
    assert packed.block_bounds == (0, 4, 8)
    assert packed == Ranges(8, packed.per_rank)
    assert packed.scaled(3).block_bounds == (0, 12, 24)
    assert packed.within(4, 8).block_bounds == ()
    assert packed.within(4, 8).repeated(2).block_bounds == (0, 4, 8)
    assert packed.within(4, 8).repeated(2) == packed
    assert packed.repeated(2).block_bounds == (0, 4, 8, 12, 16)
