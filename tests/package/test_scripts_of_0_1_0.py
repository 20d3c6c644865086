"""Scripts in TorchShard 0.1.0's style, with its spellings: each gives dense torch's numbers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard.state import gathered
from torchshard.testing import run_ranks

WORLDS = [1, 2, 3]


def seeded(build, *args, **kwargs):
    torch.manual_seed(5)
    return build(*args, **kwargs).double()


def scattered_logits():
    dense = randoms((4, 3, 11), 1).requires_grad_()
    parallel = dense.detach().clone().requires_grad_()
    target = torch.randint(11, (12,), generator=torch.Generator().manual_seed(2))
    for reduction in ("none", "sum", "mean"):
        want = F.cross_entropy(dense.view(-1, 11), target, reduction=reduction)
        logits = ts.distributed.scatter(parallel.view(-1, 11), dim=-1)
        if ts.distributed.get_group_size() > 1:
            assert ts.get_parallel_dim(logits) == -1
        loss = ts.nn.functional.parallel_cross_entropy(
            logits, target, reduction=reduction
        )
        close(loss, want, reduction)
        loss.sum().backward()
        want.sum().backward()
        close(parallel.grad, dense.grad, reduction)
    criterion = ts.nn.ParallelCrossEntropy()
    close(criterion(ts.distributed.scatter(dense.view(-1, 11)), target), want, "class")


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_scatter_returns_goes_to_the_loss(world_size):
    """0.1.0 left it marked."""
    run_ranks(scattered_logits, world_size)


class Stack(nn.Module):
    """Linear layers divided in turn, gathered where their output says so."""

    DIMS = (0, 0, 1, None, -1, 0, -1, None, 1, 0)

    def __init__(self):
        super().__init__()
        sizes = [
            (8, 6) if index % 2 == 0 else (6, 8) for index in range(len(self.DIMS))
        ]
        self.dense = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.parallel = nn.ModuleList(
            ts.nn.ParallelLinear(*size, dim=dim)
            for size, dim in zip(sizes, self.DIMS, strict=True)
        )

    def forward(self, x):
        y1, y2 = x, x
        for layer in self.dense:
            y1 = layer(y1)
        for dim, layer in zip(self.DIMS, self.parallel, strict=True):
            assert layer.dim == dim
            y2 = layer(y2)
            if getattr(y2, ts._PARALLEL_DIM, None) in [-1, 1]:
                y2 = ts.distributed.gather(y2, dim=dim)
                setattr(y2, ts._PARALLEL_DIM, "None")
        return y1, y2


def stacked():
    model = Stack().double()
    for dense, layer in zip(model.dense, model.parallel, strict=True):
        ts.nn.init.shard_init_helper_(nn.init.xavier_normal_, layer.weight)
        ts.nn.init.shard_init_helper_(nn.init.constant_, layer.bias.data, val=0.133)
        parallel_dim = getattr(layer.weight, ts._PARALLEL_DIM)
        assert parallel_dim == ts.get_parallel_dim(layer.weight)
        weight, bias = layer.weight.data, layer.bias.data
        if parallel_dim == 0:
            weight = ts.distributed.gather(weight, dim=1)
        elif parallel_dim in (1, -1):
            weight = ts.distributed.gather(weight, dim=0)
            bias = ts.distributed.gather(bias, dim=0)
        dense.weight.data.copy_(weight)
        dense.bias.data.copy_(bias)
    y1, y2 = model(randoms((3, 8), 3))
    close(y2, y1, "output")
    (y1.square().sum() + y2.square().sum()).backward()
    for dense, layer in zip(model.dense, model.parallel, strict=True):
        for name in ("weight", "bias"):
            grad = getattr(layer, name).grad
            close(gathered(grad, layer, name), getattr(dense, name).grad, name)


@pytest.mark.parametrize("world_size", WORLDS)
def test_layers_say_how_they_are_divided(world_size):
    """The attribute of weights and outputs, `layer.dim`, and gather along it."""
    run_ranks(stacked, world_size)


class Attention(nn.Module):
    """Self-attention that views its divided projection in this rank's own sizes."""

    def __init__(self, width, heads, parallel):
        super().__init__()
        self.heads, self.parallel = heads, parallel
        if parallel:
            self.kqv = ts.nn.ParallelLinear(width, 3 * width, dim=1)
            self.proj = ts.nn.ParallelLinear(width, width, dim=0)
        else:
            self.kqv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        B, T, C = x.size()
        own = self.heads
        if self.parallel:
            own //= ts.distributed.get_group_size()
        kqv = self.kqv(x).view(B, T, own, 3 * (C // self.heads))
        k, q, v = ts.slice(kqv, 3, dim=-1, contiguous=True)
        k, q, v = k.transpose(1, 2), q.transpose(1, 2), v.transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(mask[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, -1)
        if self.parallel:
            ts.register_parallel_dim(y, -1)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, width, heads, parallel):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, parallel)
        column, row = nn.Linear, nn.Linear
        if parallel:
            self.mlp = nn.Sequential(
                ts.nn.ParallelLinear(width, 4 * width, dim=-1),
                nn.GELU(),
                ts.nn.RegisterParallelDim(-1),
                ts.nn.ParallelLinear(4 * width, width, dim=0),
            )
        else:
            self.mlp = nn.Sequential(
                column(width, 4 * width),
                nn.GELU(),
                nn.Identity(),
                row(4 * width, width),
            )

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A language model built twice from one config, as the minGPT project does."""

    def __init__(self, parallel, vocabulary=13, width=12, heads=6):
        super().__init__()
        if parallel:
            self.tok_emb = ts.nn.ParallelEmbedding(vocabulary, width, dim=0)
            self.head = ts.nn.ParallelLinear(width, vocabulary, bias=False, dim=-1)
        else:
            self.tok_emb = nn.Embedding(vocabulary, width)
            self.head = nn.Linear(width, vocabulary, bias=False)
        self.pos_emb = nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.ModuleList(Block(width, heads, parallel) for _ in range(2))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.2)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        elif isinstance(module, (ts.nn.ParallelLinear, ts.nn.ParallelEmbedding)):
            ts.nn.init.shard_init_helper_(
                nn.init.normal_, module.weight.data, mean=0.0, std=0.2
            )
            if isinstance(module, ts.nn.ParallelLinear) and module.bias is not None:
                module.bias.data.zero_()

    def forward(self, idx):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1), :]
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def trained(model, criterion, is_parallel):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        idx = torch.randint(13, (4, 5), generator=generator)
        target = torch.randint(13, (4, 5), generator=generator)
        output = model(idx)
        output = output.view(-1, output.size(-1))
        if is_parallel:
            ts.register_parallel_dim(output, -1)
        loss = criterion(output, target.view(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item()


def language_model():
    dense, model = seeded(GPT, False), seeded(GPT, True)
    start = dense.state_dict()
    for key, value in ts.collect_state_dict(model, model.state_dict()).items():
        close(value, start[key], key)
    ts.register_ddp_parameters_to_ignore(model)
    want = list(trained(dense, nn.CrossEntropyLoss(), False))
    found = list(trained(model, ts.nn.ParallelCrossEntropyLoss(), True))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)
    for key, value in ts.collect_state_dict(model, model.state_dict()).items():
        close(value, dense.state_dict()[key], key, tolerance=1e-8)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_language_model_trains_as_the_dense_one(world_size):
    """Own-size views, `ts.slice`, marks put back, `.data` initialised, torch's clipping."""
    run_ranks(language_model, world_size)


class ConvLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 6, 1), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.flatten(self.conv(x), 1)
        if isinstance(self.fc, ts.nn.ParallelLinear) and self.fc.dim in [-1, 1, 0]:
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def aligned_by_hand(dim):
    """Weights put in through `.data` and scatter, a model wrapped after its conversion."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dense = seeded(ConvLinear)
    model = copy.deepcopy(dense)
    torch.manual_seed(100 + rank)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
        torch.distributed.broadcast(parameter.data, 0)
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
    model = DistributedDataParallel(model)
    fc = model.module.fc
    for (_, theirs), (_, ours) in zip(
        dense.named_parameters(), model.named_parameters(), strict=True
    ):
        parallel_dim = ts.get_parallel_dim(ours)
        if parallel_dim is None:
            ours.data.copy_(theirs.data)
        elif parallel_dim == 0:
            is_matrix = len(ours.shape) == 2
            ours.data.copy_(
                ts.distributed.scatter(theirs.data, dim=-1)
                if is_matrix
                else theirs.data
            )
        else:
            ours.data.copy_(ts.distributed.scatter(theirs.data, dim=0))
    along = {1: 0, -1: 0, 0: -1}.get(dim)
    if along is not None:
        close(
            ts.distributed.gather(fc.weight.data, dim=along), dense.fc.weight, "weight"
        )
    x = randoms((2 * size, 4, 1, 1), 4)
    target = torch.randint(6, (2 * size,), generator=torch.Generator().manual_seed(6))
    own = slice(2 * rank, 2 * rank + 2)
    output = model(x[own])
    close(
        ts.distributed.gather(output, dim=1) if along == 0 else output, dense(x), "y"
    ) if (along is not None) else None
    own_target = target[own]
    if along is not None:
        own_target = ts.distributed.gather(own_target, dim=0)
    loss = ts.nn.ParallelCrossEntropyLoss()(output, own_target)
    loss.backward()
    F.cross_entropy(dense(x), target).backward()
    close(model.module.conv.weight.grad, dense.conv.weight.grad, "conv")
    if along is None:
        close(fc.weight.grad, dense.fc.weight.grad, "fc")
    else:
        close(
            ts.distributed.gather(fc.weight.grad, dim=along), dense.fc.weight.grad, "fc"
        )
    state = ts.collect_state_dict(model, model.state_dict())
    assert list(state) == [f"module.{key}" for key in dense.state_dict()]
    for key, value in state.items():
        assert type(value) is torch.Tensor
        close(value, dense.state_dict()[key.removeprefix("module.")], key)
    model.load_state_dict(ts.relocate_state_dict(model, state))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_conversion_tells_the_wrapper(world_size, dim):
    """0.1.0's conversion had DistributedDataParallel leave its shards alone."""
    run_ranks(aligned_by_hand, world_size, dim)


def tables():
    dense = seeded(nn.Embedding, 10, 6)
    ids = torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(3))
    weight = randoms((4, 3, 6), 8)
    (dense(ids) * weight).sum().backward()
    for dim in (None, 0, 1, -1):
        layer = ts.nn.ParallelEmbedding(10, 6, dim=dim).double()
        whole, grad = dense.weight.data, dense.weight.grad
        if dim is not None:
            whole = ts.distributed.scatter(whole, dim=dim)
            grad = ts.distributed.scatter(grad, dim=dim)
        layer.weight.data.copy_(whole)
        loss = torch.mul(layer(ids), weight)
        loss.sum().backward()
        assert (layer.weight.grad - grad).abs().max() < 1e-12
        difference = (dense(ids) * weight) - loss
        assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("world_size", WORLDS)
def test_tables_are_filled_through_data(world_size):
    """Both divisions of an embedding, compared as scripts compare: a difference's maximum."""
    run_ranks(tables, world_size)


def by_hand_gradients():
    dense = seeded(nn.Linear, 6, 8)
    x, weight = randoms((3, 6), 1).requires_grad_(), randoms((3, 8), 2)
    for dim in (0, -1):
        layer = seeded(ts.nn.ParallelLinear, 6, 8, dim=dim)
        x.grad = None
        output = layer(x)
        if dim == -1:
            output = ts.distributed.gather(output, dim=-1)
        torch.mul(output, weight).sum().backward()
        whole = layer.weight.cpu()
        if dim == -1:
            whole = ts.distributed.gather(whole, dim=0)
        product = torch.matmul(weight, whole)
        if dim == 0:
            product = ts.distributed.gather(product, dim=-1)
        close(x.grad, product, "input")
        close(x.grad, weight @ dense.weight, "dense")
        part = ts.distributed.scatter(weight.t() @ x.detach(), dim=1 if dim == 0 else 0)
        close(layer.weight.grad, part, "weight")


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_are_checked_by_hand(world_size):
    """Products with a layer's own weight, gathered or not."""
    run_ranks(by_hand_gradients, world_size)


def marks():
    y = ts.nn.ParallelLinear(4, 6, dim=1)(torch.ones(2, 4))
    assert getattr(y, ts._PARALLEL_DIM) == -1
    assert hasattr(y, "parallel_dim")
    setattr(y, ts._PARALLEL_DIM, 1)  # it is that already
    plain = y.to_local()
    assert not hasattr(plain, ts._PARALLEL_DIM)
    setattr(y, ts._PARALLEL_DIM, None)
    assert not isinstance(y, ts.ShardedTensor)
    close(y, plain, "unmarked")
    ts.set_attribute(y, -1)
    assert y.parallel_dim == -1
    layer = ts.nn.ParallelLinear(4, 6, dim=0)
    assert layer.weight.parallel_dim == 0
    layer.weight.parallel_dim = 0
    with pytest.raises(ts.errors.LayoutError, match="its layer divides by 0"):
        layer.weight.parallel_dim = -1
    copied = copy.deepcopy(layer)
    assert copied.weight.parallel_dim == 0
    assert copied.weight.data.parallel_dim == 0


def test_the_attribute_reads_and_sets_the_mark():
    """As `get_parallel_dim` and `register_parallel_dim` do."""
    run_ranks(marks, 2)
