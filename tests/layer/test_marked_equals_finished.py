"""A dense forward on marked parameters and the finished layer: the same numbers."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.tensor import whole
from torchshard.testing import run_ranks


class Marked(ts.MarkedLayer):
    """A dense forward on parameters that are divided as those of a finished layer."""

    def __init__(self, finished, dense, forward):
        super().__init__()
        self._forward = forward
        self.declare(
            axes=finished.axes,
            parameters={
                name.replace(".", "_"): ts.ParameterSpec(
                    spec.shape,
                    spec.layout,
                    ts.Given(dense.get_parameter(name).detach()),
                )
                for name, spec in finished.specs.items()
            },
            inputs={},
            output=ts.Whole(),
            dtype=torch.float64,
        )

    def dense_forward(self, x):
        return self._forward(self, x)


def linear(layer, x):
    return F.linear(x, layer.weight, layer.bias)


def convolution(groups):
    def forward(layer, x):
        return F.conv2d(x, layer.weight, layer.bias, 2, 1, 1, groups)

    return forward


def attention(layer, x):
    batch, length, size = x.shape
    qkv = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = qkv.view(batch, length, 3, 5, 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    mixed = mixed.reshape(batch, length, size)
    return F.linear(mixed, layer.out_proj_weight, layer.out_proj_bias)


IDS = torch.tensor([[0, 6, 2], [2, 1, 5]])
CASES = {
    "linear, column": (ts.nn.ParallelLinear, (5, 7), {"dim": -1}, linear, (3, 5)),
    "linear, row": (ts.nn.ParallelLinear, (5, 7), {"dim": 0}, linear, (3, 5)),
    "conv, column": (
        ts.nn.ParallelConv2d,
        (4, 5, 3, 2, 1),
        {"dim": 1},
        convolution(1),
        (2, 4, 5, 6),
    ),
    "conv, row": (
        ts.nn.ParallelConv2d,
        (4, 5, 3, 2, 1),
        {"dim": 0},
        convolution(1),
        (2, 4, 5, 6),
    ),
    "conv, groups": (
        ts.nn.ParallelConv2d,
        (8, 12, 3, 2, 1, 1, 4),
        {"dim": 1},
        convolution(4),
        (2, 8, 5, 6),
    ),
    "embedding, vocabulary": (
        ts.nn.ParallelEmbedding,
        (7, 5, 2),
        {"dim": 0},
        lambda layer, ids: F.embedding(ids, layer.weight, 2),
        IDS,
    ),
    "embedding, columns": (
        ts.nn.ParallelEmbedding,
        (7, 5),
        {"dim": 1},
        lambda layer, ids: F.embedding(ids, layer.weight),
        IDS,
    ),
    "group norm": (
        ts.nn.ParallelGroupNorm,
        (4, 8),
        {},
        lambda layer, x: F.group_norm(x, 4, layer.weight, layer.bias),
        (2, 8, 3),
    ),
    "attention": (
        ts.nn.ParallelMultiheadAttention,
        (10, 5),
        {"batch_first": True},
        attention,
        (2, 4, 10),
    ),
}


def same_numbers(finished_class, arguments, options, forward, given):
    dense_options = {key: value for key, value in options.items() if key != "dim"}
    torch.manual_seed(4)
    finished = finished_class(*arguments, **options, dtype=torch.float64)
    torch.manual_seed(4)
    dense = finished.dense_class(*arguments, **dense_options, dtype=torch.float64)
    marked = Marked(finished, dense, forward)
    found = []
    for layer in (finished, marked):
        torch.manual_seed(5)
        x = given
        if isinstance(given, tuple):
            x = torch.randn(given, dtype=torch.float64, requires_grad=True)
        operands = (
            (x, x, x) if finished_class is ts.nn.ParallelMultiheadAttention else (x,)
        )
        output = layer(*operands[: 1 if layer is marked else None])
        output = whole(output[0] if isinstance(output, tuple) else output)
        output.backward(torch.randn_like(output))
        grads = [parameter.grad for parameter in layer.parameters()]
        found.append([output.detach(), x.grad, *sorted(grads, key=lambda g: g.shape)])
    torch.testing.assert_close(*found)


def all_cases():
    for case in CASES.values():
        same_numbers(*case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_marked_layer_equals_the_finished_one(world_size):
    """In output and in the gradients of input, weights and biases, divided alike."""
    run_ranks(all_cases, world_size)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.kernel = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.shift = nn.Parameter(torch.randn(6))
        self.scale, self.bias = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.head = nn.Parameter(torch.randn(5, 6 * 4))
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("var", torch.rand(6))

    def forward(self, x):
        x = F.conv2d(x, self.kernel, self.shift, padding=1)
        x = F.batch_norm(x, self.mean, self.var, self.scale, self.bias, self.training)
        x = F.max_pool2d(F.relu(x), 2)
        return F.linear(torch.flatten(x, 1), self.head)


class MarkedNetwork(ts.MarkedLayer):
    dense_forward = Network.forward

    def __init__(self, dense):
        super().__init__()
        layouts = {name: ts.Shard(0, "channel") for name in dense.state_dict()}
        layouts["head"] = ts.Shard(1, ts.Segment("channel", 4))
        specs = {
            name: ts.ParameterSpec(tuple(x.shape), layouts[name], ts.Given(x))
            for name, x in dense.state_dict().items()
        }
        self.declare(
            axes={"channel": ts.Axis(6)},
            buffers={name: specs.pop(name) for name in ("mean", "var")},
            parameters=specs,
            inputs={},
            output=ts.Whole(),
            dtype=torch.float64,
        )


def gathers_nothing():
    dense = Network().double()
    layer = MarkedNetwork(dense)
    torch.manual_seed(7)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    own_x, dense_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with CommDebugMode() as counted:
        y = layer(own_x)
    assert counted.get_total_counts() == (layer.group.size > 1)
    expected = dense(dense_x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own_x.grad, dense_x.grad)
    for name, parameter in dense.named_parameters():
        own = layer.own_state(name, name, parameter.grad)
        torch.testing.assert_close(getattr(layer, name).grad, own)
    torch.testing.assert_close(ts.collect_state_dict(layer), dict(dense.state_dict()))
    for model in (layer, dense):
        model.eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), dense(x))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_convolutional_network_gathers_nothing(world_size):
    """Convolution, batch norm, pool and flatten stay divided; the head makes one all-reduce."""
    run_ranks(gathers_nothing, world_size)
