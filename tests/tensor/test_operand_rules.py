"""What an operation does with a divided operand: the result of whole tensors, or an error."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 2, 3, 4]

_ = None
PRODUCTS = {
    "linear": (
        F.linear,
        [(2, 3, 5), (7, 5), (7,)],
        {
            (_, 0, 0),
            (_, 0, _),
            (_, _, 0),
            (2, 1, _),
            (2, _, _),
            (_, 1, _),
            (0, _, _),
            (1, _, _),
        },
    ),
    "linear without bias": (F.linear, [(3, 5), (7, 5)], {(_, 0), (1, 1), (0, _)}),
    "linear of a vector": (F.linear, [(5,), (7, 5), (7,)], {(0, 1, _), (_, 0, 0)}),
    "linear by a vector": (F.linear, [(2, 5), (5,)], {(1, 0), (0, _)}),
    "matmul": (
        torch.matmul,
        [(2, 3, 5), (2, 5, 7)],
        {(0, 0), (0, _), (2, 1), (2, _), (_, 1), (1, _), (_, 2)},
    ),
    "matmul of a matrix": (torch.matmul, [(4, 3, 5), (5, 7)], {(2, 0), (0, _), (_, 1)}),
    "matmul by vectors": (torch.matmul, [(3, 5), (5,)], {(1, 0), (0, _)}),
    "vectors by matmul": (torch.matmul, [(5,), (2, 5, 3)], {(0, 1), (_, 0), (_, 2)}),
    "@": (lambda x, y: x @ y, [(1, 3, 5), (4, 5, 2)], {(2, 1), (1, _), (_, 0)}),
    "mm": (torch.mm, [(3, 5), (5, 4)], {(1, 0), (0, _), (_, 1)}),
    "bmm": (torch.bmm, [(4, 3, 5), (4, 5, 2)], {(0, 0), (2, 1), (1, _), (_, 2)}),
    "mv": (torch.mv, [(3, 5), (5,)], {(1, 0), (0, _)}),
    "dot": (torch.dot, [(5,), (5,)], {(0, 0), (0, _)}),
    "outer": (torch.outer, [(3,), (5,)], {(0, _), (_, 0)}),
    "addmm": (
        lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=2),
        [(4,), (3, 5), (5, 4)],
        {(_, 1, 0), (0, _, 1), (_, 0, _), (_, _, 1)},
    ),
    "addmm of beta 0": (
        lambda x, y, z: torch.addmm(x, y, z, beta=0),
        [(3, 1), (3, 5), (5, 4)],
        {(_, 1, 0), (0, 0, _)},
    ),
    "addmv": (torch.addmv, [(3,), (3, 5), (5,)], {(_, 1, 0), (0, 0, _)}),
    "addr": (torch.addr, [(3, 5), (3,), (5,)], {(0, 0, _), (1, _, 0)}),
    "addbmm": (
        torch.addbmm,
        [(3, 4), (2, 3, 5), (2, 5, 4)],
        {(_, 0, 0), (_, 2, 1), (0, 1, _)},
    ),
    "baddbmm": (
        torch.baddbmm,
        [(2, 1, 4), (2, 3, 5), (2, 5, 4)],
        {(0, 0, 0), (_, 2, 1), (2, _, 2)},
    ),
    "einsum": (
        lambda x, y: torch.einsum("bth,oh->bto", x, y),
        [(2, 3, 5), (7, 5)],
        {(2, 1), (0, _), (_, 0), (2, _)},
    ),
    "einsum of three": (
        lambda x, y, z: torch.einsum("ij, jk, kl -> il", x, y, z),
        [(3, 5), (5, 4), (4, 2)],
        {(_, 1, 0), (1, 0, _), (0, _, _)},
    ),
    "einsum with dots": (
        lambda x, y: torch.einsum("...nhd,...mhd->...hnm", x, y),
        [(2, 3, 5, 4), (1, 2, 5, 4)],
        {(2, 2), (3, 3), (0, _), (1, _)},
    ),
    "einsum that names no result": (
        lambda x, y: torch.einsum("ij,jk", x, y),
        [(3, 5), (5, 4)],
        {(1, 0), (0, _), (_, 1)},
    ),
    "einsum of a sum": (lambda x: torch.einsum("ijk->j", x), [(3, 5, 4)], {(0,), (1,)}),
    "einsum of a diagonal": (
        lambda x, y: torch.einsum("ii,ij->ij", x, y),
        [(3, 3), (3, 4)],
        {(_, 1)},
    ),
    "einsum of subscripts": (
        lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]),
        [(3, 5), (5, 4)],
        {(1, 0), (0, _)},
    ),
    "bilinear": (
        F.bilinear,
        [(2, 3, 4), (2, 3, 5), (7, 4, 5), (7,)],
        {(_, _, 0, 0), (2, _, 1, _), (_, 2, 2, _), (0, 0, _, _)},
    ),
    "cdist": (torch.cdist, [(2, 3, 5), (2, 4, 5)], {(0, 0), (1, _), (_, 1)}),
    "cdist by names": (
        lambda x, y: torch.cdist(x1=x, x2=y, p=1.0),
        [(3, 5), (4, 5)],
        {(_, 0)},
    ),
    "tensordot": (
        lambda x, y: torch.tensordot(x, y, dims=([1, -1], [0, 1])),
        [(2, 3, 5), (3, 5, 4)],
        {(1, 0), (2, 1), (0, _), (_, 2), (1, _)},
    ),
    "tensordot of a number": (
        torch.tensordot,
        [(2, 3, 5), (3, 5, 4)],
        {(1, 0), (0, _)},
    ),
}


def products_hold():
    expect_rules(PRODUCTS)


@pytest.mark.parametrize("world_size", WORLDS)
def test_products_of_divided_operands(world_size):
    """Right on every way to divide them that a layer has; refused, never wrong, on others."""
    run_ranks(products_hold, world_size)


def compiles():
    expect_compiled(PRODUCTS, "einsum with dots", (2, 2))
    expect_compiled(PRODUCTS, "cdist", (1, _))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)
