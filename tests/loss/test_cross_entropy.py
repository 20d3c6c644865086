"""Cross-entropy over a sharded class dim, against torch's on the whole logits."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_cases import close, marked, randoms
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups
from torchshard.errors import LayoutError, ShapeError, ShardedOpError, TargetError
from torchshard.layout import (
    Axis,
    Segment,
    balanced_ranges,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.loss import rows
from torchshard.nn.functional import parallel_cross_entropy
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 2, 4]
INF = float("inf")
SHAPES = [(6, 7), (7,), (2, 7, 3), (2, 5, 2, 3), (3, 2), (0, 5)]


def class_dim(shape):
    return 0 if len(shape) == 1 else 1


def splits(classes, size):
    """Even or nearly, empty shards, and all the classes on the last rank."""
    yield balanced_ranges(classes, size)
    yield ranges_of_lengths([0] * (size - 1) + [classes])


def targets_of(shape, seed, ignored):
    dim = class_dim(shape)
    rows = shape[:dim] + shape[dim + 1 :]
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, shape[dim], rows, generator=generator)
    if ignored < 0 and target.numel():
        target.view(-1)[::3] = ignored
    return target


def compare(x, target, ranges, options, case, tolerance=1e-12, loss=F.cross_entropy):
    """Loss and logits' gradient of a shard and of the whole, for an awkward cotangent."""
    dim = class_dim(x.shape)
    dense, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.cross_entropy(dense, target, **options)
    actual = loss(marked(mine, dim, ranges), target, **options)
    assert type(actual) is torch.Tensor, case
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), case
    close(actual.detach(), expected.detach(), case, tolerance)
    cot = randoms(expected.shape, 5, expected.dtype)
    if cot.dim() > 1:
        cot = cot[:1].expand(cot.shape).transpose(0, -1).contiguous().transpose(0, -1)
    elif cot.dim():
        cot = cot[:1].expand(cot.shape)
    kept = cot.clone()
    actual.backward(cot)
    expected.backward(cot)
    close(mine.grad, dense.grad, f"{case}, gradient", tolerance)
    assert torch.equal(cot, kept), case


def z_lossed(x, target, scale, **options):
    """Torch's loss of the whole logits, with the z-loss, and the rows' logsumexp."""
    loss = F.cross_entropy(x, target, **options)
    lse = x.logsumexp(class_dim(x.shape))
    live = target != options["ignore_index"]
    if target.is_floating_point():
        live = torch.ones_like(lse, dtype=torch.bool)
    z_loss = torch.where(live, scale * lse.square(), 0)
    if options["reduction"] == "mean":
        return loss + z_loss.sum() / live.sum(), lse
    return loss + (z_loss.sum() if options["reduction"] == "sum" else z_loss), lse


def compare_extended(x, target, ranges, options, case, inplace):
    """Loss and logsumexp, gradients to logits and probabilities, and gradients of those."""
    soft = target.is_floating_point()
    dense, mine = (
        [x.clone().requires_grad_(), target.clone().requires_grad_(soft)]
        for _ in range(2)
    )
    want = z_lossed(*dense, **options)
    logits = marked(mine[0], class_dim(x.shape), ranges) * 1
    have = parallel_cross_entropy(
        logits,
        mine[1],
        lse_square_scale=options["scale"],
        return_lse=True,
        inplace=inplace,
        **{name: value for name, value in options.items() if name != "scale"},
    )
    dense, mine = dense[: 1 + soft], mine[: 1 + soft]
    cots = [
        randoms(part.shape, 5 + place).requires_grad_()
        for place, part in enumerate(want)
    ]
    want_grads = torch.autograd.grad(want, dense, cots, create_graph=True)
    have_grads = torch.autograd.grad(have, mine, cots, create_graph=not inplace)
    for one, other in zip((*have, *have_grads), (*want, *want_grads), strict=True):
        close(one.detach(), other.detach(), case, 1e-12)
    if inplace:
        return
    again = [randoms(grad.shape, 9 + place) for place, grad in enumerate(want_grads)]
    unused = {"allow_unused": True, "materialize_grads": True}
    second = torch.autograd.grad(want_grads, [*dense, *cots], again, **unused)
    found = torch.autograd.grad(have_grads, [*mine, *cots], again, **unused)
    for one, other in zip(found, second, strict=True):
        close(one, other, f"{case}, second order", 1e-11)


def extended_options():
    size = groups.get_world_size()
    for shape, reduction, smoothing, weighted, soft, (scale, inplace) in product(
        SHAPES[:3],
        ("mean", "sum", "none"),
        (0.0, 0.3, 1.0),
        (False, True),
        (False, True),
        ((0.0, False), (0.1, False), (0.1, True)),
    ):
        dim = class_dim(shape)
        target = targets_of(shape, 2, -100)
        if soft:
            target = randoms(shape, 2).softmax(dim)
        options = {
            "weight": randoms((shape[dim],), 3).abs() if weighted else None,
            "ignore_index": -100,
            "reduction": reduction,
            "label_smoothing": smoothing,
            "scale": scale,
        }
        for ranges in splits(shape[dim], size):
            case = f"{shape} as {ranges.lengths}, {options}, {soft}, {inplace}"
            compare_extended(randoms(shape, 1), target, ranges, options, case, inplace)


@pytest.mark.parametrize(
    "world_size", [2, *[pytest.param(n, marks=pytest.mark.prove) for n in (1, 3)]]
)
def test_probabilities_z_loss_logsumexp_and_second_order_match_dense(world_size):
    """Class and soft targets x weight x smoothing x reduction x z-loss x in place, to 1e-12."""
    run_ranks(extended_options, world_size)


def every_option():
    size = groups.get_world_size()
    for shape, reduction, smoothing, weighted, ignored in product(
        SHAPES, ("mean", "sum", "none"), (0.0, 0.3, 1.0), (False, True), (-100, -1, 1)
    ):
        classes = shape[class_dim(shape)]
        weight = randoms((classes,), 3).abs() if weighted else None
        options = {
            "weight": weight,
            "ignore_index": ignored,
            "reduction": reduction,
            "label_smoothing": smoothing,
        }
        x, target = randoms(shape, 1), targets_of(shape, 2, ignored)
        for ranges in splits(classes, size):
            case = f"{shape} as {ranges.lengths}, {options}"
            compare(x, target, ranges, options, case)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_option_matches_dense(world_size):
    """R4, R7, R8, R8b, R8c, T01, T09, T11: reduction x smoothing x weight x ignore_index."""
    run_ranks(every_option, world_size)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    offset=st.sampled_from([0.0, 1e6, -1e6]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def compare_any_numbers(
    rows, lengths, seed, scale, offset, smoothing, weighted, reduction
):
    classes = sum(lengths)
    x = randoms((rows, classes), seed) * scale + offset
    target = targets_of((rows, classes), seed, -100)
    weight = randoms((classes,), seed + 1).abs() if weighted else None
    options = {
        "weight": weight,
        "label_smoothing": smoothing,
        "reduction": reduction,
    }
    case = f"{rows} x {lengths}, seed {seed}, {scale}, {offset}, {options}"
    compare(x, target, ranges_of_lengths(lengths), options, case, tolerance=1e-9)


def any_numbers():
    compare_any_numbers()


def test_any_split_scale_and_offset_matches_dense():
    """T04: random uneven splits, tiny to large logits, offsets of a million."""
    run_ranks(any_numbers, 3)


def hard_logits():
    size = groups.get_world_size()
    shape, target = (4, 6), torch.tensor([0, 5, 2, 3])
    x = randoms(shape, 1)
    first, last, target_gone, all_gone = (x.clone() for _ in range(4))
    first[:, 1:3] = -INF
    last[:, 4] = -INF
    target_gone[1, 5] = -INF
    all_gone[2] = -INF
    an_inf, a_nan = x.clone(), x.clone()
    an_inf[0, 3], a_nan[3, 1] = INF, float("nan")
    ignore_all = torch.full((4,), -100)
    first[2, 2] = 0.5
    for name, logits in {
        "first shard gone": first,
        "one class gone": last,
        "a target gone": target_gone,
        "a row gone": all_gone,
        "an inf": an_inf,
        "a nan": a_nan,
    }.items():
        for smoothing, reduction in product((0.0, 0.2), ("mean", "none")):
            options = {"label_smoothing": smoothing, "reduction": reduction}
            for ranges in splits(6, size):
                compare(logits, target, ranges, options, f"{name}, {options}")
    for smoothing, reduction, weight in product(
        (0.0, 0.2), ("mean", "sum", "none"), (None, randoms((6,), 3).abs())
    ):
        options = {
            "label_smoothing": smoothing,
            "reduction": reduction,
            "weight": weight,
        }
        for ranges in splits(6, size):
            compare(x, ignore_all, ranges, options, f"all ignored, {options}")
    zero = {"weight": torch.zeros(6, dtype=torch.float64)}
    compare(x, target, balanced_ranges(6, size), zero, "weights of 0")
    signed = {"weight": randoms((6,), 3), "label_smoothing": 0.2, "reduction": "sum"}
    compare(x, target, balanced_ranges(6, size), signed, "weights of both signs")
    perfect = torch.full(shape, -1e4, dtype=torch.float64)
    perfect[torch.arange(4), target] = 1e4
    compare(perfect, target, balanced_ranges(6, size), {}, "T12: losses of 0")
    compare(x, target.byte(), balanced_ranges(6, size), {}, "byte targets")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_infinite_logits_and_ignored_batches_match_dense(world_size):
    """-inf and inf logits, nan, an all-ignored batch (nan as torch's) and weights of 0."""
    run_ranks(hard_logits, world_size)


def half_inputs():
    size = groups.get_world_size()
    for dtype, scale in product((torch.bfloat16, torch.float16), (1.0, 30.0)):
        x = (randoms((5, 9), 1) * scale).to(dtype)
        target = targets_of((5, 9), 2, -100)
        for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
            for autocast in (False, True):
                exact, mine = x.float().requires_grad_(), x.clone().requires_grad_()
                want = F.cross_entropy(exact, target, **options)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    have = F.cross_entropy(
                        marked(mine, 1, balanced_ranges(9, size)), target, **options
                    )
                    dense = F.cross_entropy(x, target, **options)
                case = f"{dtype} {options} {autocast}"
                assert have.dtype == dense.dtype, case
                eps = torch.finfo(have.dtype).eps
                close(have.float(), want, case, 2 * eps)
                cot = randoms(want.shape, 3, torch.float32).to(have.dtype)
                have.backward(cot)
                want.backward(cot.float())
                assert mine.grad.dtype == dtype
                close(mine.grad.float(), exact.grad, case, torch.finfo(dtype).eps)
    many = marked(torch.full((2, 80_000), 1.0).half(), 1, balanced_ranges(80_000, size))
    loss = F.cross_entropy(many, torch.tensor([0, 79_999]))
    close(loss.double(), torch.tensor(math.log(80_000)).double(), "80 000", 1e-3)


@pytest.mark.parametrize("world_size", [2, 3])  # alone, torch's own loss is inf
def test_half_logits_use_float32_maths(world_size):
    """R8d: the float32 loss, rounded once, in torch's own dtype with and without autocast."""
    run_ranks(half_inputs, world_size)


def left_alone():
    y = marked(randoms((3, 5), 1), 1, balanced_ranges(5, 2))
    before, sharding = y.to_local().clone(), y.sharding
    leaf = y.detach().requires_grad_()
    target, weight = torch.tensor([0, 4, -100]), randoms((5,), 2).abs()
    kept = (target.clone(), weight.clone())
    with CommDebugMode() as forward:
        loss = nn.CrossEntropyLoss(weight, label_smoothing=0.1)(leaf, target)
    with CommDebugMode() as backward:
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(leaf.to_local(), before)
    assert leaf.sharding == sharding
    assert torch.equal(target, kept[0])
    assert torch.equal(weight, kept[1])
    leaf.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_after_write(leaf)
    return forward.get_total_counts(), backward.get_total_counts()


def loss_after_write(leaf):
    y = leaf * 1
    loss = F.cross_entropy(y, torch.tensor([0, 4, 1]))
    y.mul_(2)
    loss.backward()


def test_one_collective_forward_none_backward_and_nothing_is_written():
    """T03: logits, targets and weights keep their values, also over two backwards."""
    assert run_ranks(left_alone, 2) == [(1, 0), (1, 0)]


def gathered_logits():
    x, target = randoms((3, 5), 1), torch.tensor([0, 4, 2])
    y = marked(x.clone().requires_grad_(), 1, balanced_ranges(5, 2))
    for logits in (y.gather(), x):
        for loss in (F.cross_entropy, parallel_cross_entropy):
            close(loss(logits, target), F.cross_entropy(x, target), "gathered")
    legacy = F.cross_entropy(y, target, None, False)
    with pytest.warns(UserWarning, match="size_average"):
        want = F.cross_entropy(x, target, None, False)
    close(legacy, want, "size_average")


def test_whole_logits_go_to_torch():
    """R6: a gathered tensor is plain, and its loss is not reduced over the ranks."""
    run_ranks(gathered_logits, 2)


def errors():
    group = groups.model_group()
    y = marked(randoms((3, 5), 1), 1, ranges_of_lengths([5, 0]))
    rows = marked(randoms((3, 5), 1), 0, balanced_ranges(3, 2))
    packed = ranges_of([Segment("x")] * 2, {"x": Axis(2)}, 2)
    good = torch.tensor([0, 1, 2])
    wrong = [
        (TargetError, y, torch.tensor([0, 5, 1]), {}),
        (TargetError, y, torch.tensor([0, -3, 1]), {"ignore_index": 2}),
        (IndexError, y, torch.tensor([0, -100, 1]), {"ignore_index": 2}),
        (ShapeError, y, good[:2], {}),
        (ShapeError, y, good, {"weight": torch.ones(3)}),
        (LayoutError, y, good, {"weight": torch.ones(5, requires_grad=True)}),
        (LayoutError, y, good, {"reduction": "average"}),
        (LayoutError, y, good, {"label_smoothing": 1.5}),
        (ShardedOpError, rows, good, {}),
        (ShardedOpError, marked(randoms((3, 4), 1), 1, packed), good, {}),
        (ShapeError, y, randoms((3, 4), 2), {}),
        (LayoutError, y, randoms((3, 5), 2), {"ignore_index": 1}),
        (ShardedOpError, y, rows, {}),
    ]
    found = []
    for kind, logits, target, options in wrong:
        with pytest.raises(kind) as error:
            parallel_cross_entropy(logits, target, **options)
        found.append(str(error.value))
    assert group.size == 2
    return found


REMEDY = (
    "Call torchshard.distributed.gather(x) first for the whole tensor, or x.to_local() to"
    " work on this rank's shard alone."
)


def test_errors_are_alike_on_all_ranks():
    """R16, T37: wrong targets, shapes and options raise before the collective, everywhere."""
    found = run_ranks(errors, 2, timeout_s=20)
    assert found[0] == found[1]
    assert found[0] == [
        "target holds 5, which is out of range. Expected indices from 0 to 4, or"
        " ignore_index=-100.",
        "target holds -3, which is out of range. Expected indices from 0 to 4, or"
        " ignore_index=2.",
        "target holds -100, which is out of range. Expected indices from 0 to 4, or"
        " ignore_index=2.",
        "target has shape (2,); logits of whole shape (3, 5) need (3,).",
        "weight has shape (3,); expected one weight for each of the 5 classes, whole on"
        " every rank.",
        "weight requires grad, and cross-entropy has no gradient for it. Pass"
        " weight.detach().",
        "reduction='average' is unknown. Expected none, mean or sum.",
        "label_smoothing=1.5 is out of range. Expected 0 to 1.",
        "cross_entropy: dim 0 of this tensor, 3 indices, is spread over 2 ranks, and"
        f" cross_entropy needs the classes, dim 1, sharded. {REMEDY}",
        "cross_entropy: dim 1 of this tensor, 4 indices, is spread over 2 ranks, and"
        f" cross_entropy needs the classes, dim 1, sharded. {REMEDY}",
        "target has shape (3, 4); probabilities for logits of whole shape (3, 5) need the"
        " same shape.",
        "ignore_index=1 is not supported for probabilities. Leave it out, or give class"
        " indices.",
        "cross_entropy: dim 0 of this tensor, 3 indices, is spread over 2 ranks, and"
        f" cross_entropy needs the target sharded as the logits are. {REMEDY}",
    ]


def lost_marks():
    x, target = randoms((4, 6), 1), torch.tensor([0, 5, 2, 3])
    y = marked(x, 1, balanced_ranges(6, 2))
    want = F.cross_entropy(x, target)
    for name, logits in {
        "times": y * 1,
        "view": y.view(4, -1),
        "clone": y.clone(),
        "dtype": y.float().double(),
        "transposed twice": y.t().t(),
    }.items():
        assert isinstance(logits, ShardedTensor)
        close(nn.CrossEntropyLoss()(logits, target), want, name, 1e-6)
    close(F.nll_loss(y.log_softmax(1), target), want, "in two steps")


def test_the_loss_finds_the_mark_after_other_operations():
    """R5: logits that were scaled, viewed, cloned or cast give the dense loss."""
    run_ranks(lost_marks, 2)


def blocks_of_rows(block):
    rows._CPU_BLOCK = block
    generator = torch.Generator().manual_seed(9)
    group = ts.distributed.model_group()
    for shape in ((7, 5), (3, 5, 4)):
        dense = torch.randn(shape, generator=generator, dtype=torch.float64)
        target = torch.randint(5, (shape[0], *shape[2:]), generator=generator)
        weight = torch.rand(5, generator=generator, dtype=torch.float64)
        options = {"weight": weight, "label_smoothing": 0.2}
        whole_logits, leaf = dense.clone().requires_grad_(), dense.requires_grad_()
        expected = F.cross_entropy(whole_logits, target, **options)
        expected.backward()
        ranges = ts.ranges_of("c", {"c": ts.Axis(5)}, group.size)
        shard = ts.distributed.scatter(leaf, 1, ranges=ranges)
        sharded = ts.ShardedTensor.from_local(shard, 1, ranges=ranges)
        loss = ts.nn.functional.parallel_cross_entropy(sharded, target, **options)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(leaf.grad, whole_logits.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [1, 7, 10**9])
def test_rows_taken_in_blocks_give_the_loss_of_all(block):
    """Statistics of one row, of some or of all rows at a time are the same."""
    run_ranks(blocks_of_rows, 3, block)


@st.composite
def problems(draw):
    """A random problem: shapes, split and every option; the numbers follow from a seed."""
    lengths = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any))
    inner = draw(st.sampled_from([(), (2,), (1, 3)]))
    rows = draw(st.integers(0, 4))
    batched = draw(st.booleans()) or bool(inner)
    return {
        "lengths": lengths,
        "inner": inner,
        "rows": (rows,) if batched else (),
        "seed": draw(st.integers(0, 2**20)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "scale": draw(st.sampled_from([0.1, 1.0, 30.0])),
        "soft": draw(st.booleans()),
        "weighted": draw(st.booleans()),
        "inplace": draw(st.booleans()),
        "ignored": draw(st.sampled_from([-100, -1, 0])),
        "smoothing": draw(st.sampled_from([0.0, 0.1, 0.7, 1.0])),
        "z": draw(st.sampled_from([0.0, 0.01])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
    }


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def compare_any_problem(problem):
    size = groups.get_world_size()
    lengths = problem["lengths"][: size - 1]
    lengths = [*lengths, sum(problem["lengths"][size - 1 :])]
    shape = (*problem["rows"], max(1, sum(lengths)), *problem["inner"])
    if not sum(lengths):
        lengths[-1] = 1
    dim, seed, dtype = class_dim(shape), problem["seed"], problem["dtype"]
    x = (randoms(shape, seed) * problem["scale"]).to(dtype)
    ignored = -100 if problem["soft"] else problem["ignored"]
    target = targets_of(shape, seed, ignored)
    if problem["soft"]:
        target = randoms(shape, seed + 1).softmax(dim).to(dtype)
    weight = randoms((shape[dim],), seed + 2).abs().to(dtype)
    options = {
        "weight": weight if problem["weighted"] else None,
        "ignore_index": ignored,
        "reduction": problem["reduction"],
        "label_smoothing": problem["smoothing"],
    }
    dense, mine = (x.clone().requires_grad_() for _ in range(2))
    want = z_lossed(dense, target, problem["z"], **options)
    have = parallel_cross_entropy(
        marked(mine, dim, ranges_of_lengths(lengths)) * 1,
        target,
        lse_square_scale=problem["z"],
        return_lse=True,
        inplace=problem["inplace"],
        **options,
    )
    cots = [randoms(part.shape, 5 + place, dtype) for place, part in enumerate(want)]
    want_grad = torch.autograd.grad(want, dense, cots)
    have_grad = torch.autograd.grad(have, mine, cots)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip((*have, *have_grad), (*want, *want_grad), strict=True):
        scale = (
            max(1.0, float(other.detach().abs().nan_to_num().max()))
            if other.numel()
            else 1
        )
        close(one.detach() / scale, other.detach() / scale, str(problem), tolerance)


def any_problem():
    compare_any_problem()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_problem_matches_dense(world_size):
    """T04, T06: the cross product of shapes, splits and options at random, in both precisions."""
    run_ranks(any_problem, world_size)


def cheaper_collectives():
    rows._GATHERED_BYTES = 0
    compare_any_problem()
    y = marked(randoms((3, 5), 1).requires_grad_(), 1, balanced_ranges(5, 3))
    with CommDebugMode() as mode:
        F.cross_entropy(y, torch.tensor([0, 4, 2]), label_smoothing=0.1)
    return mode.get_total_counts()


def test_many_rows_on_many_ranks_take_two_all_reduces():
    """Where one all-gather would move more bytes: the same numbers, two collectives."""
    assert run_ranks(cheaper_collectives, 3) == [2, 2, 2]


def other_softmax():
    """A log-softmax beside the loss keeps its own gradient; nothing is patched."""
    before = F.cross_entropy, F.log_softmax, torch.Tensor.log_softmax
    x, target = randoms((4, 6), 1), torch.tensor([0, 5, 2, 3])
    cot = randoms((4, 6), 2)
    dense, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = marked(mine, 1, balanced_ranges(6, groups.get_world_size()))
    with pytest.raises(TargetError):
        F.cross_entropy(y, target + 6)
    loss = (
        F.cross_entropy(y, target)
        + (y.log_softmax(1) * marked(cot, 1, y.sharding.ranges)).sum()
    )
    want = F.cross_entropy(dense, target) + (dense.log_softmax(1) * cot).sum()
    loss.backward()
    want.backward()
    close(mine.grad, dense.grad, "both")
    assert before == (F.cross_entropy, F.log_softmax, torch.Tensor.log_softmax)


def test_t07_other_softmaxes_keep_their_gradients():
    """T07: the loss patches nothing, also after an error."""
    run_ranks(other_softmax, 2)


def inplace_logits():
    x = randoms((4, 6), 1)
    ranges = balanced_ranges(6, groups.get_world_size())
    target = torch.tensor([0, 5, 2, 3])
    leaf = marked(x, 1, ranges).to_local().clone().requires_grad_()
    head = leaf * 1
    y = ShardedTensor.from_local(head, 1, ranges=ranges)
    kept = head.detach().clone()
    loss = parallel_cross_entropy(y, target, inplace=True)
    assert torch.equal(head.detach(), kept)  # forward writes nothing
    loss.backward(retain_graph=True)
    assert torch.equal(
        head.detach(), leaf.grad
    )  # the gradient is where the logits were
    with pytest.raises(RuntimeError, match="there cannot be a second"):
        loss.backward()
    wide = marked(x, 1, ranges).to_local()[:, :1].expand(4, 3).requires_grad_()
    before = wide.detach().clone()
    parallel_cross_entropy(
        ShardedTensor.from_local(wide, 1), target, inplace=True
    ).backward()
    assert torch.equal(wide.detach(), before)  # places that share memory are left alone
    saved = head.detach().clone().requires_grad_()
    z = ShardedTensor.from_local((saved * 1).exp(), 1, ranges=ranges)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        # exp keeps its result for its own backward, which meets a gradient in its place
        parallel_cross_entropy(z, target, inplace=True).backward()


def test_inplace_puts_the_gradient_where_the_logits_were():
    """Forward writes nothing; a second backward, and others that kept the logits, raise."""
    run_ranks(inplace_logits, 2)


def odd_arguments():
    size = groups.get_world_size()
    x = marked(randoms((3, 300), 1), 1, balanced_ranges(300, size))
    target = torch.tensor([100, 45, 1], dtype=torch.uint8)
    want = F.cross_entropy(ts.distributed.gather(x), target.long())
    close(parallel_cross_entropy(x, target), want, "a class that is -ignore_index")
    few = marked(randoms((3, 100), 1), 1, balanced_ranges(100, size))
    with pytest.raises(TargetError, match="holds 156"):
        parallel_cross_entropy(few, torch.tensor([156, 1, 2], dtype=torch.uint8))
    with pytest.raises(LayoutError, match="logits are floating-point"):
        parallel_cross_entropy(
            marked(torch.zeros(3, 7).long(), 1, balanced_ranges(7, size)), target % 7
        )
    with pytest.raises(LayoutError, match="its own gradient"):
        parallel_cross_entropy(
            nn.Parameter(torch.zeros(3, 7)), target % 7, inplace=True
        )


def test_bytes_are_indices_and_integers_no_logits():
    """In uint8 the -100 of ignore_index is 156: targets are widened before they are compared."""
    run_ranks(odd_arguments, 2, timeout_s=20)


def test_overlapping_logits_are_not_written_to():
    """Windows of one buffer share memory without a stride of 0."""
    buffer, target = randoms((7,), 1).requires_grad_(), torch.arange(5) % 3
    twin = buffer.detach().clone().requires_grad_()
    parallel_cross_entropy(
        buffer.mul(2).unfold(0, 3, 1), target, inplace=True
    ).backward()
    F.cross_entropy(twin.mul(2).unfold(0, 3, 1), target).backward()
    close(buffer.grad, twin.grad, "windows")
