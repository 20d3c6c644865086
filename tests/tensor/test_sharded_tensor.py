"""ShardedTensor: what every operation does to a marked activation.

A function is called once on the whole tensor and once on the marked shard; what comes out is
gathered if it is marked. Values, shapes and every gradient must agree, on each of the places
a shard can have.
"""

import copy
import io
import operator
import pickle
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, marked, places, randoms, same_as_dense
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from torchshard.distributed import groups, ops
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import (
    Axis,
    Segment,
    balanced_ranges,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 3]  # three ranks have uneven and empty shards already


def sweep(table):
    """Run every function of `table` on every place of a shard."""
    for place in places(groups.get_world_size()):
        for name, function in table.items():
            same_as_dense(function, place, f"{name} on {place[0]}")


UNARY = """
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
    reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid
    logit sign sgn floor ceil round trunc frac nan_to_num isnan isinf isfinite logical_not
    zeros_like ones_like clone detach
""".split()
ACTIVATIONS = """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardsigmoid
    hardswish hardshrink softshrink tanhshrink logsigmoid
""".split()
IN_PLACE = """
    abs_ neg_ exp_ log_ sqrt_ rsqrt_ square_ reciprocal_ sin_ cos_ tanh_ sigmoid_ relu_ floor_
    ceil_ round_ nan_to_num_ zero_
""".split()


def elementwise_of_one():
    table = {name: getattr(torch, name) for name in UNARY}
    table |= {name: getattr(F, name) for name in ACTIVATIONS}
    for name in IN_PLACE:
        table[name] = lambda x, name=name: getattr(x * 1, name)()
    for name in ("relu_", "elu_", "leaky_relu_", "selu_", "celu_", "hardtanh_"):
        table[f"F.{name}"] = lambda x, name=name: getattr(F, name)(x * 1)
    table |= {
        "clamp": lambda x: x.clamp(-0.5, 0.5),
        "clip": lambda x: torch.clip(x, min=0.1),
        "clamp_min": lambda x: x.clamp_min(0.1),
        "clamp_max": lambda x: x.clamp_max(0.1),
        "threshold": lambda x: F.threshold(x, 0.1, 20.0),
        "float": lambda x: x.float().double(),
        "half": lambda x: x.half(),
        "bfloat16": lambda x: x.bfloat16(),
        "to": lambda x: x.to(torch.float32),
        "to kw": lambda x: x.to(dtype=torch.float32, copy=True),
        "to same": lambda x: x.to(torch.float64),
        "to other": lambda x: x.to(torch.zeros(7, dtype=torch.float32)),
        "type_as": lambda x: x.type_as(torch.zeros(7, 9, dtype=torch.float32)),
        "type": lambda x: x.type(torch.float32),
        "int": lambda x: (x * 9).int(),
        "long": lambda x: (x * 9).long(),
        "bool": lambda x: (x > 0).bool(),
        "cpu": lambda x: x.cpu(),
        "contiguous": lambda x: x.contiguous(),
        "full_like": lambda x: torch.full_like(x, 3.0),
        "data": lambda x: x.data,
        "pow": lambda x: x.pow(2) + x**3 + 2**x,
        "unary operators": lambda x: -x + abs(x) + (+x),
        "scalars": lambda x: (1 - x) / 2 + 3 / (x + 9) + x % 2 + 2 * x,
        "floor": lambda x: [x.detach() // 2, 2 // x.detach()],
        "comparison": lambda x: [x == 0, x != 0, x < 0, x <= 0, x > 0, x >= 0],
        "masks": lambda x: [
            (x > 0) & (x < 1),
            (x > 0) | (x < 1),
            (x > 0) ^ (x < 1),
            ~(x > 0),
        ],
        "where": lambda x: torch.where(x > 0, x, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
        "masked_fill_": lambda x: (x * 1).masked_fill_(x > 0, -1.0),
        "inplace": lambda x: (x * 1).mul_(2).add_(1).sub_(x).div_(3).clamp_(-1, 1),
        "fill_": lambda x: (x * 1).fill_(2.0),
        "relu inplace": lambda x: nn.ReLU(inplace=True)(x * 1),
        "dropout eval": lambda x: F.dropout(x, 0.5, training=False),
        "dropout 0": lambda x: F.dropout(x, 0.0),
        "keyword input": lambda x: torch.exp(input=x),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
        "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    }
    sweep(table)


@pytest.mark.parametrize("world_size", WORLDS)
def test_elementwise_functions_keep_the_mark(world_size):
    """Every unary function, cast, comparison and in-place form equals dense on each place."""
    run_ranks(elementwise_of_one, world_size)


BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "reversed -": lambda x, y: y - x,
    "*": operator.mul,
    "/": lambda x, y: x / (y.square() + 1),
    "reversed /": lambda x, y: y / (x.square() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "max": torch.max,
    "min": lambda x, y: torch.min(y, x),
    "fmax": torch.fmax,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "pow": lambda x, y: (x.abs() + 0.1) ** y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where reversed": lambda x, y: torch.where(y > 0, y, x),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "compare": lambda x, y: [x < y, x == y, x >= y],
    "add alpha": lambda x, y: torch.add(x, y, alpha=2.5),
    "rsub": lambda x, y: torch.rsub(x, y),
    "keyword other": lambda x, y: torch.mul(input=x, other=y),
}
WRITES = {
    "+=": lambda x, y: operator.iadd(x * 1, y),
    "-=": lambda x, y: operator.isub(x * 1, y),
    "*=": lambda x, y: operator.imul(x * 1, y),
    "/=": lambda x, y: operator.itruediv(x * 1, y.square() + 1),
    "add_": lambda x, y: (x * 1).add_(y),
    "copy_": lambda x, y: (x * 1).copy_(y),
    "masked_fill_": lambda x, y: (x * 1).masked_fill_(y > 0, 2.0),
}


def elementwise_of_two():
    for place in places(groups.get_world_size()):
        name, shape, dim, _ = place
        others = {
            "whole": shape,
            "size 1 in the sharded dim": (*shape[:dim], 1, *shape[dim + 1 :]),
            "the sharded dim alone": [
                n if d == dim else 1 for d, n in enumerate(shape)
            ],
            "behind the sharded dim": shape[dim + 1 :],
            "from the sharded dim on": shape[dim:],
            "scalar": (),
            "a dim more": (2, *shape),
        }
        for kind, other in others.items():
            y = randoms(other, 2)
            every = kind in ("whole", "size 1 in the sharded dim")
            for label in BINARY if every else ("+", "reversed /", "where", "hypot"):
                function = BINARY[label]
                case = f"{label} with {kind} on {name}"
                same_as_dense(function, place, case, y)
                if kind == "whole":
                    both = sharded_second(function, place)
                    same_as_dense(both, place, f"{label} of two shards on {name}", y)
            if kind == "a dim more":
                continue
            for label, function in WRITES.items():
                same_as_dense(function, place, f"{label} with {kind} on {name}", y)


def sharded_second(function, place):
    def call(x, y):
        is_shard = isinstance(x, ShardedTensor)
        return function(x, marked(y, *place[2:]) if is_shard else y)

    return call


@pytest.mark.parametrize("world_size", WORLDS)
def test_plain_tensors_beside_a_shard_are_whole(world_size):
    """Whole operands are cut, broadcast ones get a summed gradient, like splits combine."""
    run_ranks(elementwise_of_two, world_size)


def views():
    by_place = {
        "column": {
            "view": lambda x: x.view(-1, x.size(-1)),
            "view same": lambda x: x.view(x.shape),
            "add dims": lambda x: x.view(3, 1, 5, 1),
            "T": lambda x: [x.T, x.t(), x.mT],
            "len": lambda x: x.new_zeros(()) if False else x * len(x),
            "expand": lambda x: [
                x.expand(2, 3, 5),
                x.expand(2, -1, -1),
                x[:, None].expand(3, 4, 5),
            ],
            "expand_as": lambda x: x.expand_as(torch.zeros(2, 3, 5)),
            "broadcast_to": lambda x: x.broadcast_to(2, 3, 5),
        },
        "channels": {
            "flatten": lambda x: [x.flatten(1), x.flatten(2), torch.flatten(x, 1, 2)],
            "flatten module": lambda x: nn.Flatten()(x),
            "merge behind": lambda x: x.reshape(2, 6, -1),
            "reshape": lambda x: x.reshape(2, 6, 2, 6),
            "permute": lambda x: [x.permute(0, 2, 3, 1), x.permute((1, -1, 0, 2))],
            "unflatten": lambda x: x.unflatten(2, (3, 1)),
        },
        "middle": {
            "transpose": lambda x: [x.transpose(1, 2), x.transpose(-2, 0), x.mT],
            "transpose kw": lambda x: torch.transpose(input=x, dim0=0, dim1=1),
            "swapaxes": lambda x: x.swapaxes(0, 1),
            "movedim": lambda x: [x.movedim(1, -1), torch.movedim(x, 0, 2)],
            "movedim kw": lambda x: x.movedim(source=2, destination=0),
            "T of the reversed dims": lambda x: x.permute(2, 1, 0),
            "view_as": lambda x: x.view_as(torch.zeros(1, 2, 5, 3)),
        },
        "no rows": {
            "view": lambda x: [x.view(-1, x.size(-1)), x.view(0, 2, 2, 5)],
            "flatten": lambda x: x.flatten(0, 1),
            "transpose": lambda x: x.transpose(0, 2),
        },
        "packed": {
            "view": lambda x: [x.view(2, 2, 6), x.view(4, 6, 1)],
            "merge": lambda x: x.unsqueeze(-1).expand(4, 6, 2).flatten(1),
        },
    }
    general = {
        "unsqueeze": lambda x: [
            x.unsqueeze(d) for d in range(-x.dim() - 1, x.dim() + 1)
        ],
        "squeeze": lambda x: [
            x.unsqueeze(d).squeeze(d) for d in range(-x.dim() - 1, x.dim() + 1)
        ],
        "squeeze all": lambda x: [x[None].squeeze(), x[..., None].squeeze((0, -1))],
        "squeeze nothing": lambda x: x.squeeze(0),
        "none": lambda x: [x[None], x[..., None], x[None, ...], x[..., None, :]],
        "ellipsis": lambda x: [x[...], x[:]],
        "reshape_as": lambda x: x.reshape_as(x),
        "view dtype": lambda x: x.detach().view(torch.int64),
    }
    for place in places(groups.get_world_size()):
        for label, function in (general | by_place.get(place[0], {})).items():
            same_as_dense(function, place, f"{label} on {place[0]}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_views_take_whole_sizes_and_follow_the_sharded_dim(world_size):
    """view, flatten, permute, transpose, squeeze, expand and indexing equal dense."""
    run_ranks(views, world_size)


def heads():
    size = groups.get_world_size()
    ranges = ranges_of(Segment("head", 2), {"head": Axis(5)}, size)
    place = ("heads", (2, 3, 10), 2, ranges)

    def attention(x):
        q = x.view(2, 3, 5, 2).transpose(1, 2)
        k = (x * 2).view(2, 3, -1, 2).permute(0, 2, 1, 3)
        scores = q @ k.transpose(-2, -1) / 2**0.5
        causal = torch.ones(3, 3, dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        mixed = torch.matmul(scores, other=k)
        return mixed.transpose(1, 2).reshape(2, 3, -1), mixed.transpose(1, 2).flatten(2)

    def fused(x, mask=None):
        q = x.view(2, 3, 5, 2).transpose(1, 2)
        attend = F.scaled_dot_product_attention
        masked = attend(q, q * 2, value=q, attn_mask=mask)
        return masked, attend(q, q * 2, q, is_causal=True), attend(q, q, q, None, 0.0)

    same_as_dense(fused, place, "fused attention")
    for mask in (randoms((3, 3), 4), randoms((2, 5, 3, 3), 4), randoms((1, 3, 3), 4)):
        same_as_dense(fused, place, f"fused, mask {tuple(mask.shape)}", mask)
    same_as_dense(attention, place, "attention")
    halves = ("halves", (2, 3, 10), 2, ranges)
    same_as_dense(lambda x: x.unflatten(-1, (5, 2)), halves, "unflatten")
    if size > 1:
        with pytest.raises(ShardedOpError):
            marked(randoms((2, 3, 10), 1), 2, ranges).view(2, 3, 2, 5)
        x = marked(randoms((2, 3, 10), 1), 2, ranges)
        with pytest.raises(ShardedOpError, match=r"multiplies queries and keys"):
            F.scaled_dot_product_attention(x, x, x)
        q = marked(torch.ones(1, 5, 2, 3), 1, balanced_ranges(5, size))
        torch.manual_seed(0)
        dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        gathered = whole(dropped)
        assert not torch.equal(gathered[:, 0], gathered[:, -1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_heads_are_split_attended_and_merged(world_size):
    """The head-splitting code of one device runs unchanged on a shard of whole heads."""
    run_ranks(heads, world_size)


def pieces():
    size = groups.get_world_size()
    table = {}
    for place in places(size):
        name, shape, dim, _ = place
        for other in [d for d in range(len(shape)) if d != dim]:
            for d in (other, other - len(shape)):
                length = shape[other]
                table[f"chunk {d}"] = partial(torch.chunk, chunks=2, dim=d)
                table[f"split {d}"] = lambda x, d=d: x.split(2, d)
                table[f"split kw {d}"] = lambda x, d=d: torch.split(x, 2, dim=d)
                table[f"tensor_split {d}"] = lambda x, d=d: x.tensor_split(2, dim=d)
                table[f"unbind {d}"] = lambda x, d=d: x.unbind(d)
                table[f"flip {d}"] = lambda x, d=d: [
                    x.flip(d),
                    torch.flip(x, dims=(d,)),
                ]
                table[f"roll {d}"] = lambda x, d=d: [
                    x.roll(1, d),
                    x.roll(shifts=1, dims=d),
                ]
                table[f"narrow {d}"] = lambda x, d=d, n=length: x.narrow(d, 0, n // 2)
                table[f"stack {d}"] = lambda x, d=d: torch.stack([x, x * 2], d)
                table[f"cat {d}"] = lambda x, d=d: torch.cat([x, x * 2], d)
                table[f"cat axis {d}"] = lambda x, d=d: torch.cat((x, x), axis=d)
                if length:
                    table[f"select {d}"] = lambda x, d=d: x.select(d, -1)
                    index = [slice(None)] * len(shape)
                    for item in (0, -1, slice(0, 2), slice(None, None, 2)):
                        index[other] = item
                        table[f"index {index}"] = lambda x, index=tuple(index): x[index]
        table["stack last"] = lambda x: torch.stack([x, x * 2], -1)
        table["iterate"] = lambda x, dim=dim: list(x) if dim else x
        for label, function in table.items():
            same_as_dense(function, place, f"{label} on {name}")
        table.clear()
        other = 1 if dim == 0 else 0
        joined = partial(cat_between, dim=other)
        same_as_dense(joined, place, f"cat with whole on {name}", randoms(shape, 3))


def cat_between(x, y, dim):
    return torch.cat([x, y, x], dim)


@pytest.mark.parametrize("world_size", WORLDS)
def test_cutting_and_joining_along_whole_dims(world_size):
    """chunk, split, cat, stack, flip, roll, select and slices equal dense, whole parts cut."""
    run_ranks(pieces, world_size)


def batched():
    size = groups.get_world_size()
    weight, bias = randoms((4, 3), 3), randoms((4,), 4)
    middle = ("middle", (2, 5, 3), 1, balanced_ranges(5, size))
    same_as_dense(F.linear, middle, "linear", weight, bias)
    scale, shift = randoms((3,), 5), randoms((3,), 6)
    for label, function, *extra in [
        ("by name", lambda x, w, b: F.linear(input=x, weight=w, bias=b), weight, bias),
        ("norm", lambda x, w, b: F.layer_norm(x, (3,), weight=w, bias=b), scale, shift),
        ("rms_norm", lambda x, w: F.rms_norm(x, [3], w), scale),
    ]:
        same_as_dense(function, middle, label, *extra)
    same_as_dense(lambda x, y: x @ y, middle_last(size), "matmul", randoms((3, 4), 5))
    batch = ("batch of matrices", (5, 2, 3), 0, balanced_ranges(5, size))
    same_as_dense(lambda x, y: x @ y, batch, "matmul", randoms((5, 3, 4), 5))
    same_as_dense(lambda x, y: x @ y, batch, "matmul broadcast", randoms((3, 4), 5))
    same_as_dense(lambda x, y: x @ y, batch, "matrix times vector", randoms((3,), 5))
    same_as_dense(lambda x, y: y @ x, batch, "vector times matrix", randoms((2,), 5))
    same_as_dense(lambda x, y: y @ x, batch, "plain first", randoms((4, 2), 5))
    same_as_dense(torch.bmm, batch, "bmm", randoms((5, 3, 4), 5))
    image = ("channels", (2, 5, 4, 6), 1, balanced_ranges(5, size))
    table = {
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "max_pool2d module": nn.MaxPool2d(3, 2, 1),
        "max_pool2d indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
        "lp_pool2d": lambda x: F.lp_pool2d(x.abs(), 2, 2),
        "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
        "pad value": lambda x: F.pad(x, (1, 2), value=3.0),
        "pad reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    }
    for label, function in table.items():
        same_as_dense(function, image, label)
    line = ("line", (2, 5, 6), 1, balanced_ranges(5, size))
    for name in (
        "max_pool1d",
        "avg_pool1d",
        "adaptive_avg_pool1d",
        "adaptive_max_pool1d",
    ):
        same_as_dense(lambda x, name=name: getattr(F, name)(x, 2), line, name)
    volume = ("volume", (1, 5, 2, 2, 4), 1, balanced_ranges(5, size))
    for name in (
        "max_pool3d",
        "avg_pool3d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool3d",
    ):
        same_as_dense(lambda x, name=name: getattr(F, name)(x, 2), volume, name)


def middle_last(size):
    return ("batch", (4, 2, 3), 0, balanced_ranges(4, size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_products_norms_and_pools_over_other_dims_are_local(world_size):
    """They equal dense, and whole parameters beside the shard get the summed gradient."""
    run_ranks(batched, world_size)


def refusals():
    x = randoms((3, 4), 1)
    y = marked(x, 1, balanced_ranges(4, 2))
    image = marked(randoms((2, 4, 3, 3), 1), 1, balanced_ranges(4, 2))
    batch = marked(randoms((4, 3), 1), 0, balanced_ranges(4, 2))
    both = marked(x, 1, ranges_of_lengths([1, 3]))
    calls = {
        "cov": lambda: y.cov(),
        "sort": lambda: y.sort(),
        "local_response_norm": lambda: F.local_response_norm(image, 2),
        "both sharded": lambda: F.linear(batch, y),
        "glu": lambda: F.glu(y),
        "outer": lambda: torch.outer(y[0], y[0]),
        "index list": lambda: y[[0, 1]],
        "index mask": lambda: y[y > 0],
        "index bool": lambda: y[True],
        "index false": lambda: y[False],
        "plain by mask": lambda: x[y > 0],
        "cut by index": lambda: y[:, 0],
        "cut by slice": lambda: y[:, :2],
        "cut at the end": lambda: y[..., 1],
        "item": lambda: y.item(),
        "tolist": lambda: y.tolist(),
        "numpy": lambda: y.numpy(),
        "bool": lambda: bool(y),
        "chunk": lambda: y.chunk(2, 1),
        "split": lambda: y.split(2, -1),
        "cat": lambda: torch.cat([y, y], 1),
        "cat of sharded and shard": lambda: torch.cat([y, both]),
        "unbind": lambda: y.unbind(1),
        "iterate": lambda: list(batch),
        "flip": lambda: y.flip(1),
        "roll": lambda: y.roll(1, 1),
        "roll flat": lambda: y.roll(1),
        "repeat": lambda: y.repeat(2, 2),
        "expand": lambda: marked(x[:, :1], 1, ranges_of_lengths([1, 0])).expand(3, 4),
        "squeeze": lambda: marked(x[:, :1], 1, ranges_of_lengths([1, 0])).squeeze(),
        "view cut": lambda: y.view(4, 3),
        "view size": lambda: y.view(3, 5),
        "view bytes": lambda: y.view(torch.int16),
        "complex": lambda: [y.mH],
        "pool": lambda: F.avg_pool1d(y[None], 2),
        "pad": lambda: F.pad(y, (1, 1)),
        "different splits": lambda: y + both,
        "equal of different splits": lambda: y == both,
        "different dims": lambda: y + batch[:, :1],
        "where condition": lambda: torch.where(y > 0),
        "out": lambda: torch.add(y, y, out=torch.empty(3, 4)),
        "write into plain": lambda: x.add_(y),
        "write into plain by +=": lambda: operator.iadd(x, y),
        "copy into plain": lambda: torch.zeros(3, 4).copy_(y),
        "softmax of no dim": lambda: F.softmax(y, dim=None),
        "argmax of all": lambda: y.argmax(),
        "norm 0": lambda: y.norm(0, 1),
        "transpose_": lambda: y.transpose_(0, 1),
        "median": lambda: y.median(),
        "as numpy array": lambda: y.__array__(),
    }
    for name, call in calls.items():
        kept = x.clone()
        assert "torchshard.distributed.gather(x)" in refusal(call), name
        assert torch.equal(x, kept), name
    return [
        refusal(calls[name])
        for name in ("cov", "glu", "both sharded", "different splits")
    ]


def refusal(call):
    with pytest.raises(ShardedOpError) as error:
        call()
    return str(error.value)


REMEDY = (
    "Call torchshard.distributed.gather(x) first for the whole tensor, or x.to_local() to"
    " work on this rank's shard alone."
)


def test_whatever_would_mix_the_sharded_dim_raises():
    """R5, T28: no rule, no result: the error names the operation, the dim and the remedy."""
    assert run_ranks(refusals, 2)[0] == [
        "cov: dim 1 of this tensor, 4 indices, is spread over 2 ranks, and cov has no"
        f" rule for sharded tensors. {REMEDY}",
        "glu: dim 1 of this tensor, 4 indices, is spread over 2 ranks, and glu needs the two"
        " indices that it multiplies on one rank: divide the layer that made it in 2 blocks."
        f" {REMEDY}",
        "linear: its arguments are sharded differently: dim 0 of 4 indices as [2, 2] against"
        " dim 1 of 4 as [2, 2]. Gather one with torchshard.distributed.gather(x).",
        "add: its arguments are sharded differently: dim 1 of 4 indices against dim -1 (from"
        " the back) of 4. Gather one with torchshard.distributed.gather(x).",
    ]


def wrong_sizes():
    y = marked(randoms((3, 6), 1), 1, balanced_ranges(6, 2))
    row = marked(randoms((3, 2), 1), 1, balanced_ranges(2, 2))
    shape_errors = [
        lambda: y + torch.ones(3, 3),
        lambda: torch.where(torch.ones(3, 4) > 0, y, 0.0),
        lambda: torch.cat([y, torch.ones(3, 1)]),
        lambda: torch.cat([row, torch.ones(3, 1)]),
        lambda: torch.stack([row, torch.ones(3, 1)]),
        lambda: ShardedTensor.from_local(
            torch.ones(2, 2), 1, ranges=balanced_ranges(6, 2)
        ),
    ]
    found = []
    for call in shape_errors:
        with pytest.raises(ShapeError) as error:
            call()
        found.append(str(error.value))
    for call in (
        lambda: y.sum(2),
        lambda: y.softmax(-3),
        lambda: y.unsqueeze(4),
        lambda: y.transpose(0, 2),
        lambda: y.topk(1, 5),
        lambda: y.argmax(7),
        lambda: y.max(dim=2),
        lambda: y.flatten(3),
        lambda: torch.cat([y, y], 2),
        lambda: y.norm(2, 3),
        lambda: y.size(2),
        lambda: y.chunk(2, 2),
        lambda: y.permute(0, 2),
    ):
        with pytest.raises(IndexError):
            call()
    return found


def test_plain_tensors_of_another_size_and_dims_out_of_range_raise():
    """A lost mark is an error and no silent broadcast; dims are checked as torch does."""
    mark_it = "mark it with ShardedTensor.from_local(x, dim)."
    assert run_ranks(wrong_sizes, 2)[0] == [
        "add: a plain tensor of size 3 in dim -1 meets a tensor of 6 indices spread over 2"
        f" ranks. Expected the whole 6 or 1. If it is this rank's shard, {mark_it}",
        "where: a plain tensor of size 4 in dim -1 meets a tensor of 6 indices spread over"
        f" 2 ranks. Expected the whole 6 or 1. If it is this rank's shard, {mark_it}",
        "cat: a tensor of shape (3, 1) is joined to one with 6 indices in dim -1, spread"
        f" over 2 ranks. Expected the same size there; if it is this rank's shard, {mark_it}",
        "cat: a tensor of shape (3, 1) is joined to one with 2 indices in dim -1, spread"
        f" over 2 ranks. Expected the same size there; if it is this rank's shard, {mark_it}",
        "stack: a tensor of shape (3, 1) is joined to one with 2 indices in dim -1, spread"
        f" over 2 ranks. Expected the same size there; if it is this rank's shard, {mark_it}",
        "x has size 2 in dim 1; rank 0 of 2 holds 3 of its 6 indices.",
    ]


def facts():
    group = groups.model_group()
    x = randoms((3, 5), 1)
    y = marked(x.clone().requires_grad_(), 1, balanced_ranges(5, 2))
    length = [3, 2][group.rank]
    assert isinstance(y, ShardedTensor)
    assert y.shape == torch.Size([3, 5])
    assert (y.size(), y.size(1), y.size(dim=-1)) == (torch.Size([3, 5]), 5, 5)
    assert (len(y), y.dim(), y.ndim, y.numel(), y.nelement()) == (3, 2, 2, 15, 15)
    assert (y.dtype, y.device.type, y.requires_grad) == (torch.float64, "cpu", True)
    assert type(y.to_local()) is torch.Tensor
    assert y.to_local().shape == (3, length)
    assert type(y.gather()) is torch.Tensor
    assert torch.equal(y.gather(), x)
    assert torch.equal(ts.distributed.gather(y), x)
    assert torch.equal(ts.distributed.gather(y, dim=1), x)
    assert torch.equal(ts.distributed.gather(y, dim=-1), x)
    assert hash(y) == hash(y)
    text = f"dim=1, whole_size=5, rank={group.rank}, size=2)"
    for shown in (repr(y), str(y), f"{y}", f"{y:>1}"):
        assert shown.startswith("ShardedTensor(tensor(["), shown
        assert shown.endswith(text)
    with torch.no_grad():
        z = y * 2
    assert isinstance(z, ShardedTensor)
    assert not z.requires_grad
    again = ShardedTensor.from_local(y.to_local(), 1)
    assert again.sharding == y.sharding
    leaf = y.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert isinstance(leaf.grad, ShardedTensor)
    close(whole(leaf.grad), 2 * x, "grad")
    y.retain_grad()
    seen = []
    y.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    for cot in (
        torch.ones(3, 5),
        marked(torch.ones(3, 5).double(), 1, y.sharding.ranges),
    ):
        y.backward(cot.double(), retain_graph=True)
    close(whole(y.grad), torch.full((3, 5), 2.0).double(), "retained")
    assert len(seen) == 2


def test_a_shard_shows_itself_as_the_whole_tensor():
    """Sizes are the whole's, the repr says what is held, gather and to_local convert."""
    run_ranks(facts, 2)


def copies():
    x = randoms((3, 5), 1)
    leaf = marked(x, 1, balanced_ranges(5, 2)).requires_grad_()
    copied = copy.deepcopy({"a": leaf, "b": leaf})
    assert copied["a"] is copied["b"]
    assert copied["a"].requires_grad
    stream = io.BytesIO()
    torch.save(leaf, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    unpickled = pickle.loads(pickle.dumps(leaf))
    for other in (copied["a"], loaded, unpickled, copy.copy(leaf)):
        assert isinstance(other, ShardedTensor)
        assert other.sharding == leaf.sharding
        close(whole(other).detach(), x, "copy")
    copied["a"].data.zero_()
    close(whole(leaf).detach(), x, "original")
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly"):
        copy.deepcopy(leaf * 2)


def test_shards_are_deep_copied_and_pickled_with_their_mark():
    """A leaf copies and pickles whole with its mark; a computed one is refused, as by torch."""
    run_ranks(copies, 2)


def dropout_bodies():
    torch.manual_seed(0)
    x = torch.ones(4, 64, dtype=torch.float64)
    y = marked(x, 1, balanced_ranges(64, 2))
    mask = whole(F.dropout(y, 0.5))
    after = torch.rand(())
    module = nn.Dropout(0.5)
    inplace = whole(F.dropout(y * 1, 0.5, inplace=True))
    noise = whole(torch.rand_like(y))
    state = torch.get_rng_state()
    module.eval()(y)
    assert torch.equal(torch.get_rng_state(), state)
    kept = mask[mask != 0]
    assert torch.equal(kept, torch.full_like(kept, 2.0))
    assert 0.2 < (mask == 0).double().mean() < 0.8
    halves = [t.chunk(2, 1) for t in (mask, inplace, noise)]
    assert not any(torch.equal(first, second) for first, second in halves)
    return after.item()


def test_dropout_masks_differ_between_shards_and_leave_ranks_in_step():
    """T42: each shard has its own mask; afterwards the common stream is equal on all ranks."""
    first, second = run_ranks(dropout_bodies, 2)
    assert first == second


class Column(ts.ParallelLayer):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.declare(
            axes={"out": ts.Axis(out_features)},
            parameters={
                "weight": ts.ParameterSpec(
                    (out_features, in_features),
                    ts.Shard(0, "out"),
                    ts.kaiming_uniform(in_features),
                )
            },
            inputs={"input": ts.Whole(-1, in_features)},
            output=ts.Shard(-1, "out"),
        )

    def local_forward(self, input):
        return F.linear(input, self.weight)


class Row(ts.ParallelLayer):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.declare(
            axes={"in": ts.Axis(in_features)},
            parameters={
                "weight": ts.ParameterSpec(
                    (out_features, in_features),
                    ts.Shard(1, "in"),
                    ts.kaiming_uniform(in_features),
                )
            },
            inputs={"input": ts.Shard(-1, "in")},
            output=ts.Partial(),
        )

    def local_forward(self, input):
        return F.linear(input, self.weight)


def seeded(build):
    torch.manual_seed(0)
    return build()


def sharded_and_dense():
    sharded = seeded(
        lambda: nn.Sequential(Column(5, 7), nn.GELU(), Row(7, 6), Column(6, 9))
    )
    dense = seeded(
        lambda: nn.Sequential(
            nn.Linear(5, 7, bias=False),
            nn.GELU(),
            nn.Linear(7, 6, bias=False),
            nn.Linear(6, 9, bias=False),
        )
    )
    return sharded, dense


def ways_to_run():
    """Every wrapper of a step gives the loss and gradients of the dense model."""
    x, target = randoms((4, 5), 1, torch.float32), torch.tensor([0, 8, 3, 5])
    for name in ("plain", "compile", "checkpoint", "autocast", "twice"):
        torch._dynamo.reset()
        sharded, dense = sharded_and_dense()

        def step(model, x):
            return F.cross_entropy(model(x), target)

        def rematerialised(model, x, step=step):
            return checkpoint(step, model, x, use_reentrant=False)

        def half(model, x, step=step):
            with torch.autocast("cpu", torch.bfloat16):
                return step(model, x)

        def twice(model, x, step=step):
            return step(model, x) + step(model, x * 2)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        run = {
            "plain": (step, step),
            "compile": (compiled, step),
            "checkpoint": (rematerialised, step),
            "autocast": (half, half),
            "twice": (twice, twice),
        }[name]
        inputs = [x.clone().requires_grad_() for _ in run]
        losses = [
            f(m, i) for f, m, i in zip(run, (sharded, dense), inputs, strict=True)
        ]
        assert losses[0].dtype == losses[1].dtype, name
        tolerance = 2e-2 if name == "autocast" else 1e-5
        close(losses[0].detach(), losses[1].detach(), name, tolerance)
        for loss in losses:
            loss.backward()
        close(inputs[0].grad, inputs[1].grad, f"{name}, input", tolerance)
        for layer, twin in zip(sharded, dense, strict=True):
            for key, spec in getattr(layer, "specs", {}).items():
                dim, ranges = spec.layout.dim, layer.ranges_of(key)
                grad = ops.gather(layer.weight.grad, dim, ranges=ranges)
                close(grad, twin.weight.grad, f"{name}, {key}", tolerance)


@pytest.mark.parametrize("world_size", [1, 3])
def test_marks_survive_compile_checkpoint_and_autocast(world_size):
    """R5: column, GELU, row, column and loss equal dense under each of them."""
    run_ranks(ways_to_run, world_size)


def compiled_rules():
    ranges = balanced_ranges(6, 2)
    target = torch.tensor([0, 5, 2, 3])
    functions = {
        "softmax": lambda x: x.softmax(1).square().sum(),
        "log_softmax": lambda x: (x.log_softmax(1) * 0.5).square().sum(),
        "logsumexp": lambda x: x.logsumexp(1).sum(),
        "cross_entropy": lambda x: F.cross_entropy(x, target, label_smoothing=0.1),
        "mean": lambda x: x.mean(),
        "vector_norm": torch.linalg.vector_norm,
        "max": lambda x: x.max(1)[0].sum() + x.amax(1).sum(),
        "argmax": lambda x: (x.argmax(1) * x.sum(1)).sum(),
        "topk": lambda x: x.topk(2)[0].sum(),
        "views": lambda x: x.view(4, 1, 6).transpose(0, 1)[:, :2].square().sum(),
        "joins": lambda x: torch.cat([x, x * 2], 0).chunk(2)[1].sum(),
        "casts": lambda x: x.float().type_as(x).sum(),
        "T": lambda x: (x.T * x.mT.square()).sum() + x.T.size(0) + x.t().shape[0],
        "sizes": lambda x: x.sum() * x.shape[1] * x.size(1) * x.numel() * len(x),
        "binary": lambda x: (torch.max(x, 2 * x) + torch.min(x, x.square())).sum(),
        "all": lambda x: x.max() - x.min(),
        "whole operands": lambda x: (x * torch.ones(6) + x[:, None].sum(0)).sum(),
    }

    def every(x):
        return torch.stack([function(x) for function in functions.values()])

    step = torch.compile(
        lambda x: every(marked(x, 1, ranges)), fullgraph=True, backend="aot_eager"
    )
    mine, dense = (randoms((4, 6), 1).requires_grad_() for _ in range(2))
    values, expected = step(mine), every(dense)
    cot = randoms(values.shape, 2)
    values.backward(cot)
    expected.backward(cot)
    for name, value, want in zip(functions, values, expected, strict=True):
        close(value.detach(), want.detach(), name, 1e-6)
    close(mine.grad, dense.grad, "gradient", 1e-6)


def test_rules_compile_into_one_graph():
    """fullgraph=True: values and gradients of the compiled rules equal dense."""
    run_ranks(compiled_rules, 2)


def engine_calls():
    ranges = balanced_ranges(6, 2)

    def twice(y):
        return F.gelu(y) * 2

    mine, dense = (randoms((4, 6), 1).requires_grad_() for _ in range(2))
    cot = randoms((4, 6), 2)
    twice(dense).backward(cot)
    y = checkpoint(twice, marked(mine, 1, ranges), use_reentrant=True)
    assert isinstance(y, ShardedTensor)
    y.backward(cot)
    close(mine.grad, dense.grad, "reentrant checkpoint")
    leaf = marked(mine.detach(), 1, ranges).requires_grad_()
    for given in (cot, marked(cot, 1, ranges), [cot]):
        (grad,) = torch.autograd.grad(twice(leaf), leaf, given)
        assert isinstance(grad, ShardedTensor)
        close(whole(grad), dense.grad, "autograd.grad")
    (grad,) = torch.autograd.grad([twice(leaf).sum()], [leaf])
    assert grad.sharding == leaf.sharding
    torch.autograd.backward(
        [twice(leaf), leaf.sum()], [cot, torch.tensor(1.0).double()]
    )
    close(whole(leaf.grad), dense.grad + 1, "autograd.backward")


def test_the_autograd_engine_takes_shards():
    """backward, grad and reentrant checkpoints take whole or marked gradients."""
    run_ranks(engine_calls, 2)


def through_ddp():
    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            return {"y": x * self.weight, "list": [(x * 2 * self.weight).view(3, 5)]}

    size = groups.get_world_size()
    x = marked(randoms((3, 5), 1), 1, balanced_ranges(5, size))
    for flags in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = nn.parallel.DistributedDataParallel(TwoOutputs(), **flags)
        for _ in range(2):
            result = model(x)
            assert isinstance(result["y"], ShardedTensor), flags
            assert result["list"][0].sharding == x.sharding, flags
            (result["y"].sum() + result["list"][0].sum()).backward()
    grads = model.module.weight.grad
    close(grads, 2 * 3 * whole(x).sum(0), "weight")


def test_marks_survive_ddp_with_every_flag():
    """R5: outputs in dicts and lists keep their marks through DDP's traversal."""
    run_ranks(through_ddp, 2)


def caller_is_left_alone():
    y = marked(randoms((3, 5), 1), 1, balanced_ranges(5, 2))
    before = dict(y.__dict__)
    Row(5, 2).double()(y)
    F.gelu(y)
    assert y.__dict__ == before
    x = randoms((3, 5), 1)
    Column(5, 4).double()(x)
    assert type(x) is torch.Tensor
    assert x.__dict__ == {}


def test_layers_leave_their_callers_marks_alone():
    """R32: nothing is written on the tensors that a layer is given."""
    run_ranks(caller_is_left_alone, 2)


def test_local_work_costs_no_collective():
    """Elementwise functions, views and cuts of a shard run without one."""
    assert run_ranks(local_collectives, 2) == [0, 0]


def local_collectives():
    y = marked(randoms((3, 4), 1).requires_grad_(), 1, balanced_ranges(4, 2))
    other = randoms((3, 4), 2)
    with CommDebugMode() as counted:
        z = F.gelu(y * other + 1).view(3, 4).transpose(0, 1)[:, :2]
        torch.stack([z, z]).float()
    return counted.get_total_counts()


def test_messages_name_the_dim_that_is_sharded():
    """The remedy names calls that exist."""
    for name in re.findall(r"torchshard\.distributed\.(\w+)", REMEDY):
        assert callable(getattr(ts.distributed, name))
