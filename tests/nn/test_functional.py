"""The functional layers compute what torch.nn.functional computes with the whole weight."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.layout import balanced
from torchshard.nn.functional import parallel_embedding, parallel_linear
from torchshard.testing import run_ranks

IN_FEATURES, OUT_FEATURES = 5, 7


def randn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def own(x, dim):
    start, stop = balanced(
        x.shape[dim], ts.distributed.get_world_size(), ts.distributed.get_rank()
    )
    return x.detach().narrow(dim, start, stop - start).clone().requires_grad_()


def whole(x):
    return ts.distributed.gather(x) if isinstance(x, ts.ShardedTensor) else x


def linear_as_dense(dim, has_bias, marked):
    x, weight, bias = randn(0, 2, 3, 5), randn(1, 7, 5), randn(2, 7)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    expected = F.linear(x, weight, bias if has_bias else None)
    expected.backward(cotangent := randn(3, *expected.shape))
    x_in = x.detach().clone().requires_grad_()
    weight_r, bias_r = weight.detach().clone().requires_grad_(), bias.detach().clone()
    bias_r.requires_grad_()
    parts = [(x_in, x.grad)]
    if dim is not None:
        weight_dim = 1 if dim == 0 else 0
        weight_r = own(weight, weight_dim)
        parts.append((weight_r, own(weight.grad, weight_dim)))
        bias_r = own(bias, 0) if dim else bias_r
    entering = ts.distributed.scatter(x_in, -1) if marked else x_in
    entering = ts.ShardedTensor.from_local(entering) if marked else entering
    y = parallel_linear(entering, weight_r, bias_r if has_bias else None, dim)
    assert isinstance(y, ts.ShardedTensor) == (
        dim in (1, -1) and ts.distributed.get_world_size() > 1
    )
    y = whole(y)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    y.backward(cotangent)
    if has_bias:
        parts.append((bias_r, own(bias.grad, 0) if dim in (1, -1) else bias.grad))
    for tensor, grad in parts:
        torch.testing.assert_close(tensor.grad, grad.detach(), rtol=0, atol=1e-10)


def every_linear():
    for has_bias in (True, False):
        for dim in (1, -1, 0, None):
            linear_as_dense(dim, has_bias, marked=False)
        linear_as_dense(0, has_bias, marked=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_r27_linear_matches_dense(world_size):
    """R27: output and every gradient are the whole weight's, at uneven sizes."""
    run_ranks(every_linear, world_size)


OPTIONS = [
    {},
    {"padding_idx": -2},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"max_norm": 1.0, "norm_type": 1.5},
]


def embedding_as_dense(dim, options):
    ids = torch.tensor([[0, 6, 5, 5], [3, 0, 1, 5]])
    weight = randn(0, 7, 5).requires_grad_()
    weight_r = weight if dim is None else own(weight, 1 if dim else 0)
    weight_r = weight_r.detach().clone().requires_grad_()
    table = weight.detach().clone().requires_grad_()
    expected = F.embedding(ids, table, **options)
    expected.backward(cotangent := randn(1, *expected.shape))
    y = whole(parallel_embedding(ids, weight_r, dim=dim, num_embeddings=7, **options))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    y.backward(cotangent)
    grad, found = table.grad.to_dense(), weight_r.grad.to_dense()
    value = table.detach()
    if dim is not None:
        grad, value = own(grad, 1 if dim else 0), own(value, 1 if dim else 0)
    torch.testing.assert_close(found, grad.detach(), rtol=0, atol=1e-10)
    # max_norm scales the caller's own table, as torch does.
    torch.testing.assert_close(weight_r.detach(), value.detach(), rtol=0, atol=1e-10)


def every_embedding():
    for options in OPTIONS:
        for dim in (0, 1, -1, None):
            embedding_as_dense(dim, options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embedding_matches_dense(world_size):
    """Rows, the table's gradient and every option are those of the whole table."""
    run_ranks(every_embedding, world_size)


def wrong_shards():
    rank = ts.distributed.get_rank()
    weight = torch.ones(2 + 3 * rank, 3)
    message = (
        r"The ranks' shards of weight have sizes \[2, 5\] in dim 0\. Expected \[4, 3\]"
    )
    with pytest.raises(ts.errors.ShapeError, match=message):
        parallel_linear(torch.ones(1, 3), weight, dim=1)
    with pytest.raises(ts.errors.ShapeError, match=message):
        parallel_embedding(torch.ones(1, dtype=torch.int64), weight, dim=0)
    even = torch.ones(2, 3)
    with pytest.raises(ts.errors.ShapeError, match=r"num_embeddings=2, .* have 4 rows"):
        parallel_embedding(torch.tensor([1]), even, num_embeddings=2, dim=0)
    with pytest.raises(ts.errors.LayoutError, match="dim=2 is no split"):
        parallel_linear(torch.ones(1, 3), even, dim=2)
    with pytest.raises(ts.errors.ShapeError, match="mark it with"):
        parallel_linear(torch.ones(1, 3), even, dim=0)
    with pytest.raises(ts.errors.TargetError):
        parallel_embedding(torch.tensor([4]), even, dim=0)


def test_errors_are_the_same_on_all_ranks():
    """Shards of no even split, lost marks and ids out of range are refused everywhere."""
    run_ranks(wrong_shards, 2)


def layers_weight():
    layer = ts.nn.ParallelLinear(5, 7, dim=1)
    with CommDebugMode() as counted:
        parallel_linear(torch.ones(2, 5), layer.weight, layer.bias, dim=1)
    assert counted.get_total_counts() == 0
    x = torch.ones(2, 5)
    y = parallel_linear(x, layer.weight, layer.bias, dim=1)
    assert torch.equal(whole(y), whole(layer(x)))


def test_a_layers_weight_needs_no_exchange():
    """Of a layer's parameter the whole size is known."""
    run_ranks(layers_weight, 2)
