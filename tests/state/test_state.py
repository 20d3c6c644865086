"""Whole state, local state, and the ways between them."""

import copy
import io
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.errors import GroupError, StateError
from torchshard.state import collect_state_dict, relocate_state_dict
from torchshard.testing import run_ranks

from layer_zoo import (
    ParallelConv2d,
    ParallelEmbedding,
    ParallelLinear,
    ParallelMultiheadAttention,
)

WORLDS = [1, 2, 3, 4]


class Block(nn.Module):
    """Layers of every kind, nested, with buffers and a module under two names."""

    def __init__(self, linear, embedding, attention, conv):
        super().__init__()
        self.embedding = embedding(7, 8)
        self.attention = attention(8, 4, add_bias_kv=True)
        self.inner = nn.ModuleDict(
            {
                "norm": nn.BatchNorm1d(8),
                "rows": linear("row", 5, 3),
                "columns": linear("column", 3, 2),
            }
        )
        self.same = self.inner["rows"]
        self.conv = conv(2, 6, 3, groups=2, bias=False)
        self.register_buffer("steps", torch.tensor(3))


def dense_block():
    return Block(
        lambda split, *args: nn.Linear(*args),
        nn.Embedding,
        nn.MultiheadAttention,
        nn.Conv2d,
    ).double()


def sharded_block(device=None):
    dims = {"row": 0, "column": 1}
    # Two groups of channels are too few for more ranks.
    conv_dim = 1 if ts.distributed.get_world_size() <= 2 else None
    return Block(
        lambda split, *args: ParallelLinear(*args, dim=dims[split], device=device),
        partial(ParallelEmbedding, dim=0, device=device),
        partial(ParallelMultiheadAttention, device=device),
        partial(ParallelConv2d, dim=conv_dim, device=device),
    ).double()


def dense_state():
    """The same on every rank, without the ranks' help."""
    generator = torch.Generator().manual_seed(7)
    state = dense_block().state_dict()
    for value in state.values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator).double())
    state["steps"].fill_(9)
    state["inner.norm.num_batches_tracked"].fill_(4)
    return state


def same_state(actual, expected):
    assert list(actual) == list(expected)
    for key, value in actual.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key


def goes_both_ways():
    state = dense_state()
    kept = copy.deepcopy(state)
    model = sharded_block()
    assert model.load_state_dict(
        state, strict=True
    ) == nn.modules.module._IncompatibleKeys([], [])
    same_state(state, kept)
    collected = collect_state_dict(model)
    same_state(collected, kept)
    dense = dense_block()
    assert collected._metadata.items() >= dense.state_dict()._metadata.items()
    dense.load_state_dict(collected, strict=True)
    same_state(dense.state_dict(), kept)

    local = relocate_state_dict(sharded_block(), state)
    same_state(local, model.state_dict())
    same_state(relocate_state_dict(model, local), local)
    for key, value in local.items():
        assert (
            value.untyped_storage().nbytes() == value.numel() * value.element_size()
        ), f"{key} keeps its whole tensor alive"
    again = sharded_block()
    again.load_state_dict(local)
    same_state(collect_state_dict(again), kept)
    return {key: value.clone() for key, value in local.items()}


@pytest.mark.parametrize("world_size", WORLDS)
def test_state_goes_both_ways(world_size):
    """Dense state loads strictly, is left alone, collects exactly, and loads into torch.nn."""
    run_ranks(goes_both_ways, world_size)


def own_rows_are_right():
    state, model = dense_state(), sharded_block()
    model.load_state_dict(state)
    rank = model.attention.group.rank
    heads = [(0, 2), (2, 3), (3, 4)][rank]
    rows = [
        part * 8 + row for part in range(3) for row in range(heads[0] * 2, heads[1] * 2)
    ]
    packed = state["attention.in_proj_weight"][rows]
    assert torch.equal(model.attention.in_proj_weight, packed)
    columns = state["attention.out_proj.weight"][:, heads[0] * 2 : heads[1] * 2]
    assert torch.equal(model.attention.out_proj.weight, columns)
    vocabulary = [(0, 3), (3, 5), (5, 7)][rank]
    assert torch.equal(
        model.embedding.weight, state["embedding.weight"][slice(*vocabulary)]
    )


def test_t52_each_rank_holds_its_own_rows():
    """T52: packed q, k and v, columns and vocabulary hold the right numbers, not just shapes."""
    run_ranks(own_rows_are_right, 3)


def with_prefix():
    model, state = sharded_block(), dense_state()
    model.load_state_dict(state)
    prefixed = {f"net.{key}": value for key, value in state.items()}
    same_state(collect_state_dict(model, prefix="net."), prefixed)
    local = model.state_dict(prefix="net.")
    same_state(collect_state_dict(model, local, "net."), prefixed)
    same_state(relocate_state_dict(model, prefixed, "net."), local)
    sub = {"rows." + key: value for key, value in model.same.state_dict().items()}
    whole_sub = {key: state["inner." + key] for key in ("rows.weight", "rows.bias")}
    same_state(collect_state_dict(model.same, sub, "rows."), whole_sub)


def test_r31_prefixes():
    """R31: collect and relocate mind the prefix of the keys."""
    run_ranks(with_prefix, 2)


class Centre(ts.ParallelLayer):
    """A sharded buffer."""

    def __init__(self, features, *, group=None):
        super().__init__(group)
        mean = ts.ParameterSpec((features,), ts.Shard(0, "features"), ts.Normal())
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters={},
            buffers={"mean": mean},
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Shard(-1, "features"),
        )

    def local_forward(self, input):
        return input - self.mean


def one_layer_under_two_names():
    layer = Centre(5)
    model = nn.ModuleDict({"first": layer, "second": layer})
    collected = collect_state_dict(model)
    assert collected["first.mean"].shape == collected["second.mean"].shape == (5,)
    assert torch.equal(collected["first.mean"], collected["second.mean"])


def test_r20_one_layer_under_two_names():
    """R20: a sharded buffer is whole under both names of its layer."""
    run_ranks(one_layer_under_two_names, 2)


def shared_with_a_plain_module():
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(3, 7, bias=False),
            "embedding": ParallelEmbedding(7, 3, dim=0),
        }
    )
    model["plain"].weight = model["embedding"].weight
    collected = collect_state_dict(model)
    assert collected["plain.weight"].shape == (7, 3)
    assert torch.equal(collected["plain.weight"], collected["embedding.weight"])
    model["embedding"].weight.data.zero_()
    model.load_state_dict(relocate_state_dict(model, collected))
    same_state(collect_state_dict(model), collected)


def test_r18_a_shard_that_a_plain_module_shares():
    """R18: a tied parameter is whole under both of its keys, whoever else holds it."""
    run_ranks(shared_with_a_plain_module, 2)


def on_one_rank(dst):
    model, state = sharded_block(), dense_state()
    model.load_state_dict(state)
    collected = collect_state_dict(model, dst=dst)
    if ts.distributed.get_rank() == dst:
        same_state(collected, state)
        assert all(value.device.type == "cpu" for value in collected.values())
    else:
        assert collected == {}
    alone = nn.Sequential(
        ParallelLinear(2, 3, dim=1, group=ts.distributed.ShardGroup()), model.same
    )
    assert bool(collect_state_dict(alone, dst=dst)) == (
        ts.distributed.get_rank() == dst
    )
    assert bool(collect_state_dict(nn.Linear(2, 3), dst=dst)) == (
        ts.distributed.get_rank() == dst
    )


@pytest.mark.parametrize("dst", [0, 2])
def test_collecting_to_one_rank(dst):
    """`dst` gives that rank the whole state on the CPU, and the others an empty dict."""
    run_ranks(on_one_rank, 3, dst)


def from_rank_0_alone(device):
    state = dense_state()
    expected = sharded_block()
    expected.load_state_dict(state)
    model = sharded_block(device)
    mine = state if ts.distributed.get_rank() == 0 else None
    local = relocate_state_dict(model, mine)
    same_state(local, expected.state_dict())
    model.load_state_dict(local, strict=True, assign=device == "meta")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    same_state(collect_state_dict(model), state)
    layer = ParallelLinear(3, 5, dim=1, device=device)
    sent = {"weight": torch.ones(5, 3), "bias": torch.arange(5.0)}
    mine = sent if ts.distributed.get_rank() == 0 else None
    layer.load_state_dict(relocate_state_dict(layer, mine), assign=True)
    same_state(collect_state_dict(layer), sent)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rank_0_sends_to_ranks_that_have_none(device):
    """Ranks that pass None get their shards from rank 0, also for a model still on meta."""
    run_ranks(from_rank_0_alone, 3, device)


def assigned():
    state = dense_state()
    for device in ("cpu", "meta"):
        model = sharded_block(device)
        model.load_state_dict(state, assign=True)
        for key, value in model.state_dict().items():
            assert value.untyped_storage().nbytes() == (
                value.numel() * value.element_size()
            ), key
        same_state(collect_state_dict(model), state)
        assert all(
            isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters()
        )


def test_assigning_whole_state():
    """`assign=True` takes shards that do not hold on to the whole tensors, from meta too."""
    run_ranks(assigned, 3)


def saved_bytes():
    model = sharded_block()
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    again = sharded_block()
    again.load_state_dict(torch.load(stream, weights_only=True))
    same_state(again.state_dict(), model.state_dict())


def test_local_state_round_trip():
    """`torch.save` of the local state loads again on the same rank, weights_only."""
    run_ranks(saved_bytes, 3)


def training_goes_on():
    torch.manual_seed(1)
    model = ParallelLinear(5, 7, dim=1).double()
    dense = nn.Linear(5, 7).double()
    dense.load_state_dict(collect_state_dict(model))
    x = torch.randn(4, 5, dtype=torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, dense)]
    for step in range(3):
        for module, optimizer in zip((model, dense), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(x), torch.arange(4)).backward()
            optimizer.step()
        if step == 1:
            parameters = list(model.parameters())
            model.load_state_dict(collect_state_dict(model))
            assert all(
                a is b for a, b in zip(parameters, model.parameters(), strict=True)
            )
    for key, value in collect_state_dict(model).items():
        torch.testing.assert_close(value, dense.state_dict()[key])


def test_loading_leaves_the_optimizer_alone():
    """Collecting and loading in the middle of training changes no parameter's identity."""
    run_ranks(training_goes_on, 2)


def load_trained(state):
    model = sharded_block()
    model.load_state_dict(state)
    return {
        key: value.clone() for key, value in collect_state_dict(model, dst=0).items()
    }


def test_any_number_of_ranks_to_any_other():
    """Whole state passes from N ranks to M, through 1 to 4, without a changed bit."""
    state = dense_state()
    for world_size in [2, 4, 1, 3]:
        moved, *_ = run_ranks(load_trained, world_size, state)
        same_state(moved, state)
        state = moved


def raised_by(call, error):
    with CommDebugMode() as counted, pytest.raises(error) as raised:
        call()
    assert counted.get_total_counts() == 0
    return str(raised.value)


def wrong_state_is_refused():
    rank = ts.distributed.get_rank()
    model = nn.ModuleDict({"fc": ParallelLinear(3, 5, dim=1)})
    local, own = model.state_dict(), 3 - rank
    whole_state = collect_state_dict(model)

    lacking = {"fc.bias": local["fc.bias"]}
    assert raised_by(lambda: collect_state_dict(model, lacking), StateError) == (
        "state_dict lacks ['fc.weight'], which the model holds in shards. Pass the model's"
        " own state_dict(prefix=''), and the same prefix."
    )
    assert raised_by(lambda: collect_state_dict(model, local, "net."), StateError) == (
        "state_dict lacks ['net.fc.bias', 'net.fc.weight'], which the model holds in"
        " shards. Pass the model's own state_dict(prefix='net.'), and the same prefix."
    )
    assert raised_by(lambda: collect_state_dict(model, whole_state), StateError) == (
        "fc.weight has shape (5, 3) in state_dict. Expected rank"
        f" {rank}'s shard ({own}, 3) of the whole (5, 3)."
    )
    assert raised_by(lambda: collect_state_dict(model, dst=2), GroupError) == (
        "dst=2 is no rank of the group. Expected 0 to 1, or None for all of them."
    )
    wrong = {"fc.weight": torch.zeros(6, 3), "fc.bias": torch.zeros(5)}
    for load in (model.load_state_dict, partial(relocate_state_dict, model)):
        with pytest.raises(StateError) as raised:
            load(wrong)
        assert str(raised.value) == (
            "fc.weight has shape (6, 3) in the state dict. Expected the whole (5, 3) or"
            f" rank {rank}'s shard ({own}, 3)."
        )
    with pytest.raises(
        RuntimeError, match=re.escape('Missing key(s) in state_dict: "fc')
    ):
        model.load_state_dict({})
    result = model.load_state_dict({"fc.bias": torch.ones(5), "x": 1}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["fc.weight"], ["x"])
    assert model["fc"].bias.tolist() == [1.0] * own
    with pytest.raises(StateError) as raised:
        relocate_state_dict(model, None if rank == 0 else whole_state)
    assert str(raised.value) == (
        "Rank 0 of the group passed state_dict=None. Expected the whole state on rank 0 at"
        " least; the other ranks may pass None."
    )
    even = nn.ModuleDict({"fc": ParallelLinear(3, 6, dim=1)})
    with pytest.raises(StateError) as raised:
        relocate_state_dict(even, even.state_dict() if rank == 0 else None)
    assert str(raised.value) == (
        "fc.bias has shape (3,) in rank 0's state dict. Expected the whole (6,), of which"
        " each rank is sent its part."
    )


def test_state_that_does_not_fit_is_refused():
    """Each message in full, on every rank; rank 0's shards are never sent as everybody's."""
    run_ranks(wrong_state_is_refused, 2)
