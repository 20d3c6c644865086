"""`x[index] = value`: the part that a rank holds is written, as of the whole tensor."""

from itertools import product

import pytest
import torch
from sharded_cases import close, marked, randoms
from torchshard.distributed import groups
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import balanced_ranges, ranges_of_lengths
from torchshard.state import collect_state_dict
from torchshard.tensor import whole
from torchshard.testing.ranks import run_ranks

from layer_zoo import ParallelEmbedding

SHAPE = (7, 5, 6)
INDICES = {
    "one": 3,
    "one from behind": -1,
    "a slice": slice(1, 3),
    "a slice over all ranks": slice(2, 6),
    "nothing": slice(4, 4),
    "all": slice(None),
    "an ellipsis": ...,
    "a cell": (2, 3, 4),
    "a cell from behind": (-7, -1, -6),
    "a column": (slice(None), 3),
    "of the last dim": (..., 5),
    "a new dim": (None, 2, slice(1, None)),
    "a step along another dim": (slice(2, 5), slice(None, None, 2)),
    "both": (4, ..., slice(0, 3)),
}


ROWS = {
    "a list": [0, -1],
    "ids": torch.tensor([5, 0]),
    "no ids": torch.tensor([], dtype=torch.long),
    "ids of more dims": torch.tensor([[4], [1]]),
    "a mask of rows": torch.arange(7) % 3 == 0,
    "a mask of rows and columns": torch.arange(35).view(7, 5) % 3 == 0,
}


def written(index, dim, lengths, value_of):
    """Write the same into a divided tensor and a dense one; compare values and gradients."""
    mine, dense = (randoms(SHAPE, 1).requires_grad_() for _ in range(2))
    given = [value_of(dense.detach()[index].shape) for _ in range(2)]
    x = marked(mine, dim, ranges_of_lengths(lengths)) * 2
    x[index] = given[0]
    y = dense * 2
    y[index] = given[1]
    close(whole(x), y, f"{index} at {dim}")
    (whole(x) * randoms(SHAPE, 2)).sum().backward()
    (y * randoms(SHAPE, 2)).sum().backward()
    close(mine.grad, dense.grad, f"gradient of {index} at {dim}")
    if isinstance(given[0], torch.Tensor):
        close(given[0].grad, given[1].grad, f"gradient of the value, {index} at {dim}")


def number(shape):
    return 2.5


def scalar(shape):
    return torch.tensor(1.5).double().requires_grad_()


def whole_value(shape):
    return randoms(tuple(shape), 3).requires_grad_()


def last_dim(shape):
    return randoms(tuple(shape)[-1:], 3).requires_grad_()


def with_dims_in_front(shape):
    return randoms((1, 1, *shape), 3).requires_grad_()


VALUES = (number, scalar, whole_value, last_dim, with_dims_in_front)


def every_index():
    count = 0
    for dim, size in enumerate(SHAPE):
        even = balanced_ranges(size, groups.get_world_size()).lengths
        on_the_last = [0] * (len(even) - 1) + [size]
        for lengths, index in product((even, on_the_last), INDICES.values()):
            if dim == 1 and index is INDICES["a step along another dim"]:
                continue
            for value_of in (VALUES[count % 5], VALUES[(count + 2) % 5]):
                written(index, dim, lengths, value_of)
            count += 1


def every_row():
    for dim, size in enumerate(SHAPE):
        lengths = balanced_ranges(size, groups.get_world_size()).lengths
        for index, value_of in product(ROWS.values(), (number, scalar)):
            written(index, dim, lengths, value_of)


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_are_set_to_a_number(world_size):
    """Named by ids, a list or a mask of the first dims, whichever dim is divided."""
    run_ranks(every_row, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_written_part_is_that_of_the_whole(world_size):
    """Numbers and tensors, broadcast or not, at every index and every split."""
    run_ranks(every_index, world_size)


def masks_and_shards():
    ranges = balanced_ranges(6, 2)
    dense = randoms((4, 6), 1)
    x = marked(dense.clone(), 1, ranges)
    x[x > 0] = 0.0
    close(whole(x), dense.clamp(max=0), "a mask of its own")
    x[dense < -1] = -1.0
    close(whole(x), dense.clamp(-1, 0), "a whole mask")
    other = randoms((4, 6), 2)
    x[1:3] = marked(other, 1, ranges)[1:3]
    close(whole(x)[1:3], other[1:3], "a shard")
    parts = marked(randoms((4, 6), 4), 1, ranges)
    plain = torch.zeros(4, 6).double()
    before = whole(x).clone()
    refused = [
        lambda: x.__setitem__((slice(None), slice(0, 4, 2)), 0.0),
        lambda: x.__setitem__([1, 2], parts[1:3]),
        lambda: x.__setitem__((slice(None), slice(0, 3)), parts),
        lambda: plain.__setitem__(0, parts[0]),
        lambda: plain.__setitem__(x > 0, 1.0),
    ]
    for write in refused:
        with pytest.raises((ShardedOpError, ShapeError)):
            write()
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension 1"):
        x[0, 6] = 1.0
    close(whole(x), before, "what was refused wrote nothing")


def test_masks_shards_and_what_is_refused():
    """A mask of the whole size fills; a shard goes where it lies alike."""
    run_ranks(masks_and_shards, 2)


def as_models_initialise():
    for dim in (0, 1):
        layer = ParallelEmbedding(7, 6, dim=dim)
        expected = collect_state_dict(layer)["weight"].clone()
        layer.weight.data[3] = 0.0
        expected[3] = 0
        with torch.no_grad():
            layer.weight[-1] = torch.arange(6.0)
            layer.weight[1:3, 2:] = 2.0
            layer.weight[layer.weight.abs() > 1.5] = 1.0
        expected[-1] = torch.arange(6.0)
        expected[1:3, 2:] = 2.0
        expected[expected.abs() > 1.5] = 1.0
        close(
            collect_state_dict(layer)["weight"], expected, f"weight divided along {dim}"
        )


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_are_written_as_models_initialise_them(world_size):
    """`weight.data[padding_idx] = 0`, and under no_grad."""
    run_ranks(as_models_initialise, world_size)
