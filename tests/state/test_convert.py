"""Models of torch.nn turned into sharded ones, by a plan of names or by class, and back.

Names of tests begin with the row: R of TorchShard 0.1.0, T of public reports on its peers.
"""

import copy
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchshard.errors import LayoutError
from torchshard.owners import owner_of
from torchshard.state import gathered, sharded_entries
from torchshard.tensor import whole
from torchshard.testing import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import models

MODELS = {
    "resnet": (models.ResNet, {}, models.RESNET_PLAN),
    "gpt": (models.GPT, {}, models.GPT_PLAN),
    "packed gpt": (models.GPT, {"packed": True}, models.PACKED_GPT_PLAN),
    "vit": (models.ViT, {}, models.VIT_PLAN),
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def randoms(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def seeded(build):
    torch.manual_seed(0)
    return build().double()


def samples(name):
    generator = torch.Generator().manual_seed(1)
    if "gpt" in name:
        ids = torch.randint(13, (3, 6), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    size = 20 if name == "resnet" else 8
    return randoms(4, 3, size, size), torch.randint(7, (4,), generator=generator)


def trained(model, name, optimizer, steps=5):
    """Return the loss of every step."""
    x, target = samples(name)
    criterion = ts.nn.ParallelCrossEntropyLoss()
    optimizer, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(steps):
        loss = criterion(model(x).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def expect_same_state(state, expected, tolerance=0.0):
    assert list(state) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            state[key], value, rtol=0, atol=tolerance, msg=lambda t, k=key: f"{k}: {t}"
        )


def models_train(names):
    for name in names:
        cls, options, plan = MODELS[name]
        initial = seeded(lambda cls=cls, options=options: cls(**options))
        for optimizer in OPTIMIZERS:
            dense = copy.deepcopy(initial)
            model = ts.parallelize(copy.deepcopy(initial), plan)
            expected = trained(dense, name, optimizer)
            losses = trained(model, name, optimizer)
            gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
            assert max(gaps) < 1e-9, (name, optimizer, gaps)
            assert expected[-1] < 0.9 * expected[0]
            state = ts.collect_state_dict(model)
            expect_same_state(state, dense.state_dict(), 1e-9)
            # What was trained loads into a fresh model, whole or cut.
            fresh = ts.parallelize(copy.deepcopy(initial), plan)
            fresh.load_state_dict(state)
            expect_same_state(ts.collect_state_dict(fresh), state)
            expect_same_state(fresh.state_dict(), model.state_dict())
            back = ts.to_dense(model)
            assert str(back) == str(dense)
            expect_same_state(back.state_dict(), state)
            again = with_state(initial, state)
            (loss,), (want,) = (trained(m, name, optimizer, 1) for m in (back, again))
            assert abs(loss - want) < 1e-12


def with_state(model, state):
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("world_size", [2, 4])
def test_t29_models_train_as_dense(world_size):
    """T29: losses and weights of 5 steps are the dense model's; state goes both ways, exactly."""
    run_ranks(models_train, world_size, list(MODELS))


@pytest.mark.parametrize("world_size", [1, 3])
def test_models_train_over_any_number_of_ranks(world_size):
    """Heads, channels and classes that do not divide, and a group of one."""
    run_ranks(models_train, world_size, ["resnet", "vit", "packed gpt"])


# Ties


def fingerprint(model):
    """Return what an error may not change: every module, parameter, value and mode."""
    modules = {
        path: (id(m), m.training) for path, m in model.named_modules(remove_duplicate=0)
    }
    tensors = {
        name: (id(p), p.requires_grad, p.detach().clone().tolist())
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return modules, tensors, list(model.state_dict())


def refused(model, convert):
    """Return the error's text; the model must be as it was."""
    before = fingerprint(model)
    with pytest.raises(LayoutError) as raised:
        convert(model)
    assert fingerprint(model) == before
    return str(raised.value)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def ties():
    ids, cotangent = torch.tensor([[0, 6, 3]]), randoms(1, 3, 7, seed=4)
    plans = [
        {"embedding": "vocabulary", "head": "column"},
        {"embedding": "embedding_dim", "head": "row"},
        {"embedding": {"dim": None}, "head": {"dim": None}},
        {"embedding": {"dim": None}},
        {"head": {"dim": None}},
    ]
    for plan in plans:
        dense = seeded(Tied)
        dense(ids).backward(cotangent)
        model = ts.parallelize(seeded(Tied), plan)
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == 2
        whole(model(ids)).backward(cotangent)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        torch.optim.SGD(dense.parameters(), lr=0.5).step()
        expect_same_state(ts.collect_state_dict(model), dense.state_dict(), 1e-12)
        copied = copy.deepcopy(model)
        assert copied.head.weight is copied.embedding.weight
        back = ts.to_dense(model)
        assert back.head.weight is back.embedding.weight
        expect_same_state(back.state_dict(), dense.state_dict(), 1e-12)
    size = ts.distributed.get_world_size()
    for plan in (
        {"embedding": "embedding_dim", "head": "column"},
        {"embedding": "vocabulary"},
        {"head": "row"},
    ):
        text = refused(
            seeded(Tied), lambda model, plan=plan: ts.parallelize(model, plan)
        )
        assert "embedding.weight" in text
        assert "head.weight" in text
        assert "are one parameter, but would be divided differently" in text, size
        assert "an embedding by 'vocabulary' with a linear head by 'column'" in text


@pytest.mark.parametrize("world_size", [2, 3])
def test_r18_t38_ties_are_kept_or_refused(world_size):
    """R18, T38: a tied parameter stays one, sharded or whole; a plan that parts it is an error."""
    run_ranks(ties, world_size)


# What a layer keeps


class TwoNames(nn.Module):
    """One layer under two names here, and under a third in a child."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = self.a
        self.child = nn.Sequential(nn.Tanh(), self.a)

    def forward(self, x):
        return self.child(self.b(self.a(x)))


def two_names():
    x = randoms(2, 5)
    expected = seeded(TwoNames)(x)
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    by_class = convert(seeded(TwoNames), dim=1)
    for model in (
        by_class,
        ts.parallelize(seeded(TwoNames), {"*a": "row", "b": "row"}),
        ts.parallelize(seeded(TwoNames), {"a": "column"}),
        ts.parallelize(seeded(TwoNames), {"child.1": "column"}),
    ):
        assert type(model.a) is ts.nn.ParallelLinear
        assert model.a is model.b
        assert model.a is model.child[1]
        torch.testing.assert_close(whole(model(x)), expected)
        assert list(ts.collect_state_dict(model)) == list(model.state_dict())
        ts.to_dense(model)
        assert type(model.a) is nn.Linear
        assert model.a is model.b
        assert model.a is model.child[1]
        assert torch.equal(model(x), expected)
    text = refused(
        seeded(TwoNames), lambda model: ts.parallelize(model, {"a": "row", "b": None})
    )
    assert text == (
        "b and a are one module, but the plan divides it both as None and as 'row'."
    )


def test_r20_one_module_under_several_names():
    """R20: it becomes one sharded layer under all of its names, whichever the plan names."""
    run_ranks(two_names, 2)


def frozen_and_modes():
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[1].eval()
    model.to(torch.bfloat16)
    model[2].double()
    plan = {"0": "column", "1": "row", "2": {"dim": None}}
    converted = ts.parallelize(copy.deepcopy(model), plan)
    for version in (converted, copy.deepcopy(converted)):
        for _ in range(2):
            for name, parameter in model.named_parameters():
                other = version.get_parameter(name)
                assert other.requires_grad == parameter.requires_grad, name
                assert other.dtype == parameter.dtype, name
            modes = [module.training for module in version]
            assert modes == [True, False, True]
            version = ts.to_dense(version)
            assert [type(module) for module in version] == [nn.Linear] * 3


def test_r20_t26_frozen_parameters_dtypes_and_modes_are_kept():
    """R20, T26: requires_grad, dtype and training mode of every layer, there and back."""
    run_ranks(frozen_and_modes, 2)


def hooks():
    model, seen = nn.Sequential(nn.Linear(4, 6)), []
    layer = model[0]

    def note(name):
        return lambda *args, **kwargs: seen.append(name)

    def note_module(module, *args):
        seen.append(type(module).__name__)

    handles = [
        layer.register_forward_pre_hook(note("before")),
        layer.register_forward_hook(note("after"), with_kwargs=True),
        layer.register_full_backward_pre_hook(note("before back")),
        layer.register_full_backward_hook(note("back")),
        layer.register_state_dict_pre_hook(note("save")),
        layer.register_state_dict_post_hook(note("saved")),
        layer.register_load_state_dict_pre_hook(note_module),
        layer.register_load_state_dict_post_hook(note_module),
    ]
    names = ["before", "after", "before back", "back", "save", "saved"]

    def run(kind):
        whole(model(torch.ones(2, 4, requires_grad=True))).sum().backward()
        model.load_state_dict(model.state_dict())
        expected = [*names, kind, kind] if kind else []
        assert seen == expected
        seen.clear()

    run("Linear")
    ts.parallelize(model, {"0": "row"})
    run("ParallelLinear")
    ts.to_dense(model)
    run("Linear")
    ts.parallelize(model, {"0": "row"})
    for handle in handles:
        handle.remove()
    run(None)


def test_r20_hooks_are_kept():
    """R20: every kind of hook fires on the new layer, and the handle of each removes it."""
    run_ranks(hooks, 2)


def lazy_layers():
    def model():
        return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))

    expected = "1: LazyLinear has no sizes yet. Run the model once, then convert it."
    lazy = model()
    for convert in (
        lambda: ts.nn.ParallelLinear.convert_parallel_linear(lazy, dim=1),
        lambda: ts.parallelize(lazy, {"*": "column"}),
    ):
        with pytest.raises(LayoutError) as raised:
            convert()
        assert str(raised.value) == expected
        assert type(lazy[0]) is nn.Linear
    lazy(torch.ones(2, 3))
    ts.nn.ParallelLinear.convert_parallel_linear(lazy, dim=1)
    assert lazy[1].out_features == 4


def test_r20_a_lazy_layer_is_refused_until_it_has_sizes():
    """R20: the error names the layer and the remedy, which works."""
    run_ranks(lazy_layers, 2)


# Attention and torch's fused encoder


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0])


def out_proj():
    x = randoms(2, 4, 6)
    expected = seeded(Attending)(x)
    for dim in (0, 1):
        model = seeded(Attending)
        part = model.attention.out_proj
        ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
        assert model.attention.out_proj is part
        torch.testing.assert_close(whole(model(x)), expected)
    text = refused(
        seeded(Attending), lambda model: ts.parallelize(model, {"*out_proj": "row"})
    )
    assert text == (
        "attention.out_proj: this Linear is a part of MultiheadAttention, which reads its"
        " weight itself. Convert the attention whole, with 'heads'."
    )
    model = ts.parallelize(seeded(Attending), {"attention": "heads", "head": "column"})
    torch.testing.assert_close(whole(model(x)), expected)
    text = refused(
        seeded(Attending),
        lambda model: ts.parallelize(
            model, {"attention": "heads", "attention.out_proj": "row"}
        ),
    )
    assert text == (
        "attention.out_proj is a part of attention, which the plan converts whole. Leave"
        " one of them out."
    )
    text = refused(
        nn.GroupNorm(1, 8), lambda model: ts.parallelize(model, {"": "groups"})
    )
    assert text.startswith(
        "the model: num_groups=1 is fewer than the 2 ranks of the group"
    )


def test_r21_a_part_of_attention_is_left_whole_or_refused():
    """R21: by class out_proj stays; a plan that names it is told to convert the attention."""
    run_ranks(out_proj, 2)


def encoder_layer():
    # An even number of heads: torch keeps odd ones from the fused path itself.
    return nn.TransformerEncoderLayer(8, 4, 7, dropout=0.0, batch_first=True)


def encoder():
    return nn.TransformerEncoder(encoder_layer(), 2)


ENCODER_PLANS = [
    {"*linear1": "column", "*linear2": "row"},
    {"*self_attn": "heads"},
    {"*self_attn": "heads", "*linear1": "column", "*linear2": "row"},
]


def fused_paths():
    x = randoms(3, 4, 8)
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    for build in (encoder_layer, encoder):
        for plan in ENCODER_PLANS:
            dense = seeded(build)
            model = ts.parallelize(copy.deepcopy(dense), plan)
            for _ in range(2):
                for training in (False, True):
                    dense.train(training)
                    model.train(training)
                    for mask in (None, padding):
                        # Rows of padding: the fused path fills them with zeros, the plain
                        # one with values that mean nothing.
                        kept = slice(None) if mask is None else ~padding
                        with torch.no_grad():
                            expected = dense(x, src_key_padding_mask=mask)
                            actual = model(x, src_key_padding_mask=mask)
                        length = expected.shape[1]
                        assert actual[:, :length].shape == expected.shape
                        gap = (actual[:, :length] - expected)[kept].abs().max()
                        assert gap < 1e-9, (build.__name__, plan, training, gap)
                model = copy.deepcopy(model)
            back = ts.to_dense(model)
            for module, other in zip(back.modules(), dense.modules(), strict=True):
                assert module.__dict__.keys() == other.__dict__.keys()
                for name in ("activation_relu_or_gelu", "use_nested_tensor"):
                    assert getattr(module, name, 0) == getattr(other, name, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_r22_the_fused_encoder_path_is_left():
    """R22: eval without grad equals dense, with padding as nested tensors too; and is restored."""
    run_ranks(fused_paths, 2)


# Every layer with every option


def expect_alike(case, dense, plan, call):
    """Compare outputs in both modes with and without grad, gradients, and the way back."""
    dense = dense.double()
    model = ts.parallelize(copy.deepcopy(dense), plan)
    for training in (True, False):
        for grad in (True, False):
            dense.train(training)
            model.train(training)
            with torch.set_grad_enabled(grad):
                expected, actual = call(dense), whole(call(model))
            assert (actual - expected).abs().max() < 1e-10, (case, training, grad)
    cotangent = randoms(*expected.shape, seed=8)
    call(dense).backward(cotangent)
    whole(call(model)).backward(cotangent)
    owned = {key: place for key, *place in sharded_entries(model)}
    for name, parameter in dense.named_parameters():
        grad = model.get_parameter(name).grad
        grad = gathered(grad, *owned[name]) if name in owned else grad
        assert (grad - parameter.grad).abs().max() < 1e-9, (case, name)
    back = ts.to_dense(model)
    assert str(back) == str(dense)
    expect_same_state(back.state_dict(), dense.state_dict())


def every_option():
    torch.manual_seed(0)
    images = randoms(2, 4, 9, 8)
    for options in (
        {},
        {"padding": "same", "bias": False},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": 1, "padding_mode": "reflect"},
    ):
        for split in ("column", "row"):
            conv = nn.Sequential(nn.Conv2d(4, 6, 3, **options))
            expect_alike(options, conv, {"0": split}, lambda model: model(images))
    for options in (
        {"bias": False},
        {"add_bias_kv": True, "batch_first": True},
        {"add_zero_attn": True},
        {"kdim": 5, "vdim": 6},
    ):
        query = randoms(5, 3, 8)
        key, value = (randoms(5, 3, options.get(k, 8)) for k in ("kdim", "vdim"))
        attention = nn.Sequential(nn.MultiheadAttention(8, 4, **options))
        expect_alike(
            options,
            attention,
            {"0": "heads"},
            lambda model, given=(query, key, value): model[0](*given)[0],
        )
    transformer = nn.Transformer(8, 4, 1, 1, 11, 0.0, batch_first=True)
    plan = {
        "*_attn": "heads",
        "*linear1": "column",
        "*linear2": "row",
    }
    source, target = randoms(3, 5, 8), randoms(3, 4, 8, seed=1)
    expect_alike("transformer", transformer, plan, lambda model: model(source, target))


@pytest.mark.parametrize("world_size", [2, 3])
def test_options_of_every_layer_are_kept(world_size):
    """Convolutions, attention and nn.Transformer equal dense with each option, and come back."""
    run_ranks(every_option, world_size)


# Embeddings


def embedding_options():
    options = {"padding_idx": 1, "max_norm": 1.5, "norm_type": 1.0}
    ids = torch.tensor([[1, 5, 5, 0], [7, 1, 8, 3]])
    convert = ts.nn.ParallelEmbedding.convert_parallel_embedding
    for dim in (0, 1, -1, None):
        for extra in ({"scale_grad_by_freq": True}, {"sparse": True}):
            dense = seeded(
                lambda e=extra: nn.Sequential(nn.Embedding(9, 5, **options, **e))
            )
            model = convert(copy.deepcopy(dense), dim=dim)
            for name in [*options, *extra]:
                assert getattr(model[0], name) == getattr(dense[0], name)
            expected, actual = dense(ids), whole(model(ids))
            torch.testing.assert_close(actual, expected)
            for y in (expected, actual):
                y.backward(randoms(2, 4, 5, seed=2))
            assert model[0].weight.grad.is_sparse == ("sparse" in extra)
            for module in (dense, model):
                torch.optim.SGD(module.parameters(), lr=0.5).step()
            expect_same_state(ts.collect_state_dict(model), dense.state_dict(), 1e-12)
            back = ts.to_dense(model)
            assert str(back) == str(dense)


@pytest.mark.parametrize("world_size", [2, 3])
def test_r23_embeddings_keep_their_options(world_size):
    """R23: padding_idx, max_norm, norm_type, scale_grad_by_freq and sparse, both ways to split."""
    run_ranks(embedding_options, world_size)


# Loading, names, devices


def loading_swaps_nothing():
    dense = seeded(lambda: models.GPT())
    model = ts.parallelize(copy.deepcopy(dense), models.GPT_PLAN)
    before = {path: id(module) for path, module in model.named_modules()}
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    other = {key: value + 1 for key, value in dense.state_dict().items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    assert {path: id(module) for path, module in model.named_modules()} == before
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    expect_same_state(ts.collect_state_dict(model), other)
    model.load_state_dict(ts.relocate_state_dict(model, dense.state_dict()))
    expect_same_state(ts.collect_state_dict(model), dense.state_dict())


def test_t56_loading_never_swaps_modules():
    """T56: a dense state dict loads into the converted model, its layers and parameters stay."""
    run_ranks(loading_swaps_nothing, 2)


def assigning_keeps_owners():
    dense = seeded(models.ViT)
    model = ts.parallelize(copy.deepcopy(dense), models.VIT_PLAN)
    model.encoder.layers[0].self_attn.get_parameter("out_proj.weight").requires_grad_(
        False
    )
    for state in (dense.state_dict(), dense.state_dict(keep_vars=True)):
        model.load_state_dict(state, assign=True)
        for layer in model.modules():
            if isinstance(layer, ts.ParallelLayer):
                for name in layer.specs:
                    tensor = layer.tensor_of(name)
                    assert owner_of(tensor) == (layer, name)
                    frozen = layer is model.encoder.layers[0].self_attn
                    frozen = frozen and name == "out_proj.weight"
                    assert tensor.requires_grad == (not frozen)
    names = ts.register_ddp_parameters_to_ignore(model)
    assert "encoder.layers.1.self_attn.out_proj.weight" in names


def test_t56_assigned_parameters_belong_to_their_layers():
    """T56: after `load_state_dict(assign=True)` the new parameters are known as shards."""
    run_ranks(assigning_keeps_owners, 2)


def on_the_meta_device():
    expected = seeded(models.ViT)
    with torch.device("meta"):
        model = models.ViT().double()
    ts.parallelize(model, models.VIT_PLAN)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.state_dict()) == list(expected.state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    x, _ = samples("vit")
    torch.testing.assert_close(model(x), expected(x))


def test_a_model_is_divided_on_the_meta_device():
    """Nothing is allocated until `to_empty`; a dense state dict then fills the shards."""
    run_ranks(on_the_meta_device, 2)


def names_and_order():
    for name, (cls, options, plan) in MODELS.items():
        dense = cls(**options)
        model = ts.parallelize(copy.deepcopy(dense), plan)
        assert list(model.state_dict()) == list(dense.state_dict()), name
        parameters = [n for n, _ in dense.named_parameters()]
        assert sorted(n for n, _ in model.named_parameters()) == sorted(parameters)
        assert model.state_dict()._metadata.keys() >= {""}


def test_names_and_their_order_are_kept():
    """The state dict of the divided model has the dense one's keys, in its order."""
    run_ranks(names_and_order, 2)


def weights_of_rank_0():
    torch.manual_seed(ts.distributed.get_rank())
    model = ts.parallelize(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        {"0": "row", "1": {"dim": None}},
    )
    return [model[0].bias, model[1].weight.detach(), model[1].bias.detach()]


def test_r28_whole_parameters_are_rank_0s():
    """R28: a row-parallel bias, and a layer that stays whole, are the same on every rank."""
    first, second = run_ranks(weights_of_rank_0, 2)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    expected = [dense[0].bias, dense[1].weight, dense[1].bias]
    for a, b, want in zip(first, second, expected, strict=True):
        assert torch.equal(a, want)
        assert torch.equal(b, want)


# Refusals


class ScaledLinear(nn.Linear):
    pass


class OwnScale(nn.Module):
    """A dense layer of the user's own."""

    def __init__(self, features, device=None, dtype=None):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))

    def forward(self, x):
        return x * self.weight


class ParallelOwnScale(ts.ParallelLayer):
    dense_class = OwnScale

    def __init__(self, features, *, group=None, device=None, dtype=None):
        super().__init__(group)
        self.features = features
        shard = ts.Shard(0, "features")
        self.declare(
            axes={"features": ts.Axis(features)},
            parameters={
                "weight": ts.ParameterSpec((features,), shard, ts.Constant(1.0))
            },
            inputs={"input": ts.Shard(-1, "features")},
            output=ts.Shard(-1, "features"),
            device=device,
            dtype=dtype,
        )

    def local_forward(self, input):
        return input * self.weight


class Undivided(ts.ParallelLayer):
    def local_forward(self, input):
        return input


def own_layers():
    dense = seeded(lambda: nn.Sequential(nn.Linear(4, 5), OwnScale(5), nn.Linear(5, 3)))
    dense[1].weight.data.copy_(randoms(5, seed=3))
    plan = {"0": "column", "1": {}, "2": "row"}
    model = ts.parallelize(copy.deepcopy(dense), plan, layers=[ParallelOwnScale])
    assert type(model[1]) is ParallelOwnScale
    x = randoms(2, 4)
    torch.testing.assert_close(model(x), dense(x))
    by_class = ts.convert_layers(copy.deepcopy(dense), ParallelOwnScale)
    assert type(by_class[1]) is ParallelOwnScale
    expect_same_state(ts.to_dense(model).state_dict(), dense.state_dict())
    assert refused(
        dense, lambda m: ts.parallelize(m, {"0": "row"}, layers=[Undivided])
    ) == (
        "Undivided in layers=[...] has no dense_class. Set it to the class of the modules"
        " that it stands for."
    )
    with pytest.raises(LayoutError) as raised:
        ts.to_dense(nn.Sequential(nn.Tanh(), Undivided()))
    assert str(raised.value) == "1: Undivided has no dense_class to turn back into."


def test_a_layer_of_ones_own_takes_part():
    """`layers=[...]` adds sharded classes of the user's own to the plan's."""
    run_ranks(own_layers, 2)


def net():
    return nn.Sequential(
        nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4), ScaledLinear(4, 4)
    )


def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.utils.spectral_norm(nn.Linear(6, 4)))


REFUSALS = [
    (
        {"0": "column", "5": "row", "head.*": "row"},
        {},
        "The patterns ['5', 'head.*'] of the plan match no module. Module names are those"
        " of model.named_modules(); pass strict=False to allow it.",
    ),
    (
        {"0": "heads"},
        {},
        "0: ParallelLinear cannot be divided as 'heads'. Expected 'column' (the"
        " output features), 'row' (the input features), or a dict of its arguments.",
    ),
    (
        {"0": "vocabulary"},
        {},
        "0: ParallelLinear cannot be divided as 'vocabulary'. Expected 'column' (the"
        " output features), 'row' (the input features), or a dict of its arguments.",
    ),
    (
        {"0": "column", "3": "rows"},
        {},
        "3: ParallelLinear cannot be divided as 'rows'. Expected 'column' (the"
        " output features), 'row' (the input features), or a dict of its arguments.",
    ),
    (
        {"0": "column", "2": "row"},
        {},
        "2: LayerNorm has no sharded class. Expected one of",
    ),
    (
        {"0": "column", "4": "row"},
        {},
        "4: ScaledLinear is a subclass of Linear; dividing it as one would drop what it"
        " adds. Write a ParallelLayer for it and pass layers=[...].",
    ),
    (
        {"0": "column", "3": {"dims": 1}},
        {},
        "3: ParallelLinear takes no arguments ['dims'].",
    ),
    ({"0": "column", "3": {"dim": 2}}, {}, "3: dim=2"),
    (
        {"0": "column"},
        {"gather_ouptut": True},
        "The options ['gather_ouptut'] are arguments of none of ParallelLinear.",
    ),
]


def refusals():
    for plan, options, expected in REFUSALS:
        text = refused(net(), lambda m, p=plan, o=options: ts.parallelize(m, p, **o))
        assert text.startswith(expected), text
    plan = {"0": "column", "1": "row"}
    text = refused(normed(), lambda model: ts.parallelize(model, plan))
    assert text.startswith("1 holds {'bias': (4,), 'weight_orig': (4, 6), 'weight_u':")
    assert text.endswith(
        "but a Linear to divide holds {'weight': (4, 6), 'bias': (4,)}. Undo what changes"
        " its weights (weight_norm, pruning, a parametrization) before it is divided."
    )
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    assert refused(normed(), lambda model: convert(model, dim=1)).startswith("1 holds")
    model = ts.parallelize(net(), {"0": "column"})
    with pytest.raises(LayoutError, match=r"^0: ParallelLinear is divided already\.$"):
        ts.parallelize(model, {"0": "column"})
    model = ts.parallelize(net(), {"7": "row", "0": "column"}, strict=False)
    assert type(model[0]) is ts.nn.ParallelLinear
    assert type(ts.parallelize(nn.Linear(3, 3), {"": "row"})) is ts.nn.ParallelLinear


def test_plans_that_cannot_be_carried_out_change_nothing():
    """The error names module, reason and remedy, and the model is as it was."""
    run_ranks(refusals, 2)


def quantised():
    import torch.ao.nn.quantized.dynamic as quantized

    model = nn.Sequential(nn.Linear(4, 4), quantized.Linear(4, 4))
    with pytest.raises(
        LayoutError, match=r"^1: torch\.ao\..*\.Linear has no sharded class\."
    ):
        ts.parallelize(model, {"0": "column", "1": "column"})
    assert type(model[0]) is nn.Linear
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=1)
    assert type(model[0]) is ts.nn.ParallelLinear
    assert type(model[1]) is quantized.Linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_layers_are_refused():
    """A plan that names one is an error; by class they are left alone."""
    run_ranks(quantised, 2)


def test_the_report_of_a_plan():
    """It lists what is divided and how, what stays whole though it could be, unused rules."""
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(7, 4),
            "body": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            "attention": nn.MultiheadAttention(4, 2),
            "head": nn.Linear(4, 7),
        }
    )
    model["again"] = model["head"]
    plan = {
        "body.2": None,
        "head": {"dim": 1, "gather_output": True},
        "attention": "heads",
        "embedding": "vocabulary",
        "tail": "row",
    }
    before = fingerprint(model)
    report = ts.plan_conversion(model, plan)
    assert str(report) == (
        "embedding: Embedding -> ParallelEmbedding(dim='vocabulary')\n"
        "attention: MultiheadAttention -> ParallelMultiheadAttention()\n"
        "head = again: Linear -> ParallelLinear(dim=1, gather_output=True)\n"
        "body.0: stays whole\n"
        "rule 'tail' matches no module"
    )
    assert report.unused == ["tail"]
    assert report.untouched == ["body.0"]
    assert fingerprint(model) == before


# Memory


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that exist, at every operation."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {}
        self.note(tensors)
        self.peak = self.live = self.count()

    def note(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (
                    StorageWeakRef(storage),
                    storage.nbytes(),
                )

    def count(self):
        self.storages = {
            key: (reference, size)
            for key, (reference, size) in self.storages.items()
            if not reference.expired()
        }
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        self.peak = max(self.peak, self.count())
        return result


def no_second_copy():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10)))
    dense = [weakref.ref(layer) for layer in model]
    layer_bytes = 64 * 64 * 4
    with LiveBytes(model.parameters()) as counted:
        assert counted.peak == 10 * layer_bytes
        ts.parallelize(model, {"*": "column"})
    assert [reference() for reference in dense] == [None] * 10
    assert counted.peak <= 11 * layer_bytes
    assert counted.count() == 10 * layer_bytes / ts.distributed.get_world_size()


def test_no_second_copy_of_the_model_exists():
    """The whole weights of a layer go when its shards are cut: the peak is one layer more."""
    run_ranks(no_second_copy, 2)


def test_a_class_without_a_dense_twin_converts_nothing():
    """It is refused, and so is a dense class in the place of the sharded one."""
    for wrong in (ts.nn.ParallelCrossEntropyLoss, nn.Linear):
        with pytest.raises(LayoutError, match="names no dense_class"):
            ts.convert_layers(nn.Linear(2, 3), wrong)


def named_linear(*bases):
    """A class of a user's own that bears torch's name."""
    return type("Linear", bases, {"__module__": "mine"})


def test_classes_of_one_name_are_named_in_full():
    """`Linear is a subclass of Linear` says nothing."""
    model = nn.Sequential(named_linear(nn.Linear)(4, 6))
    text = "0: mine.Linear is a subclass of torch.nn.modules.linear.Linear; dividing"
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        ts.parallelize(model, {"0": "column"})
    model = nn.Sequential(named_linear(nn.Module)())
    with pytest.raises(
        LayoutError, match=r"^0: mine\.Linear has no sharded class"
    ) as error:
        ts.parallelize(model, {"0": "column"})
    assert "torch.nn.modules.linear.Linear" in str(error.value)
