"""A divided parameter in code that is not its layer's: right, or refused; never the shard alone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchshard.errors import LayoutError, ShapeError, ShardedOpError
from torchshard.tensor import ShardedTensor, whole
from torchshard.tensor.gradient import ShardedGradient
from torchshard.tensor.parameter import ShardedParameter
from torchshard.testing.ranks import run_ranks

DIMS = (0, 1)


def pair(dim, shape=(6, 5)):
    """A dense linear layer, and the same one divided."""
    torch.manual_seed(1)
    dense = nn.Linear(*shape, dtype=torch.float64)
    layer = ts.nn.ParallelLinear(*shape, dim=dim, dtype=torch.float64)
    layer.load_state_dict(dense.state_dict())
    return dense, layer


def whole_of(tensor, layer, name="weight"):
    return ts.state.gathered(tensor.detach(), layer, name)


READS = {
    "a parent's linear": lambda weight, x: F.linear(x, weight),
    "matmul": lambda weight, x: x @ weight.T,
    "normalised": lambda weight, x: F.linear(x, F.normalize(weight)),
    "scaled": lambda weight, x: F.linear(x, weight * 2 + weight.square()),
    "einsum": lambda weight, x: torch.einsum("ni,oi->no", x, weight),
    "penalty": lambda weight, x: weight.square().sum() + weight.abs().mean(),
    "norm": lambda weight, x: weight.norm() + weight.norm(dim=0).sum(),
    "largest": lambda weight, x: weight.max() - weight.min(),
    "rows": lambda weight, x: weight.norm(dim=1).sum(),
    "softmax": lambda weight, x: (torch.softmax(weight, 1) * weight).sum(),
    "against a copy": lambda weight, x: (weight - weight.detach().clone() + 1).sum(),
    "checkpointed": lambda weight, x: checkpoint(
        lambda v: F.linear(v, torch.softmax(weight, -1)), x, use_reentrant=False
    ),
}


def read_outside(dim):
    for case, read in READS.items():
        dense, layer = pair(dim)
        mine, theirs = (randoms((4, 6), 2).requires_grad_() for _ in range(2))
        got, want = read(layer.weight, mine), read(dense.weight, theirs)
        close(whole(got), want, case)
        cotangent = randoms(want.shape, 3)
        got.backward(cotangent)
        want.backward(cotangent)
        close(whole_of(layer.weight.grad, layer), dense.weight.grad, case)
        if theirs.grad is not None:
            close(mine.grad, theirs.grad, case)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_reads_a_parameter_elsewhere_gets_the_whole(world_size, dim):
    """Values and all gradients are those of the dense parameter."""
    run_ranks(read_outside, world_size, dim)


INITS = {
    "uniform_": {},
    "normal_": {"std": 0.02},
    "constant_": {"val": 0.3},
    "ones_": {},
    "zeros_": {},
    "xavier_uniform_": {"gain": 2.0},
    "xavier_normal_": {},
    "kaiming_uniform_": {"a": 0.1},
    "kaiming_normal_": {"mode": "fan_out"},
}
WHOLE_ONLY = {
    "trunc_normal_": {"std": 0.5},
    "orthogonal_": {},
    "sparse_": {"sparsity": 0.5},
    "eye_": {},
}
FILLS = {
    "normal_": lambda tensor: tensor.normal_(1.0, 2.0),
    "uniform_": lambda tensor: tensor.uniform_(-1, 1),
    "exponential_": lambda tensor: tensor.exponential_(2.0),
    "scaled": lambda tensor: tensor.normal_().mul_(0.02).clamp_(-0.03, 0.03),
    "random_": lambda tensor: tensor.random_(0, 9),
}


def initialised(dim):
    dense, layer = pair(dim)
    for name, options in INITS.items():
        for model in (dense, layer):
            torch.manual_seed(4)
            getattr(nn.init, name)(model.weight, **options)
        assert torch.equal(whole_of(layer.weight, layer), dense.weight), name
    for name, fill in FILLS.items():
        for reach in (lambda weight: weight, lambda weight: weight.data):
            for model in (dense, layer):
                torch.manual_seed(4)
                with torch.no_grad():
                    fill(reach(model.weight))
            assert torch.equal(whole_of(layer.weight, layer), dense.weight), name
    if layer.group.size > 1:
        for name, options in WHOLE_ONLY.items():
            with pytest.raises(ShardedOpError, match=rf"torchshard\.nn\.init\.{name}"):
                getattr(nn.init, name)(layer.weight, **options)
    for name, options in {**INITS, **WHOLE_ONLY}.items():
        torch.manual_seed(4)
        getattr(nn.init, name)(dense.weight, **options)
        torch.manual_seed(4)
        getattr(ts.nn.init, name)(layer.weight, **options)
        assert torch.equal(whole_of(layer.weight, layer), dense.weight), name


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_initialisers_set_what_the_whole_would_be(world_size, dim):
    """torch.nn.init, fills and `ts.nn.init`: bit for bit, or an error that names the remedy."""
    run_ranks(initialised, world_size, dim)


def changed_in_place():
    dense, layer = pair(1)
    whole_values = randoms((5, 6), 5)
    for model in (dense, layer):
        with torch.no_grad():
            model.weight.copy_(whole_values)
            model.weight.mul_(2).add_(1)
            average = copy.deepcopy(model)
            average.weight.lerp_(model.weight, 0.5)
            model.weight.data.clamp_(-1, 1)
    close(whole_of(layer.weight, layer), dense.weight, "in place")
    own = layer.weight.to_local()
    assert type(own) is torch.Tensor
    assert own.data_ptr() == layer.weight.data_ptr()
    close(layer.weight.full(), dense.weight, "full")
    with torch.no_grad():
        layer.weight.sub_(0.1 * own)
        dense.weight.sub_(0.1 * dense.weight)
    close(
        whole_of(layer.weight, layer), dense.weight, "beside a tensor of its own size"
    )
    with pytest.raises(ShapeError, match=r"weight\.data = .* was given shape \(5, 7\)"):
        layer.weight.data = torch.ones(5, 7)
    layer.weight.data = whole_values
    close(layer.weight.full(), whole_values, "a whole assigned")


def test_changes_in_place_are_those_of_the_whole():
    """By whole values, by numbers, by what has the shard's shape, of copies too."""
    run_ranks(changed_in_place, 2)


def held_as_ever():
    _, layer = pair(1)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ShardedParameter)
    own = (3 if layer.group.rank == 0 else 2, 6)
    assert (
        weight.shape == weight.detach().shape == torch.zeros_like(weight).shape == own
    )
    assert type(weight.detach()) is torch.Tensor
    assert type(torch.zeros_like(weight)) is ShardedGradient
    assert isinstance(copy.deepcopy(layer).weight, ShardedParameter)
    assert isinstance(copy.deepcopy(weight), ShardedParameter)
    assert isinstance(layer.float().weight, ShardedParameter)
    assert isinstance(layer.state_dict()["weight"], torch.Tensor)
    assert not isinstance(layer.state_dict()["weight"], ShardedParameter)
    assert "Parameter containing" in repr(weight)
    assert type(layer.bias) is ShardedParameter
    assert type(ts.nn.ParallelLinear(4, 5, dim=0).bias) is nn.Parameter


def test_the_parameter_is_a_local_one_for_who_keeps_it():
    """Shape, copies, state and moves are the shard's."""
    run_ranks(held_as_ever, 2)


SURGERY = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "weight norm parametrization": parametrizations.weight_norm,
    "spectral norm parametrization": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "ln": lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 0),
    "global": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.5
    ),
    "identity": lambda layer: prune.identity(layer, "weight"),
}


def operate_and_run(operate, layer, case):
    operate(layer)
    layer(randoms((4, 6), 2))
    raise AssertionError(case)


def operated_on():
    for case, operate in SURGERY.items():
        for dim in DIMS:
            _, layer = pair(dim)
            with pytest.raises((ShardedOpError, LayoutError, ShapeError)):
                operate_and_run(operate, layer, case)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_surgery_on_a_shard_is_refused():
    """Norms, parametrizations and pruning of every kind."""
    run_ranks(operated_on, 2)


def clipped(norm_type):
    grads = []
    for foreach in (None, False, True):
        dense, layer = pair(1)
        for model in (dense, layer):
            whole(model(randoms((4, 6), 2))).square().sum().backward()
        want = nn.utils.clip_grad_norm_(
            dense.parameters(), 0.1, norm_type, foreach=foreach
        )
        got = nn.utils.clip_grad_norm_(
            layer.parameters(), 0.1, norm_type, foreach=foreach
        )
        close(got, want, foreach)
        close(whole_of(layer.weight.grad, layer), dense.weight.grad, foreach)
        grads.append(type(layer.weight.grad))
    assert set(grads) == {ShardedGradient}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_torch_clips_the_norm_of_the_whole(world_size, norm_type):
    """`torch.nn.utils.clip_grad_norm_`, however it was imported."""
    run_ranks(clipped, world_size, norm_type)


def scaled():
    _, layer = pair(1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    layer.bias.grad = torch.ones_like(layer.bias)
    if layer.group.rank == 1:
        layer.weight.grad[0, 0] = math.inf
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight.detach(), before)
    assert scaler.get_scale() == 2.0


def test_torchs_scaler_skips_a_step_on_all_ranks():
    """An overflow on one rank's shard, with `torch.amp.GradScaler`."""
    run_ranks(scaled, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(7, 4, dtype=torch.float64)

    def forward(self, ids):
        return F.linear(self.embedding(ids), self.embedding.weight).square().sum()


def compiled_tie():
    ids = torch.tensor([0, 6, 3])
    dense, model = Tied(), ts.parallelize(Tied(), {"embedding": "vocabulary"})
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    want, got = dense(ids), step(ids)
    close(got, want, "compiled")
    want.backward()
    got.backward()
    embedding = model.embedding
    close(
        whole_of(embedding.weight.grad, embedding), dense.embedding.weight.grad, "tied"
    )


def test_a_tied_weight_compiles_into_one_graph():
    """The parent reads the weight inside the graph."""
    run_ranks(compiled_tie, 2)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
}


def mlp():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4)).double()


def built_before(steps_before):
    for case, make in OPTIMIZERS.items():
        dense, model = mlp(), mlp()
        made = [make(part.parameters()) for part in (dense, model)]
        for step in range(4):
            if step == steps_before:
                kept = list(model.parameters())
                ts.parallelize(model, {"0": "column", "2": "row"})
                assert all(
                    a is b for a, b in zip(kept, model.parameters(), strict=True)
                )
            for part, optimizer in zip((dense, model), made, strict=True):
                optimizer.zero_grad()
                part(randoms((3, 4), step)).square().sum().backward()
                optimizer.step()
        for key, value in ts.collect_state_dict(model).items():
            close(value, dense.state_dict()[key], f"{case}, {key}")
        back = ts.to_dense(model)
        assert all(type(part) is nn.Parameter for part in back.parameters())


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_optimizer_built_before_goes_on(world_size, steps_before):
    """With the state that it has made of the whole parameters, which is divided."""
    run_ranks(built_before, world_size, steps_before)


@torch.library.custom_op("torchshard_tests::row_sum", mutates_args=())
def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def operators_are_refused():
    _, layer = pair(1)
    y = layer(randoms((4, 6), 2)).detach()
    assert isinstance(y, ShardedTensor)
    for call in (
        lambda: row_sum(y),
        lambda: torch.ops.aten.sum.dim_IntList(y, [-1]),
        lambda: torch.ops.aten.relu.default(y),
        lambda: torch.ops.aten.sum.default(layer.weight),
    ):
        with pytest.raises(ShardedOpError, match="is an operator of"):
            call()


class Counter(TorchDispatchMode):
    """As benchmarks and profilers count."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **kwargs or {})


def counted_by_a_mode():
    torch.manual_seed(1)
    layer = ts.nn.ParallelLinear(4, 6, dim=1).double()
    x = randoms((3, 4), 1).requires_grad_()
    F.gelu(layer(x)).square().sum().backward()
    plain = x.grad
    x.grad = None
    with Counter() as counter:
        F.gelu(layer(x)).square().sum().backward()
    close(x.grad, plain, "counted")
    assert "gelu_backward" in counter.names


def test_a_dispatch_mode_hands_on_what_it_is_given():
    """It calls operators on marked tensors, in backward as well, and means no harm."""
    run_ranks(counted_by_a_mode, 2)


def test_operators_of_torch_library_have_no_rule():
    """They would run on the shard alone, unseen; a compiled graph's own go on."""
    run_ranks(operators_are_refused, 2)


def sharpness_aware(model):
    """A step of SAM: up along the gradient, down from where it was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(randoms((5, 4), 1)).square().sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            before = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        model.zero_grad()
        model(randoms((5, 4), 1)).square().sum().backward()
        for p, was in zip(model.parameters(), before, strict=True):
            p.data = was
        optimizer.step()
        optimizer.zero_grad()


def as_a_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2 + 0.1, model.parameters())
    (grad,) = torch.autograd.grad(vector.square().sum(), model[0].bias)
    assert grad.shape == model[0].bias.shape


def truncated(model):
    """As timm fills: a uniform draw, through the inverse error function, clamped."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * 2**0.5).clamp_(-0.03, 0.03)


@pytest.mark.parametrize("change", [sharpness_aware, as_a_vector, truncated])
def test_what_changes_all_parameters_changes_the_whole_ones(change):
    """What is kept of `weight.data`, vectors of all parameters, fills in several steps."""
    run_ranks(changed_alike, 3, change)


def changed_alike(change):
    models = []
    for plan in (None, {"0": "column", "2": "row"}):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3)).double()
        if plan:
            ts.parallelize(model, plan)
        change(model)
        models.append(ts.collect_state_dict(model) if plan else model.state_dict())
    for name, value in models[0].items():
        close(models[1][name], value, name)
