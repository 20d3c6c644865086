"""A divided parameter's gradient in other code's hands: the shard, with the norm of the whole."""

import copy
import io
import math
import pickle

import pytest
import torch
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.errors import ShardedOpError, StateError
from torchshard.tensor import mark, whole
from torchshard.testing import run_ranks


def mlp():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3)).double()


def twins():
    dense, model = mlp(), mlp()
    ts.parallelize(model, {"0": "column", "2": "row"})
    for module in (dense, model):
        module(randoms((5, 4), 1)).square().sum().backward()
    return dense, model


def loop(model):
    """What trainers write to log a norm, or to clip by it."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += parameter.grad.data.norm(2).item() ** 2
    return total**0.5


NORMS = {
    "loop": loop,
    "detached": lambda model: torch.stack(
        [p.grad.detach().norm(3.0) for p in model.parameters()]
    ).norm(3.0),
    "largest": lambda model: max(p.grad.norm(math.inf) for p in model.parameters()),
    "single precision": lambda model: torch.stack(
        [torch.linalg.vector_norm(p.grad.float()) for p in model.parameters()]
    ).norm(),
    "foreach": lambda model: torch.stack(
        torch._foreach_norm([p.grad for p in model.parameters()])
    ).norm(),
    "torch.norm": lambda model: torch.norm(
        torch.stack([torch.norm(p.grad) for p in model.parameters()])
    ),
    "get_total_norm": lambda model: nn.utils.get_total_norm(
        [p.grad for p in model.parameters()]
    ),
    "get_total_norm, 1, no foreach": lambda model: nn.utils.get_total_norm(
        [p.grad for p in model.parameters()], norm_type=1.0, foreach=False
    ),
    "by row": lambda model: model[0].weight.grad.norm(dim=0).sum(),
    "a copy": lambda model: model[0].weight.grad.clone().norm(),
    "a power": lambda model: sum((p.grad**2).sum() for p in model.parameters()),
    "a square": lambda model: sum(
        p.grad.data.square().sum() for p in model.parameters()
    ),
    "a product": lambda model: sum((p.grad * p.grad).sum() for p in model.parameters()),
    "a root": lambda model: model[0].weight.grad.pow(2).mean().sqrt(),
    "scaled": lambda model: (model[0].weight.grad / 2.0).float().abs().max(),
    "extremes": lambda model: model[0].weight.grad.max() - model[0].weight.grad.min(),
    "a deviation": lambda model: model[0].weight.grad.std(),
    "zeros": lambda model: (model[0].weight.grad == 0).float().mean(),
    "larger ones": lambda model: (model[0].weight.grad.abs() > 0.1).sum(),
    "linalg.norm": lambda model: sum(
        torch.linalg.norm(p.grad) for p in model.parameters()
    ),
    "a dot product": lambda model: sum(
        torch.dot(p.grad.flatten(), p.grad.view(-1)) for p in model.parameters()
    ),
    "a vector": lambda model: sum(
        p.grad.reshape(-1).abs().sum() for p in model.parameters()
    ),
    "flattened": lambda model: model[2].weight.grad.detach().double().sum(),
}
BROKEN = {
    "isnan": lambda grad: torch.isnan(grad).any(),
    "isfinite": lambda grad: not grad.isfinite().all(),
    "sum": lambda grad: torch.isnan(grad.sum()),
    "unequal to itself": lambda grad: (grad != grad).any(),
}


def broken():
    _, model = twins()
    weight = model[0].weight
    if ts.distributed.get_rank() == 0:
        weight.grad.to_local().view(-1)[:1].fill_(math.nan)
    for case, is_broken in BROKEN.items():
        assert is_broken(weight.grad), case


def test_one_broken_shard_breaks_the_gradient():
    """What skips a step by itself skips it on all ranks."""
    run_ranks(broken, 2)


def norms():
    dense, model = twins()
    for case, norm in NORMS.items():
        close(torch.as_tensor(norm(model)), torch.as_tensor(norm(dense)), case, 1e-6)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
    total = nn.utils.get_total_norm([p.grad for p in dense.parameters()])
    nn.utils.clip_grads_with_norm_(dense.parameters(), 0.1, total)
    for name, parameter in model.named_parameters():
        place = ts.owners.owner_of(parameter)
        grad = ts.state.gathered(parameter.grad, *place)
        close(grad, dense.get_parameter(name).grad, name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_norms_are_of_the_whole(world_size):
    """Every way in which loops over `parameter.grad` take one."""
    run_ranks(norms, world_size)


ALONG_DIMS = {
    "a mean": lambda g: g.mean(dim=0),
    "a mean of the other dim": lambda g: g.mean(dim=1, keepdim=True),
    "centred": lambda g: g - g.mean(dim=(0, 1), keepdim=True),
    "centred along one": lambda g: g - g.mean(dim=0, keepdim=True),
    "by its norms": lambda g: g / g.norm(dim=0, keepdim=True).clamp(min=1e-6),
    "extremes": lambda g: g.amax(1) - g.amin(1),
    "the largest": lambda g: g.abs().max(dim=0).values,
    "by rows": lambda g: g.view(g.shape[0], -1).norm(dim=1),
    "a row mask": lambda g: g * torch.arange(7.0).double()[:, None],
    "a column mask": lambda g: g * torch.arange(4.0).double(),
    "what is alike": lambda g: torch.where(g > 0, g, torch.zeros_like(g)).sum(0),
    "a product": lambda g: g.T @ g,
    "with a vector": lambda g: g @ torch.ones(4).double(),
    "a row": lambda g: g[:, 1],
    "some rows": lambda g: g[torch.tensor([6, 0, 3])],
    "an update": lambda g: torch.zeros_like(g).lerp_(g, 0.1).square().mean(0),
}
WRITTEN = {
    "a row": lambda g: g.__setitem__(0, 0.0),
    "a slice": lambda g: g.__setitem__(slice(2, None), 1.0),
    "where": lambda g: g.__setitem__(g > 0, 0.0),
    "rows by a mask": lambda g: g.mul_((torch.arange(7.0) > 3).double()[:, None]),
    "less its mean": lambda g: g.sub_(g.mean(1, keepdim=True)),
    "less that of the other": lambda g: g.sub_(g.mean(0, keepdim=True)),
    "clamped by its norm": lambda g: g.clamp_(max=g.norm() / 100),
}
BY_IDS = {
    "ids": lambda g: g.__setitem__(torch.tensor([6, 0]), 0.0),
    "a list": lambda g: g.__setitem__([-1, 3], 1.5),
    "a mask of rows": lambda g: g.__setitem__(torch.arange(7) > 3, 0.0),
}
REFUSED = {
    "median": lambda g: g.median(),
    "quantile": lambda g: g.quantile(0.9),
    "svd": torch.linalg.svdvals,
    "histc": torch.histc,
}


def along_dims():
    dense, model = twins()
    grads = [each[0].weight.grad for each in (dense, model)]
    for case, use in ALONG_DIMS.items():
        results = [use(grad) for grad in grads]
        mine = results[1]
        if hasattr(mine, "sharding"):
            mine = whole(mark(mine.to_local(), mine.sharding))
        close(mine, results[0], case)
    for case, write in {**WRITTEN, **BY_IDS}.items():
        grads = [each[0].weight.grad.clone() for each in (dense, model)]
        for grad in grads:
            write(grad)
        mine = whole(mark(grads[1].to_local(), grads[1].sharding))
        close(mine, grads[0], f"written: {case}")
    for case, use in REFUSED.items():
        with pytest.raises(ShardedOpError, match="spread over"):
            raise AssertionError(f"{case}: {use(grads[1])}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_computed_of_it_is_the_wholes(world_size):
    """Along a dim, by rows and beside masks of the whole; what has no rule is refused."""
    run_ranks(along_dims, world_size)


NOISE = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(std=0.1),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: nn.functional.dropout(torch.ones_like(x)),
    "init": lambda x: nn.init.normal_(torch.empty_like(x)),
}


def noises():
    _, model = twins()
    weight = model[0].weight  # of 7 x 4, 3 rows on one rank and 2 on others
    for case, noise in NOISE.items():
        for given in (weight, weight.grad, weight.grad.clone()):
            with torch.no_grad():
                drawn = noise(given)
            assert drawn.is_leaf, case
            own = drawn.to_local()
            assert own.shape == weight.shape, case
            weight.grad.add_(drawn)
            streams = all_gather_object(torch.get_rng_state().tolist())
            assert streams.count(streams[0]) == len(streams), case
            rows = all_gather_object(own[0].tolist())
            assert case.startswith(("bern", "drop")) or rows[0] != rows[1], case
    weight.data.copy_(torch.empty_like(weight).fill_(2.0))
    assert weight.sum() == 56


def all_gather_object(value):
    values = [None] * ts.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def test_noise_like_it_differs_between_ranks_and_leaves_their_streams_alike():
    """A replicated parameter that draws next draws the same on all ranks."""
    run_ranks(noises, 3)


def gathered_by_hand():
    """Buffers made like a parameter, which a collective fills."""
    torch.manual_seed(4)
    dense = nn.Linear(4, 6)
    layer = copy.deepcopy(nn.Sequential(dense))
    ts.parallelize(layer, {"0": "column"})
    for module in (dense, layer):
        module(torch.ones(2, 4)).square().sum().backward()
    for mine, whole_one in zip(layer.parameters(), dense.parameters(), strict=True):
        for own, expected in ((mine, whole_one), (mine.grad, whole_one.grad)):
            for make in (torch.empty_like, torch.zeros_like):
                parts = [make(own) for _ in range(ts.distributed.get_world_size())]
                torch.distributed.all_gather(parts, own.detach().contiguous())
                close(torch.cat(parts), expected, "joined")
                close(torch.stack(parts).flatten(0, 1), expected, "stacked")
                total = sum(part.sum() for part in parts)
                close(total, expected.sum(), "summed", 1e-6)
                first = expected[: len(parts[0])].norm()
                close((parts[0] * 1.0).norm(), first, "that of the first rank")
                scale = torch.zeros_like(own)
                for part in parts:
                    scale.add_(part)
                close(torch.cat(parts), expected, "read, and joined")
                close(scale.norm() > 0, torch.tensor(True), "written")


def test_what_is_made_like_it_may_be_a_buffer():
    """Until a function of torch writes into it, it is a plain one."""
    run_ranks(gathered_by_hand, 2)


def copies():
    _, model = twins()
    grad = model[0].weight.grad
    for copied in (copy.deepcopy(grad), grad.clone(), grad.detach(), grad.data, +grad):
        close(copied.norm(), grad.norm(), "a copy")
    file = io.BytesIO()
    torch.save({"grad": grad, "like": torch.zeros_like(model[0].weight)}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert {type(x) for x in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["grad"], grad.to_local())
    assert type(pickle.loads(pickle.dumps(grad))) is torch.Tensor
    model[0].weight.grad = loaded["grad"]
    close(model[0].weight.grad.norm(), grad.norm(), "set again")
    assert repr(grad).startswith("ShardedGradient(")
    assert torch.equal(grad, loaded["grad"])
    assert torch.allclose(loaded["grad"], grad)
    assert not torch.equal(grad, loaded["grad"] + 1)
    assert torch.equal(grad, grad.clone())
    assert grad.numpy().shape == grad.shape == grad.to_local().shape


def test_copies_know_what_they_are_copies_of():
    """A pickle is a plain tensor, which another rank may read."""
    run_ranks(copies, 2)


def other_uses():
    _, model = twins()
    layer = model[0]
    own = layer.weight.to_local().shape
    grad = layer.weight.grad
    plain = torch.zeros(own).double() + grad
    assert type(plain) is type(grad), "beside a tensor of the shard's shape"
    assert grad.shape == plain.shape == own
    plain = plain.to_local()
    assert (grad - plain).abs().max() == 0
    with torch.no_grad():
        before = layer.weight.detach().clone()
        layer.weight.add_(grad, alpha=-0.5)
        close(layer.weight.detach(), before - 0.5 * plain, "a step by hand")
        layer.weight.data.sub_(grad)
        close(layer.weight.detach(), before - 1.5 * plain, "and through data")
        layer.weight.mul_(2).add_(grad)
    grad.detach_()
    grad.zero_()
    assert layer.weight.grad.sum() == 0
    layer.weight.grad += 1
    assert layer.weight.grad.sum() == 28, "of the whole"
    assert layer.weight.grad.sum(0).sum() == 28, "along a dim too"
    layer.weight.grad = plain
    layer.weight.grad.data.clamp_(max=0.01)
    assert layer.weight.grad.max() <= 0.01
    layer.weight.grad = layer.weight.grad
    with CommDebugMode() as counter:
        nn.utils.clip_grad_norm_(nn.Parameter(plain), 1.0)
        torch.optim.Adam(layer.parameters()).step()
    assert counter.get_total_counts() == 0
    with pytest.raises(ShardedOpError, match="cat along it would interleave"):
        torch.cat([p.grad.view(-1) for p in layer.parameters()]).norm()
    layer.weight.grad = None
    assert layer.weight.grad is None


def test_everything_else_is_the_shards():
    """Shapes, steps by hand, zeroing, clamping, assignment."""
    run_ranks(other_uses, 3)


def sparse_gradients():
    for dim in (0, 1):
        torch.manual_seed(1)
        dense = nn.Embedding(8, 5, sparse=True)
        model = copy.deepcopy(nn.Sequential(dense))
        ts.convert_layers(model, ts.nn.ParallelEmbedding, dim=dim)
        ids = torch.tensor([0, 7, 3, 3])
        for module in (dense, model):
            module(ids).square().sum().backward()
        close(loop(model), loop(dense), dim, 1e-6)
        grad = model[0].weight.grad
        grad.mul_(2)
        assert model[0].weight.grad.to_dense().equal(grad.to_dense())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ShardedOpError, match=r"Use torchshard.amp.GradScaler"):
            scaler.unscale_(optimizer)
        scaler = ts.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)


def test_sparse_gradients_too():
    """torch's scaler would look for infinities in them on each rank alone."""
    run_ranks(sparse_gradients, 2)


class Initialised(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 6, 1)
        self.body = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3))
        self.norm = nn.LayerNorm(3)


def init_weights(module):
    """As models of transformers and timm ask and fill."""
    if isinstance(module, (nn.Linear, nn.Conv1d)):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
        if module.bias is not None:
            module.bias.data.fill_(0.25)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight)


def init_by_hand(module):
    """By sizes that it reads and numbers that it draws itself."""
    if isinstance(module, nn.Linear):
        bound = 1 / math.sqrt(module.weight.size(1))
        module.weight.data.uniform_(-bound, bound)
        module.bias.data = torch.randn(module.bias.shape) * len(module.bias)
    elif isinstance(module, nn.Conv1d):
        out, own, width = module.weight.shape
        module.weight.data.copy_(torch.randn(out, own, width) / math.sqrt(own * width))
        std = module.bias.numel() ** -0.5
        torch.nn.init.trunc_normal_(whole := torch.empty(out), std=std)
        with torch.no_grad():
            module.bias.copy_(whole)
    elif isinstance(module, nn.Embedding):
        module.weight.data = torch.nn.init.xavier_normal_(
            torch.empty_like(module.weight)
        )
        module.weight.data[0] = 0


def applied(init):
    torch.manual_seed(1)
    dense = Initialised()
    torch.manual_seed(1)
    model = Initialised()
    plan = {"embedding": "vocabulary", "conv": "column", "body.0": "column"}
    ts.parallelize(model, {**plan, "body.2": "row"})
    classes = [type(module) for module in model.modules()]
    for module in (dense, model):
        torch.manual_seed(2)
        module.apply(init)
    assert [type(module) for module in model.modules()] == classes
    for key, value in ts.collect_state_dict(model).items():
        assert torch.equal(value, dense.state_dict()[key]), key
    assert not isinstance(model.body[0], nn.Linear)

    def fails(module):
        if isinstance(module, nn.Linear):
            raise StateError("no")

    with pytest.raises(StateError):
        model.apply(fails)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("init", [init_weights, init_by_hand])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_apply_finds_the_layers_that_it_asks_for(world_size, init):
    """`isinstance(module, nn.Linear)` holds in a function given to `apply`, bit for bit."""
    run_ranks(applied, world_size, init)


def loss_of(model):
    return model(randoms((5, 4), 1)).square().mean()


def by_norm(grad):
    return grad / (grad.norm() + 1e-6)


def penalty(model):
    """A norm of all gradients, differentiated."""
    loss = loss_of(model)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + torch.stack([g.norm() for g in grads]).norm()).backward()


def adaptive_weight(model):
    """Of two losses, the second weighted by the ratio of their gradients' norms."""
    first, second = loss_of(model), model(randoms((5, 4), 2)).abs().mean()
    last = model[2].weight
    norms = [
        torch.autograd.grad(x, last, retain_graph=True)[0].norm()
        for x in (first, second)
    ]
    (first + second * (norms[0] / norms[1]).detach()).backward()


def step_by_hand(model):
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
    norm = torch.stack([g.norm() for g in grads]).norm()
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p -= 0.1 * g / norm
    loss_of(model).backward()


def hooked(model):
    for p in model.parameters():
        p.register_hook(by_norm)
    loss_of(model).backward()


def hooked_between(model):
    h = model[0](randoms((5, 4), 1))
    h.register_hook(by_norm)
    model[2](h).square().sum().backward()


def kept_graph(model):
    loss_of(model).backward(create_graph=True)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    model.zero_grad()
    norm.backward()


def counted_together(model):
    seen = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda grads: seen.append(len(grads))
    )
    loss_of(model).backward()
    assert seen == [4]


def gradients_elsewhere(use):
    dense, model = mlp(), mlp()
    ts.parallelize(model, {"0": "column", "2": "row"})
    for module in (dense, model):
        use(module)
    for name, parameter in model.named_parameters():
        place = ts.owners.owner_of(parameter)
        grad = ts.state.gathered(parameter.grad.detach(), *place)
        close(grad, dense.get_parameter(name).grad, name, 1e-9)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "use",
    [
        penalty,
        adaptive_weight,
        step_by_hand,
        hooked,
        hooked_between,
        kept_graph,
        counted_together,
    ],
)
def test_gradients_that_are_not_in_grad(use):
    """Those of `torch.autograd.grad`, in hooks, and such that are differentiated again."""
    run_ranks(gradients_elsewhere, 3, use)
