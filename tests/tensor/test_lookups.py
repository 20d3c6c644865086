"""Lookups in divided tables: those of whole ones, or an error before any collective."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules
from torchshard.errors import ShapeError, ShardedOpError, TargetError
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

_ = None
ROWS, COLUMNS, IDS = (_, 0), (_, 1), (0, _)
IDS_2D = torch.tensor([[0, 6, 2], [2, 1, 6], [3, 3, 6], [5, 4, 0]])
IDS_1D = torch.tensor([6, 0, 2, 2, 5, 1, 4, 3, 3])
OFFSETS = torch.tensor([0, 3, 3, 7])
TABLE = (7, 5)


def of(function, **options):
    return lambda *operands: function(*operands, **options)


def bag(*operands, **options):
    ids, table, *weights = operands
    weights = weights[0] if weights else None
    return F.embedding_bag(ids, table, per_sample_weights=weights, **options)


EMBEDDINGS = {
    "embedding": (F.embedding, [IDS_2D, TABLE], {ROWS, COLUMNS, IDS, (1, _)}),
    "embedding of one id": (F.embedding, [torch.tensor(5), TABLE], {ROWS, COLUMNS}),
    "embedding of few": (F.embedding, [IDS_2D % 2, (2, 1)], {ROWS, COLUMNS}),
    "padding": (of(F.embedding, padding_idx=2), [IDS_2D, TABLE], {ROWS, COLUMNS, IDS}),
    "last padding": (of(F.embedding, padding_idx=-1), [IDS_1D, TABLE], {ROWS, COLUMNS}),
    "by frequency": (
        of(F.embedding, scale_grad_by_freq=True, padding_idx=3),
        [IDS_2D.int(), TABLE],
        {ROWS, COLUMNS},
    ),
    "of torch": (
        lambda ids, table: torch.embedding(table, ids, 1),
        [IDS_2D, TABLE],
        {ROWS, COLUMNS, IDS},
    ),
    "table[ids]": (lambda ids, table: table[ids - 7], [IDS_2D, TABLE], {ROWS, COLUMNS}),
    "table[ids] of more dims": (
        lambda ids, table: table[ids],
        [IDS_1D, (7, 2, 3)],
        {ROWS, COLUMNS, (_, 2), IDS},
    ),
}
BAGS = {
    "mean": (bag, [IDS_2D, TABLE], {ROWS, COLUMNS, IDS}),
    "sum": (
        of(bag, mode="sum", padding_idx=-1),
        [IDS_2D, TABLE],
        {ROWS, COLUMNS, IDS},
    ),
    "max": (of(bag, mode="max"), [IDS_2D, TABLE], {COLUMNS, IDS}),
    "offsets": (
        of(bag, offsets=OFFSETS, padding_idx=2),
        [IDS_1D, TABLE],
        {ROWS, COLUMNS},
    ),
    "last offset": (
        of(bag, offsets=torch.tensor([0, 3, 3, 9]), include_last_offset=True),
        [IDS_1D, TABLE],
        {ROWS, COLUMNS},
    ),
    "weights": (
        of(bag, mode="sum", padding_idx=6),
        [IDS_2D, TABLE, (4, 3)],
        {(_, 0, _), (_, 1, _), (0, _, 0), (0, _, _), (_, _, 0)},
    ),
    "weights and offsets": (
        of(bag, mode="sum", offsets=OFFSETS),
        [IDS_1D, TABLE, (9,)],
        {(_, 0, _), (_, 1, _)},
    ),
    "bags of few": (bag, [IDS_2D % 2, (2, 1)], {ROWS}),
    "table first": (
        lambda ids, table: F.embedding_bag(table, ids),
        [IDS_2D, TABLE],
        {ROWS, COLUMNS, IDS},
    ),
}


def lookups_hold():
    expect_rules(EMBEDDINGS)
    expect_rules(BAGS)


def rows_stay_apart():
    table = torch.ones(6, 2, dtype=torch.float64)
    table[0], table[3] = float("inf"), float("nan")
    ids = torch.tensor([[1, 2], [4, 5], [0, 1]])
    own = table.tensor_split(2)[torch.distributed.get_rank()]
    for mode in ("sum", "mean"):
        found = F.embedding_bag(ids, ShardedTensor.from_local(own, 0), mode=mode)
        torch.testing.assert_close(found, F.embedding_bag(ids, table, mode=mode))


def test_a_row_that_is_infinite_or_nan_stays_in_its_bags():
    """Foreign ids look up the first row of each rank, and nothing of it is seen."""
    run_ranks(rows_stay_apart, 2)


@pytest.mark.filterwarnings("ignore:Argument order")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_lookups_in_divided_tables(world_size):
    """Rows, columns and ids divided: outputs and gradients, of ranks without a row too."""
    run_ranks(lookups_hold, world_size)


def compiles():
    expect_compiled(EMBEDDINGS, "padding", ROWS)
    expect_compiled(EMBEDDINGS, "table[ids]", ROWS)
    expect_compiled(BAGS, "offsets", ROWS)
    expect_compiled(BAGS, "weights", (_, 1, _))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def says_why_it_cannot():
    rows = ShardedTensor.from_local(torch.ones(4, 2), 0)
    ids = ShardedTensor.from_local(torch.tensor([[0, 1]]), 0)
    plain = torch.tensor([[1, 7]])
    refused = {
        "max_norm rescales rows in place": lambda: F.embedding(
            plain, rows, max_norm=1.0
        ),
        "counts the ids of this rank alone": lambda: F.embedding(
            ids, torch.ones(4, 2), scale_grad_by_freq=True
        ),
        "compares rows; divide columns": lambda: F.embedding_bag(
            plain, rows, mode="max"
        ),
        "view of a marked table": lambda: F.embedding_bag(plain, rows, sparse=True),
        "use F.embedding_bag": lambda: torch.embedding_bag(rows, plain, plain[0]),
        "divide the bags": lambda: F.embedding_bag(
            ShardedTensor.from_local(plain, 1), torch.ones(9, 2)
        ),
        "with a list, a mask": lambda: rows[[0, 1]],
    }
    for message, call in refused.items():
        with pytest.raises(ShardedOpError, match=message):
            call()
    ids, offsets = torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(RuntimeError, match="has to be 0"):
        F.embedding_bag(ids, rows, offsets, mode="sum")
    last = {"offsets": torch.tensor([0, 1]), "include_last_offset": True}
    with pytest.raises(ShapeError, match=r"last offset is 1\. Expected 2"):
        F.embedding_bag(ids, rows, **last)
    for call in (lambda: F.embedding(plain + 1, rows), lambda: rows[plain + 1]):
        with pytest.raises(TargetError, match="holds 8, which is out of range"):
            call()


def test_what_is_refused_says_why():
    """And an id that no rank holds is out of range."""
    run_ranks(says_why_it_cannot, 2)
