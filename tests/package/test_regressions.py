"""What TorchShard 0.1.0 got wrong, row by row, where no other test bears the row's name.

`test_rNN_` names row NN. Rows whose tests lie beside what they test:
`grep -rn "def test_r[0-9]" tests`; the last test here checks that none is missing.
"""

import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from cli_project import render_layer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchshard import amp
from torchshard.distributed import copy, gather, leave_model_parallel, reduce, reduce_
from torchshard.errors import LayoutError, ShapeError, TargetError
from torchshard.state import gathered
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing import run_ranks
from torchshard_cli.project.lock import read_lock
from torchshard_cli.template.catalogue import Catalogue, bundled_templates

ROOT = Path(__file__).resolve().parents[2]


def randoms(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def sharded(x, dim=-1):
    """Return `x`, the same on every rank, as a shard that is a leaf of its own."""
    shard = ts.distributed.scatter(x.detach(), dim).requires_grad_()
    return shard, ShardedTensor.from_local(shard, dim)


def rank():
    return ts.distributed.get_rank()


def mlp_of_pooled_batches(back):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).double()
    column = ts.nn.ParallelLinear(3, 5, dim=1).double()
    row = ts.nn.ParallelLinear(5, 4, dim=0).double()
    column.load_state_dict(dense[0].state_dict())
    row.load_state_dict(dense[1].state_dict())
    x = randoms(4, 3)
    own = x.chunk(2)[rank()].clone().requires_grad_()
    y = back(row(column(gather(own, dim=0))), dim=0)
    assert y.shape == (2, 4)
    y.square().mean().backward()
    x.requires_grad_()
    dense(x).square().mean().backward()
    for layer, twin in ((column, dense[0]), (row, dense[1])):
        for name in ("weight", "bias"):
            grad = gathered(getattr(layer, name).grad, layer, name)
            same(grad, getattr(twin, name).grad)
    # An averaging wrapper of a backbone before the gather divides by the two ranks.
    same(own.grad / 2, x.grad.chunk(2)[rank()])


def test_r2_local_losses_give_shards_the_mean_gradient():
    """R2: gather(0), column, row, own rows, local loss: factor 1, not the number of ranks."""
    run_ranks(mlp_of_pooled_batches, 2, leave_model_parallel)
    run_ranks(mlp_of_pooled_batches, 2, ts.distributed.scatter)


def groups_of_two():
    assert ts.distributed.get_world_size() == ts.distributed.get_group_size() == 2
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    column = ts.nn.ParallelLinear(8, 8, dim=1).double()
    row = ts.nn.ParallelLinear(8, 8, dim=0).double()
    column.load_state_dict(dense[0].state_dict())
    row.load_state_dict(dense[1].state_dict())
    assert column.weight.shape == (4, 8)
    assert row.weight.shape == (8, 4)
    x = randoms(3, 8)
    same(row(column(x)), dense(x))
    embedding = ts.nn.ParallelEmbedding(16, 3, dim=0).double()
    assert embedding.weight.shape == (8, 3)
    table = randoms(16, 3)
    embedding.load_state_dict({"weight": table})
    same(embedding(torch.arange(16)), table)
    assert gather(torch.tensor([[float(rank())]]), dim=1).tolist() == [[0.0, 1.0]]


def test_r3_a_group_is_smaller_than_the_world():
    """R3: with group_size 2 in a world of 4, everything is divided by 2."""
    run_ranks(groups_of_two, 4, group_size=2)


def losses_of_uneven_shards():
    loss = ts.nn.ParallelCrossEntropyLoss()
    x, target = randoms(5, 7), torch.tensor([0, 6, 3, 4, 2])
    leaf, logits = sharded(x)
    assert leaf.shape == (5, 4 - rank())
    want = F.cross_entropy(x.requires_grad_(), target)
    want.backward()
    loss(logits, target).backward()
    same(loss(logits, target), want)
    same(gather(leaf.grad), x.grad)


def test_r4_shards_of_4_and_3_classes():
    """R4: loss and gradient are those of the 7 classes."""
    run_ranks(losses_of_uneven_shards, 2)


def derived_logits():
    x, target = randoms(6, 5), torch.tensor([0, 4, 3, 1, 2, 2])
    loss = ts.nn.ParallelCrossEntropyLoss()
    for derive in (
        lambda y: y * 2,
        lambda y: y.view(6, 5),
        lambda y: y.view(2, 3, 5).view(-1, 5),
        lambda y: y.clone(),
        lambda y: y.float().double(),
    ):
        same(loss(derive(sharded(x)[1]), target), F.cross_entropy(derive(x), target))


def test_r5_derived_logits_keep_their_mark():
    """R5: scaled, viewed, cloned and cast logits give the loss of all classes."""
    run_ranks(derived_logits, 2)


def whole_logits():
    x, target = randoms(3, 4), torch.tensor([0, 3, 1])
    y = gather(sharded(x)[1])
    assert not isinstance(y, ShardedTensor)
    same(ts.nn.ParallelCrossEntropyLoss()(y, target), F.cross_entropy(x, target))


def test_r6_gathered_logits_are_whole():
    """R6: the loss of gathered logits is not larger by the logarithm of the ranks."""
    run_ranks(whole_logits, 2)


def loss_options():
    x = randoms(6, 5).requires_grad_()
    target = torch.tensor([0, 4, 3, 1, 2, 2])
    for options in (
        {"weight": randoms(5, seed=1).abs()},
        {"ignore_index": 2},
        {"label_smoothing": 0.3},
        {"reduction": "none"},
        {"weight": randoms(5, seed=1).abs(), "ignore_index": 0, "label_smoothing": 0.1},
    ):
        leaf, logits = sharded(x)
        loss = ts.nn.ParallelCrossEntropyLoss(**options)(logits, target)
        want = nn.CrossEntropyLoss(**options)(x, target)
        assert loss.shape == want.shape
        cotangent = randoms(*want.shape, seed=2)
        (grad,) = torch.autograd.grad(want, x, cotangent)
        loss.backward(cotangent)
        same(loss, want)
        same(gather(leaf.grad), grad)


def test_r8_options_of_the_loss():
    """R8: class weights, an ignored class in range, smoothing: loss and gradient of torch."""
    run_ranks(loss_options, 2)


def ignored_targets():
    x, target = randoms(4, 5), torch.tensor([0, -100, 4, -100])
    leaf, logits = sharded(x)
    each = ts.nn.ParallelCrossEntropyLoss(reduction="none")(logits, target)
    assert each[target == -100].tolist() == [0.0, 0.0]
    mean = ts.nn.ParallelCrossEntropyLoss()(logits, target)
    same(mean, each.sum() / 2)
    mean.backward()
    assert leaf.grad[target == -100].count_nonzero() == 0
    with pytest.raises(TargetError):
        ts.nn.ParallelCrossEntropyLoss()(logits, torch.tensor([0, 5, 1, 1]))


def test_r8b_ignored_targets():
    """R8b: -100 gives no loss, no gradient, and does not count in the mean."""
    run_ranks(ignored_targets, 2)


def losses_of_images():
    x = randoms(2, 5, 3, 4)
    target = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    _, logits = sharded(x, 1)
    same(ts.nn.ParallelCrossEntropyLoss()(logits, target), F.cross_entropy(x, target))


def test_r8c_logits_of_positions():
    """R8c: classes on dim 1, positions behind it."""
    run_ranks(losses_of_images, 2)


def half_losses():
    logits = ShardedTensor.from_local(torch.zeros(2, 40_000, dtype=torch.float16), -1)
    target = torch.tensor([0, 79_999])
    return ts.nn.ParallelCrossEntropyLoss()(logits, target).item()


def test_r8d_many_classes_in_half_precision():
    """R8d: the loss of 80 000 equal logits is their logarithm, 11.29, not infinity."""
    assert run_ranks(half_losses, 2) == [pytest.approx(11.29, abs=0.005)] * 2


class LargestTensor(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return result


def largest_tensor():
    shard = torch.randn(32, 3000, dtype=torch.float64, requires_grad=True)
    logits = ShardedTensor.from_local(shard, -1)
    with LargestTensor() as seen:
        target = torch.arange(32) * 100
        ts.nn.ParallelCrossEntropyLoss()(logits, target).backward()
    return seen.num_bytes / shard.nbytes


def test_r8e_no_tensor_of_all_classes_exists():
    """R8e: the largest tensor of a loss and its backward is one of the shard's size."""
    assert run_ranks(largest_tensor, 2) == [1.0, 1.0]


def argument_of_reduce():
    x = torch.tensor([1.0 + rank()])
    assert reduce(x).item() == 3
    assert x.item() == 1 + rank()
    z = torch.zeros(1, requires_grad=True)
    reduce(z.exp()).sum().backward()
    assert z.grad.item() == 1
    leaf = torch.ones(2, requires_grad=True)
    reduce(leaf)
    assert leaf.tolist() == [1, 1]
    with pytest.raises(LayoutError):
        reduce_(leaf)
    assert reduce_(x) is x
    assert x.item() == 3


def test_r9_reduce_leaves_its_argument_alone():
    """R9: no write into the argument, a gradient of 1; `reduce_` is the one in place."""
    run_ranks(argument_of_reduce, 2)


def shared_gradient():
    a = torch.zeros(1, requires_grad=True)
    (copy(a) + a).backward(torch.tensor([1.0 + rank()]))
    return a.grad.item()


def test_r10_copy_owns_its_gradient():
    """R10: copy(a) + a with gradients 1 and 2 gives a 3 + 1 and 3 + 2."""
    assert run_ranks(shared_gradient, 2) == [4, 5]


def uneven_rows():
    rows = torch.arange(10.0).view(5, 2)
    own = rows[:3] if rank() == 0 else rows[3:]
    assert torch.equal(gather(own, dim=0), rows)
    assert torch.equal(gather(own.t(), dim=1), rows.t())


def test_r11_uneven_rows_are_gathered():
    """R11: 3 and 2 rows make 5, in order."""
    run_ranks(uneven_rows, 2)


def whole_norms():
    table, ids = randoms(6, 5) * 3, torch.tensor([5, 0, 5])
    dense = nn.Embedding(6, 5, max_norm=1.0).double()
    layer = ts.nn.ParallelEmbedding(6, 5, max_norm=1.0, dim=1).double()
    for module in (dense, layer):
        module.load_state_dict({"weight": table})
    same(whole(layer(ids)), dense(ids))
    same(ts.collect_state_dict(layer)["weight"], dense.weight.detach())


def test_r15_norms_of_rows_are_those_of_all_columns():
    """R15: max_norm of a table that is divided by columns minds the whole rows."""
    run_ranks(whole_norms, 2)


def overflow_in_one_shard():
    shared = nn.Linear(3, 2)
    head = ts.nn.ParallelLinear(2, 4, dim=1)
    parameters = [*shared.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    for overflows in (True, False):
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.zero_grad()
        loss = whole(head(shared(torch.ones(1, 3)))).sum()
        scaler.scale(loss).backward()
        if overflows and rank() == 1:
            head.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        stepped = [
            not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)
        ]
        assert stepped == [not overflows] * 4
        assert scaler.get_scale() == 2.0


def test_r26_an_overflow_in_one_shard_skips_the_step_on_all():
    """R26: no rank steps alone, and the scale goes down on all."""
    run_ranks(overflow_in_one_shard, 2)


def rendered(name):
    layers = [locked.layer for locked in read_lock(ROOT).layers.values()]
    layer = next(layer for layer in layers if layer.class_name == name)
    module = name.lower()
    layer = replace(layer, package=".", tests=".", module=module, import_path=module)
    files = render_layer(layer, Catalogue(bundled_templates()))
    namespace = types.ModuleType(module)
    exec(compile(files[f"{module}.py"], module, "exec"), namespace.__dict__)
    return getattr(namespace, name)


def test_r27_generated_code_runs():
    """R27: rendered layers and losses are built, run forward and backward, as dense torch."""
    torch.manual_seed(0)
    linear, x = rendered("ParallelLinear")(4, 3, dim=1).double(), randoms(2, 4)
    target = torch.tensor([2, 0])
    loss = rendered("ParallelCrossEntropyLoss")()(linear(x), target)
    want = F.cross_entropy(F.linear(x, linear.weight, linear.bias), target)
    same(loss, want)
    loss.backward()
    assert linear.weight.grad.shape == (3, 4)
    embedding = rendered("ParallelEmbedding")(5, 3, dim=0)
    assert embedding(torch.tensor([4, 0])).shape == (2, 3)


def without_cuda():
    def no_cuda(*args, **kwargs):
        raise AssertionError("a rank on the CPU asked for CUDA")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", no_cuda)
        patch.setattr(torch.Tensor, "cuda", no_cuda)
        layer = ts.nn.ParallelLinear(4, 6, dim=1)
        ts.nn.init.shard_init_helper_(torch.nn.init.constant_, layer.bias, val=2.0)
        state = ts.collect_state_dict(layer)
        assert state["bias"].tolist() == [2.0] * 6
        assert state["weight"].device.type == "cpu"
        local = ts.relocate_state_dict(layer, state)
        assert torch.equal(local["weight"], layer.weight)


def test_r29_state_and_initialisers_on_the_cpu():
    """R29: nothing asks for CUDA."""
    run_ranks(without_cuda, 2)


def marks_of_the_caller():
    _, x = sharded(randoms(2, 4))
    before = x.sharding
    ts.nn.ParallelLinear(4, 3, dim=0).double()(x)
    ts.nn.ParallelLinear(4, 3, dim=1).double()(x)
    assert isinstance(x, ShardedTensor)
    assert x.sharding == before
    with pytest.raises(ShapeError):
        ts.nn.ParallelLinear(5, 3, dim=1).double()(x)
    assert x.sharding == before


def test_r32_layers_leave_the_callers_mark():
    """R32: a shard that a layer was given is still marked, also after an error."""
    run_ranks(marks_of_the_caller, 2)


ROWS = [*(str(row) for row in range(1, 34)), "8b", "8c", "8d", "8e"]


def test_every_row_has_a_test():
    """Rows 1 to 33, and 8b to 8e, are each in the name of a test."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def test_((?:r\d+[a-e]?_)+)", path.read_text(), re.M):
            found.update(row.removeprefix("r") for row in name.split("_"))
    assert set(ROWS) - found == set()
