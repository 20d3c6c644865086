"""A class-parallel classifier with its loss, against torch's linear and cross-entropy."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from sharded_cases import close, randoms
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import collectives, groups
from torchshard.errors import LayoutError, ShapeError, TargetError
from torchshard.layout import balanced_ranges, ranges_of_lengths
from torchshard.nn.functional import parallel_linear_cross_entropy
from torchshard.testing import run_ranks

# Leading dims of the input, dims of the outputs, classes.
HEADS = [((6,), (), 7), ((), (), 5), ((3,), (2, 2), 4), ((2,), (3,), 3), ((0,), (), 4)]
FEATURES = 3


def own(x, ranges):
    return collectives.own_shard(x, 0, ranges, groups.model_group()).clone()


def targets_of(lead, outputs, classes, soft):
    generator = torch.Generator().manual_seed(3)
    if soft:
        return randoms((*lead, classes, *outputs), 2).softmax(len(lead))
    target = torch.randint(0, classes, (*lead, *outputs), generator=generator)
    if target.dim() and target.numel():
        target.view(-1)[0] = -100
    return target


def dense_losses(x, head, bias, target, scale, **options):
    """Torch's loss, with the z-loss, and the rows' logsumexp."""
    flat_bias = None if bias is None else bias.flatten()
    logits = F.linear(x, head.flatten(0, -2), flat_bias)
    logits = logits.view(*x.shape[:-1], *head.shape[:-1])
    lse = logits.logsumexp(x.dim() - 1)
    live = torch.ones_like(lse, dtype=torch.bool)
    if not target.is_floating_point():
        live = target != -100
    z_loss = torch.where(live, scale * lse.square(), 0)
    loss = F.cross_entropy(logits, target, **options)
    if options["reduction"] == "mean":
        return loss + z_loss.sum() / live.sum(), lse
    return loss + (z_loss.sum() if options["reduction"] == "sum" else z_loss), lse


def compare(head, soft, scale, biased, options, chunk_bytes, lengths):
    """Loss, logsumexp and the gradients of input, weight and bias; to 1e-12."""
    case = f"{head}, {soft}, {scale}, {biased}, {options}, {chunk_bytes}, {lengths}"
    lead, outputs, classes = head
    ranges = ranges_of_lengths(lengths)
    weight = randoms((classes, *outputs, FEATURES), 2)
    wholes = [randoms((*lead, FEATURES), 1), weight]
    wholes += [randoms((classes, *outputs), 4)] if biased else []
    shards = [wholes[0].clone(), *(own(x, ranges) for x in wholes[1:])]
    dense = [x.clone().requires_grad_() for x in wholes]
    mine = [x.requires_grad_() for x in shards]
    target = targets_of(lead, outputs, classes, soft)
    bias = dense[2] if biased else None
    want = dense_losses(*dense[:2], bias, target, scale, **options)
    have = parallel_linear_cross_entropy(
        *mine[:2],
        target,
        linear_bias=mine[2] if biased else None,
        lse_square_scale=scale,
        return_lse=True,
        chunk_bytes=chunk_bytes,
        ranges=ranges,
        **options,
    )
    cots = [randoms(part.shape, 5 + place) for place, part in enumerate(want)]
    want_grads = torch.autograd.grad(want, dense, cots)
    have_grads = torch.autograd.grad(have, mine, cots)
    wanted = [want_grads[0], *(own(grad, ranges) for grad in want_grads[1:])]
    for one, other in zip((*have, *have_grads), (*want, *wanted), strict=True):
        close(one.detach(), other.detach(), case, 1e-12)


def every_option():
    size = groups.get_world_size()
    for head, reduction, smoothing, weighted, soft, scale, biased in product(
        HEADS,
        ("mean", "sum", "none"),
        (0.0, 0.3),
        (False, True),
        (False, True),
        (0.0, 0.1),
        (False, True),
    ):
        classes = head[2]
        options = {
            "weight": randoms((classes,), 3).abs() if weighted else None,
            "reduction": reduction,
            "label_smoothing": smoothing,
        }
        even = balanced_ranges(classes, size).lengths
        skewed = [0] * (size - 1) + [classes]
        for lengths, chunk_bytes in ((even, None if biased else 8), (skewed, 200)):
            compare(head, soft, scale, biased, options, chunk_bytes, lengths)


@pytest.mark.parametrize(
    "world_size", [1, 2, *(pytest.param(n, marks=pytest.mark.prove) for n in (3, 4))]
)
def test_every_option_and_chunk_size_matches_dense(world_size):
    """Soft and class targets x weight x smoothing x bias x K dims x chunks, to 1e-12."""
    run_ranks(every_option, world_size)


def small_call(**changes):
    """Loss of a head of 10 classes with one argument changed."""
    ranges = balanced_ranges(10, groups.get_world_size())
    given = {
        "input": randoms((4, FEATURES), 1),
        "linear_weight": own(randoms((10, FEATURES), 2), ranges),
        "target": torch.tensor([0, 9, 3, -100]),
    }
    given = {name: changes.pop(name, value) for name, value in given.items()}
    return parallel_linear_cross_entropy(*given.values(), **changes)


def wrong_arguments():
    found = []
    for kind, changes in [
        (ShapeError, {"input": randoms((4, 2), 1)}),
        (ShapeError, {"target": torch.tensor([1, 2])}),
        (ShapeError, {"linear_bias": torch.zeros(1)}),
        (ShapeError, {"ranges": balanced_ranges(4, groups.get_world_size())}),
        (TargetError, {"target": torch.tensor([0, 10, 3, 1])}),
        (LayoutError, {"input": randoms((4, FEATURES), 1).float()}),
        (LayoutError, {"reduction": "average"}),
        (
            LayoutError,
            {"target": randoms((4, 10), 1).softmax(1).requires_grad_()},
        ),
    ]:
        with pytest.raises(kind) as error:
            small_call(**changes)
        found.append(str(error.value))
    x = randoms((4, FEATURES), 1).requires_grad_()
    (grad,) = torch.autograd.grad(small_call(input=x), x)
    assert grad.shape == x.shape
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(small_call(input=x), x, create_graph=True)
    return found


def test_wrong_arguments_raise_before_the_collective():
    """Shapes, dtypes, targets and options: the same error on all ranks, before any wait."""
    found = run_ranks(wrong_arguments, 2, timeout_s=20)
    assert found[0] == [text.replace("rank 1", "rank 0") for text in found[1]]
    assert found[0][0] == (
        "input has shape (4, 2); expected (N, 3) or (3,), as linear_weight has shape (5, 3)."
    )
    assert found[0][5] == (
        "input is torch.float32 and linear_weight torch.float64. Expected one dtype, or"
        " torch.autocast."
    )


def counted():
    ranges = balanced_ranges(10, 2)
    x = randoms((4, FEATURES), 1).requires_grad_()
    weight = own(randoms((10, FEATURES), 2), ranges).requires_grad_()
    options = {
        "label_smoothing": 0.1,
        "lse_square_scale": 0.1,
        "weight": randoms((10,), 3).abs(),
        "chunk_bytes": 64,
    }
    with CommDebugMode() as forward:
        loss = parallel_linear_cross_entropy(
            x, weight, torch.tensor([0, 9, 3, -100]), ranges=ranges, **options
        )
    with CommDebugMode() as backward:
        loss.backward(retain_graph=True)
    before = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * before)
    return forward.get_total_counts(), backward.get_total_counts()


def test_one_collective_forward_and_the_input_gradients_backward():
    """Whatever the options and the number of chunks; a second backward adds the same."""
    assert run_ranks(counted, 2) == [(1, 1), (1, 1)]


def half_head():
    size = groups.get_world_size()
    for dtype, autocast in product((torch.bfloat16, torch.float16), (False, True)):
        ranges = balanced_ranges(9, size)
        x, weight = randoms((5, 8), 1), randoms((9, 8), 2)
        target = torch.tensor([0, 8, 4, 4, 2])
        given = torch.float32 if autocast else dtype
        mine = x.to(given).requires_grad_(), own(weight, ranges).to(given)
        mine[1].requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast):
            loss = parallel_linear_cross_entropy(
                *mine, target, ranges=ranges, chunk_bytes=64
            )
        exact = [v.to(dtype).double().requires_grad_() for v in (x, weight)]
        want = F.cross_entropy(F.linear(*exact), target)
        loss.backward()
        want.backward()
        assert loss.dtype == (torch.float32 if autocast else dtype)
        assert [v.grad.dtype for v in mine] == [given, given]
        eps = torch.finfo(dtype).eps
        close(loss.double(), want, f"{dtype}, {autocast}", 4 * eps)
        close(mine[0].grad.double(), exact[0].grad, f"{dtype}, {autocast}, x", 4 * eps)
        whole = own(exact[1].grad, ranges)
        close(mine[1].grad.double(), whole, f"{dtype}, {autocast}, w", 4 * eps)


@pytest.mark.parametrize("world_size", [1, 3])
def test_half_heads_and_autocast_use_float32_statistics(world_size):
    """Logits are rounded to the compute dtype, as by a linear layer, and nothing else is."""
    run_ranks(half_head, world_size)


def input_gradients():
    ranges = balanced_ranges(10, groups.get_world_size())
    x = randoms((4, FEATURES), 1).requires_grad_()
    weight = own(randoms((10, FEATURES), 2), ranges)
    small = parallel_linear_cross_entropy(
        x, weight, torch.tensor([0, 9, 3, -100]), ranges=ranges
    )
    small.backward()
    first = collectives.broadcast(x.grad, groups.model_group())
    assert torch.equal(x.grad, first)


def test_t08_the_input_gradient_is_whole_on_every_rank():
    """T08: it is summed over the ranks once, by the all-reduce of backward, and bit for bit equal."""
    run_ranks(input_gradients, 3)


def test_targets_and_weights_that_change_before_backward_raise():
    """They are saved as torch saves them, whose version it knows."""
    for changed in ("weight", "target"):
        given = {
            "weight": randoms((10,), 3).abs(),
            "target": randoms((4, 10), 4).softmax(1),
        }
        x = randoms((4, FEATURES), 1).requires_grad_()
        loss = small_call(input=x, label_smoothing=0.1, **given)
        given[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_for_a_chunk_is_positive():
    """Zero and less are refused, not taken for one class a chunk."""
    with pytest.raises(LayoutError, match="chunk_bytes=0; expected at least 1"):
        small_call(chunk_bytes=0)
