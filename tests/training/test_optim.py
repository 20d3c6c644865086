"""The optimizer that divides its state trains, saves and loads like a plain one."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torchshard.optim import ZeroRedundancyOptimizer
from torchshard.state import gathered
from torchshard.testing import run_ranks

FEATURES, CLASSES = 6, 7
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.05}),
]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6))
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.fc(self.backbone(x).relu())


def dense_model():
    torch.manual_seed(0)
    return Classifier().double()


def sharded_model(dim):
    model = ts.nn.ParallelLinear.convert_parallel_linear(dense_model().fc, dim=dim)
    model.gather_batch = True
    whole = dense_model()
    whole.fc = model
    return whole


def samples(step):
    generator = torch.Generator().manual_seed(step)
    count = 2 * torch.distributed.get_world_size()
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def own_loss(model, step):
    """Return this rank's loss: of all samples of its model group."""
    rank, group = torch.distributed.get_rank(), ts.distributed.get_world_size()
    x, target = samples(step)
    first = rank // group * group
    pooled = target[2 * first : 2 * (first + group)]
    logits = model(x[2 * rank : 2 * rank + 2])
    return ts.nn.ParallelCrossEntropyLoss()(logits, pooled)


def dense_loss(dense, step):
    x, target = samples(step)
    return nn.functional.cross_entropy(dense(x), target)


def train(wrapped, optimizer, dense, plain, steps):
    for step in steps:
        for loss, each in (
            (own_loss(wrapped, step), optimizer),
            (dense_loss(dense, step), plain),
        ):
            each.zero_grad()
            loss.backward()
            each.step()


def expect_equal_models(model, dense):
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        layer, value = model.get_submodule(path), parameter.detach()
        if isinstance(layer, ts.ParallelLayer):
            value = gathered(value, layer, leaf)
        worst = (value - dense.get_parameter(name)).abs().max().item()
        assert worst <= 1e-10, f"{name} differs by {worst}"


def wrapped_model(dim):
    model = sharded_model(dim)
    ts.register_ddp_parameters_to_ignore(model)
    return DistributedDataParallel(model)


def groups_of(model):
    return [
        {"params": list(model.backbone.parameters()), "lr": 0.02},
        {"params": list(model.fc.parameters())},
    ]


def trains_as_plain(optimizer_class, defaults, dim, given):
    wrapped, dense = wrapped_model(dim), dense_model()
    model = wrapped.module
    forms = {
        "model": (wrapped, dense.parameters()),
        "parameters": (model.parameters(), dense.parameters()),
        "groups": (groups_of(model), groups_of(dense)),
    }
    own, plain = forms[given]
    optimizer = ZeroRedundancyOptimizer(own, optimizer_class, **defaults)
    reference = optimizer_class(plain, **defaults)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, reference)
    ]
    for step in range(4):
        train(wrapped, optimizer, dense, reference, [step])
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    expect_equal_models(model, dense)
    reloads(optimizer, reference, wrapped, dense, (optimizer_class, defaults))


def reloads(optimizer, reference, wrapped, dense, how):
    """Consolidate, compare with the plain optimizer's state, load it anew, go on training."""
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(box)
    expected = reference.state_dict()
    assert [g["params"] for g in box[0]["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]
    torch.testing.assert_close(box[0]["state"], expected["state"], rtol=0, atol=1e-10)
    saved = copy.deepcopy(box[0]["state"])
    optimizer_class, defaults = how
    shape = [{"params": group["params"]} for group in copy.copy(optimizer.param_groups)]
    fresh = ZeroRedundancyOptimizer(shape, optimizer_class, **(defaults | {"lr": 9.0}))
    fresh.load_state_dict(box[0])
    assert fresh.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    train(wrapped, fresh, dense, reference, [7, 8])
    expect_equal_models(wrapped.module, dense)
    torch.testing.assert_close(box[0]["state"], saved, rtol=0, atol=0)


def every_optimizer():
    for optimizer_class, defaults in OPTIMIZERS:
        for dim, given in ((1, "model"), (0, "parameters"), (1, "groups")):
            trains_as_plain(optimizer_class, defaults, dim, given)


@pytest.mark.parametrize(
    ("world_size", "group_size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)]
)
def test_r24_t64_trains_and_reloads_like_the_plain_optimizer(world_size, group_size):
    """R24, T64: over the DDP recipe, parameters and state are those of a dense optimizer."""
    run_ranks(every_optimizer, world_size, group_size=group_size)


def torch_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, on import
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero


def torch_zero_is_refused():
    model = sharded_model(1)
    optimizer = torch_zero()(model.parameters(), torch.optim.SGD, lr=0.1)
    before = copy.deepcopy(model.state_dict())
    own_loss(model, 0).backward()
    with pytest.raises(ts.errors.GroupError) as raised:
        optimizer.step()
    assert str(raised.value) == (
        "torch's ZeroRedundancyOptimizer over the ranks [0, 1] would overwrite"
        " ParallelLinear.weight, a shard, with another rank's. Nothing has been changed"
        " yet. Use torchshard.optim.ZeroRedundancyOptimizer(model, optimizer_class), which"
        " takes the same arguments and leaves shards where they are."
    )
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    whole = torch_zero()(model.backbone.parameters(), torch.optim.SGD, lr=0.1)
    whole.step()


def test_r24_t64_torchs_own_is_refused_before_any_step():
    """R24, T64: torch's class over the model group changes nothing and names the remedy."""
    run_ranks(torch_zero_is_refused, 2)


def torch_zero_over_replicas():
    data = ts.distributed.get_data_parallel_group()
    layer = ts.nn.ParallelLinear(3, 5, dim=1).double()
    before = layer.weight.detach().clone()
    optimizer = torch_zero()(
        layer.parameters(), torch.optim.SGD, process_group=data, lr=0.5
    )
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before - 0.5)


def test_torchs_own_over_the_data_parallel_group():
    """Over ranks that hold the same shard torch's class is right, and allowed."""
    run_ranks(torch_zero_over_replicas, 4, group_size=2)


def behaves_as_an_optimizer():
    model = sharded_model(1)
    optimizer = ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    with pytest.raises(ts.errors.StateError, match=r"consolidate_state_dict\(to"):
        optimizer.state_dict()
    with pytest.raises(ts.errors.StateError, match="after construction"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ts.errors.StateError, match=r"\[1\] parameters; .* \[6\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})

    def closure():
        optimizer.zero_grad()
        loss = own_loss(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    optimizer.consolidate_state_dict(to=1)
    if ts.distributed.get_rank() == 1:
        assert optimizer.state_dict()["state"][4]["exp_avg"].shape == (
            CLASSES,
            FEATURES,
        )
    else:
        with pytest.raises(ts.errors.StateError, match="divided over the ranks"):
            optimizer.state_dict()


def test_looks_like_an_optimizer():
    """Closures, defaults, groups, and errors that name the remedy."""
    run_ranks(behaves_as_an_optimizer, 2)


class RowSums(torch.optim.SGD):
    """An optimizer that keeps one number for each row, as Adafactor does."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            row_var = parameter.grad.reshape(len(parameter), -1).mean(1, keepdim=True)
            self.state[parameter]["row_var"] = row_var


def factored_state():
    layer = ts.nn.ParallelLinear(3, 5, dim=1)
    optimizer = ZeroRedundancyOptimizer(layer, RowSums, lr=0.1)
    layer(torch.ones(2, 3)).to_local().sum().backward()
    optimizer.step()
    with pytest.raises(ts.errors.StateError, match=r"'row_var' of shape \(., 1\)"):
        optimizer.consolidate_state_dict()


def test_state_that_is_no_shard_is_refused():
    """Row sums over a shard are not put together as if they were shards."""
    run_ranks(factored_state, 2)


def only_shards():
    layer = ts.nn.ParallelLinear(3, 5, dim=1)
    optimizer = ZeroRedundancyOptimizer(layer, torch.optim.SGD, lr=0.1, momentum=0.9)
    layer(torch.ones(2, 3)).to_local().sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if ts.distributed.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        assert state[0]["momentum_buffer"].shape == (5, 3)
    else:
        with pytest.raises(ts.errors.StateError):
            optimizer.state_dict()


def test_a_model_of_shards_only():
    """Without a whole parameter, no optimizer of torch's is made."""
    run_ranks(only_shards, 2)


def assigned_parameter():
    layer = ts.nn.ParallelLinear(3, 5, dim=1)
    layer.weight = nn.Parameter(
        torch.full_like(layer.weight, ts.distributed.get_rank())
    )
    optimizer = ZeroRedundancyOptimizer(layer, torch.optim.SGD, lr=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = torch.full_like(layer.weight, ts.distributed.get_rank() - 0.5)
    assert torch.equal(layer.weight, expected)


def test_a_parameter_that_was_assigned_to_a_layer():
    """The model's layers say what is a shard, not the history of the parameter."""
    run_ranks(assigned_parameter, 2)


def test_without_groups_it_is_the_plain_optimizer():
    """In one process, without torch.distributed, it trains, saves and loads."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        ZeroRedundancyOptimizer(models[0], torch.optim.Adam, lr=0.1),
        torch.optim.Adam(models[1].parameters(), lr=0.1),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    optimizers[0].consolidate_state_dict()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())


def compiled_step():
    layer = ts.nn.ParallelLinear(3, 2, dim=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).to_local().sum().backward()
    before = layer.bias.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    torch.testing.assert_close(layer.bias.detach(), before - 0.1)


def test_a_compiled_step():
    """The check before every optimizer's step does not stand in the way of compiling it."""
    run_ranks(compiled_step, 2)


IMPORT_SETS_NO_HOOK = """
import torch.nn.modules.module as module
import torch.optim.optimizer as optimizer

def hooks():
    return {
        (place.__name__, name): dict(value)
        for place in (module, optimizer)
        for name, value in vars(place).items()
        if name.startswith("_global_") and "hook" in name and value is not None
        and not isinstance(value, bool)
    }

before = hooks()
assert len(before) > 4
import torchshard as ts
import layer_zoo
ts.init_process_group()
layer = ts.nn.ParallelLinear(4, 6, dim=1)
assert hooks() == before
"""


def test_importing_sets_no_hook():
    """torch's global hooks are left alone, by a layer in a group of one too."""
    command = [sys.executable, "-W", "error", "-c", IMPORT_SETS_NO_HOOK]
    subprocess.run(command, check=True, timeout=120)


def step_checks():
    """Return the checks that torch calls before every optimizer's step."""
    return [check.__name__ for check in _global_optimizer_pre_hooks.values()]


def expect_refused(layer):
    optimizer = torch.optim.Adafactor(layer.parameters())
    with pytest.raises(ts.errors.GroupError, match="works on whole tensors"):
        optimizer.step()


def checks_come_and_go(path):
    assert step_checks() == []
    layer = ts.nn.ParallelLinear(3, 5, dim=1)
    all_checks = [
        "expect_no_shards",
        "expect_elementwise",
        "divide_state",
        "expect_right_on_shards",
        "keep_state_known",
    ]
    assert step_checks() == all_checks
    expect_refused(ts.nn.ParallelLinear(3, 5, dim=0))
    assert step_checks() == all_checks
    saved, rank = pickle.dumps(layer), ts.distributed.get_rank()
    ts.destroy_process_group()
    assert step_checks() == []
    place = {"init_method": path.as_uri(), "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **place)
    ts.init_process_group()
    assert step_checks() == []
    expect_refused(pickle.loads(saved))
    assert step_checks() == all_checks


def test_steps_are_checked_while_there_are_shards(tmp_path):
    """From the first layer with shards, made or unpickled, until the groups are destroyed."""
    run_ranks(checks_come_and_go, 2, tmp_path / "again")


def own_group_is_watched():
    group = torch.distributed.new_group()
    ts.init_process_group(1)
    assert ts.nn.ParallelLinear(3, 5, dim=1).group.size == 1
    assert step_checks() == []
    expect_refused(ts.nn.ParallelLinear(3, 5, dim=1, group=group))


def test_steps_are_checked_over_a_group_of_the_callers_own():
    """It is the layer's group that counts, whoever initialised it."""
    run_ranks(own_group_is_watched, 2)
