"""TableLayer carries bags of embeddings, and says of a packing what it cannot be."""

import pytest
import torch
import torchshard as ts
from torch import nn
from torchshard.testing import Case, Integers, check_layer, run_ranks


class ParallelEmbeddingBag(ts.TableLayer):
    """nn.EmbeddingBag of bags of equal size, in an (N, B) input: their rows' sum or mean."""

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        *,
        max_norm=None,
        norm_type=2.0,
        mode="mean",
        sparse=False,
        padding_idx=None,
        dim=None,
        unit=1,
        gather_output=False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__(group, dim, ts.Packing(unit))
        self.max_norm, self.norm_type, self.sparse = max_norm, norm_type, sparse
        self.padding_idx, self.mode = padding_idx, mode
        self.declare_table(
            num_embeddings,
            embedding_dim,
            gather_output=gather_output,
            device=device,
            dtype=dtype,
        )

    def local_forward(self, input):
        rows = self.look_up(input)
        if self.padding_idx is None:
            counts = torch.full_like(input[..., :1], input.shape[-1])
        else:
            taken = (input != self.padding_idx).unsqueeze(-1)
            rows, counts = rows.where(taken, 0), taken.sum(-2).clamp(min=1)
        total = rows.sum(-2)
        return total / counts if self.mode == "mean" else total


def bag(options=None, **sharding):
    return Case(
        ParallelEmbeddingBag,
        nn.EmbeddingBag,
        args=(11, 6),
        options=options or {},
        sharding=sharding,
        inputs=[Integers(11, (4, 5))],
    )


CASES = [
    bag(dim=0),
    bag({"mode": "sum"}, dim="vocabulary"),
    bag({"max_norm": 1.5}, dim=0),
    bag({"padding_idx": 3, "mode": "sum"}, dim=0),
    # Not scale_grad_by_freq: torch 2.13's own bag divides by another row's count on the CPU.
    bag({"mode": "sum", "sparse": True}, dim=0),
    bag({"max_norm": 1.0, "norm_type": 1.0}, dim=1),
    bag({"padding_idx": 3}, dim="embedding_dim", unit=2),
    bag(dim=1, unit=3, gather_output=True),
]


def bags_equal_dense():
    for case in CASES:
        check_layer(case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_bag_equals_the_dense_one(world_size):
    """Sums and means of rows, with the look-up's options."""
    run_ranks(bags_equal_dense, world_size)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ts.nn.ParallelEmbedding(4, 6, dim=0, unit=2),
            "Packing(unit=2, blocks=1, serves=1) with dim=0: a vocabulary is dealt out row by"
            " row. Only the columns, dim='embedding_dim', have units and blocks.",
        ),
        (
            lambda: ts.nn.ParallelEmbedding(4, 6, dim=1, unit=4),
            "unit=4 does not divide embedding_dim=6. Expected units of equal size.",
        ),
        (
            lambda: ts.TableLayer.__init__(
                ParallelEmbeddingBag.__new__(ParallelEmbeddingBag),
                dim=1,
                packing=ts.Packing(serves=2),
            ),
            "serves=2: columns of a table serve no others. Leave it out.",
        ),
    ],
)
def test_units_that_do_not_fit_are_refused(build, message):
    """What was given, what was expected."""
    with pytest.raises(ts.errors.LayoutError) as error:
        build()
    assert str(error.value) == message
