"""shard_init_helper_ gives a shard what torch.nn.init gives the whole tensor."""

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn import init
from torchshard.testing import run_ranks

IN_FEATURES, OUT_FEATURES = 5, 7
WEIGHT_METHODS = [
    (init.uniform_, {"a": -2.0, "b": 3.0}),
    (init.normal_, {"mean": 1.0, "std": 2.0}),
    (init.trunc_normal_, {"std": 0.5}),
    (init.constant_, {"val": 0.3}),
    (init.ones_, {}),
    (init.zeros_, {}),
    (init.eye_, {}),
    (init.xavier_uniform_, {"gain": 2.0}),
    (init.xavier_normal_, {}),
    (init.kaiming_uniform_, {"a": 1.0, "mode": "fan_out"}),
    (init.kaiming_normal_, {"a": 0, "mode": "fan_in", "nonlinearity": "leaky_relu"}),
    (init.orthogonal_, {"gain": 1.5}),
    (init.sparse_, {"sparsity": 0.4}),
]


def expect_as_dense(layer, dense, name, method, arguments):
    torch.manual_seed(4)
    method(dense.get_parameter(name), **arguments)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    parameter = layer.get_parameter(name)
    assert ts.nn.init.shard_init_helper_(method, parameter, **arguments) is parameter
    assert torch.equal(torch.get_rng_state(), after)
    expected = layer.own_state(name, name, dense.get_parameter(name).detach())
    assert torch.equal(parameter.detach(), expected), (method.__name__, name)
    assert parameter.requires_grad


def every_method():
    dense = nn.Linear(IN_FEATURES, OUT_FEATURES).double()
    for dim in (1, 0, None):
        layer = ts.nn.ParallelLinear(IN_FEATURES, OUT_FEATURES, dim=dim).double()
        for method, arguments in WEIGHT_METHODS:
            expect_as_dense(layer, dense, "weight", method, arguments)
        for method, arguments in WEIGHT_METHODS[:6]:
            expect_as_dense(layer, dense, "bias", method, arguments)
    convolution = nn.Conv1d(5, 7, 3).double()
    sharded = ts.nn.ParallelConv1d(5, 7, 3, dim=1).double()
    for method, arguments in [(init.dirac_, {}), (init.orthogonal_, {})]:
        expect_as_dense(sharded, convolution, "weight", method, arguments)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_r29_t39_t41_every_method_of_torch(world_size):
    """R29, T39, T41: values and random stream are those of the whole tensor, on the CPU."""
    run_ranks(every_method, world_size)


def whole_parameters_are_equal():
    torch.manual_seed(ts.distributed.get_rank())
    layer = ts.nn.ParallelLinear(IN_FEATURES, OUT_FEATURES, dim=0)
    ts.nn.init.shard_init_helper_(init.normal_, layer.bias)
    everywhere = ts.distributed.gather(layer.bias.detach(), dim=0)
    assert torch.equal(everywhere, layer.bias.detach().repeat(2))


def test_r28_t40_whole_parameters_are_equal_on_all_ranks():
    """R28, T40: a row-parallel bias is rank 0's, whatever the ranks' seeds."""
    run_ranks(whole_parameters_are_equal, 2)


def strangers_are_refused():
    layer = ts.nn.ParallelLinear(IN_FEATURES, OUT_FEATURES, dim=1)
    before = layer.weight.detach().clone()
    for tensor in (torch.ones(2, 3), layer.weight.to_local()[:1]):
        with pytest.raises(ts.errors.StateError, match=r"belongs to no sharded layer"):
            ts.nn.init.shard_init_helper_(init.zeros_, tensor)
    assert torch.equal(layer.weight.detach(), before)


def test_a_tensor_without_layer_is_refused():
    """A tensor whose place is unknown is left alone, with the remedy in the error."""
    run_ranks(strangers_are_refused, 2)


def test_plain_tensors_in_a_group_of_one():
    """Without a group the helper is the torch function."""
    torch.manual_seed(0)
    expected = init.kaiming_normal_(torch.empty(3, 4), a=1.0)
    torch.manual_seed(0)
    found = ts.nn.init.shard_init_helper_(
        init.kaiming_normal_, torch.empty(3, 4), a=1.0
    )
    assert torch.equal(found, expected)


def test_meta_parameters_stay_without_values():
    """On the meta device nothing is drawn."""
    layer = ts.nn.ParallelLinear(3, 4, dim=1, device="meta")
    before = torch.get_rng_state()
    assert ts.nn.init.shard_init_helper_(init.normal_, layer.weight).is_meta
    assert torch.equal(torch.get_rng_state(), before)
