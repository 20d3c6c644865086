"""The differentiable moves between whole tensors, shards and partials.

Every op is compared with the same map written for one process over the list of all ranks'
tensors: a whole tensor stands once in the list, so that the gradient contract is not assumed.
"""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups, ops
from torchshard.errors import LayoutError, ShapeError, ShardedOpError
from torchshard.layout import (
    Axis,
    Ranges,
    Segment,
    balanced_ranges,
    covering,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 2, 3, 4]
SUMS = (
    "reduce",
    "total",
    "reduce_scatter",
)  # rounded in another order; the rest only move


def same(actual, expected, case, exact=False):
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0 if exact else 1e-12,
        atol=0 if exact else 1e-12,
        msg=lambda text: f"{case}: {text}",
    )


def randoms(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


# How a tensor lies in memory: the base with gradient, and the view that an op is given.
LAYOUTS = {
    "contiguous": (lambda shape: shape, lambda base: base),
    "transposed": (lambda shape: shape[::-1], lambda base: base.permute(2, 1, 0)),
    "every other": (
        lambda shape: (*shape[:-1], shape[-1] * 2),
        lambda base: base[..., ::2],
    ),
    "channels last": (
        lambda shape: (shape[0], shape[2], shape[1]),
        lambda base: base.transpose(1, 2),
    ),
    "expanded": (
        lambda shape: (1, *shape[1:]),
        lambda base, rows=None: base.expand(rows, -1, -1),
    ),
}


def view_of(layout, base, shape):
    view = LAYOUTS[layout][1]
    return view(base, rows=shape[0]) if layout == "expanded" else view(base)


def take(whole, dim, bounds):
    index = [i for start, stop in bounds for i in range(start, stop)]
    return whole.index_select(dim, torch.tensor(index, dtype=torch.long))


def lay(shards, dim, ranges):
    """The whole tensor of all ranks' shards; of several holders of an index the last."""
    place = {}
    for rank, bounds in enumerate(ranges.per_rank):
        index = [i for start, stop in bounds for i in range(start, stop)]
        place |= {i: (rank, local) for local, i in enumerate(index)}
    parts = [shards[r].select(dim, i) for r, i in (place[j] for j in sorted(place))]
    unused = sum(shard.sum() * 0 for shard in shards)
    return (torch.stack(parts, dim) if parts else shards[0]) + unused


class Case:
    """An op, the same map over all ranks' tensors, and which of its ends are whole."""

    def __init__(self, op, dense, whole_in, whole_out):
        self.op, self.dense = op, dense
        self.whole_in, self.whole_out = whole_in, whole_out


def cases(dim, ranges, size):
    over = range(size)
    split = partial(take, dim=dim)
    kw = {"dim": dim, "ranges": ranges}
    yield "copy", Case(ops.copy, lambda xs: [xs[0] for _ in over], True, False)
    yield "reduce", Case(ops.reduce, lambda xs: [sum(xs)], False, True)
    yield "total", Case(ops.total, lambda xs: [sum(xs) for _ in over], False, False)
    yield (
        "scatter",
        Case(
            partial(ops.scatter, **kw),
            lambda xs: [split(xs[0], bounds=b) for b in ranges.per_rank],
            True,
            False,
        ),
    )
    yield (
        "gather",
        Case(
            partial(ops.gather, grad="whole", **kw),
            lambda xs: [lay(xs, dim, ranges)],
            False,
            True,
        ),
    )
    yield (
        "all_gather",
        Case(
            partial(ops.all_gather, **kw),
            lambda xs: [lay(xs, dim, ranges) for _ in over],
            False,
            False,
        ),
    )
    yield (
        "reduce_scatter",
        Case(
            partial(ops.reduce_scatter, **kw),
            lambda xs: [split(sum(xs), bounds=b) for b in ranges.per_rank],
            False,
            False,
        ),
    )


def splits(length, size):
    """Every kind of split of `length` indices, by name."""
    yield "balanced", balanced_ranges(length, size)
    lengths = [0] * size
    lengths[-1], lengths[0] = length - length // 3, lengths[0] + length // 3
    yield "given", ranges_of_lengths(lengths if size > 1 else [length])
    if length % 2 == 0:
        yield (
            "packed",
            ranges_of([Segment("x"), Segment("x")], {"x": Axis(length // 2)}, size),
        )
    if length == 4:
        heads = covering(Axis(8), 2)
        yield "overlapping", ranges_of("kv", {"kv": heads}, size)
        every = tuple(((0, length),) for _ in range(size))
        yield "on every rank", Ranges(length, every)


def shards_shape(name, shape, dim, ranges, rank):
    if name not in ("gather", "all_gather"):
        return shape
    return (*shape[:dim], ranges.length(rank), *shape[dim + 1 :])


def check(name, case, shapes, layout, label):
    """Compare output, gradient and double backward with the dense map."""
    group = groups.model_group()
    rank, over = group.rank, range(1 if case.whole_in else group.size)
    to_base = LAYOUTS[layout][0]
    bases = [randoms(to_base(shapes[r]), 7 + r).requires_grad_() for r in over]
    outs = case.dense([view_of(layout, bases[r], shapes[r]) for r in over])
    cots = [randoms(out.shape, 70 + r) for r, out in enumerate(outs)]
    cots = [expanded_like(cot, layout).requires_grad_() for cot in cots]
    grads = torch.autograd.grad(outs, bases, cots, create_graph=True)
    again = [randoms(base.shape, 700 + r) for r, base in enumerate(bases)]
    seconds = torch.autograd.grad(grads, cots, again)

    mine_in, mine_out = 0 if case.whole_in else rank, 0 if case.whole_out else rank
    base = bases[mine_in].detach().clone().requires_grad_()
    cot = cots[mine_out].detach().requires_grad_()
    x = view_of(layout, base, shapes[mine_in])
    kept, cot_kept = base.detach().clone(), cot.detach().clone()
    out = case.op(x)
    same(out, outs[mine_out], label, exact=name not in SUMS)
    (grad,) = torch.autograd.grad(out, base, cot, create_graph=True)
    same(grad, grads[mine_in], f"{label}, gradient")
    (second,) = torch.autograd.grad(grad, cot, again[mine_in])
    same(second, seconds[mine_out], f"{label}, double backward")
    same(base.detach(), kept, f"{label}, argument afterwards", exact=True)
    same(cot.detach(), cot_kept, f"{label}, cotangent afterwards", exact=True)


def expanded_like(cot, layout):
    """A cotangent that is as awkward as the argument: stride 0, or transposed."""
    if layout == "expanded" and cot.numel():
        return cot[:1].expand(cot.shape)
    if layout == "transposed":
        return cot.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return cot


def ops_match_dense():
    size = groups.get_world_size()
    for shape in [(4, 3, 6), (0, 4, 3)]:
        for dim in range(3):
            for split, ranges in splits(shape[dim], size):
                for name, case in cases(dim, ranges, size):
                    over = range(size)
                    shapes = [shards_shape(name, shape, dim, ranges, r) for r in over]
                    for layout in LAYOUTS:
                        if layout == "expanded" and dim == 0 and "gather" in name:
                            continue  # its rows are not one row repeated on every rank
                        label = f"{name} of {shape}, dim {dim}, {split}, {layout}"
                        check(name, case, shapes, layout, label)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_op_matches_dense(world_size):
    """Output, gradient and double backward equal dense, for any dim, split and strides.

    R9, R10, T16, T17, T20: arguments and cotangents are not written to.
    """
    run_ranks(ops_match_dense, world_size)


def all_to_all_matches_dense():
    group = groups.model_group()
    size, rank = group.size, group.rank
    for shape, split_dim, join_dim in [
        ((5, 6, 3), 1, 0),
        ((5, 6, 3), 0, 1),
        ((2, 7, 4), -1, -2),
        ((0, 4, 5), 2, 1),
        ((1, 2, 3), 0, 1),
    ]:
        for join_name, join in splits(shape[join_dim], size):
            if join.overlaps:
                continue
            split = balanced_ranges(shape[split_dim], size)
            whole = randoms(shape, 3)
            mine = take(whole, join_dim, join.per_rank[rank])
            x = mine.clone().requires_grad_()
            given = None if join.is_contiguous else join
            y = ops.all_to_all(x, split_dim, join_dim, join_ranges=given)
            label = f"all_to_all of {shape}, {split_dim}, {join_dim}, {join_name}"
            same(y, take(whole, split_dim, split.per_rank[rank]), label, exact=True)
            cot_whole = randoms(shape, 4)
            cot = take(cot_whole, split_dim, split.per_rank[rank]).requires_grad_()
            (grad,) = torch.autograd.grad(y, x, cot, create_graph=True)
            expected = take(cot_whole, join_dim, join.per_rank[rank])
            same(grad, expected, f"{label}, gradient", exact=True)
            (second,) = torch.autograd.grad(grad, cot, mine)
            same(second, y, f"{label}, double backward", exact=True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_moves_the_sharding(world_size):
    """It turns a shard of one dim into a shard of another, gradients the same way back."""
    run_ranks(all_to_all_matches_dense, world_size)


def sum_over_holders_matches_dense():
    group = groups.model_group()
    size, rank = group.size, group.rank
    for name, ranges in splits(4, size):
        for dim in (0, 1):
            whole = randoms((4, 4), 5).requires_grad_()
            cots = [randoms((4, 4), 50 + r) for r in range(size)]
            cots = [
                take(cot, dim, ranges.per_rank[r]).requires_grad_()
                for r, cot in enumerate(cots)
            ]
            outs = [take(whole, dim, bounds) for bounds in ranges.per_rank]
            (dense,) = torch.autograd.grad(outs, whole, [c.detach() for c in cots])
            x = take(whole.detach(), dim, ranges.per_rank[rank]).requires_grad_()
            y = ops.sum_over_holders(x, dim, ranges)
            same(y, x, name, exact=True)
            (grad,) = torch.autograd.grad(y, x, cots[rank])
            same(grad, take(dense, dim, ranges.per_rank[rank]), f"{name}, gradient")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shared_units_sum_the_gradients_of_their_holders(world_size):
    """Each holder of an index gets the sum of all its holders' gradients."""
    run_ranks(sum_over_holders_matches_dense, world_size)


def dtypes_move():
    group = groups.model_group()
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        whole = (randoms((5, 6), 1) * 3).to(dtype)
        own = ops.scatter(whole, 1)
        same(ops.gather(own, 1), whole, f"gather {dtype}", exact=True)
        if dtype == torch.bool:
            continue
        ones = torch.ones_like(whole)
        same(ops.reduce(ones), ones * group.size, f"reduce {dtype}", exact=True)
        part = ops.reduce_scatter(ones, 0)
        same(part, ops.scatter(ones * group.size, 0), f"rs {dtype}", exact=True)
        if dtype.is_floating_point:
            x = whole.clone().requires_grad_()
            ops.copy(x).sum().backward()
            same(x.grad, ones * group.size, f"copy {dtype}", exact=True)
    scalar = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ops.copy(ops.reduce(scalar)).backward()
    same(scalar.grad, torch.tensor(1.0 * group.size, dtype=torch.float64), "scalar")
    assert ops.reduce(scalar) == 2.0 * group.size


@pytest.mark.parametrize("world_size", [1, 3])
def test_half_integers_and_scalars_move(world_size):
    """Every dtype moves exactly, and a 0-dim tensor is copied and reduced."""
    run_ranks(dtypes_move, world_size)


def reduce_leaves_its_argument():
    group = groups.model_group()
    sizes = group.size
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = ops.reduce(x)
    assert x.tolist() == [1.0, 2.0]
    assert y.tolist() == [1.0 * sizes, 2.0 * sizes]
    z = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    ops.reduce(z.exp()).backward(torch.tensor([2.0, 3.0], dtype=torch.float64))
    same(z.grad, z.detach().exp() * torch.tensor([2.0, 3.0]), "exp")
    strided = torch.arange(6.0).reshape(2, 3)[:, 1]
    assert ops.reduce(strided).tolist() == [1.0 * sizes, 4.0 * sizes]


def test_reduce_leaves_its_argument_alone():
    """R9: the argument and what its backward saved keep their values."""
    run_ranks(reduce_leaves_its_argument, 2)


def shared_gradients_stay_apart():
    group = groups.model_group()
    a = torch.ones(2, requires_grad=True)
    (ops.copy(a) + a).backward(torch.full((2,), group.rank + 1.0))
    assert a.grad.tolist() == [4.0 + group.rank] * 2
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    given = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        (a + ops.reduce(b)).backward(given)
    assert a.grad.tolist() == b.grad.tolist() == [2.0, 4.0, 6.0]
    assert given.tolist() == [1.0, 2.0, 3.0]
    ops.copy(c := torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert c.grad.tolist() == [[2.0] * 3] * 2


def test_gradients_shared_with_other_branches_are_not_written():
    """R10: `copy(a) + a` gets 4 and 5 on ranks 0 and 1; accumulation leaves cotangents alone."""
    run_ranks(shared_gradients_stay_apart, 2)


def uneven_rows_gather():
    group = groups.model_group()
    whole = randoms((sum(range(1, group.size + 1)), 2), 2)
    own = whole.split(list(range(1, group.size + 1)))[group.rank].clone()
    same(ops.gather(own, 0), whole, "rows", exact=True)
    empty = own[:0] if group.rank else own
    same(ops.gather(empty, 0), whole[:1], "all but rank 0 empty", exact=True)
    same(ops.gather(own[:0], 0), whole[:0], "all empty", exact=True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_rows_are_gathered_in_rank_order(world_size):
    """R11: ranks may have different numbers of rows, or none."""
    run_ranks(uneven_rows_gather, world_size)


def pooled_batch_is_one_batch():
    """DDP's average of the ranks' gradients is the gradient of the whole batch's loss."""
    group = groups.model_group()
    size, rank = group.size, group.rank
    lengths = [2 + r for r in range(size)]
    x, t = randoms((sum(lengths), 3), 1), randoms((sum(lengths), 4), 2)
    weight, head = randoms((5, 3), 3).requires_grad_(), randoms((4, 5), 4)
    head = head.requires_grad_()
    loss = ((x @ weight.T).tanh() @ head.T - t).square().sum()
    loss.backward()

    mine = weight.detach().clone().requires_grad_()
    h = (x.split(lengths)[rank] @ mine.T).tanh()
    pool = ops.enter_model_parallel(h)
    shard = ops.scatter(head.detach(), 0).requires_grad_()
    logits = ops.gather(ops.copy(pool) @ shard.T, -1)
    (logits - t).square().sum().backward()
    averaged = ops.reduce(mine.grad) / size
    same(averaged, weight.grad, "backbone")
    same(shard.grad, ops.scatter(head.grad, 0), "head")

    # Back to a loss of each rank's own samples: the shards see the mean of the losses.
    own = head.detach().clone().requires_grad_()
    mine = weight.detach().clone().requires_grad_()
    pool = ops.enter_model_parallel((x.split(lengths)[rank] @ mine.T).tanh())
    shard = ops.scatter(own, 0).detach().requires_grad_()
    logits = ops.gather(ops.copy(pool) @ shard.T, -1)
    local = ops.leave_model_parallel(logits, ranges=ranges_of_lengths(lengths))
    assert torch.relu_(local.clone()).shape == local.shape
    (local - t.split(lengths)[rank]).square().sum().backward()
    same(shard.grad * size, ops.scatter(head.grad, 0), "head, local losses")
    same(ops.reduce(mine.grad), weight.grad, "backbone, local losses")


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_pooled_batch_trains_like_one_process(world_size):
    """R1, R2: under an averaging wrapper, enter and leave give the whole batch's gradients."""
    run_ranks(pooled_batch_is_one_batch, world_size)


def gather_knows_batches():
    group = groups.model_group()
    size = group.size
    for dim, grad, factor in [
        (0, None, size),
        (-1, None, 1),
        (-2, None, 1),
        (0, "whole", 1),
        (0, "batch", size),
        (0, "shards", size),
    ]:
        x = torch.ones(2, 2, requires_grad=True)
        whole = ops.gather(x, dim, grad=grad)
        whole.backward(torch.ones_like(whole))
        assert x.grad.tolist() == [[factor] * 2] * 2, (dim, grad)
    ranges = ranges_of_lengths([2] * size)
    x = torch.ones(2, 2, requires_grad=True)
    ops.gather(x, 0, ranges=ranges).sum().backward()
    assert x.grad.tolist() == [[1.0] * 2] * 2


def test_gather_takes_dim_0_of_a_plain_tensor_for_a_batch():
    """Without `grad`, only a plain tensor gathered along the literal 0 gets R x its slice."""
    run_ranks(gather_knows_batches, 3)


def round_trip():
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    pool = ops.gather(x, 0)
    w = torch.ones(4, 3, dtype=torch.float64)
    shard = ops.scatter(w, 0).requires_grad_()
    v = ops.scatter(torch.ones(5, 4, dtype=torch.float64), 1).requires_grad_()
    y = ops.reduce((ops.copy(pool) @ shard.T) @ v.T)
    loss = ops.leave_model_parallel(y).mean()
    loss.backward()
    dense = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    whole_x = torch.ones(2, 3, dtype=torch.float64)
    (whole_x @ dense.T @ torch.ones(4, 5, dtype=torch.float64)).mean().backward()
    same(shard.grad, ops.scatter(dense.grad, 0), "column shard")
    out = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    (whole_x @ torch.ones(3, 4, dtype=torch.float64) @ out.T).mean().backward()
    same(v.grad, ops.scatter(out.grad, 1), "row shard")


def test_gather_column_row_leave_round_trip_has_factor_one():
    """R2: gather(0), column, row and back to local losses gives shards the mean gradient."""
    run_ranks(round_trip, 2)


def double_backward_through_an_mlp():
    group = groups.model_group()
    x0, w0, v0 = randoms((3, 5), 1), randoms((7, 5), 2), randoms((2, 7), 3)

    def penalty(x, w, v, enter, leave):
        y = leave(torch.tanh(enter(x) @ w.T) @ v.T)
        (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return grad.square().sum()

    x, w, v = (t.clone().requires_grad_() for t in (x0, w0, v0))
    dense = torch.autograd.grad(penalty(x, w, v, lambda t: t, lambda t: t), (x, w, v))
    x = x0.clone().requires_grad_()
    w = ops.scatter(w0, 0).requires_grad_()
    v = ops.scatter(v0, 1).requires_grad_()
    loss = penalty(x, w, v, ops.copy, ops.reduce)
    mine = torch.autograd.grad(loss, (x, w, v))
    same(mine[0], dense[0], "x")
    same(
        mine[1],
        take(dense[1], 0, balanced_ranges(7, group.size).per_rank[group.rank]),
        "w",
    )
    same(
        mine[2],
        take(dense[2], 1, balanced_ranges(7, group.size).per_rank[group.rank]),
        "v",
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradient_penalty_of_a_column_row_pair(world_size):
    """The gradient of a gradient's norm equals dense."""
    run_ranks(double_backward_through_an_mlp, world_size)


def reduce_in_place():
    size = groups.get_world_size()
    x = torch.arange(6.0).reshape(2, 3)
    assert ops.reduce_(x) is x
    assert x.tolist() == [[0.0, size, 2.0 * size], [3.0 * size, 4.0 * size, 5.0 * size]]
    y = torch.ones(3, 4)
    ops.reduce_(y[:, 1])
    assert y[:, 1].tolist() == [size] * 3
    assert y[:, 0].tolist() == [1.0] * 3
    weight = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        ops.reduce_(weight)
    assert weight.tolist() == [size] * 2
    with pytest.raises(LayoutError) as error:
        ops.reduce_(weight)
    saved = torch.ones(2)
    out = weight * saved
    ops.reduce_(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return str(error.value)


def test_reduce_in_place_refuses_what_autograd_saved():
    """`reduce_` writes only outside autograd, and a graph that saved the tensor notices."""
    assert run_ranks(reduce_in_place, 2)[0] == (
        "reduce_ was given a tensor that requires grad; writing into it would make its"
        " gradient wrong. Use reduce(x), which returns the sum."
    )


def group_of_one_is_free():
    x = randoms((3, 4), 1).requires_grad_()
    with CommDebugMode() as counted:
        for op in (
            ops.copy,
            ops.reduce,
            ops.total,
            ops.scatter,
            ops.gather,
            ops.all_gather,
            ops.reduce_scatter,
            ops.enter_model_parallel,
            ops.leave_model_parallel,
        ):
            assert op(x) is x, op
        assert ops.all_to_all(x, 0, 1) is x
    assert counted.get_total_counts() == 0


def test_a_group_of_one_returns_its_argument():
    """Alone, every op is the identity and no collective runs, with or without a launcher."""
    group_of_one_is_free()
    run_ranks(group_of_one_is_free, 1)


def count(op, x, cot=True):
    with CommDebugMode() as forward:
        y = op(x)
    with CommDebugMode() as backward:
        y.sum().backward()
    return forward.get_total_counts(), backward.get_total_counts()


def collectives_are_counted():
    ranges = balanced_ranges(6, groups.get_world_size())
    whole = randoms((4, 6), 1)
    own = ops.scatter(whole, 1)
    kw = {"dim": 1, "ranges": ranges}
    return {
        "copy": count(ops.copy, whole.clone().requires_grad_()),
        "reduce": count(ops.reduce, whole.clone().requires_grad_()),
        "scatter": count(ops.scatter, whole.clone().requires_grad_()),
        "gather": count(partial(ops.gather, **kw), own.clone().requires_grad_()),
        "gather, sizes unknown": count(ops.gather, own.clone().requires_grad_()),
        "all_gather": count(
            partial(ops.all_gather, **kw), own.clone().requires_grad_()
        ),
        "reduce_scatter": count(ops.reduce_scatter, whole.clone().requires_grad_()),
    }


def test_each_op_costs_the_collectives_that_its_table_names():
    """(forward, backward) numbers of collectives; known ranges save exchanging sizes."""
    assert run_ranks(collectives_are_counted, 2)[0] == {
        "copy": (0, 1),
        "reduce": (1, 0),
        "scatter": (0, 1),
        "gather": (1, 0),
        "gather, sizes unknown": (2, 0),
        "all_gather": (1, 1),
        "reduce_scatter": (1, 1),
    }


def messages():
    x = torch.ones(2, 3)
    group = groups.model_group()
    two = balanced_ranges(6, 2)
    marked = ShardedTensor.from_local(x, 1, ranges=two)
    wrong = [
        (ShapeError, lambda: ops.scatter(x, 1, ranges=two)),
        (ShapeError, lambda: ops.reduce_scatter(x, 1, ranges=two)),
        (ShapeError, lambda: ops.gather(x[:, :1], 1, ranges=two)),
        (LayoutError, lambda: ops.gather(x, 1, ranges=balanced_ranges(6, 3))),
        (LayoutError, lambda: ops.gather(x, 1, grad="slice")),
        (LayoutError, lambda: ops.all_to_all(x, 1, -1)),
        (
            LayoutError,
            lambda: ops.all_to_all(
                x, 1, 0, join_ranges=Ranges(2, (((0, 2),), ((0, 2),)))
            ),
        ),
        (ShardedOpError, lambda: ops.reduce(marked)),
        (ShapeError, lambda: ops.gather(marked, 0)),
    ]
    found = []
    for kind, call in wrong:
        with pytest.raises(kind) as error:
            call()
        found.append(str(error.value))
    for op in (
        ops.copy,
        ops.reduce_,
        ops.total,
        ops.scatter,
        ops.reduce_scatter,
        ops.enter_model_parallel,
        ops.leave_model_parallel,
        partial(ops.all_to_all, split_dim=0, join_dim=1),
        partial(ops.sum_over_holders, dim=1, ranges=two),
    ):
        with pytest.raises(ShardedOpError):
            op(marked)
    assert group.size == 2
    return found


def test_errors_are_raised_before_the_collective():
    """Wrong sizes, groups, words and marked tensors are refused with the remedy."""
    expected = [
        "x has size 3 in dim 1; the split is of 6 indices. Pass the whole tensor.",
        "x has size 3 in dim 1; the split is of 6 indices. Pass the whole tensor.",
        "x has size 1 in dim 1; rank 0 holds 3 of the 6 indices that are split. Pass this"
        " rank's shard.",
        "ranges split a dim over 3 ranks; the group has 2. Make them for the group that"
        " holds the shards.",
        "grad='slice' is not a way back. Expected 'whole', 'shards' or 'batch'.",
        "split_dim=1 and join_dim=-1 are the same dim. Expected two: the one that becomes"
        " sharded and the one that becomes whole.",
        "all_to_all was given ranges that overlap; each index needs one holder. Use"
        " all_gather and scatter.",
        "reduce: dim 1 of this tensor, 6 indices, is spread over 2 ranks, and reduce has"
        " no rule for sharded tensors. Call torchshard.distributed.gather(x) first for the"
        " whole tensor, or x.to_local() to work on this rank's shard alone.",
        "dim=0 is not the dim along which this tensor is sharded, 1. Leave it out, or pass"
        " 1.",
    ]
    found = run_ranks(messages, 2)
    assert found[0] == expected
    assert [re.sub("rank 1", "rank 0", text) for text in found[1]] == expected
