"""Scripts written for TorchShard 0.1.0, from its documented API, run and are right."""

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard.testing import run_ranks

import layer_zoo

CLASSES, FEATURES, LOCAL_BATCH, STEPS = 7, 6, 2, 4


class Net(nn.Module):
    """A user's model, with the line that TorchShard's tutorial adds to its forward."""

    def __init__(self, gather):
        super().__init__()
        self.body = nn.Sequential(
            nn.Unflatten(1, (3, 1)),
            nn.Conv1d(3, 5, 1),
            nn.ReLU(),
            nn.Conv1d(5, FEATURES, 1),
            nn.Flatten(),
        )
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.gather = gather

    def forward(self, x):
        x = self.body(x)
        if self.gather:
            x = ts.distributed.gather(x, dim=0)  # gather input along the batch
        return self.fc(x)


def batches(world_size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        size = LOCAL_BATCH * world_size
        images = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        yield images, torch.randint(CLASSES, (size,), generator=generator)


def net(gather):
    torch.manual_seed(0)
    return Net(gather).double()


def old_script(path, dim, enable_zero, enable_amp):
    """Train, save and load as the tutorials for classification, AMP and ZeRO do."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    ts.distributed.init_process_group(group_size=world_size)
    model = net(gather=True)
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
    ignored = ts.register_ddp_parameters_to_ignore(model)
    assert ignored == {1: ["fc.weight", "fc.bias"], 0: ["fc.weight"]}[dim]
    model = DistributedDataParallel(model)
    criterion = ts.nn.ParallelCrossEntropyLoss()
    scaler = ts.amp.GradScaler("cpu", enabled=enable_amp, init_scale=2.0**8)
    if enable_zero:
        optimizer = ts.optim.ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, lr=0.2, momentum=0.9
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for images, target in batches(world_size):
        own = slice(rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)
        images, target = images[own], target[own]
        with torch.autocast("cpu", enabled=enable_amp):
            output = model(images)
            target = ts.distributed.gather(target, dim=0)
            loss = criterion(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())

    state_dict = model.module.state_dict()
    state_dict = ts.collect_state_dict(model.module, state_dict)
    if ts.distributed.get_rank() == 0:
        torch.save(state_dict, path)
    torch.distributed.barrier()
    state_dict = None
    if ts.distributed.get_rank() == 0:
        state_dict = torch.load(path)
    loaded = net(gather=True)
    ts.nn.ParallelLinear.convert_parallel_linear(loaded, dim=dim)
    state_dict = ts.relocate_state_dict(loaded, state_dict)
    loaded.load_state_dict(state_dict)
    for name, value in model.module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    return losses


def one_process(world_size):
    model = net(gather=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for images, target in batches(world_size):
        loss = nn.functional.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("enable_amp", [False, True])
@pytest.mark.parametrize("enable_zero", [False, True])
@pytest.mark.parametrize("dim", [1, 0])
def test_r24_t64_an_old_script_trains_like_one_process(
    tmp_path, dim, enable_zero, enable_amp
):
    """Losses of every step and the saved model are those of one process on all samples."""
    path = str(tmp_path / "model.pt")
    losses = run_ranks(old_script, 2, path, dim, enable_zero, enable_amp)
    expected, dense = one_process(2)
    tolerance = 0.1 if enable_amp else 1e-10  # bfloat16 has 8 bits
    for found in losses:
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    saved = torch.load(path)
    torch.testing.assert_close(
        dict(saved), dict(dense.state_dict()), rtol=0, atol=tolerance
    )


def quick_start(path):
    """The README's usage, on the CPU."""
    ts.init_process_group(group_size=torch.distributed.get_world_size())
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        torch.nn.Linear(20, 30, bias=True),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=None),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=0),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=1),
    )
    x, y = torch.ones(4, 20), torch.tensor([0, 29, 5, 7])
    x = m(x)
    assert ts.get_parallel_dim(x) == -1
    loss = ts.nn.functional.parallel_cross_entropy(x, y)
    loss.backward()
    state_dict = ts.collect_state_dict(m, m.state_dict())
    if ts.distributed.get_rank() == 0:
        torch.save(state_dict, path)
    return loss.item()


def test_the_quick_start(tmp_path):
    """Forward, loss, backward and saving, with the dense layers' values and names."""
    path = str(tmp_path / "m.pt")
    losses = run_ranks(quick_start, 2, path)
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), *(nn.Linear(30, 30) for _ in range(3))]
    dense = nn.Sequential(*layers)
    target = torch.tensor([0, 29, 5, 7])
    expected = nn.functional.cross_entropy(dense(torch.ones(4, 20)), target)
    assert losses == pytest.approx([expected.item()] * 2, abs=1e-5)
    dense.load_state_dict(torch.load(path))
    torch.testing.assert_close(
        nn.functional.cross_entropy(dense(torch.ones(4, 20)), target), expected
    )


def marked_by_hand():
    rank = ts.distributed.get_rank()
    whole = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).double()
    target = torch.tensor([4, 0, 2])
    start, stop = ts.layout.balanced(5, 2, rank)
    for register in (
        lambda x: ts.register_parallel_dim(x, -1),
        lambda x: ts.register_parallel_attribute(x, -1, 0),
        lambda x: ts.set_attribute(x, -1),
    ):
        logits = whole[:, start:stop].clone().requires_grad_()
        x = logits * 1
        assert ts.get_parallel_dim(x) is None
        assert register(x) is None
        assert ts.get_parallel_dim(x) == -1
        loss = ts.nn.ParallelCrossEntropy()(x, target)
        dense = whole.clone().requires_grad_()
        expected = nn.functional.cross_entropy(dense, target)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(logits.grad, dense.grad[:, start:stop])
        ts.register_parallel_dim(x, None)
        assert ts.get_parallel_dim(x) is None
        assert type(x) is torch.Tensor
        assert x.shape == (3, stop - start)


def test_marks_set_by_hand():
    """A tensor that is registered, in place, is a shard to the loss, until it is taken back."""
    run_ranks(marked_by_hand, 2)


def module_marks():
    rank = ts.distributed.get_rank()
    start, stop = ts.layout.balanced(5, 2, rank)
    whole = torch.arange(15.0).view(3, 5)
    x = whole[:, start:stop].clone()
    first, second = ts.nn.RegisterParallelDim(dim=1)((x, x * 2))
    assert type(x) is torch.Tensor, "R32: the caller's tensor stays as it was"
    assert ts.get_parallel_dim(x) is None
    assert ts.get_parallel_dim(first) == 1
    assert torch.equal(ts.distributed.gather(second), whole * 2)
    assert ts.nn.RegisterParallelDim(dim=-1)(first) is first
    assert torch.equal(ts.nn.RegisterParallelDim()(first), x)
    with pytest.raises(ts.errors.LayoutError, match="given a shard on dim 1"):
        ts.nn.RegisterParallelDim(dim=0)(first)
    with pytest.raises(TypeError, match="given a int"):
        ts.nn.RegisterParallelDim(dim=0)(3)


def test_r32_the_module_marks_what_passes():
    """R32: what is returned is marked, the argument is left alone."""
    run_ranks(module_marks, 2)


def parameters_codes():
    column = ts.nn.ParallelLinear(4, 6, dim=1)
    row = ts.nn.ParallelLinear(4, 6, dim=0)
    found = [
        [ts.get_parallel_dim(tensor) for tensor in (layer.weight, layer.bias)]
        for layer in (column, row)
    ]
    assert found == [[-1, -1], [0, None]]
    tables = [ts.nn.ParallelEmbedding(4, 6, dim=dim) for dim in (0, 1, None)]
    assert [ts.get_parallel_dim(table.weight) for table in tables] == [0, -1, None]
    ts.register_parallel_dim(column.weight, 1)
    for parameter, match in (
        (column.weight, "its layer divides by -1"),
        (nn.Parameter(torch.ones(2, 3)), "no layer declares"),
    ):
        with pytest.raises(ts.errors.LayoutError, match=match):
            ts.register_parallel_dim(parameter, 0)


def test_codes_of_parameters():
    """Parameters have TorchShard's codes; one that no layer declares is refused."""
    run_ranks(parameters_codes, 2)


def test_arguments_out_of_range():
    """Dims, orders and numbers of parts that do not exist are refused."""
    with pytest.raises(ts.errors.LayoutError, match="parallel_dim=2 is no dim"):
        ts.register_parallel_dim(torch.ones(2, 3), 2)
    with pytest.raises(ts.errors.LayoutError, match="order_type=2 is unknown"):
        ts.set_attribute(torch.ones(2, 3), 0, 2)
    with pytest.raises(ts.errors.LayoutError, match="num_partitions=0"):
        ts.slice(torch.ones(2, 3), 0)


def test_slice():
    """Parts are as even as they can be, of the last dim unless another is named."""
    x = torch.arange(30).view(3, 10)
    parts = ts.slice(x, 2, dim=-1)
    assert isinstance(parts, tuple)
    assert [tuple(part.shape) for part in parts] == [(3, 5), (3, 5)]
    assert [part.shape[1] for part in ts.slice(x, 3)] == [4, 3, 3]
    assert [len(part) for part in ts.slice(x, 2, dim=0)] == [2, 1]
    assert all(part.is_contiguous() for part in ts.slice(x, 3, -1, contiguous=True))
    assert torch.equal(torch.cat(ts.slice(x, 4), -1), x)


def test_names_in_one_process():
    """Without a group, marks are kept as they were given, and layers have both names."""
    x = torch.ones(3)
    assert ts.get_parallel_dim(x) is None
    assert ts.get_parallel_dim(ts.nn.RegisterParallelDim(dim=0)(x)) == 0
    assert ts.get_parallel_dim(x) is None
    ts.register_parallel_dim(x, 0)
    assert ts.get_parallel_dim(x) == 0
    assert type(x) is torch.Tensor
    assert ts.nn.ParallelCrossEntropy is layer_zoo.ParallelCrossEntropyLoss
    assert "ParallelCrossEntropy" in dir(ts.nn)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_the_module_compiles():
    """A compiled model may hold the module that marks."""
    module = torch.compile(
        ts.nn.RegisterParallelDim(dim=0), backend="eager", fullgraph=True
    )
    assert torch.equal(module(torch.ones(3)), torch.ones(3))
