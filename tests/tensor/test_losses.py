"""Losses of divided operands: as of whole tensors, or an error before any collective."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules
from sharded_cases import close, marked, randoms
from torchshard.distributed import groups
from torchshard.errors import ShapeError, ShardedOpError, TargetError
from torchshard.layout import balanced_ranges
from torchshard.testing.ranks import run_ranks

_ = None
BOTH = {(0, 0), (1, 1), (0, _), (_, 1)}
REDUCTIONS = ("none", "sum", "mean")
LABELS = torch.tensor([2, 0, 4, 1, 0])
SIGNS = torch.tensor([[1.0, -1, 1], [-1, -1, 1], [1, 1, 1], [-1, 1, -1]]).double()
PROBABILITIES = torch.rand(4, 3, generator=torch.Generator().manual_seed(3)).double()
WEIGHTS = torch.tensor([0.5, 2, 1, 3, 0.25]).double()


def by_reduction(name, *operands, needed, prepare=lambda x: x, **options):
    """A case for each reduction of a loss whose first operand is prepared."""
    for reduction in (*REDUCTIONS, *(["batchmean"] if name == "kl_div" else [])):

        def loss(x, *rest, reduction=reduction):
            call = getattr(F, name)
            return call(prepare(x), *rest, reduction=reduction, **options)

        yield f"{name} {reduction} {options}", (loss, list(operands), needed)


def elementwise():
    x = (4, 3)
    for name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"):
        yield from by_reduction(name, x, x, needed=BOTH)
    yield from by_reduction("smooth_l1_loss", x, x, needed=BOTH, beta=0.0)
    for log_target in (False, True):
        given = {"needed": BOTH, "log_target": log_target}
        yield from by_reduction("kl_div", x, PROBABILITIES, **given)
    yield from by_reduction(
        "binary_cross_entropy",
        x,
        PROBABILITIES,
        PROBABILITIES + 1,
        needed={(0, _, _), (1, 1, _), (0, 0, 0)},
        prepare=torch.sigmoid,
    )
    yield from by_reduction(
        "binary_cross_entropy_with_logits", x, PROBABILITIES, needed=BOTH
    )
    yield from by_reduction("poisson_nll_loss", x, PROBABILITIES, needed=BOTH)
    yield from by_reduction("soft_margin_loss", x, SIGNS, needed=BOTH)
    yield from by_reduction("hinge_embedding_loss", x, SIGNS, needed=BOTH)
    yield from by_reduction(
        "margin_ranking_loss", x, x, SIGNS, needed={(0, 0, _), (1, _, _), (_, _, 1)}
    )
    weighted = {(0, _, _), (1, 1, 1), (_, _, 0)}
    for name in ("mse_loss", "huber_loss"):
        call = getattr(F, name)
        for reduction in REDUCTIONS:

            def loss(x, y, w, call=call, reduction=reduction):
                return call(x, y, weight=w, reduction=reduction)

            yield f"weighed {name} {reduction}", (loss, [x, x, (4, 3)], weighted)


def positive_weights(x, target, weight):
    return F.binary_cross_entropy_with_logits(x, target, pos_weight=weight)


def of_samples():
    x, needed = (5, 5), {(0, _), (0, 0), (_, 0)}
    yield from by_reduction("nll_loss", x, LABELS, needed=needed | {(1, _)})
    yield from by_reduction("nll_loss", x, LABELS, needed=needed, ignore_index=0)
    yield from by_reduction("cross_entropy", x, LABELS, needed=needed)
    yield from by_reduction(
        "cross_entropy", x, LABELS, needed=needed, label_smoothing=0.2, ignore_index=0
    )
    for name in ("nll_loss", "cross_entropy"):
        yield from by_reduction(
            name, x, LABELS, WEIGHTS, needed={(0, _, _), (0, 0, _), (_, 0, _)}
        )
    images = torch.stack([LABELS[:3], LABELS[2:]])
    for name in ("nll_loss", "cross_entropy"):
        yield from by_reduction(
            name, (2, 5, 3), images, needed={(0, _), (2, _), (2, 1), (0, 0)}
        )
    yield from by_reduction("multi_margin_loss", x, LABELS, needed=needed)
    ids = torch.stack([LABELS - 1] * 5)
    yield from by_reduction("multilabel_margin_loss", x, ids, needed=needed)
    yield from by_reduction(
        "cosine_embedding_loss",
        x,
        x,
        SIGNS.flatten()[:5],
        needed={(0, 0, _), (_, _, 0), (0, 0, 0)},
    )
    yield from by_reduction(
        "triplet_margin_loss", x, x, x, needed={(0, _, _), (0, 0, 0)}
    )


def one_class_weight():
    """Weights divided with the classes, and a target of one sample without a batch."""
    for reduction in REDUCTIONS:

        def loss(x, target, weight, reduction=reduction):
            return F.nll_loss(x, target, weight, reduction=reduction)

        given = [(5, 5), LABELS, WEIGHTS]
        yield f"nll_loss {reduction}", (loss, given, {(1, _, 0), (1, _, _)})
    yield "nll_loss of one", (F.nll_loss, [(5,), LABELS[0]], {(0, _)})


def sequences():
    targets = torch.tensor([[1, 2], [2, 1], [1, 0], [1, 2]])
    lengths = torch.full((4,), 6), torch.tensor([2, 2, 1, 2])
    log_probs = randoms((6, 4, 3), 1).log_softmax(-1).requires_grad_()
    given = [log_probs, targets, *lengths]
    return {"ctc_loss": (F.ctc_loss, given, {(1, _, _, _), (1, 0, 0, 0)})}


def losses_hold():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides")
        expect_rules(dict(elementwise()))
    pos_weight = {
        "pos_weight": (positive_weights, [(4, 3), PROBABILITIES, WEIGHTS[:3]], BOTH3)
    }
    expect_rules({**pos_weight, **dict(of_samples()), **dict(one_class_weight())})
    if groups.get_world_size() <= 2:
        expect_rules(sequences())  # four samples, of which no rank may have none


BOTH3 = {(0, _, _), (1, _, _), (1, 1, 0)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_of_divided_operands(world_size):
    """All reductions, weights and ignored targets; refused, never wrong, on other ways."""
    run_ranks(losses_hold, world_size)


def compiles():
    cases = {
        "mse_loss": (F.mse_loss, [(4, 3), (4, 3)], BOTH),
        "nll_loss": (F.nll_loss, [(5, 5), LABELS], {(1, _)}),
    }
    expect_compiled(cases, "mse_loss", (1, _))
    expect_compiled(cases, "nll_loss", (1, _))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def curvature(loss, x, y):
    """The gradient of the squared gradient of a loss."""
    (grad,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


def twice_differentiable():
    for loss in (F.mse_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
        x, y = randoms((4, 3), 1).requires_grad_(), PROBABILITIES
        for dim in (0, 1):
            ranges = balanced_ranges(x.shape[dim], groups.get_world_size())

            def divided(x, y, loss=loss, dim=dim, ranges=ranges):
                return loss(marked(x, dim, ranges), y)

            close(curvature(divided, x, y), curvature(loss, x, y), loss.__name__)


def test_double_backward():
    """The gradient of a gradient is that of whole tensors."""
    run_ranks(twice_differentiable, 3)


def refusals():
    x = marked(randoms((4, 3), 1), 1, balanced_ranges(3, 2))
    rows = marked(randoms((4, 3), 1), 0, balanced_ranges(4, 2))
    target = marked(torch.tensor([0, 1, 2, 3]), 0, balanced_ranges(4, 2))
    whole = randoms((4, 3), 2)
    for expected, call in (
        (ShapeError, lambda: F.binary_cross_entropy(x, whole[:, :1])),
        (ShapeError, lambda: F.mse_loss(x, whole, weight=whole[:, :1])),
        (ShardedOpError, lambda: F.l1_loss(x, whole, weight=whole.abs())),
        (ShardedOpError, lambda: F.multi_margin_loss(x, LABELS[:4] % 3)),
        (ShardedOpError, lambda: F.cross_entropy(whole, LABELS[:4] % 3, x[0])),
        (TargetError, lambda: F.nll_loss(rows, target)),  # 3 is a class on one rank
        (TargetError, lambda: F.nll_loss(x, LABELS[:4])),
        (ShardedOpError, lambda: torch.kl_div(x, whole)),
    ):
        with pytest.raises(expected):
            call()


def test_what_is_refused_is_refused_on_all_ranks():
    """Shapes that differ, targets out of range, a weight that torch loses on its way."""
    run_ranks(refusals, 2)
