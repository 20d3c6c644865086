"""Reductions and softmax of sharded activations, over the sharded dim and over others."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sharded_cases import close, marked, places, randoms, same_as_dense
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups
from torchshard.errors import ShardedOpError
from torchshard.layout import (
    Axis,
    Segment,
    balanced_ranges,
    covering,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.tensor import whole
from torchshard.testing.ranks import run_ranks

WORLDS = [2, 4]
INF = float("inf")


def over_every_dim(shape, dim):
    """The dims to reduce: the sharded one alone, others, several, all."""
    yield dim
    yield dim - len(shape)
    yield from (d for d in range(len(shape)) if d != dim)
    yield (0, 1)
    yield tuple(range(len(shape)))


def bytes_of(x):
    return (x.abs() * 9).to(torch.uint8)


def sums():
    for place in places(groups.get_world_size()):
        name, shape, dim, _ = place
        table = {
            "sum": torch.sum,
            "mean": torch.mean,
            "sum method": lambda x, **kw: x.sum(**kw),
            "mean dtype": partial(torch.mean, dtype=torch.float32),
            "sum of ints": lambda x, **kw: (x * 9).int().sum(**kw),
            "sum of bools": lambda x, **kw: (x > 0).sum(**kw),
            "norm": lambda x, **kw: x.norm(**kw),
            "vector_norm": torch.linalg.vector_norm,
            "1-norm": partial(torch.linalg.vector_norm, ord=1),
            "3-norm": lambda x, **kw: torch.norm(x, 3, **kw),
            "logsumexp": torch.logsumexp,
        }
        extremes = {
            "max-norm": partial(torch.linalg.vector_norm, ord=INF),
            "amax": torch.amax,
            "amin": lambda x, **kw: x.amin(**kw),
            "amax of ints": lambda x, **kw: (x * 9).int().amax(**kw),
            "amin of bytes": lambda x, **kw: bytes_of(x).amin(**kw),
            "amax of bools": lambda x, **kw: (x > 0).amax(**kw),
        }
        if 0 not in shape:
            table |= extremes
        for label, function in table.items():
            for dims in over_every_dim(shape, dim):
                if not isinstance(dims, int) and len(dims) > 2 and "norm" in label:
                    continue  # torch.norm takes one dim, two or all
                for keepdim in (False, True):
                    call = partial(function, dim=dims, keepdim=keepdim)
                    tolerance = 1e-6 if "dtype" in label else 1e-10
                    case = f"{label} over {dims} on {name}"
                    same_as_dense(call, place, case, tolerance=tolerance)
            if label not in ("logsumexp", "mean dtype"):
                same_as_dense(function, place, f"{label} of all on {name}")
        same_as_dense(lambda x: x.sum(axis=1, keepdims=True), place, f"axis on {name}")
        same_as_dense(lambda x: [x.sum(()), x.mean(dim=[])], place, f"() on {name}")
        same_as_dense(lambda x, d=dim: x.sum(d, True), place, f"positional on {name}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_norms_and_extremes_match_dense(world_size):
    """Values and gradients over each dim, several and all, kept or dropped."""
    run_ranks(sums, world_size)


def extremes(x, dim):
    return [x.amax(dim), x.amin(dim), x.max(), x.min(), x.max(dim), x.argmin(dim)]


def extremes_alone(x, dim):
    return extremes(x.detach(), dim)


def choices():
    for place in places(groups.get_world_size()):
        name, shape, dim, _ = place
        for d in range(len(shape)):
            if not shape[d]:
                continue
            table = {
                "max": lambda x, d=d: x.max(d),
                "max kept": lambda x, d=d: torch.max(x, dim=d, keepdim=True),
                "min": lambda x, d=d: x.min(d - x.dim()),
                "argmax": lambda x, d=d: x.argmax(d),
                "argmin kept": lambda x, d=d: torch.argmin(x, d, keepdim=True),
                "argmax axis": lambda x, d=d: torch.argmax(x, axis=d),
                "topk": lambda x, d=d: x.topk(2, d),
                "topk smallest": lambda x, d=d: x.topk(
                    min(3, x.shape[d]), d, largest=False
                ),
                "topk all": lambda x, d=d: torch.topk(x, x.shape[d], dim=d),
                "max of ties": lambda x, d=d: x.sign().max(d),
                "argmin of ties": lambda x, d=d: x.sign().argmin(d),
                "max of ints": lambda x, d=d: (x * 2).int().max(d),
            }
            for label, function in table.items():
                same_as_dense(function, place, f"{label} over {d} on {name}")
        if 0 not in shape:
            same_as_dense(lambda x: [x.max(), x.min()], place, f"max of all on {name}")
            ties = randoms(shape, 1).sign()
            same_as_dense(
                partial(extremes, dim=dim), place, f"tied extremes on {name}", x=ties
            )


@pytest.mark.parametrize("world_size", WORLDS)
def test_choices_match_dense(world_size):
    """max, argmax and topk give whole indices, the first of ties, and dense gradients."""
    run_ranks(choices, world_size)


def softmaxes():
    table = {
        "softmax": torch.softmax,
        "log_softmax": torch.log_softmax,
        "F.softmax": F.softmax,
        "F.log_softmax": F.log_softmax,
        "method": lambda x, dim: x.softmax(dim),
        "axis": lambda x, dim: x.log_softmax(axis=dim),
        "dtype": lambda x, dim: F.softmax(x.float(), dim, dtype=torch.float64),
        "positional dtype": lambda x, dim: torch.log_softmax(x, dim, torch.float64),
    }
    for place in places(groups.get_world_size()):
        name, shape, dim, _ = place
        for d in (*range(len(shape)), dim - len(shape)):
            for label, function in table.items():
                call = partial(function, dim=d)
                tolerance = 1e-6 if label == "dtype" else 1e-10
                case = f"{label} over {d} on {name}"
                same_as_dense(call, place, case, tolerance=tolerance)
        if 0 in shape:
            continue
        hard = {
            "large": randoms(shape, 1) + 1e6,
            "spread": randoms(shape, 1) * 1e3,
            "some -inf": randoms(shape, 1).masked_fill(randoms(shape, 2) > 0.5, -INF),
            "all -inf": torch.full(shape, -INF, dtype=torch.float64),
            "an inf": inf_at_first(shape, INF),
            "a nan": inf_at_first(shape, float("nan")),
        }
        for label, x in hard.items():
            for function in (torch.softmax, torch.log_softmax, torch.logsumexp):
                call = partial(function, dim=dim)
                case = f"{function.__name__} of {label} on {name}"
                same_as_dense(call, place, case, x=x)
            if label == "all -inf":
                continue
            call = partial(extremes, dim=dim)
            if label == "a nan":  # torch's own gradient is nan for some, 1 for others
                call = partial(extremes_alone, dim=dim)
            same_as_dense(call, place, f"extremes of {label} on {name}", x=x)


def inf_at_first(shape, value):
    x = randoms(shape, 1)
    x[(0,) * len(shape)] = value
    return x


@pytest.mark.parametrize("world_size", [1, 3])
def test_softmax_and_logsumexp_match_dense(world_size):
    """Over each dim, with large offsets, -inf, inf and nan entries: values and gradients."""
    run_ranks(softmaxes, world_size)


def normalized():
    for place in places(groups.get_world_size()):
        for d in range(len(place[1])):
            for order in (1, 2.0, 3) if 0 in place[1] else (1, 2.0, float("inf")):
                call = partial(F.normalize, p=order, dim=d)
                same_as_dense(call, place, f"normalize {order} of dim {d}, {place[0]}")
        call = partial(F.normalize, dim=place[2])
        zeros = torch.zeros(place[1], dtype=torch.float64)
        same_as_dense(call, place, f"normalize of 0, {place[0]}", x=zeros)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_normalize_matches_dense(world_size):
    """Over the sharded dim and over others, for several norms: values and gradients."""
    run_ranks(normalized, world_size)


def norms_of_nothing():
    for place in places(groups.get_world_size()):
        zeros = torch.zeros(place[1], dtype=torch.float64)
        for order in (0.5, 1, 2, 3):
            call = partial(torch.linalg.vector_norm, ord=order, dim=place[2])
            same_as_dense(call, place, f"{order}-norm of 0 on {place[0]}", x=zeros)


def test_the_gradient_of_a_norm_at_zero_is_zero():
    """As torch's, and no nan."""
    run_ranks(norms_of_nothing, 2)


def half_precision():
    ranges = balanced_ranges(80_000, groups.get_world_size())
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 80_000), 3.0, dtype=dtype)
        y = marked(x, 1, ranges)
        for name, function in {
            "softmax": lambda x: x.softmax(1),
            "log_softmax": lambda x: x.log_softmax(1),
            "logsumexp": lambda x: x.logsumexp(1),
            "mean": lambda x: x.mean(1),
            "norm": lambda x: (x * 10).norm(dim=1),
            "sum": lambda x: (x / 16).sum(1),
        }.items():
            # torch.cat refuses float16 under bfloat16 autocast on the CPU.
            for autocast in (False, True) if dtype == torch.bfloat16 else (False,):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    mine, dense = whole(function(y)), function(x)
                exact = function(
                    x.double()
                )  # torch's own half log_softmax is -inf here
                assert mine.dtype == dense.dtype, (name, dtype, autocast)
                tolerance = 2 * torch.finfo(dtype).eps
                close(mine.double(), exact, f"{name} of {dtype}", tolerance)


def test_half_precision_is_summed_in_float32():
    """R8d: 80 000 equal classes overflow no half-precision sum; autocast's dtype is torch's."""
    run_ranks(half_precision, 2)


def double_backward():
    for place in places(groups.get_world_size()):
        _, shape, dim, ranges = place
        if 0 in shape:
            continue
        for function in (torch.softmax, torch.log_softmax, torch.logsumexp, torch.sum):
            results = []
            for is_dense in (True, False):
                x = randoms(shape, 1).requires_grad_()
                y = function(x if is_dense else marked(x, dim, ranges), dim=dim)
                c = randoms(whole(y).shape, 2)
                loss = (whole(y) * c).sin().sum()
                (grad,) = torch.autograd.grad(loss, x, create_graph=True)
                (second,) = torch.autograd.grad(grad.square().sum(), x)
                results += [grad.detach(), second]
            close(results[2], results[0], f"{function.__name__} on {place[0]}")
            close(results[3], results[1], f"{function.__name__} twice on {place[0]}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_softmax_and_sums_are_differentiable_twice(world_size):
    """The gradient of the gradient's norm equals dense."""
    run_ranks(double_backward, world_size)


def shared_units():
    heads = covering(Axis(6), 3)
    ranges = ranges_of(Segment("kv", 2), {"kv": heads}, 3)
    place = ("shared", (3, 4), 1, ranges)
    assert ranges.overlaps
    same_as_dense(lambda x: x * 2 + x, place, "elementwise")
    same_as_dense(lambda x, y: x * y, place, "with whole", randoms((3, 4), 2))
    same_as_dense(lambda x, y: x * y, place, "with a row", randoms((3, 1), 2))
    same_as_dense(lambda x: x.sum(0), place, "sum over rows")
    same_as_dense(lambda x: x.view(3, 2, 2).softmax(-1), place, "softmax inside a unit")
    y = marked(randoms((3, 4), 1), 1, ranges)
    messages = []
    for call in (
        lambda: y.sum(),
        lambda: y.mean(1),
        lambda: y.softmax(1),
        lambda: y.logsumexp(1),
        lambda: y.topk(2),
        lambda: y.argmax(1),
        lambda: y.max(1),
        lambda: y.amax(),
        lambda: y.norm(),
    ):
        with pytest.raises(ShardedOpError) as error:
            call()
        messages.append(str(error.value))
    return messages[0]


def test_units_that_several_ranks_hold_are_not_counted_twice():
    """Overlapping shards work elementwise with dense gradients; reducing over them raises."""
    assert run_ranks(shared_units, 3)[0] == (
        "sum: dim 1 of this tensor, 4 indices, is spread over 3 ranks, and sum would count"
        " indices that several ranks hold twice. Call torchshard.distributed.gather(x)"
        " first for the whole tensor, or x.to_local() to work on this rank's shard alone."
    )


def counts():
    found = {}
    for name, function in {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "sum": lambda x: x.sum(1),
        "mean of all": lambda x: x.mean(),
        "norm": lambda x: x.norm(),
        "amax": lambda x: x.amax(1),
        "topk": lambda x: x.topk(2)[0],
        "sum over rows": lambda x: x.sum(0),
    }.items():
        local = marked(randoms((3, 5), 1), 1, balanced_ranges(5, 2)).to_local()
        y = marked_local(local.requires_grad_())
        with CommDebugMode() as forward:
            z = function(y)
        z = z.to_local() if hasattr(z, "to_local") else z
        with CommDebugMode() as backward:
            z.backward(torch.ones_like(z))
        found[name] = (forward.get_total_counts(), backward.get_total_counts())
    return found


def marked_local(local):
    from torchshard.tensor import ShardedTensor

    return ShardedTensor.from_local(local, 1, ranges=balanced_ranges(5, 2))


def test_reductions_cost_the_fewest_collectives():
    """(forward, backward) numbers of collectives; over other dims there are none."""
    assert run_ranks(counts, 2)[0] == {
        "softmax": (2, 1),
        "log_softmax": (2, 1),
        "logsumexp": (2, 0),
        "sum": (1, 0),
        "mean of all": (1, 0),
        "norm": (1, 0),
        "amax": (2, 0),
        "topk": (2, 0),
        "sum over rows": (0, 0),
    }


def beyond_the_size():
    y = marked(randoms((3, 5), 1), 1, ranges_of_lengths([5, 0]))
    none = marked(torch.ones(0, 5), 1, ranges_of_lengths([5, 0]))
    for call in (
        lambda: y.topk(6),
        lambda: none.amax(),
        lambda: none.max(),
        lambda: none.argmax(0),
        lambda: (y * 2).int().mean(),
        lambda: (y * 2).int().softmax(1),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            call()


def test_errors_of_torch_are_raised_on_every_rank():
    """What dense torch refuses is refused on all ranks, also by those with an empty shard."""
    run_ranks(beyond_the_size, 2, timeout_s=20)
