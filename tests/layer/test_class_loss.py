"""ClassLoss and MarginHead: what they refuse, and the split that they name."""

import pytest
import torch
import torchshard as ts
from torch import nn
from torchshard.errors import LayoutError, ShapeError
from torchshard.testing import run_ranks

from layer_zoo import (
    ParallelArcFace,
    ParallelCrossEntropyLoss,
    ParallelLinearCrossEntropyLoss,
)

ROWS, CLASSES, FEATURES = 4, 7, 5


class RowsGiven(ts.ClassLoss):
    """Puts together what it is given."""

    def __init__(self, weight=None, reduction="mean"):
        super().__init__(ts.loss.Criterion(2, reduction))
        self.declare_loss(weight)

    def local_forward(self, rows, target):
        return self.put_together(rows, target)


WEIGHT = torch.tensor([1.0, 3.0, 5.0])


@pytest.mark.parametrize(
    ("weight", "reduction", "expected"),
    [
        (None, "none", [10.0, 0.0, 30.0]),
        (None, "sum", 40.0),
        (None, "mean", 20.0),
        (WEIGHT, "none", [10.0, 0.0, 90.0]),
        (WEIGHT, "sum", 100.0),
        (WEIGHT, "mean", 25.0),
    ],
)
def test_rows_are_weighted_and_put_together(weight, reduction, expected):
    """A mean is that of the weights; an ignored row counts for nothing, though it were nan."""
    rows, target = torch.tensor([10.0, float("nan"), 30.0]), torch.tensor([0, 2, 1])
    loss = RowsGiven(weight, reduction)(rows, target)
    assert torch.equal(loss, torch.tensor(expected))


@pytest.mark.parametrize(
    "target",
    [torch.zeros(2, dtype=torch.long), torch.zeros(3, 1).long(), torch.ones(3)],
)
def test_rows_without_a_class_each_are_refused(target):
    """Nothing is broadcast, and probabilities are no classes."""
    with pytest.raises(ShapeError, match="expected one class for each row of"):
        RowsGiven()(torch.ones(3), target)


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (
            lambda: ParallelCrossEntropyLoss(reduction="average"),
            LayoutError,
            "reduction='average'",
        ),
        (
            lambda: ParallelArcFace(FEATURES, CLASSES, reduction="average"),
            LayoutError,
            "reduction='average'",
        ),
        (
            lambda: ParallelCrossEntropyLoss(label_smoothing=1.5),
            LayoutError,
            "label_smoothing=1.5",
        ),
        (
            lambda: ParallelCrossEntropyLoss(torch.ones(2, 3)),
            ShapeError,
            r"weight has shape \(2, 3\)",
        ),
        (
            lambda: ParallelLinearCrossEntropyLoss(
                FEATURES, CLASSES, weight=torch.ones(CLASSES + 2)
            ),
            ShapeError,
            r"weight has shape \(9,\); expected one weight for each of the 7",
        ),
        (
            lambda: ParallelCrossEntropyLoss(nn.Parameter(torch.ones(3))),
            LayoutError,
            "weight requires grad",
        ),
    ],
)
def test_options_are_refused_where_the_loss_is_built(build, kind, message):
    """Not in the first step, and not after a collective."""
    with pytest.raises(kind, match=message):
        build()


def test_class_weights_keep_their_dtype_and_come_back_with_a_reset():
    """Of a loss of logits, whose only tensor they are."""
    loss = ParallelCrossEntropyLoss(WEIGHT.double())
    assert loss.weight.dtype == torch.float64
    loss.weight.zero_()
    loss.reset_parameters()
    assert torch.equal(loss.weight, WEIGHT.double())


def divided_by_a_plan():
    torch.manual_seed(0)
    dense = nn.LinearCrossEntropyLoss(FEATURES, CLASSES, weight=torch.rand(CLASSES))
    x, target = torch.randn(ROWS, FEATURES), torch.arange(ROWS)
    want = dense(x, target)
    model = ts.parallelize(nn.ModuleDict({"head": dense}), {"head": "classes"})
    assert model["head"].split == "classes"
    assert len(model["head"].linear.weight) < CLASSES
    torch.testing.assert_close(model["head"](x, target), want)


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="from torch 2.13 on"
)
def test_a_plan_divides_a_classifier_with_its_loss_by_classes():
    """The word is the split's name, which the class declares."""
    run_ranks(divided_by_a_plan, 2)


def test_the_losses_name_their_split():
    """One that is always taken: they have no `dim`."""
    assert ParallelCrossEntropyLoss().split == "classes"
    assert ParallelLinearCrossEntropyLoss(FEATURES, CLASSES).dim is None
