"""The finished layers, row by row of the known faults of sharded layers elsewhere.

Names of tests begin with the row: R of TorchShard 0.1.0, T of public reports on its peers.
"""

import copy
import inspect
import io
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.errors import LayoutError, ShapeError, TargetError
from torchshard.state import collect_state_dict, gathered
from torchshard.tensor import whole
from torchshard.testing import run_ranks

import layer_zoo
from layer_zoo import (
    ParallelConv1d,
    ParallelConv2d,
    ParallelCrossEntropyLoss,
    ParallelEmbedding,
    ParallelLinear,
    ParallelMultiheadAttention,
)

WORLDS = [1, 2, 3, 4]
WITHOUT_TWIN = {
    "ParallelArcFace",
    "ParallelCombinedMargin",
    "ParallelCosFace",
    "ParallelScaleShift",
}
TWINS = {
    "ParallelConv1d": nn.Conv1d,
    "ParallelConv2d": nn.Conv2d,
    "ParallelConv3d": nn.Conv3d,
    "ParallelCrossEntropyLoss": nn.CrossEntropyLoss,
    "ParallelEmbedding": nn.Embedding,
    "ParallelGroupNorm": nn.GroupNorm,
    "ParallelLinear": nn.Linear,
    "ParallelLinearCrossEntropyLoss": nn.LinearCrossEntropyLoss,
    "ParallelMultiheadAttention": nn.MultiheadAttention,
}


def randoms(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def same(actual, expected, what="value"):
    torch.testing.assert_close(
        actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def trained(layer, x):
    """Return the output, the parameter's value and its dense gradient, all whole."""
    y = whole(layer(x))
    y.backward(randoms(*y.shape, seed=5))
    weight, grad = layer.weight.detach(), layer.weight.grad
    if isinstance(layer, ts.ParallelLayer):
        weight = gathered(weight, layer, "weight")
        grad = None if grad is None else gathered(grad.to_dense(), layer, "weight")
    elif grad is not None:
        grad = grad.to_dense()
    return {"output": y, "weight": weight, "gradient": grad}


# Embedding

IDS = torch.tensor([[1, 5, 5, 0], [7, 1, 5, 3]])
"""Ids of a table of 9 rows: some twice or more, some never, the last row never."""


def embedded(cls, ids=IDS, rows=9, columns=5, **options):
    """Return what a step does to an embedding whose rows have different norms."""
    layer = cls(rows, columns, **options).double()
    table = randoms(rows, columns, seed=2) * torch.arange(1.0, rows + 1).unsqueeze(1)
    layer.load_state_dict({"weight": table})
    return trained(layer, ids), layer


def embeds_as_dense(options, changes, dims=(0, 1)):
    """Compare with dense torch, and make sure that the options do change `changes`."""
    expected, _ = embedded(nn.Embedding, **options)
    plain, _ = embedded(nn.Embedding)
    for what in ("output", "weight", "gradient"):
        assert torch.equal(expected[what], plain[what]) == (what not in changes), what
    for dim in dims:
        actual, layer = embedded(ParallelEmbedding, dim=dim, **options)
        for what, value in actual.items():
            same(value, expected[what], f"dim={dim} {what}")
    return layer


def padding_rows():
    for pad in (0, 1, 5, 7, -1, -4, -9):
        changes = ["gradient"] if pad % 9 in IDS.unique() else []
        embeds_as_dense({"padding_idx": pad}, changes)
        torch.manual_seed(1)
        dense = nn.Embedding(9, 5, pad)
        assert dense.weight[pad].count_nonzero() == 0
        for dim in (None, 0, 1):
            torch.manual_seed(1)
            layer = ParallelEmbedding(9, 5, pad, dim=dim)
            assert torch.equal(
                collect_state_dict(layer)["weight"], dense.weight.detach()
            )
            assert layer.padding_idx == dense.padding_idx


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r12_t32_only_the_padding_row_is_frozen(world_size):
    """R12, T32: a padding row, also from the end, starts at 0 and gets no gradient; it alone."""
    run_ranks(padding_rows, world_size)


def max_norms():
    embeds_as_dense({"max_norm": 3.0}, ["output", "weight"])
    embeds_as_dense({"max_norm": 3.0, "norm_type": 1.0}, ["output", "weight"])
    embeds_as_dense({"max_norm": 3.0, "norm_type": 3.5}, ["output", "weight"])
    embeds_as_dense({"max_norm": 2.0, "norm_type": float("inf")}, ["output", "weight"])
    # Tokens of one rank alone, so that no other rank may touch its rows.
    for ids in (
        torch.tensor([8, 7, 8]),
        torch.tensor([0]),
        torch.tensor([], dtype=int),
    ):
        expected, _ = embedded(nn.Embedding, ids, max_norm=1.0)
        for dim in (0, 1):
            actual, _ = embedded(ParallelEmbedding, ids, max_norm=1.0, dim=dim)
            for what, value in actual.items():
                same(value, expected[what], f"{ids} dim={dim} {what}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r13_r15_t33_max_norm(world_size):
    """R13, R15, T33: looked-up rows are scaled by their whole norm, and no other row is."""
    run_ranks(max_norms, world_size)


def frequencies():
    embeds_as_dense({"scale_grad_by_freq": True}, ["gradient"])
    embeds_as_dense({"scale_grad_by_freq": True, "padding_idx": 5}, ["gradient"])


def test_r14_gradients_scaled_by_frequency():
    """R14: a row's gradient is divided by how often its id occurs, not by foreign counts."""
    run_ranks(frequencies, 3)


def sparse_gradients():
    for dim in (None, 0, 1):
        expected, _ = embedded(nn.Embedding)
        actual, layer = embedded(ParallelEmbedding, dim=dim, sparse=True)
        same(actual["gradient"], expected["gradient"])
        assert layer.weight.grad.is_sparse
        assert layer.weight.grad.shape == layer.weight.shape
        _, layer = embedded(ParallelEmbedding, dim=dim)
        assert not layer.weight.grad.is_sparse
        layer = ParallelEmbedding(9, 5, sparse=True, dim=dim).double()
        dense = nn.Embedding(9, 5, sparse=True).double()
        dense.load_state_dict(collect_state_dict(layer))
        for module in (layer, dense):
            optimizer = torch.optim.SparseAdam(list(module.parameters()), lr=0.1)
            y = whole(module(IDS))
            y.backward(randoms(*y.shape))
            optimizer.step()
        same(collect_state_dict(layer)["weight"], dense.weight.detach())


def test_t34_sparse():
    """T34: `sparse` gives a sparse gradient of the shard, which SparseAdam takes."""
    run_ranks(sparse_gradients, 2)


def given_tables():
    table = randoms(9, 5).requires_grad_() * 1.0
    for dim in (None, 0, 1):
        layer = ParallelEmbedding(
            9, 5, padding_idx=2, _weight=table, dim=dim, dtype=torch.float64
        )
        assert torch.equal(collect_state_dict(layer)["weight"], table.detach())
        assert layer.weight.requires_grad
        frozen = ParallelEmbedding(
            9, 5, None, None, 2.0, False, False, table, True, "cpu", dim=dim
        )
        assert not frozen.weight.requires_grad
        assert not frozen(IDS).requires_grad
        layer.weight.data.zero_()
    assert table.count_nonzero() == table.numel()
    with pytest.raises(ShapeError) as raised:
        ParallelEmbedding(9, 5, _weight=torch.zeros(5, 9), dim=0)
    assert str(raised.value) == "_weight has shape (5, 9); expected (9, 5)."
    with pytest.raises(LayoutError) as raised:
        ParallelEmbedding(9, 5, 9, dim=0)
    assert str(raised.value) == "padding_idx=9 is out of range for 9 embeddings."


def test_t34_given_and_frozen_tables():
    """T34: `_weight` is cut and left alone, its padding row kept; `_freeze` stops training."""
    run_ranks(given_tables, 2)


def positional_arguments():
    names = ["padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
    # torch itself refuses sparse gradients that are scaled by frequency.
    for values in [(1, 3.0, 1.0, True, False), (1, 3.0, 1.0, False, True)]:
        expected, _ = embedded(nn.Embedding, **dict(zip(names, values, strict=True)))
        for dim in (0, 1):
            layer = ParallelEmbedding(9, 5, *values, dim=dim)
            assert tuple(getattr(layer, name) for name in names) == values
            actual, _ = embedded(
                ParallelEmbedding, dim=dim, **dict(zip(names, values, strict=True))
            )
            for what, value in actual.items():
                same(value, expected[what], what)


def test_t34_arguments_by_position():
    """T34: arguments by position mean what they mean in torch.nn, all options together."""
    run_ranks(positional_arguments, 2)


def out_of_range():
    for dim in (None, 0, 1):
        layer = ParallelEmbedding(9, 5, dim=dim)
        for bad in (9, 16, -3, -9):
            with CommDebugMode() as counted, pytest.raises(TargetError) as raised:
                layer(torch.tensor([[0, bad]]))
            assert str(raised.value) == (
                f"input holds {bad}, which is out of range. Expected indices from 0 to 8."
            )
            assert isinstance(raised.value, IndexError)
            assert counted.get_total_counts() == 0


def test_r16_t37_ids_out_of_range_raise():
    """R16, T37: an id outside the whole table raises on every rank, never looks up zeros."""
    run_ranks(out_of_range, 2)


def ids_of_every_kind():
    for ids in (
        IDS.int(),
        torch.tensor(8),
        torch.zeros(2, 0, dtype=torch.long),
        IDS.t(),
        IDS[:, :1].expand(2, 3),
        IDS.reshape(2, 1, 2, 2),
    ):
        expected, _ = embedded(nn.Embedding, ids)
        for dim in (None, 0, 1):
            actual, _ = embedded(ParallelEmbedding, ids, dim=dim)
            for what, value in actual.items():
                same(value, expected[what], f"{ids} dim={dim} {what}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_ids_of_every_shape_and_stride(world_size):
    """32-bit, empty, transposed, expanded and single ids are looked up as by torch."""
    run_ranks(ids_of_every_kind, world_size)


# Linear, convolution, attention


def uneven_sizes():
    group_size = ts.distributed.get_world_size()
    x = randoms(3, 4)
    for cls, dense_cls, args, dims, x in [
        (ParallelLinear, nn.Linear, (4, 9), (1, -1), randoms(3, 4)),
        (ParallelLinear, nn.Linear, (9, 4), (0,), randoms(3, 9)),
        (ParallelLinear, nn.Linear, (1, 1), (0, 1), randoms(3, 1)),
        (ParallelEmbedding, nn.Embedding, (9, 7), (0, 1, -1), IDS),
        (ParallelEmbedding, nn.Embedding, (8, 1), (0, 1, -1), IDS),
    ]:
        for dim in dims:
            dense = dense_cls(*args).double()
            layer = cls(*args, dim=dim).double()
            layer.load_state_dict(dense.state_dict())
            expected = trained(dense, x)
            for what, value in trained(layer, x).items():
                same(value, expected[what], f"{cls.__name__}{args} dim={dim} {what}")
            lengths = layer.ranges_of("weight").lengths
            assert max(lengths) - min(lengths) <= 1
            assert sum(lengths) == layer.ranges_of("weight").size
            assert len(lengths) == group_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_r33_t11_uneven_sizes_are_balanced(world_size):
    """R33, T23: sizes that do not divide are dealt evenly; ranks may hold nothing at all."""
    run_ranks(uneven_sizes, world_size)


def bias_once():
    size = ts.distributed.get_world_size()
    for layer, x in [
        (ParallelLinear(6, 3, dim=0), torch.zeros(2, 6)),
        (ParallelConv1d(4, 3, 1, dim=0), torch.zeros(2, 4, 5)),
        (ParallelMultiheadAttention(8, 4), torch.zeros(3, 2, 8)),
    ]:
        inputs = (x, x, x) if isinstance(layer, ParallelMultiheadAttention) else (x,)
        bias = "out_proj.bias" if len(inputs) == 3 else "bias"
        with torch.no_grad():
            layer.tensor_of(bias).fill_(2.0)
        y = layer(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        assert torch.equal(y, torch.full_like(y, 2.0))
        y.sum().backward()
        grad = layer.tensor_of(bias).grad
        assert torch.equal(grad, torch.full_like(grad, y.numel() / grad.numel())), size


@pytest.mark.parametrize("world_size", [2, 4])
def test_t14_a_bias_behind_a_reduce_is_added_once(world_size):
    """T14: with zero input the output is the bias, not the ranks' number of times it."""
    run_ranks(bias_once, world_size)


def partly_frozen():
    for cls, dense_cls, args, dim, shape in [
        (ParallelLinear, nn.Linear, (5, 7), 1, (3, 5)),
        (ParallelLinear, nn.Linear, (7, 5), 0, (3, 7)),
        (ParallelConv2d, nn.Conv2d, (4, 5, 3), 1, (2, 4, 5, 6)),
        (ParallelConv2d, nn.Conv2d, (4, 5, 3), 0, (2, 4, 5, 6)),
    ]:
        for frozen in ("weight", "bias"):
            dense, layer = dense_cls(*args).double(), cls(*args, dim=dim).double()
            layer.load_state_dict(dense.state_dict())
            grads = []
            for module in (layer, dense):
                module.get_parameter(frozen).requires_grad_(False)
                x = randoms(*shape).requires_grad_()
                y = whole(module(x))
                y.backward(randoms(*y.shape, seed=1))
                assert module.get_parameter(frozen).grad is None
                grads.append((x.grad, getattr(module, _other(frozen)).grad))
            (dx, own_grad), (dense_dx, dense_grad) = grads
            same(dx, dense_dx)
            same(gathered(own_grad, layer, _other(frozen)), dense_grad)
            state = layer.state_dict()
            layer.load_state_dict(collect_state_dict(layer))
            layer.load_state_dict(state)
            assert not layer.get_parameter(frozen).requires_grad


def _other(name):
    return {"weight": "bias", "bias": "weight"}[name]


def test_t26_t27_a_frozen_parameter_stays_frozen():
    """T26, T27: no gradient, also after loading, while the input and the others get theirs."""
    run_ranks(partly_frozen, 2)


def only_needed_collectives():
    column, row = ParallelLinear(6, 4, dim=1), ParallelLinear(4, 6, dim=0)
    x = torch.ones(2, 6)
    y = row(column(x))
    with CommDebugMode() as counted:
        y.sum().backward()
    assert counted.get_total_counts() == 0  # no gradient of x is wanted
    with CommDebugMode() as counted, torch.no_grad():
        row(column(x.requires_grad_()))
    assert counted.get_total_counts() == 1


def test_t27_no_collective_for_what_is_not_wanted():
    """T27: without a gradient of the input there is no all-reduce of it."""
    run_ranks(only_needed_collectives, 2)


def packed_heads():
    dense = nn.MultiheadAttention(8, 4)
    with torch.no_grad():
        dense.in_proj_weight.copy_(torch.arange(24.0).unsqueeze(1).expand(24, 8))
        dense.in_proj_bias.copy_(torch.arange(24.0))
    layer = ParallelMultiheadAttention(8, 4)
    layer.load_state_dict(dense.state_dict())
    first, last = [(0, 4), (4, 6), (6, 8)][layer.group.rank]
    expected = [part * 8 + row for part in range(3) for row in range(first, last)]
    assert layer.in_proj_weight.detach()[:, 0].tolist() == expected
    assert layer.in_proj_bias.tolist() == expected


def test_t52_packed_projections_hold_the_right_rows():
    """T52: rank r's rows of q, then of k, then of v, whole heads of each."""
    run_ranks(packed_heads, 3)


# Loss


def losses():
    x, target = randoms(4, 7).requires_grad_(), torch.tensor([6, 0, 3, 3])
    for options in [
        {"reduction": "none"},
        {"reduction": "sum", "ignore_index": 3},
        {"weight": torch.arange(1.0, 8).double(), "label_smoothing": 0.2},
    ]:
        dense_x = x.detach().clone().requires_grad_()
        expected = nn.CrossEntropyLoss(**options)(dense_x, target)
        criterion = ParallelCrossEntropyLoss(**options)
        for logits in (x, _sharded(x)):
            x.grad = dense_x.grad = None
            loss = criterion(logits, target)
            same(loss, expected)
            cotangent = randoms(*loss.shape)
            loss.backward(cotangent)
            expected.backward(cotangent, retain_graph=True)
            same(x.grad, dense_x.grad)
    with pytest.warns(UserWarning, match="reduction='sum' instead"):
        criterion = ParallelCrossEntropyLoss(None, False)
    same(criterion(_sharded(x), target), F.cross_entropy(x, target, reduction="sum"))
    with pytest.raises(TargetError):
        criterion(_sharded(x), torch.tensor([7, 0, 0, 0]))


def _sharded(x):
    return ts.ShardedTensor.from_local(ts.distributed.scatter(x))


def test_r7_r8_the_loss_module_passes_its_options_on():
    """R7, R8: reduction, weight, ignore_index, smoothing, older names: as torch's, marked or not."""
    run_ranks(losses, 3)


# Every layer


def positional(cls):
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in kinds}


@pytest.mark.parametrize("name", TWINS)
def test_constructors_take_torchs_arguments_in_torchs_order(name):
    """By position and default they are torch.nn's; ours are keyword-only but Linear's dim."""
    ours, theirs = positional(getattr(layer_zoo, name)), positional(TWINS[name])
    if name == "ParallelLinear":
        # TorchShard's scripts pass dim fourth; torch's fourth and fifth are keywords here.
        assert list(ours) == [*list(theirs)[:3], "dim"]
        assert all(ours[key] == theirs[key] for key in list(ours)[:3])
    else:
        assert list(ours.items()) == list(theirs.items())
    everything = inspect.signature(getattr(layer_zoo, name)).parameters

    assert theirs.keys() <= everything.keys()
    assert "group" in everything


def test_every_finished_layer_is_compared():
    """No layer of the zoo with a twin in torch.nn is forgotten above."""
    assert {*TWINS, *WITHOUT_TWIN} == set(layer_zoo.__all__)


def attributes():
    for name, args in {
        "ParallelLinear": (4, 6),
        "ParallelEmbedding": (4, 6, 1),
        "ParallelConv2d": (4, 6, 3),
        "ParallelMultiheadAttention": (8, 4),
    }.items():
        layer, dense = getattr(layer_zoo, name)(*args), TWINS[name](*args)
        constants = [c for c in dense.__constants__ if c != "output_padding"]
        for constant in constants:
            assert getattr(layer, constant) == getattr(dense, constant), constant


def test_layers_have_torchs_attributes():
    """What torch.nn's layers say about themselves, in_features and so on, ours say whole."""
    run_ranks(attributes, 2)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            partial(ParallelConv1d, 4, 6, 3, groups=2, dim=0),
            "dim=0 divides the input channels, which groups=2 already separates. Use dim=1,"
            " which divides the groups.",
        ),
        (
            partial(ParallelMultiheadAttention, 8, 3),
            "num_heads=3 does not divide embed_dim=8. Expected heads of equal size.",
        ),
        (
            partial(ParallelEmbedding, 4, 2, dim=2),
            "dim=2 is no split. Expected None (not divided), 0 or 'vocabulary' (the"
            " vocabulary's rows are divided), 1, -1 or 'embedding_dim' (the embedding's"
            " columns are divided).",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(build, text):
    """The constructor says what was wrong and what would be right."""
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}$"):
        build()


def given_table_is_let_go(dim) -> None:
    table = torch.randn(9, 6, generator=torch.Generator().manual_seed(4))
    layer = ts.nn.ParallelEmbedding(9, 6, _weight=table.requires_grad_() * 1.0, dim=dim)
    same = copy.deepcopy(layer)
    ids = torch.tensor([0, 8, 3])
    expected = F.embedding(ids, table)
    for built in (layer, same, ts.nn.ParallelEmbedding.from_pretrained(table, dim=dim)):
        torch.testing.assert_close(whole(built(ids)), expected)
    stream = io.BytesIO()
    torch.save(layer, stream)
    assert all(spec.init != ts.Given(table) for spec in layer.specs.values())
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    dense = nn.Embedding(9, 6)
    torch.testing.assert_close(
        ts.collect_state_dict(layer)["weight"], dense.weight.detach(), rtol=0, atol=0
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_given_table_is_let_go(dim: int) -> None:
    """A layer built from a table copies and pickles without it, and resets as torch does."""
    run_ranks(given_table_is_let_go, 2, dim)
