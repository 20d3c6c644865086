"""A layer's parameters deleted, replaced, renamed, added to: it works on, or says what to do."""

import copy
import pickle

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torchshard.distributed import groups
from torchshard.errors import LayoutError, ShapeError, ShardedOpError
from torchshard.testing.ranks import run_ranks


def twins(bias=True):
    layers = nn.Linear(4, 6, bias), ts.nn.ParallelLinear(4, 6, bias, dim=1)
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def inputs():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def uses_of(layer):
    """What a model does with a layer, by name."""

    def trained():
        optimizer = torch.optim.Adam(layer.parameters())
        layer(inputs()).square().sum().backward()
        optimizer.step()

    def wrapped():
        model = nn.Sequential(nn.Linear(4, 4), layer)
        ts.register_ddp_parameters_to_ignore(model)
        DistributedDataParallel(model)(inputs()).sum().backward()

    return {
        "repr": lambda: repr(layer),
        "forward": lambda: layer(inputs()),
        "deepcopy": lambda: copy.deepcopy(layer),
        "pickle": lambda: pickle.loads(pickle.dumps(layer)),
        "to": lambda: copy.deepcopy(layer).to(torch.float64),
        "step": trained,
        "collect": lambda: ts.collect_state_dict(layer),
        "load": lambda: layer.load_state_dict(layer.state_dict()),
        "sharded": lambda: ts.sharded_state_dict(layer),
        "to_dense": lambda: ts.to_dense(nn.Sequential(copy.deepcopy(layer))),
        "wrapped": wrapped,
    }


def without_bias():
    dense, layer = twins()
    dense.bias = layer.bias = None
    for use in uses_of(layer).values():
        use()
    dense, layer = twins()
    dense.bias = layer.bias = None
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        y = ts.distributed.gather(made(inputs()))
        torch.testing.assert_close(y, dense(inputs()))
        assert list(ts.collect_state_dict(made)) == ["weight"]
        assert "bias" not in repr(made)
    whole = ts.to_dense(nn.Sequential(layer))[0]
    assert whole.bias is None
    assert torch.equal(whole.weight, dense.weight)
    attention = ts.nn.ParallelMultiheadAttention(6, 3)
    attention.out_proj.bias = None
    attention(*[torch.ones(2, 1, 6)] * 3)
    assert "out_proj.bias" not in ts.collect_state_dict(attention)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bias_that_was_set_to_none_is_gone(world_size):
    """As in torch: the layer computes, copies, moves, trains, saves and turns back without it."""
    run_ranks(without_bias, world_size)


def deleted(layer):
    del layer.weight


def popped(layer):
    layer._parameters.pop("weight")


def renamed(layer):
    layer._parameters["kernel"] = layer._parameters.pop("weight")


def raw(layer):
    layer._parameters["weight"] = nn.Parameter(torch.ones(6, 4))


def weight_is_lost(change):
    _, layer = twins()
    change(layer)
    uses = uses_of(layer)
    for name in ("repr", "deepcopy", "pickle", "to"):
        uses[name]()
    for name in ("forward", "step", "collect", "sharded", "to_dense", "wrapped"):
        with pytest.raises((LayoutError, ShapeError)) as error:
            uses[name]()
    return str(error.value)


@pytest.mark.parametrize("change", [deleted, popped, renamed, raw])
def test_a_parameter_that_is_lost_is_named(change):
    """Not torch's AttributeError; the layer can still be printed, copied and moved."""
    words = {
        raw: "ParallelLinear.weight was given a tensor of shape (6, 4). Expected rank 0's shard"
        " (3, 4) of the whole (6, 4). Load whole values with layer.load_state_dict, or cut them"
        " with torchshard.distributed.scatter(whole, 0, grad='whole').",
    }
    lost = (
        "ParallelLinear has no 'weight' any more, which it declared: it was deleted, or renamed."
        " Put it back, as layer.weight = nn.Parameter(x) with x of shape (3, 4), this rank's"
        " part. An optional one is taken away with layer.weight = None."
    )
    assert run_ranks(weight_is_lost, 2, change)[0] == words.get(change, lost)


def replacements():
    for make in (
        lambda weight: nn.Parameter(weight.detach() * 2),
        lambda weight: nn.Parameter(weight * 2),  # a marked one
        lambda weight: nn.Parameter((weight.to_local() * 2).detach()),
    ):
        dense, layer = twins()
        new = make(layer.weight)
        layer.weight = new
        assert layer.weight is new
        assert type(new).__name__ == "ShardedParameter"
        for use in uses_of(copy.deepcopy(layer)).values():
            use()
        state = ts.collect_state_dict(layer)
        torch.testing.assert_close(state["weight"], dense.weight * 2)
    _, layer = twins()
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight", nn.Parameter(weight.detach()))
    layer.register_buffer("steps", torch.ones(3))
    layer.add_module("added", nn.Linear(3, 2))
    for use in uses_of(layer).values():
        use()
    parent = nn.Module()
    parent.moved = layer
    whole = ts.to_dense(parent).moved
    assert torch.equal(whole.steps, torch.ones(3))
    assert whole.added.weight.shape == (2, 3)


def test_a_parameter_of_the_shards_shape_takes_its_place():
    """Made of the old one, marked or local; buffers and modules beside it go along."""
    run_ranks(replacements, 2)


def refusals():
    _, layer = twins()
    calls = [
        lambda: setattr(layer, "weight", nn.Parameter(torch.ones(6, 4))),
        lambda: setattr(layer, "extra", nn.Parameter(torch.ones(3))),
        lambda: parametrize.register_parametrization(layer, "weight", nn.Identity()),
        lambda: parametrizations.weight_norm(layer),
        lambda: layer.tensor_of("kernel"),
    ]
    found = []
    for call in calls:
        with pytest.raises((LayoutError, ShapeError, ShardedOpError)) as error:
            call()
        found.append(str(error.value))
    layer(inputs())
    return found


def test_what_does_not_fit_is_refused_where_it_is_done():
    """The layer is then as it was."""
    found = run_ranks(refusals, 2)[groups.get_rank()]
    starts = [
        "ParallelLinear.weight was given a tensor of shape (6, 4). Expected rank 0's",
        "ParallelLinear.extra is a parameter that the layer has not declared",
        "torch.nn.utils.parametrize was given a parameter of which this rank holds a shard",
        "torch.nn.utils.parametrize was given a parameter of which this rank holds a shard",
        "ParallelLinear has no parameter or buffer 'kernel'. It declared ['weight', 'bias']",
    ]
    assert all(map(str.startswith, found, starts))
