"""The gradient norm of a sharded model is the dense model's, and clips it alike on all ranks."""

import copy
import math

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.state import gathered
from torchshard.testing import run_ranks

NORM_TYPES = [2.0, 1.0, 3.5, math.inf, -math.inf, 0.0, -1.0]
DIMS = {"0": 1, "2": 0, "3": None, "4": 1}


class Overlapping(ts.ParallelLayer):
    """Two ranks next to each other hold the same units of the smaller axis."""

    def __init__(self, features, ratio):
        super().__init__()
        axis = ts.Axis(features)
        spec = ts.ParameterSpec((2, features // ratio), ts.Shard(1, "kv"), ts.Normal())
        self.declare(
            axes={"features": axis, "kv": ts.covering(axis, ratio)},
            parameters={"weight": spec},
            inputs={},
            output=ts.Whole(),
        )

    def local_forward(self):
        return self.shared("weight")


def dense_model(scale):
    """Return a model with gradients: uneven sizes, a whole layer, a tied weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 3)
    ).double()
    model.append(model[4])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    return model


def sharded_model(dense):
    """Return the model in shards, each with its part of the dense gradient."""
    model = copy.deepcopy(dense)
    plan = {key: {"dim": dim} for key, dim in DIMS.items() if key != "4"}
    model = ts.parallelize(model, plan | {"[45]": {"dim": DIMS["4"]}})
    for index, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            grad = dense[index].get_parameter(name).grad
            parameter.grad = layer.own_state(name, name, grad).clone()
    return model


def expect_gradients(model, dense):
    for index, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            grad = gathered(parameter.grad, layer, name)
            torch.testing.assert_close(grad, dense[index].get_parameter(name).grad)


def clips_as_dense(as_iterable, norm_type):
    for scale, max_norm in ((1.0, 0.5), (1e-3, 5.0), (1e200, 0.7)):
        dense = dense_model(scale)
        model = sharded_model(dense)
        # A parameter that is given twice counts once.
        target = [*model.parameters(), model[4].weight] if as_iterable else model
        expected = torch.nn.utils.clip_grad_norm_(
            dense.parameters(), max_norm, norm_type
        )
        before = ts.nn.utils.get_total_norm(target, norm_type)
        norm = ts.nn.utils.clip_grad_norm_(target, max_norm, norm_type)
        torch.testing.assert_close(norm, expected)
        assert torch.equal(norm, before)
        expect_gradients(model, dense)
        ranks = ts.distributed.gather(norm.view(1), dim=0)
        assert ranks.unique().numel() == 1 or norm.isnan()


def every_norm():
    for norm_type in NORM_TYPES:
        for as_iterable in (False, True):
            clips_as_dense(as_iterable, norm_type)


@pytest.mark.parametrize(
    ("world_size", "group_size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)]
)
def test_r25_t61_clipping_equals_dense(world_size, group_size):
    """R25, T61: norm and clipped gradients are the dense ones, bit for bit alike on all ranks."""
    run_ranks(every_norm, world_size, group_size=group_size)


def under_fully_shard():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    model = ts.parallelize(
        copy.deepcopy(dense), {"0": {"dim": 1, "gather_output": True}}
    )
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=ts.distributed.get_mesh()["data"])
    x = torch.randn(4, 3, dtype=torch.float64)
    for each in (model, dense):
        each(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
    norm = ts.nn.utils.clip_grad_norm_(model, 0.5)
    assert type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected)
    grad = gathered(model[0].weight.grad.full_tensor(), model[0], "weight")
    torch.testing.assert_close(grad, dense[0].weight.grad)
    torch.testing.assert_close(model[2].bias.grad.full_tensor(), dense[2].bias.grad)


def test_t61_parameters_of_both_kinds_under_fully_shard():
    """T61: shards that FSDP2 divides once more, beside whole parameters, are one norm."""
    run_ranks(under_fully_shard, 4, group_size=2)


def overlapping_counts_once():
    torch.manual_seed(0)
    layer = Overlapping(6, 3).double()
    whole = torch.randn(2, 2, dtype=torch.float64)
    layer.weight.grad = layer.own_state("weight", "weight", whole).clone()
    for norm_type in NORM_TYPES:
        norm = ts.nn.utils.get_total_norm(layer, norm_type)
        expected = torch.linalg.vector_norm(whole, norm_type)
        if norm_type == 0:  # torch counts tensors
            expected = torch.ones_like(expected)
        torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_overlapping_shards_count_each_index_once(world_size):
    """Units that several ranks hold enter the norm once."""
    run_ranks(overlapping_counts_once, world_size)


def sparse_clips():
    rank, size = ts.distributed.get_rank(), ts.distributed.get_world_size()
    torch.manual_seed(0)
    dense = nn.Embedding(7, 3, sparse=True).double()
    model = copy.deepcopy(dense)
    model = ts.nn.ParallelEmbedding.convert_parallel_embedding(model, dim=0)
    ids = torch.tensor([0, 5, 5, 2])
    cotangent = torch.randn(4, 3, dtype=torch.float64)
    dense(ids).backward(cotangent)
    model(ids).backward(cotangent)
    assert model.weight.grad.is_sparse
    grad = dense.weight.grad.to_dense()
    norm = ts.nn.utils.clip_grad_norm_(model, 0.3)
    expected = torch.linalg.vector_norm(grad)
    torch.testing.assert_close(norm, expected)
    start, stop = ts.layout.balanced(7, size, rank)
    own = grad[start:stop] * (0.3 / (expected + 1e-6))
    torch.testing.assert_close(model.weight.grad.to_dense(), own)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sparse_gradients(world_size):
    """Rows of a sparse gradient that occur twice are added before the norm."""
    run_ranks(sparse_clips, world_size)


def missing_gradients():
    model = sharded_model(dense_model(1.0))
    dense = dense_model(1.0)
    for part in (model, dense):
        part[0].weight.grad = None
        part[2].bias.requires_grad_(False).grad = None
    if ts.distributed.get_rank() == 1:  # it has no rows: as with a hook that drops it
        model[4].weight.grad = model[4].weight.grad if len(model[4].weight) else None
    norm = ts.nn.utils.get_total_norm(model)
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in dense.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(norm, expected)
    model.zero_grad()
    assert ts.nn.utils.clip_grad_norm_(model, 1.0).item() == 0
    assert ts.nn.utils.get_total_norm([]).item() == 0


def test_parameters_without_gradient_are_left_out():
    """A parameter without a gradient changes no norm; a model without any has norm 0."""
    run_ranks(missing_gradients, 2)


def nonfinite_everywhere():
    model = sharded_model(dense_model(1.0))
    if ts.distributed.get_rank() == 1:
        model[0].weight.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"order 2\.0 of the gradients is inf"):
        ts.nn.utils.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert ts.nn.utils.clip_grad_norm_(model, 1.0).isinf()


def test_error_if_nonfinite_on_all_ranks():
    """An infinity in one rank's shard is an error on every rank, and only if asked for."""
    run_ranks(nonfinite_everywhere, 2)


def half_parameters():
    layer = ts.nn.ParallelLinear(4, 6, dim=1, bias=False, dtype=torch.float16)
    layer.weight.grad = torch.full_like(layer.weight, 30000.0)
    norm = ts.nn.utils.clip_grad_norm_(layer, 1.0)
    torch.testing.assert_close(norm, torch.tensor(30000.0 * math.sqrt(24)))
    assert layer.weight.grad.dtype == torch.float16


def test_half_precision_norm_does_not_overflow():
    """The norm of half gradients is taken in float32."""
    run_ranks(half_parameters, 2)


def one_collective(count):
    layers = [ts.nn.ParallelLinear(3, 5, dim=1) for _ in range(count)]
    model = nn.Sequential(*layers)
    with CommDebugMode() as counted:
        ts.nn.utils.get_total_norm(model)
    return counted.get_total_counts()


@pytest.mark.parametrize("count", [1, 5])
def test_one_collective_whatever_the_number_of_parameters(count):
    """The ranks meet once."""
    assert run_ranks(one_collective, 2, count) == [1, 1]
