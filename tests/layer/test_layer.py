"""ParallelLayer: what is declared is cut, moved, checked, and equals the dense layer."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from torchshard import owners
from torchshard.distributed import groups
from torchshard.errors import (
    CheckError,
    GroupError,
    LayoutError,
    ShapeError,
    ShardedOpError,
)
from torchshard.state import collect_state_dict
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing import Case, Floats, check_cases, check_layer, run_ranks

from layer_zoo import ParallelEmbedding, ParallelLinear, ParallelMultiheadAttention

WORLDS = [1, 2, 3, 4]


def randoms(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def twins(build, dense):
    """Return the sharded and the dense module with the same weights, in float64."""
    dense = dense.double()
    layer = build().double()
    layer.load_state_dict(dense.state_dict())
    return layer, dense


def grads_of(model):
    """Return the parameters' gradients in full layout, by state key."""
    local = {key: p.grad for key, p in model.named_parameters(remove_duplicate=False)}
    return collect_state_dict(model, local)


def same_grads(model, dense):
    expected = {
        key: p.grad for key, p in dense.named_parameters(remove_duplicate=False)
    }
    actual = grads_of(model)
    assert actual.keys() == expected.keys()
    for key, grad in actual.items():
        torch.testing.assert_close(
            grad,
            expected[key],
            rtol=1e-12,
            atol=1e-12,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def trained_alike(model, dense, *shape, hand=lambda x: x, seed=1):
    """Compare output and every gradient; `hand` gives the sharded model its input."""
    x = randoms(*shape, seed=seed).requires_grad_()
    dense_x = x.detach().clone().requires_grad_()
    y, dense_y = whole(model(hand(x))), dense(dense_x)
    same(y, dense_y)
    cotangent = randoms(*dense_y.shape, seed=seed + 1)
    y.backward(cotangent)
    dense_y.backward(cotangent)
    same(x.grad, dense_x.grad)
    same_grads(model, dense)


# Declared layouts


class DenseGain(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(()))
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, input):
        return (input * self.scale).tanh() * self.gain


class Gain(ts.ParallelLayer):
    """A whole parameter, one number, that sharded compute reads."""

    def __init__(self, features, *, group=None):
        super().__init__(group)
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters={
                "gain": ts.ParameterSpec((), ts.Whole(), ts.Normal()),
                "scale": ts.ParameterSpec(
                    (features,), ts.Shard(0, "features"), ts.Normal()
                ),
            },
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Shard(-1, "features"),
        )

    def local_forward(self, input):
        return (input * self.scale).tanh() * self.shared("gain")


class UnsharedGain(Gain):
    """The mistake: each rank keeps its own part of the whole parameter's gradient."""

    def local_forward(self, input):
        return (input * self.scale).tanh() * self.gain


class DenseQueries(nn.Module):
    """Scores of grouped queries: `ratio` query heads share a key head."""

    def __init__(self, features, heads, ratio, size=2):
        super().__init__()
        self.ratio, self.size = ratio, size
        self.key = nn.Parameter(torch.randn(heads // ratio * size, features))
        self.query = nn.Parameter(torch.randn(heads * size, features))

    def forward(self, input):
        query = F.linear(input, self.query).unflatten(-1, (-1, self.size))
        key = F.linear(input, self.key).unflatten(-1, (-1, self.size))
        return (query * key.repeat_interleave(self.ratio, -2)).sum(-1)


class Queries(ts.ParallelLayer):
    """Key heads cover the query heads of a rank, so neighbours hold the same ones."""

    def __init__(self, features, heads, ratio, size=2, *, group=None):
        super().__init__(group)
        self.ratio, self.size = ratio, size
        head = ts.Axis(heads)
        self.declare(
            axes={"head": head, "key": ts.covering(head, ratio)},
            parameters={
                "key": ts.ParameterSpec(
                    (heads // ratio * size, features),
                    ts.Shard(0, ts.Segment("key", size)),
                    ts.Normal(),
                ),
                "query": ts.ParameterSpec(
                    (heads * size, features),
                    ts.Shard(0, ts.Segment("head", size)),
                    ts.Normal(),
                ),
            },
            inputs={"input": ts.Whole(-1, features)},
            output=ts.Shard(-1, "head"),
        )

    def key_weight(self):
        return self.shared("key")

    def local_forward(self, input):
        query = F.linear(input, self.query).unflatten(-1, (-1, self.size))
        key = F.linear(input, self.key_weight()).unflatten(-1, (-1, self.size))
        heads = torch.arange(*self.own("head"))
        place = heads // self.ratio - self.own("key")[0]
        return (query * key.index_select(-2, place)).sum(-1)


class UnsharedQueries(Queries):
    """The mistake: a key head's holders each keep their part of its gradient."""

    def key_weight(self):
        return self.key


class DenseGated(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * hidden, features))
        self.bias = nn.Parameter(torch.randn(2 * hidden))

    def forward(self, input):
        gate, up = F.linear(input, self.weight, self.bias).chunk(2, -1)
        return F.silu(gate) * up, gate


class Gated(ts.ParallelLayer):
    """Gate and up projection packed in one weight, returned as a tuple of two shards."""

    def __init__(self, features, hidden, *, group=None):
        super().__init__(group)
        packed = ts.Shard(0, [ts.Segment("hidden")] * 2)
        self.declare(
            axes={"hidden": ts.Axis(hidden)},
            parameters={
                "weight": ts.ParameterSpec((2 * hidden, features), packed, ts.Normal()),
                "bias": ts.ParameterSpec((2 * hidden,), packed, ts.Normal()),
            },
            inputs={"input": ts.Whole(-1, features)},
            output=(ts.Shard(-1, "hidden"), ts.Shard(-1, "hidden")),
        )

    def local_forward(self, input):
        gate, up = F.linear(input, self.weight, self.bias).chunk(2, -1)
        return F.silu(gate) * up, gate


class DenseRow(nn.Module):
    def __init__(self, features, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, features))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


class Row(ts.ParallelLayer):
    """A sum over the ranks, and a bias that is added once behind it."""

    def __init__(self, features, out, *, group=None):
        super().__init__(group)
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters={
                "weight": ts.ParameterSpec(
                    (out, features), ts.Shard(1, "features"), ts.Normal()
                ),
                "bias": ts.ParameterSpec((out,), ts.Whole(), ts.Normal()),
            },
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Partial(),
        )

    def local_forward(self, input):
        return F.linear(input, self.weight)

    def finish(self, output):
        return output + self.bias.to(output.dtype)


DECLARED = [
    Case(Gain, DenseGain, args=(7,), inputs=[Floats((3, 7), shard=1)]),
    Case(Gain, DenseGain, args=(3,), inputs=[Floats((2, 3))]),
    Case(Queries, DenseQueries, args=(5, 6, 3), inputs=[Floats((4, 5))]),
    Case(Queries, DenseQueries, args=(5, 6, 2), inputs=[Floats((2, 3, 5))]),
    Case(Queries, DenseQueries, args=(5, 4, 4), inputs=[Floats((5,))]),
    Case(Gated, DenseGated, args=(3, 5), inputs=[Floats((4, 3))]),
    Case(Gated, DenseGated, args=(3, 2), inputs=[Floats((4, 3))]),
    Case(Row, DenseRow, args=(5, 3), inputs=[Floats((4, 5), shard=1)]),
    Case(Row, DenseRow, args=(2, 3), inputs=[Floats((4, 2))], collectives=(1, 1)),
]


@pytest.mark.parametrize("world_size", WORLDS)
def test_declared_layouts_equal_dense(world_size):
    """Shared parameters, overlaps, packing, tuples and a late bias equal the dense layers."""
    run_ranks(check_cases, world_size, DECLARED)


def reads_of_the_attribute_are_caught():
    for wrong, dense, args, shape in [
        (UnsharedGain, DenseGain, (7,), (3, 7)),
        (UnsharedQueries, DenseQueries, (5, 6, 3), (4, 5)),
    ]:
        name = "gain" if wrong is UnsharedGain else "key"
        with pytest.raises(CheckError, match=rf"gradients: gradient of {name} differs"):
            check_layer(Case(wrong, dense, args=args, inputs=[Floats(shape)]))


def test_a_shared_parameter_read_as_an_attribute_is_caught():
    """Without `self.shared` a gradient is one rank's part, and check_layer says whose."""
    run_ranks(reads_of_the_attribute_are_caught, 4)


def packed_rows_are_each_segments_own():
    layer, dense = twins(partial(Gated, 3, 5), DenseGated(3, 5))
    start, stop = layer.own("hidden")
    rows = [*range(start, stop), *range(5 + start, 5 + stop)]
    assert torch.equal(layer.weight, dense.weight[rows])
    assert torch.equal(layer.bias, dense.bias[rows])


@pytest.mark.parametrize("world_size", [2, 3])
def test_packed_rows_are_each_segments_own(world_size):
    """A rank holds its units of every segment, segment after segment (T52)."""
    run_ranks(packed_rows_are_each_segments_own, world_size)


class Both(ts.ParallelLayer):
    """Two whole inputs, of which the sum of squares over sharded rows is returned."""

    def __init__(self, features, *, group=None):
        super().__init__(group)
        self.declare(
            axes={"out": ts.Axis(4)},
            parameters={
                "weight": ts.ParameterSpec(
                    (4, features), ts.Shard(0, "out"), ts.Normal()
                )
            },
            inputs={"first": ts.Whole(-1, features), "second": ts.Whole(-1, features)},
            output=ts.Shard(-1, "out"),
        )

    def local_forward(self, first, second, scale=1.0):
        self.was_same = first is second
        return F.linear(first, self.weight) * F.linear(second, self.weight) * scale


def moves_one_tensor_once():
    layer = Both(3).double()
    x, z = randoms(2, 3).requires_grad_(), randoms(2, 3, seed=4).requires_grad_()
    size = layer.group.size
    for second, expected in [(x, 1), (z, 2), (x.view_as(x), 2)]:
        # Outside of the count, whose hooks make two tensors of one.
        y = layer(x, second=second, scale=2.0)
        with CommDebugMode() as backward:
            y.backward(torch.ones(2, 4, dtype=torch.float64))
        assert backward.get_total_counts() == (expected if size > 1 else 0)
        assert layer.was_same == (second is x)
    weight = collect_state_dict(layer)["weight"]
    x.grad = None
    whole(layer(x, x)).backward(torch.ones(2, 4, dtype=torch.float64))
    same(x.grad, 2 * (x.detach() @ weight.T) @ weight)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tensor_given_twice_is_moved_once(world_size):
    """The same tensor as two inputs costs one all-reduce in backward, others one each."""
    run_ranks(moves_one_tensor_once, world_size)


# Inputs


def shard_of(x, dim=-1, **options):
    """Return `x` as a ShardedTensor whose gradient reaches the whole leaf `x`."""
    shard = ts.distributed.scatter(x, dim, grad="whole", **options)
    return ShardedTensor.from_local(shard, dim, **options)


def whole_input_takes_shards():
    for hand in (lambda x: x, shard_of, lambda x: shard_of(x, 0)):
        trained_alike(
            *twins(partial(ParallelLinear, 5, 7, dim=1), nn.Linear(5, 7)),
            4,
            5,
            hand=hand,
        )
        trained_alike(
            *twins(partial(ParallelLinear, 5, 7), nn.Linear(5, 7)), 4, 5, hand=hand
        )
    layer = ParallelLinear(5, 7, dim=1).double()
    shard = ShardedTensor.from_local(
        ts.distributed.scatter(randoms(4, 5)).requires_grad_()
    )
    with CommDebugMode() as forward:
        y = layer(shard)
    with CommDebugMode() as backward:
        y.backward(torch.ones(4, 7, dtype=torch.float64))
    ops = torch.ops.c10d
    if layer.group.size > 1:
        assert list(forward.get_comm_counts().values()) == [1]
        counts = backward.get_comm_counts()
        assert {str(op) for op in counts} == {str(ops._reduce_scatter_base_)}, counts
        assert backward.get_total_counts() == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_whole_input_takes_a_sharded_tensor(world_size):
    """A shard is gathered on the way in and reduce-scattered on the way back."""
    run_ranks(whole_input_takes_shards, world_size)


def shard_input_takes_whole_and_shards():
    build, dense = partial(ParallelLinear, 7, 5, dim=0), nn.Linear(7, 5)
    for hand in (lambda x: x, shard_of):
        trained_alike(*twins(build, dense), 4, 7, hand=hand)
        dense.zero_grad()


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_shard_input_takes_whole_and_sharded_tensors(world_size):
    """Values and gradients are the dense layer's, whichever way the input comes."""
    run_ranks(shard_input_takes_whole_and_shards, world_size)


def refuses(layer, call, error, text):
    """Check that `call` raises exactly `text`, without a collective."""
    with CommDebugMode() as counted, pytest.raises(error) as raised:
        call(layer)
    assert str(raised.value) == text
    assert counted.get_total_counts() == 0


def inputs_are_refused_alike():
    row, column = ParallelLinear(5, 3, dim=0), ParallelLinear(5, 3, dim=1)
    rank = row.group.rank
    ranges = ts.ranges_of("x", {"x": ts.Axis(5)}, 2)
    other = ts.ranges_of([ts.Segment("a"), ts.Segment("b")], _two_axes(), 2)
    local = [torch.ones(4, 3), torch.ones(4, 2)][rank]
    refuses(
        row,
        lambda layer: layer(local),
        ShapeError,
        f"input has shape (4, {3 - rank}); ParallelLinear expects size 5 in dim -1. Size"
        f" {3 - rank} is this rank's share: if input is a shard, mark it with"
        " ShardedTensor.from_local(input, dim=-1).",
    )
    for layer in (row, column):
        refuses(
            layer,
            lambda layer: layer(torch.ones(4, 7)),
            ShapeError,
            "input has shape (4, 7); ParallelLinear expects size 5 in dim -1.",
        )
        refuses(
            layer,
            lambda layer: layer(torch.tensor(1.0)),
            ShapeError,
            "input has shape (); ParallelLinear expects size 5 in dim -1.",
        )
    on_rows = ShardedTensor.from_local(
        torch.ones(2, 5), 0, ranges=ts.ranges_of("x", {"x": ts.Axis(4)}, 2)
    )
    remedy = (
        " Pass torchshard.distributed.gather(input), the whole tensor, and the layer will"
        " take its part."
    )
    refuses(
        row,
        lambda layer: layer(on_rows),
        ShapeError,
        "input is sharded on dim 0 as [2, 2]; ParallelLinear takes it sharded on dim 1 as"
        " [3, 2]." + remedy,
    )
    length = other.length(rank)
    otherwise = ShardedTensor.from_local(torch.ones(4, length), ranges=other)
    refuses(
        row,
        lambda layer: layer(otherwise),
        ShapeError,
        "input is sharded on dim 1 as [3, 2]; ParallelLinear takes it sharded on dim 1 as"
        " [3, 2]." + remedy,
    )
    seven = ShardedTensor.from_local(
        torch.ones(4, 4 - rank), ranges=ts.ranges_of("x", {"x": ts.Axis(7)}, 2)
    )
    refuses(
        column,
        lambda layer: layer(input=seven),
        ShapeError,
        "input has shape (4, 7); ParallelLinear expects size 5 in dim -1.",
    )
    good = ShardedTensor.from_local(torch.ones(2, 3 - rank), ranges=ranges)
    refuses(
        Both(5),
        lambda layer: layer(good, torch.ones(2, 6)),
        ShapeError,
        "second has shape (2, 6); Both expects size 5 in dim -1.",
    )
    with pytest.raises(TypeError, match="multiple values for argument 'first'"):
        Both(5)(torch.ones(2, 5), first=torch.ones(2, 5))


def _two_axes():
    return {"a": ts.Axis(3), "b": ts.Axis(2)}


def test_inputs_that_do_not_fit_are_refused_alike():
    """Every rank raises the whole text before any collective, whichever input is wrong."""
    run_ranks(inputs_are_refused_alike, 2)


def leading_dims_and_keywords():
    for dim, (features, out) in {1: (5, 7), 0: (7, 5), None: (3, 4)}.items():
        layer, dense = twins(
            partial(ParallelLinear, features, out, dim=dim), nn.Linear(features, out)
        )
        for shape in [(), (2,), (2, 3), (2, 1, 3), (0,)]:
            x = randoms(*shape, features)
            same(whole(layer(x)), dense(x))
            same(whole(layer(input=x)), dense(input=x))
            layer.zero_grad()
            dense.zero_grad()
            trained_alike(layer, dense, *shape, features)


@pytest.mark.parametrize("world_size", WORLDS)
def test_leading_dims_and_keywords(world_size):
    """Inputs of 1 to 4 dims, empty ones and keywords give the dense results (T22)."""
    run_ranks(leading_dims_and_keywords, world_size)


# Declarations


def declared(**options):
    """Return a function that makes a layer of the given declaration."""

    class Declared(ts.ParallelLayer):
        def __init__(self):
            super().__init__()
            defaults = {
                "axes": {"head": ts.Axis(3)},
                "parameters": {},
                "inputs": {},
                "output": ts.Whole(),
            }
            self.declare(**defaults | options)

        def local_forward(self, input, other=None):
            return input

    return Declared


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {
                "parameters": {
                    "weight": ts.ParameterSpec(
                        (7, 2), ts.Shard(0, ts.Segment("head", 2)), ts.Normal()
                    )
                }
            },
            "weight is declared with shape (7, 2), but the segments of its dim 0 add up to"
            " 6.",
        ),
        (
            {
                "parameters": {
                    "a.bias": ts.ParameterSpec((3,), ts.Shard(1, "head"), ts.Normal())
                }
            },
            "a.bias is declared with shape (3,), but the segments of its dim 1 add up to 3.",
        ),
        (
            {
                "buffers": {
                    "mean": ts.ParameterSpec((3,), ts.Shard(0, "hed"), ts.Normal())
                }
            },
            "Segment('hed') names an axis that is not declared. Expected one of ['head'].",
        ),
        (
            {"inputs": {"x": ts.Whole()}},
            "inputs declares ['x'], but local_forward of Declared takes ['input', 'other']."
            " Expected the names of its first arguments, in their order.",
        ),
        (
            {"inputs": {"input": ts.Partial()}},
            "input is declared as Partial. Expected Whole, or a Shard; a partial is reduced"
            " before it is passed on.",
        ),
        (
            {"inputs": {"other": ts.Whole()}},
            "inputs declares ['other'], but local_forward of Declared takes ['input',"
            " 'other']. Expected the names of its first arguments, in their order.",
        ),
    ],
)
def test_declarations_that_do_not_fit_are_refused(options, text):
    """Segments add up to the shape, axes exist, inputs are named as local_forward has them."""
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}$"):
        declared(**options)()


def refuses_a_wrong_local_shape():
    class Wrong(Gain):
        def local_forward(self, input):
            return input[..., :1]

    layer = Wrong(8)
    text = (
        "local_forward of Wrong returned shape (2, 1); its output is declared as a shard,"
        f" of which rank {layer.group.rank} of 2 holds 4 in dim 1."
    )
    refuses(layer, lambda layer: layer(torch.ones(2, 8)), ShapeError, text)


def test_an_output_of_another_size_than_the_shards_is_refused():
    """What is marked as a shard has the size of one."""
    run_ranks(refuses_a_wrong_local_shape, 2)


def test_dim_7_is_refused():
    """The constructor names the splits that there are."""
    with pytest.raises(LayoutError) as raised:
        ParallelLinear(2, 3, dim=7)
    assert str(raised.value) == (
        "dim=7 is no split. Expected None (not divided), 1, -1 or 'column' (the output"
        " features are divided), 0 or 'row' (the input features are divided)."
    )


def prints():
    layer = ParallelLinear(3, 5, dim=1)
    rows = 3 - layer.group.rank
    return layer.extra_repr(), repr(layer), rows


def test_printing_shows_the_sharding():
    """`print(model)` names the rank, and each parameter's own and whole shape."""
    for rank, (extra, text, rows) in enumerate(run_ranks(prints, 2)):
        expected = (
            f"rank={rank}/2, weight=({rows}, 3) of (5, 3), bias=({rows},) of (5,)"
        )
        assert extra == expected
        assert text == f"ParallelLinear({expected})"


# Groups


def works_in_subgroups():
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    world = dist.get_rank()
    group = pairs[world % 2]
    torch.manual_seed(world)  # replicated parameters come from rank 0 of the subgroup
    row = ParallelLinear(5, 3, dim=0, group=group)
    assert (row.group.size, row.group.rank) == (2, world // 2)
    torch.manual_seed(3)
    seed = 10 + world % 2
    for build, dense, shape in [
        (partial(ParallelLinear, 5, 7, dim=1, group=group), nn.Linear(5, 7), (4, 5)),
        (partial(ParallelLinear, 5, 3, dim=0, group=group), nn.Linear(5, 3), (4, 5)),
        (partial(Queries, 5, 6, 3, group=group), DenseQueries(5, 6, 3), (4, 5)),
    ]:
        trained_alike(*twins(build, dense), *shape, seed=seed)
    bias = ts.distributed.ShardGroup(dist.group.WORLD)
    return ts.distributed.collectives.stack(row.bias.detach(), bias)


def test_layers_of_two_subgroups_do_not_meet():
    """Pairs of ranks out of four, not neighbours, each equal dense on their own inputs."""
    for biases in run_ranks(works_in_subgroups, 4):
        assert torch.equal(biases[0], biases[2])
        assert torch.equal(biases[1], biases[3])
        assert not torch.equal(biases[0], biases[1])


def group_of_one_in_a_bigger_world():
    alone = ts.distributed.ShardGroup()
    for dim in (None, 0, 1):
        build = partial(ParallelLinear, 5, 7, dim=dim, group=alone)
        for hand in (lambda x: x, *([] if dim == 0 else [shard_of])):
            layer, dense = twins(build, nn.Linear(5, 7))
            assert type(layer(randoms(4, 5))) is torch.Tensor
            trained_alike(layer, dense, 4, 5, hand=hand)
    with CommDebugMode() as counted:
        ParallelLinear(5, 7, dim=1, group=alone)(torch.ones(2, 5)).sum().backward()
    assert counted.get_total_counts() == 0


def test_a_group_of_one_in_a_bigger_world_is_dense():
    """It holds everything and its gradients are not multiplied, even of a shard's input."""
    run_ranks(group_of_one_in_a_bigger_world, 3)


def refuses_shards_of_other_groups():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    x = shard_of(torch.ones(4, 8))
    text = (
        "input is sharded over another group than that of ParallelLinear. Pass"
        " torchshard.distributed.gather(input), the whole tensor."
    )
    column = ParallelLinear(8, 6, dim=1, group=group)
    refuses(column, lambda layer: layer(x), ShapeError, text)
    twin = dist.new_group([0, 1, 2, 3])
    row = ParallelLinear(8, 6, dim=0, group=twin)
    refuses(row, lambda layer: layer(x), ShapeError, text)


def test_shards_of_another_group_are_refused():
    """A shard of one group is no shard of another: gradients would be summed twice."""
    run_ranks(refuses_shards_of_other_groups, 4)


# Models


def mlp(group=None):
    return nn.Sequential(
        ParallelLinear(5, 7, dim=1, group=group),
        nn.GELU(),
        ParallelLinear(7, 3, dim=0, group=group),
    )


def dense_mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def counted_backward(model, x, loss):
    with CommDebugMode() as forward:
        value = loss(model(x))
    with CommDebugMode() as backward:
        value.backward()
    return value, forward.get_total_counts(), backward.get_total_counts()


def column_then_row():
    model, dense = twins(mlp, dense_mlp())
    trained_alike(model, dense, 4, 5)
    x = randoms(4, 5).requires_grad_()
    _, forward, backward = counted_backward(model, x, lambda y: y.square().mean())
    expected = 1 if dist.get_world_size() > 1 else 0
    assert (forward, backward) == (expected, expected)


@pytest.mark.parametrize("world_size", WORLDS)
def test_column_then_row_costs_one_collective_each_way(world_size):
    """With GELU between and no mark by hand, all is dense's (T23: uneven features)."""
    run_ranks(column_then_row, world_size)


def in_every_mode():
    model, dense = twins(mlp, dense_mlp())
    x = randoms(4, 5).requires_grad_()
    dense_x = x.detach().clone().requires_grad_()
    dense(dense_x).square().sum().backward()
    for use_reentrant in (False, True):
        x.grad = None
        model.zero_grad()
        hidden = checkpoint(model[:2], x, use_reentrant=use_reentrant)
        checkpoint(
            model[2], hidden, use_reentrant=use_reentrant
        ).square().sum().backward()
        same(x.grad, dense_x.grad)
        same_grads(model, dense)
    with torch.inference_mode():
        same(model(x), dense(x))
    for y, leaf in ((model(x), x), (dense(dense_x), dense_x)):
        (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        leaf.grad = None
        grad.square().sum().backward()
    same(x.grad, dense_x.grad)
    for module in model:
        module.register_full_backward_hook(lambda module, inputs, outputs: None)
    x.grad = dense_x.grad = None
    model.zero_grad()
    dense.zero_grad()
    for y in (model(x), dense(dense_x)):
        y.square().sum().backward()
    same(x.grad, dense_x.grad)
    same_grads(model, dense)


def test_layers_in_every_mode_of_autograd():
    """Activation checkpointing, inference, double backward and hooks give dense's numbers."""
    run_ranks(in_every_mode, 2)


def column_then_loss():
    build = partial(ParallelLinear, 5, 7, dim=1)
    x, target = randoms(6, 5).requires_grad_(), torch.arange(6)
    for options in [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}]:
        model, dense = twins(build, nn.Linear(5, 7))
        x.grad = None
        criterion = nn.CrossEntropyLoss(**options)
        loss, forward, backward = counted_backward(
            model, x, lambda y, criterion=criterion: criterion(y, target)
        )
        dense_x = x.detach().clone().requires_grad_()
        dense_loss = criterion(dense(dense_x), target)
        dense_loss.backward()
        same(loss, dense_loss)
        same(x.grad, dense_x.grad)
        same_grads(model, dense)
        expected = 1 if dist.get_world_size() > 1 else 0
        assert (forward, backward) == (expected, expected)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_column_layer_feeds_torchs_own_loss(world_size):
    """nn.CrossEntropyLoss is the parallel loss: one collective forward, the layer's back."""
    run_ranks(column_then_loss, world_size)


class Tied(nn.Module):
    """An embedding and a head that share one table."""

    def __init__(self, embedding, head):
        super().__init__()
        self.embedding, self.head = embedding, head
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids).tanh())


def tied_layers():
    def build():
        return Tied(
            ParallelEmbedding(7, 5, dim=0), ParallelLinear(5, 7, bias=False, dim=1)
        )

    model, dense = twins(build, Tied(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)))
    ids = torch.tensor([[0, 6, 2], [3, 3, 1]])
    target = torch.tensor([[1, 6, 0], [5, 3, 2]])
    for module in (model, copy.deepcopy(model)):
        assert module.head.weight is module.embedding.weight
        dense.zero_grad()
        for tied in (module, dense):
            y = tied(ids).flatten(0, 1)
            F.cross_entropy(y, target.flatten()).backward()
        same_grads(module, dense)
        assert len(list(module.parameters())) == 1
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
    collected = collect_state_dict(model)
    assert collected.keys() == {"embedding.weight", "head.weight"}
    assert torch.equal(collected["embedding.weight"], collected["head.weight"])
    torch.optim.SGD(dense.parameters(), lr=0.1).step()
    same(collected["head.weight"], dense.head.weight.detach())
    dense.load_state_dict(collected)
    model.load_state_dict(collected)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tied_layers_share_one_parameter(world_size):
    """R18: gradients add up in the one parameter, and state keeps both keys."""
    run_ranks(tied_layers, world_size)


# First values


def replicas_from_different_seeds():
    rank = ts.distributed.get_rank()
    torch.manual_seed(100 + rank)
    layers = [
        ParallelLinear(5, 7, dim=0),
        ParallelLinear(5, 7),
        Gain(5),
        ParallelEmbedding(4, 3),
    ]
    return [
        layer.tensor_of(name).detach()
        for layer in layers
        for name in layer.specs
        if layer.ranges_of(name) is None
    ]


def test_t40_whole_parameters_are_equal_whatever_the_seeds():
    """R28, T40: ranks that are seeded differently hold rank 0's whole parameters."""
    first, *others = run_ranks(replicas_from_different_seeds, 3)
    assert len(first) == 5
    for tensors in others:
        for tensor, expected in zip(tensors, first, strict=True):
            assert torch.equal(tensor, expected)


def values_of_torch():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for dim in (None, 0, 1):
            for cls, dense_cls, args in [
                (ParallelLinear, nn.Linear, (5, 7)),
                (ParallelEmbedding, nn.Embedding, (9, 5)),
            ]:
                torch.manual_seed(5)
                dense = dense_cls(*args, dtype=dtype)
                after = torch.get_rng_state()
                torch.manual_seed(5)
                layer = cls(*args, dim=dim, dtype=dtype)
                assert torch.equal(torch.get_rng_state(), after)
                late = cls(*args, dim=dim, dtype=dtype, device="meta")
                assert all(p.is_meta for p in late.parameters())
                late.to_empty(device="cpu")
                torch.manual_seed(5)
                late.reset_parameters()
                assert torch.equal(torch.get_rng_state(), after)
                for built in (layer, late):
                    for key, value in collect_state_dict(built).items():
                        assert value.dtype == dtype
                        assert torch.equal(value, dense.state_dict()[key])


@pytest.mark.parametrize("world_size", WORLDS)
def test_t39_t41_first_values_are_torchs(world_size):
    """T39, T41: one seed gives torch.nn's weights and random stream, in each dtype, late too."""
    run_ranks(values_of_torch, world_size)


def compiled_equals_eager():
    model = nn.Sequential(
        *mlp(), ParallelMultiheadAttention(3, 3), ParallelLinear(3, 5, dim=1)
    ).double()

    def loss(x, target):
        hidden = model[2](model[1](model[0](x)))
        mixed, _ = model[3](hidden, hidden, hidden, need_weights=False)
        return F.cross_entropy(model[4](mixed + hidden), target)

    x, target = randoms(6, 5).requires_grad_(), torch.tensor([0, 4, 2, 1, 3, 4])
    loss(x, target).backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, target)
    value.backward()
    same(value, loss(x, target))
    for grad, eager in zip(
        [x.grad, *(p.grad for p in model.parameters())], expected, strict=True
    ):
        same(grad, eager)


def test_t31_a_whole_model_compiles_into_one_graph():
    """T31: column, GELU, row, attention and loss in one graph equal eager."""
    run_ranks(compiled_equals_eager, 2)


def assigned_parameter_has_its_layer() -> None:
    layer = ts.nn.ParallelLinear(4, 5, dim=1)
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    assert owners.owner_of(layer.weight) == (layer, "weight")
    assert owners.is_sharded(layer.weight)


def test_an_assigned_parameter_has_its_layer() -> None:
    """A parameter put in the place of a shard is known as one."""
    run_ranks(assigned_parameter_has_its_layer, 2)


def misuse_is_refused() -> None:
    layer = ts.nn.ParallelLinear(4, 5, dim=0)
    x = torch.ones(2, 4)
    names = [
        name for name in ("Adafactor", "LBFGS", "Muon") if name in dir(torch.optim)
    ]
    for name in names:
        weights = [layer.weight]
        layer(x).sum().backward()
        optimizer = getattr(torch.optim, name)(weights)
        with pytest.raises(
            GroupError, match=f"torch.optim.{name} works on whole tensors"
        ):
            optimizer.step(lambda: layer(x).sum())
    with pytest.raises(ShardedOpError, match="parametrize was given a parameter"):
        torch.nn.utils.parametrizations.weight_norm(layer)
    y = ts.nn.ParallelLinear(4, 5, dim=1)(x)
    with pytest.raises(ShardedOpError, match=r"assigning \.data: dim 1 of this tensor"):
        y.data = torch.ones(2, 5)


def test_misuse_is_refused() -> None:
    """Optimizers and parametrizations that need whole tensors, and .data, are errors."""
    run_ranks(misuse_is_refused, 2)


def built_too_early() -> None:
    groups._model_group = ts.ShardGroup()  # as before init_process_group
    early = ts.nn.ParallelLinear(4, 5, dim=1)
    alone = ts.nn.ParallelLinear(4, 5, dim=1, group=ts.ShardGroup())
    early(torch.ones(2, 4))
    ts.init_process_group()
    with pytest.raises(GroupError, match="before building the model"):
        early(torch.ones(2, 4))
    alone(torch.ones(2, 4))


def test_a_layer_built_before_the_group_says_so() -> None:
    """A layer that was built before init_process_group does not stay whole in silence."""
    run_ranks(built_too_early, 2)


def test_split_names_what_it_divides() -> None:
    """A wrong dim is explained in the layer's own words."""
    text = (
        "dim=7 is no split. Expected None (not divided), 0 or 'vocabulary' (the"
        " vocabulary's rows are divided), 1, -1 or 'embedding_dim' (the embedding's columns"
        " are divided)."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}$"):
        ts.nn.ParallelEmbedding(6, 7, dim=7)
    with pytest.raises(LayoutError, match="dim=True is no split"):
        ts.nn.ParallelLinear(6, 7, dim=True)
