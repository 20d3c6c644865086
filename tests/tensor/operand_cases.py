"""An operation whose operands are divided, against the same on whole tensors.

Every way of dividing the operands is tried, one dim each: the result and all gradients must
be those of the whole tensors, or the operation is refused before any collective. Those ways
that a layer needs are named, and must be right.
"""

from itertools import product

import torch
from sharded_cases import close, marked, randoms, tensors_in
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups, ops
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import balanced_ranges
from torchshard.tensor import ShardedTensor, mark, whole
from torchshard.tensor.sharded import Sharding


def own_leaf(x, way):
    """This rank's part of `x` as a leaf of its own."""
    own = (
        x.detach().clone()
        if way is None
        else ops.scatter(x.detach(), way[0], ranges=way[1])
    )
    return own.requires_grad_(x.requires_grad)


def as_parameter(x, dim, ranges):
    """This rank's part of `x` as a leaf of its own, and the marked view of it."""
    group = groups.model_group()
    own = own_leaf(x, (dim, ranges))
    held = ops.sum_over_holders(own, dim, ranges)
    return own, mark(held.view_as(held), Sharding(dim, ranges, group))


def divide(tensors, ways, as_parameters):
    """Return the leaves and the operands that they are, divided as `ways` say."""
    leaves, operands = [], []
    for tensor, way in zip(tensors, ways, strict=True):
        leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        operand = leaf
        if way is not None and as_parameters:
            leaf, operand = as_parameter(leaf, *way)
        elif way is not None:
            operand = marked(leaf, *way)
        leaves.append(leaf)
        operands.append(operand)
    return leaves, operands


def whole_grads(leaves, ways, as_parameters):
    """Return the gradients of the leaves, in full layout."""
    for leaf, way in zip(leaves, ways, strict=True):
        if leaf.requires_grad:
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if way is not None and as_parameters:
                grad = ops.gather(grad, way[0], ranges=way[1])
            yield grad


def same_on_operands(function, tensors, ways, case, tolerance=1e-10):
    """Compare outputs and gradients, the operands being activations and parameters."""
    expected = tensors_in(function(*tensors))
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    roots = [i for i, want in enumerate(expected) if want.requires_grad]
    cots = [randoms(expected[i].shape, 50 + i, expected[i].dtype) for i in roots]
    unused = {"allow_unused": True, "materialize_grads": True}
    want = torch.autograd.grad([expected[i] for i in roots], inputs, cots, **unused)
    for as_parameters in (False, True):
        leaves, operands = divide(tensors, ways, as_parameters)
        actual = tensors_in(function(*operands))
        for index, (mine, dense) in enumerate(zip(actual, expected, strict=True)):
            assert mine.shape == dense.shape, (case, mine.shape, dense.shape)
            if isinstance(mine, ShardedTensor):
                own = mine.to_local().shape[mine.sharding.dim]
                assert own == mine.sharding.length, (case, mine.sharding)
            close(whole(mine).detach(), dense.detach(), f"{case}, {index}", tolerance)
        torch.autograd.backward([whole(actual[i]) for i in roots], cots)
        have = whole_grads(leaves, ways, as_parameters)
        for index, pair in enumerate(zip(have, want, strict=True)):
            close(*pair, f"{case}, gradient {index}", tolerance)


def every_way(tensors):
    """Return each choice of a dim, or None, for every tensor; at least one is divided."""
    dims = [[None, *range(tensor.dim())] for tensor in tensors]
    return [ways for ways in product(*dims) if any(dim is not None for dim in ways)]


def ways_of(tensors, dims, units=None):
    """Return for each tensor its dim and who holds what of it; None for a whole one."""
    size, units = groups.get_world_size(), units or {}

    def way(index, dim):
        unit = units.get((index, dim), 1)
        num_units = tensors[index].shape[dim] // unit
        return dim, balanced_ranges(num_units, size).scaled(unit)

    return [None if dim is None else way(index, dim) for index, dim in enumerate(dims)]


def right_ways(function, tensors, name, units=None, tolerance=1e-10):
    """Try every way; return those that are right, after none was wrong.

    What stays together in a dim of an operand stands in `units`, by the two.
    """
    right = []
    for dims in every_way(tensors):
        ways = ways_of(tensors, dims, units)
        case = f"{name} divided at {dims}"
        if groups.get_world_size() > 1 and is_refused(function, tensors, ways):
            continue
        same_on_operands(function, tensors, ways, case, tolerance)
        right.append(dims)
    return right


def case_tensors(operands):
    """Return the operands of a case: those given, and random ones of the given shapes."""
    return [
        value
        if isinstance(value, torch.Tensor)
        else randoms(value, seed).requires_grad_()
        for seed, value in enumerate(operands, 1)
    ]


def expect_rules(table):
    """Try every way of each case; those that it names must be right.

    A case is the function, the shapes of its operands, or the operands themselves, the dims
    at which they are divided, None for a whole one, and perhaps the units of some dims.
    """
    for name, (function, operands, needed, *units) in table.items():
        tensors = case_tensors(operands)
        right = set(right_ways(function, tensors, name, *units))
        assert needed <= right, (name, needed - right)


def expect_compiled(table, case, dims):
    """Compare one way of a case, compiled as one graph, with the same on whole tensors."""
    function, operands, _, *units = table[case]
    tensors = case_tensors(operands)
    ways = ways_of(tensors, dims, *units)
    group = groups.model_group()
    cot = randoms(function(*tensors).shape, 9)
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    expected = function(*tensors), *torch.autograd.grad(function(*tensors), inputs, cot)
    owns = [own_leaf(*pair) for pair in zip(tensors, ways, strict=True)]

    def run(*owns):
        return whole(
            function(
                *(
                    own
                    if way is None
                    else mark(own.view_as(own), Sharding(*way, group))
                    for own, way in zip(owns, ways, strict=True)
                )
            )
        )

    result = torch.compile(run, fullgraph=True, backend="aot_eager")(*owns)
    result.backward(cot)
    for index, pair in enumerate(
        zip((result, *whole_grads(owns, ways, True)), expected, strict=True)
    ):
        close(*pair, f"{case} compiled, {index}")


def is_refused(function, tensors, ways):
    """Whether the operation raises torchshard's error, before any collective."""
    _, operands = divide(tensors, ways, as_parameters=False)
    with CommDebugMode() as counted:
        try:
            function(*operands)
        except (ShardedOpError, ShapeError):
            assert counted.get_total_counts() == 0
            return True
    return False
