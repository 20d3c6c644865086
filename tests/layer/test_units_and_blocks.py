"""Units, packed blocks and units that serve others, in every layer that divides features."""

import pytest
import torch
import torchshard as ts
from torch import nn
from torchshard.testing import Case, Floats, check_layer, run_ranks


def linear(*sizes, inputs=(3,), **sharding):
    return Case(
        ts.nn.ParallelLinear,
        nn.Linear,
        args=sizes,
        sharding=sharding,
        inputs=[Floats((*inputs, sizes[0]))],
    )


def conv(**sharding):
    return Case(
        ts.nn.ParallelConv2d,
        nn.Conv2d,
        args=(12, 24, (3, 2)),
        options={"padding": (1, 0)},
        sharding=sharding,
        inputs=[Floats((2, 12, 4, 5))],
    )


CASES = [
    # 6 heads of 2 on 4 ranks: two ranks hold one more
    linear(5, 12, dim=1, unit=2),
    linear(5, 36, dim="column", unit=2, blocks=3),
    # fewer units than ranks: the last ranks hold nothing
    linear(5, 12, dim=1, unit=6),
    linear(5, 24, dim=1, unit=4, blocks=2, inputs=(2, 3)),
    # 8 query heads of 2; key/value heads that serve 4 and, apart, 2 each
    linear(5, 4, dim=1, unit=2, serves=4),
    linear(5, 24, dim=1, unit=2, blocks=(16, 4, 4), serves=(1, 4, 4)),
    linear(5, 12, dim=1, unit=(3, 1), blocks=(9, 3)),
    linear(5, 10, dim=1, blocks=(7, 3), gather_output=True),
    linear(12, 5, dim=0, unit=2),
    linear(12, 5, dim="row", unit=3, blocks=2),
    linear(10, 5, dim=0, blocks=(7, 3)),
    linear(12, 5, dim=None, unit=5, blocks=7),
]
CONVOLUTIONS = [
    conv(dim=1, unit=3),
    conv(dim=1, unit=2, blocks=3),
    conv(dim=0, unit=3),
    conv(dim="row", blocks=(4, 8)),
]


def every_case_equals_dense(cases):
    for case in cases:
        check_layer(case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_units_and_blocks_equal_the_dense_layer(world_size):
    """Output, every gradient, a step and state, at uneven and at fewer units than ranks."""
    run_ranks(every_case_equals_dense, world_size, CASES + CONVOLUTIONS)


def holds_whole_units():
    group = ts.nn.ParallelLinear(1, 1).group
    layer = ts.nn.ParallelLinear(2, 24, dim=1, unit=4, blocks=2)
    own = [(0, 8), (12, 20)] if group.rank == 0 else [(8, 12), (20, 24)]
    assert list(layer.ranges_of("weight").per_rank[group.rank]) == own
    layer = ts.nn.ParallelLinear(2, 8, dim=1, unit=4, serves=3)
    own = [(0, 4)] if group.rank == 0 else [(4, 8)]
    assert list(layer.ranges_of("weight").per_rank[group.rank]) == own
    layer = ts.nn.ParallelLinear(2, 4, dim=1, unit=4, serves=3)
    assert tuple(layer.weight.shape) == (4, 2)
    assert layer.specs["weight"].grad == "overlapping"


def test_a_unit_stays_on_one_rank():
    """Each rank holds its units of every block; a unit that serves others, where they are."""
    run_ranks(holds_whole_units, 2)


def plans():
    model = nn.Sequential(nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 3)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = model(x)
    plan = {"0": ts.Column(unit=4, blocks=3), "2": ts.Row(unit=4, blocks=3)}
    layers = ts.parallelize(model, plan)
    torch.testing.assert_close(layers(x), expected)
    assert (
        layers[0].ranges_of("weight").lengths == layers[2].ranges_of("weight").lengths
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plan_takes_units_and_blocks(world_size):
    """`ts.Column(...)` and `ts.Row(...)` are rules, and carry the arguments."""
    run_ranks(plans, world_size)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ts.nn.ParallelLinear(4, 6, dim=1, unit=4),
            "unit=4 does not divide out_features=6. Expected units of equal size.",
        ),
        (
            lambda: ts.nn.ParallelConv2d(4, 6, 3, dim=0, blocks=3),
            "blocks=3 does not divide in_channels=4. Expected a number of equal blocks, or"
            " their sizes.",
        ),
        (
            lambda: ts.nn.ParallelLinear(4, 6, dim=0, serves=2),
            "serves=2 with dim=0: units that several ranks hold would be added several"
            " times. Only output features can serve others.",
        ),
        (
            lambda: ts.nn.ParallelConv2d(4, 8, 3, groups=2, dim=1, unit=2),
            "Packing(unit=2, blocks=1, serves=1) with groups=2: the groups are what stays"
            " together. Leave unit, blocks and serves out.",
        ),
    ],
)
def test_units_that_do_not_fit_are_refused(build, message):
    """What was given, what was expected."""
    with pytest.raises(ts.errors.LayoutError) as error:
        build()
    assert str(error.value) == message
