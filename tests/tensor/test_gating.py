"""glu and prelu of divided operands: as of whole tensors, or an error before any collective."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules, same_on_operands
from sharded_cases import randoms
from torchshard.distributed import groups
from torchshard.errors import ShardedOpError
from torchshard.layout import Axis, Segment, ranges_of
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

_ = None
GATES = {
    "glu": (F.glu, [(4, 6)], {(0,)}),
    "glu of a dim": (lambda x: F.glu(x, dim=1), [(3, 4, 5)], {(0,), (2,)}),
    "prelu": (F.prelu, [(4, 5, 3), (5,)], {(1, 0), (1, _), (_, 0), (0, _), (2, _)}),
    "prelu of one slope": (torch.prelu, [(4, 5), (1,)], {(0, _), (1, _)}),
    "prelu of a vector": (F.prelu, [(5,), (1,)], {(0, _)}),
}


def packed(num_units):
    size = groups.get_world_size()
    axes = {"x": Axis(num_units)}
    return ranges_of([Segment("x")] * 2, axes, size)


def gates_hold():
    expect_rules(GATES)
    for num_units in (2, 5):
        x = randoms((3, 2 * num_units), num_units).requires_grad_()
        same_on_operands(F.glu, [x], [(1, packed(num_units))], "packed glu")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gates_of_divided_operands(world_size):
    """Of a dim packed in two blocks too, on ranks that hold none of it as well."""
    run_ranks(gates_hold, world_size)


def compiles():
    expect_compiled(GATES, "glu", (0,))
    expect_compiled(GATES, "prelu", (1, 0))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def says_why_it_cannot():
    x = ShardedTensor.from_local(torch.ones(2, 4), 1)
    with pytest.raises(
        ShardedOpError, match="divide the layer that made it in 2 blocks"
    ):
        F.glu(x)
    slopes = ShardedTensor.from_local(torch.ones(1), 0)
    with pytest.raises(ShardedOpError, match="has one slope for all channels"):
        F.prelu(torch.ones(2), slopes)


def test_what_is_refused_says_why():
    """A dim whose halves lie on different ranks."""
    run_ranks(says_why_it_cannot, 2)
