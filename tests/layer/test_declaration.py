"""What a layer may declare, and what it may not leave out."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.nn.utils import prune
from torchshard.errors import LayoutError
from torchshard.testing import run_ranks


class Scale(ts.ParallelLayer):
    def __init__(self, features=6, **changes):
        super().__init__()
        self.declare(
            **{
                "axes": {"features": ts.Axis(features)},
                "parameters": {"weight": weight(features)},
                "inputs": {"input": ts.Shard(-1, "features")},
                "output": ts.Shard(-1, "features"),
                **changes,
            }
        )

    def local_forward(self, input):
        return input * self.weight


def weight(features=6, layout=None, **settings):
    layout = layout or ts.Shard(0, "features")
    return ts.ParameterSpec((features,), layout, ts.Constant(1.0), **settings)


class Silent(Scale):
    def __init__(self):
        ts.ParallelLayer.__init__(self)


class Twice(Scale):
    def __init__(self):
        super().__init__()
        self.declare(axes={}, parameters={}, inputs={}, output=ts.Whole())


class Beside(Scale):
    def __init__(self):
        ts.ParallelLayer.__init__(self)
        self.extra = nn.Parameter(torch.ones(3))
        self.declare(axes={}, parameters={}, inputs={}, output=ts.Whole())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Silent()(torch.ones(2, 6)),
            "Silent has declared nothing. End its constructor with self.declare(...): axes,"
            " parameters, inputs and output.",
        ),
        (
            Twice,
            "Twice has declared already. Call self.declare(...) once, at the end of the"
            " constructor, with all of its parameters.",
        ),
        (
            Beside,
            "Beside.extra is a parameter that the layer has not declared, so that ranks would"
            " not agree on it. Name it in declare(parameters=...), with ts.Whole() if every"
            " rank holds all of it.",
        ),
        (
            lambda: Scale(parameters={"dim": weight()}),
            "Scale declares ['dim'], which are attributes of every layer. Expected other"
            " names.",
        ),
        (
            lambda: Scale(parameters={"weight": weight(grad="partial")}),
            "weight is declared with grad='partial', but its layout Shard(dim=0,"
            " segments=(Segment(axis='features', unit=1),)) gives 'sharded'.",
        ),
    ],
)
def test_what_is_left_out_or_said_twice_is_refused(build, message):
    """Each with what to do instead."""
    with pytest.raises(LayoutError) as error:
        build()
    assert str(error.value) == message


def refuses_a_late_parameter():
    layer = Scale()
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    with pytest.raises(
        LayoutError, match="extra is a parameter that the layer has not"
    ):
        layer.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(LayoutError, match="weight_orig is a parameter"):
        prune.l1_unstructured(layer, "weight", 0.5)


def test_a_parameter_that_comes_later_is_refused_on_several_ranks():
    """Also one that pruning puts in the place of a shard; a declared one can be replaced."""
    run_ranks(refuses_a_late_parameter, 2)


def test_alone_a_layer_takes_what_torch_does_to_it():
    """In a group of one pruning sees the whole weight."""
    layer = Scale()
    prune.l1_unstructured(layer, "weight", 0.5)
    assert (layer(torch.ones(6)) == 0).sum() == 3


def kinds_of_gradients():
    layer = Scale(
        axes={"features": ts.Axis(6), "kv": ts.covering(ts.Axis(6), 6)},
        parameters={
            "weight": weight(),
            "kv": ts.ParameterSpec((1,), ts.Shard(0, "kv"), ts.Constant(1.0)),
            "shift": weight(1, ts.Whole(), grad="partial"),
            "bias": weight(1, ts.Whole()),
        },
    )
    kinds = {name: spec.grad for name, spec in layer.specs.items()}
    assert kinds == {
        "weight": "sharded",
        "kv": "overlapping",
        "shift": "partial",
        "bias": "whole",
    }


def test_the_kind_of_a_gradient_stands_in_its_spec():
    """What follows from the layout is filled in; what the layer says is kept."""
    run_ranks(kinds_of_gradients, 2)


def says_how_it_is_divided():
    assert (Scale().split, Scale().dim) == ("features", None)
    column = ts.nn.ParallelLinear(4, 6, dim=-1)
    assert (column.split, column.dim) == ("column", -1)
    assert ts.nn.ParallelLinear(4, 6, dim="row").dim == 0
    whole = copy.deepcopy(ts.nn.ParallelLinear(4, 6))
    assert (whole.split, whole.dim) == ("whole", None)
    assert ts.nn.ParallelEmbedding(4, 6, dim=0).split == "vocabulary"
    assert ts.nn.ParallelMultiheadAttention(8, 4).split == "heads"
    assert ts.nn.ParallelGroupNorm(2, 4).split == "groups"


def test_every_layer_says_how_it_is_divided():
    """`split` is its name, `dim` TorchShard's code, as it was given or the split's first."""
    run_ranks(says_how_it_is_divided, 2)


class DenseUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(7, 4))
        self.shift = nn.Parameter(torch.randn(7))
        self.down = nn.Parameter(torch.randn(3, 7))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.up, self.shift)), self.down)


class MarkedUnit(ts.MarkedLayer):
    dense_forward = DenseUnit.forward

    def __init__(self, dense):
        super().__init__()

        def given(name, dim):
            whole = getattr(dense, name).detach()
            return ts.ParameterSpec(
                tuple(whole.shape), ts.Shard(dim, "hidden"), ts.Given(whole)
            )

        self.declare(
            axes={"hidden": ts.Axis(7)},
            parameters={
                "up": given("up", 0),
                "shift": given("shift", 0),
                "down": given("down", 1),
            },
            inputs={},
            output=ts.Whole(),
            dtype=torch.float64,
        )


def dense_forward_runs_as_it_stands():
    torch.manual_seed(2)
    dense = DenseUnit().double()
    layer = MarkedUnit(dense)
    for compiled in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        dense.zero_grad()
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        dense_x = x.detach().clone().requires_grad_()
        y, expected = compiled(x), dense(dense_x)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, dense_x.grad)
        for name, parameter in dense.named_parameters():
            own = layer.own_state(name, name, parameter.grad)
            torch.testing.assert_close(getattr(layer, name).grad, own)
    assert isinstance(layer.up, nn.Parameter)
    whole = ts.collect_state_dict(layer)
    torch.testing.assert_close(whole, dict(dense.state_dict()))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_dense_forward_runs_as_it_stands(world_size):
    """On marked parameters, compiled too; outside the forward they are plain."""
    run_ranks(dense_forward_runs_as_it_stands, world_size)


class DenseMixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.register_parameter("bias", None)
        self.scale = nn.Parameter(torch.randn(()))
        self.norm = nn.LayerNorm(7)
        self.sizes, self.extra, self.dim = (5, 7), None, 3
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("mask", torch.ones(5), persistent=False)


class MarkedMixture(ts.MarkedLayer):
    def __init__(self, dense):
        super().__init__()
        self.take_over(dense, {"gain": 0, "weight": 1, "bias": 0})

    def dense_forward(self):
        return (self.gain.sum(), self.weight.sum(0), self.scale, self.bias)


def takes_over_what_a_dense_module_holds():
    torch.manual_seed(ts.distributed.get_rank())
    dense = DenseMixture()
    kept = dense.norm, dense.scale, dense.mean
    layer = MarkedMixture(dense)
    assert (layer.norm, layer.scale, layer.mean) == kept
    assert list(layer.state_dict()) == list(dense.state_dict())
    names = [name for name, _ in dense.named_parameters()]
    assert [name for name, _ in layer.named_parameters()] == names
    assert layer.gain.dtype == torch.float64
    assert layer.bias is None
    assert not layer.weight.requires_grad
    assert (layer.sizes, layer.extra, layer.dim) == ((5, 7), None, None)
    assert "mask" in dict(layer.named_buffers())
    torch.manual_seed(0)  # rank 0's values are everybody's
    expected = DenseMixture().state_dict()
    torch.testing.assert_close(ts.collect_state_dict(layer), expected)
    total, column, scale, bias = layer()
    torch.testing.assert_close(total, expected["gain"].sum())
    column = ts.distributed.gather(column) if layer.group.size > 1 else column
    torch.testing.assert_close(column, expected["weight"].sum(0))
    assert scale is layer.scale
    assert bias is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_layer_takes_over_what_a_dense_module_holds(world_size):
    """The same objects in the same order, and its part of what is divided, in its dtype."""
    run_ranks(takes_over_what_a_dense_module_holds, world_size)


def test_a_layer_takes_over_once():
    """As it declares once; what it holds is then declared."""
    layer = MarkedMixture(DenseMixture())
    with pytest.raises(LayoutError, match="has declared already"):
        layer.take_over(nn.Module(), {})
