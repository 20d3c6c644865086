"""A function on a marked shard against the same function on the whole tensor."""

import torch
from torchshard.distributed import groups, ops
from torchshard.layout import (
    Axis,
    Segment,
    balanced_ranges,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.tensor import ShardedTensor, mark, whole
from torchshard.tensor.sharded import Sharding


def randoms(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def places(size):
    """Where a shard can lie: name, shape of the whole, dim, ranges."""
    packed = ranges_of([Segment("x"), Segment("x")], {"x": Axis(3)}, size)
    yield "column", (3, 5), 1, balanced_ranges(5, size)
    yield "channels", (2, 6, 3, 4), 1, balanced_ranges(6, size)
    yield "packed", (4, 6), 1, packed
    yield (
        "empty",
        (4, 3),
        1,
        ranges_of_lengths([1] * (size > 1) + [0] * (size - 2) + [3 - (size > 1)]),
    )
    yield "batch", (5, 3), 0, balanced_ranges(5, size)
    yield "middle", (2, 5, 3), 1, balanced_ranges(5, size)
    yield "no rows", (0, 4, 5), 2, balanced_ranges(5, size)


def marked(x, dim, ranges):
    group = groups.model_group()
    shard = ops.scatter(x, dim, ranges=ranges)
    return mark(shard, Sharding(dim, ranges, group))


def close(actual, expected, case, tolerance=1e-10):
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{case}: {text}",
    )


def tensors_in(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for part in result for item in tensors_in(part)]


def same_as_dense(function, place, case, *extra, x=None, tolerance=1e-10):
    """Compare function(shard, *extra) with function(whole, *extra): values and gradients."""
    _, shape, dim, ranges = place
    x = randoms(shape, 1) if x is None else x
    dense_in = [
        t.detach().clone().requires_grad_(t.is_floating_point()) for t in (x, *extra)
    ]
    shard_in = [
        t.detach().clone().requires_grad_(t.is_floating_point()) for t in (x, *extra)
    ]
    expected = tensors_in(function(*dense_in))
    actual = tensors_in(function(marked(shard_in[0], dim, ranges), *shard_in[1:]))
    assert len(actual) == len(expected), case
    for index, (mine, want) in enumerate(zip(actual, expected, strict=True)):
        assert tuple(mine.shape) == tuple(want.shape), (case, mine.shape, want.shape)
        if isinstance(mine, ShardedTensor):
            own = mine.to_local().shape[mine.sharding.dim]
            assert own == mine.sharding.length, (case, mine.sharding)
        close(whole(mine).detach(), want.detach(), f"{case}, output {index}", tolerance)
    roots = [i for i, want in enumerate(expected) if want.requires_grad]
    assert roots == [i for i, mine in enumerate(actual) if mine.requires_grad], case
    if not roots:
        return
    cots = [randoms(expected[i].shape, 50 + i, expected[i].dtype) for i in roots]
    inputs = [t for t in dense_in if t.requires_grad]
    mine = [t for t in shard_in if t.requires_grad]
    unused = {"allow_unused": True, "materialize_grads": True}
    want = torch.autograd.grad([expected[i] for i in roots], inputs, cots, **unused)
    outputs = [whole(actual[i]) for i in roots]
    have = torch.autograd.grad(outputs, mine, cots, **unused)
    for index, pair in enumerate(zip(have, want, strict=True)):
        close(*pair, f"{case}, gradient {index}", tolerance)
