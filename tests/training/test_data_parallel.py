"""Sharded layers under DistributedDataParallel, FSDP2 and activation checkpointing.

Names of tests begin with the row: R of TorchShard 0.1.0, T of public reports on its peers.
"""

import contextlib
import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchshard as ts
from test_recipe import CLASSES, Classifier, dense_step, expect_gradients, samples
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchshard.errors import GroupError, LayoutError, StateError
from torchshard.state import gathered
from torchshard.testing import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import models
import recipe_table

SIZES = [3, 1, 4, 2]


class Nested(Classifier):
    """The recipe's model with shards at several depths, and a layer that nothing uses."""

    def __init__(self):
        super().__init__(gather=False)
        head = nn.Sequential(nn.ModuleDict({"hidden": self.fc}), nn.Linear(CLASSES, 5))
        del self.fc
        self.head = head
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        x = self.squeeze(self.backbone(x).unsqueeze(-1)).squeeze(-1).relu()
        return self.head[1](self.head[0]["hidden"](x).tanh())


PLAN = {"head.0.hidden": "column", "head.1": "row"}


def pair(cls=Nested):
    """Return the dense model and the sharded one, whose head pools the ranks' samples."""
    torch.manual_seed(0)
    dense = cls().double()
    model = copy.deepcopy(dense)
    ts.parallelize(model, {"head.0.hidden": "column"}, gather_batch=True)
    ts.parallelize(model, {"head.1": "row"})
    return dense, model


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expect_same(actual, expected, tolerance=1e-10):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        gap = (actual[key] - value).abs().max().item()
        assert gap <= tolerance, f"{key} differs by {gap}"


def whole_state(model):
    state = ts.collect_state_dict(model)
    return {key: value.clone() for key, value in state.items() if "spare" not in key}


def own_samples(batch, group_size):
    """Return this rank's samples of a batch, and the pooled target of its model group."""
    rank = dist.get_rank()
    x, target = samples(SIZES[: dist.get_world_size()])
    parts = (
        part.roll(batch, 0).split(SIZES[: dist.get_world_size()])
        for part in (x, target)
    )
    x, target = parts
    target = [part % 5 for part in target]
    first = rank - rank % group_size
    return x, target, rank, range(first, first + group_size)


def sharded_loss(wrapped, batch, group_size):
    x, target, rank, group = own_samples(batch, group_size)
    pooled = torch.cat([target[r] for r in group])
    return nn.functional.cross_entropy(wrapped(x[rank]), pooled)


def dense_loss(dense, batch, group_size):
    """Return the mean of the groups' losses, in one process."""
    x, target, _, _ = own_samples(batch, group_size)
    world = dist.get_world_size()
    losses = []
    for first in range(0, world, group_size):
        logits = dense(torch.cat(x[first : first + group_size]))
        pooled = torch.cat(target[first : first + group_size])
        losses.append(nn.functional.cross_entropy(logits, pooled))
    return sum(losses) / len(losses)


def train_alike(wrapped, dense, group_size, steps=3, no_sync=False):
    """Train both; with `no_sync` each step accumulates three micro-batches."""
    micro = 3 if no_sync else 1
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (wrapped, dense)]
    for step in range(steps):
        for batch in range(step * micro, (step + 1) * micro):
            is_last = batch == (step + 1) * micro - 1
            quiet = contextlib.nullcontext() if is_last else wrapped.no_sync()
            with quiet:
                sharded_loss(wrapped, batch, group_size).backward()
            dense_loss(dense, batch, group_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


FLAGS = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


def every_flag(group_size):
    for flags in FLAGS:
        for no_sync in (False, True):
            if no_sync and "static_graph" in flags:
                continue  # torch: static_graph counts iterations, which no_sync skips
            dense, model = pair()
            ts.register_ddp_parameters_to_ignore(model)
            ts.register_ddp_parameters_to_ignore(model)
            before = weights_of(model)
            wrapped = DistributedDataParallel(model, **flags)
            expect_same(weights_of(model), before, 0)
            train_alike(wrapped, dense, group_size, no_sync=no_sync)
            expect_same(whole_state(model), whole_state(dense))


@pytest.mark.parametrize("world_size", [2, 4])
def test_r19_t58_nested_shards_are_ignored_under_every_flag(world_size):
    """R19, T58: shards at any depth survive wrapping and train as dense, with no_sync too."""
    run_ranks(every_flag, world_size, world_size)


def test_t60_shards_are_averaged_over_replicas():
    """T60: over 2 x 2 ranks each shard gets the mean over its 2 replicas, registered twice or not."""
    run_ranks(every_flag, 4, 2, group_size=2)


def averaged_once():
    counts = []
    for registrations in range(3):
        model = even()
        for _ in range(registrations):
            ts.register_ddp_parameters_to_ignore(model)
        loss = model(torch.ones(2, 3, dtype=torch.float64)).sum()
        with CommDebugMode() as counted:
            loss.backward()
        counts.append(counted.get_total_counts())
    return counts


def test_t60_shards_are_averaged_by_two_collectives():
    """T60: who has a gradient, and all 3 shards', however often the model is registered."""
    assert run_ranks(averaged_once, 4, group_size=2) == [[0, 2, 2]] * 4


def over_a_group_of_ones_own():
    model = ts.parallelize(nn.Linear(4, 8), {"": "column"}, group=dist.group.WORLD)
    assert model.weight.shape == (2, 4)
    ts.register_ddp_parameters_to_ignore(model)
    with CommDebugMode() as counted:
        model(torch.ones(2, 4)).to_local().sum().backward()
    assert counted.get_total_counts() == 0


def test_shards_of_another_group_are_not_averaged():
    """Over a group of the caller's own, ranks of one data group hold different shards."""
    run_ranks(over_a_group_of_ones_own, 4, group_size=2)


def over_the_data_group():
    dense, model = pair()
    data = ts.distributed.get_data_parallel_group()
    wrapped = DistributedDataParallel(
        model, process_group=data, find_unused_parameters=True
    )
    rank = dist.get_rank()
    for batch in range(3):
        # Samples are split over the data group alone: both ranks of a model group get the
        # same ones, so the head does not pool.
        model.head[0]["hidden"].gather_batch = False
        x, target, _, _ = own_samples(batch, 1)
        mine = rank // 2
        for module, which in ((wrapped, [mine]), (dense, [0, 1])):
            losses = [
                nn.functional.cross_entropy(module(x[r]), target[r]) for r in which
            ]
            (sum(losses) / len(losses)).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            module.zero_grad()
    expect_same(whole_state(model), whole_state(dense))


def test_t57_ddp_over_the_data_group_needs_no_ignoring():
    """T57: plain shards are equal on all ranks of the data group, and torch averages them."""
    run_ranks(over_the_data_group, 4, group_size=2)


def gpt_over_two_by_two():
    torch.manual_seed(0)
    dense = models.GPT().double()
    model = ts.parallelize(copy.deepcopy(dense), models.GPT_PLAN)
    ts.register_ddp_parameters_to_ignore(model)
    wrapped = DistributedDataParallel(model)
    ids = torch.randint(13, (3, 2, 3, 6), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, dense)]
    criterion = ts.nn.ParallelCrossEntropyLoss()
    for batch in ids:
        for module, groups in ((wrapped, [dist.get_rank() // 2]), (dense, [0, 1])):
            losses = [
                criterion(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                for rows in batch[groups]
            ]
            (sum(losses) / len(losses)).backward()
        ours = ts.nn.utils.clip_grad_norm_(model, 0.5)
        theirs = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        assert abs(ours - theirs) < 1e-10
        assert theirs > 0.5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.lm_head.weight is model.transformer["wte"].weight
    expect_same(whole_state(model), whole_state(dense), 1e-9)


def test_t60_a_gpt_over_two_by_two_ranks():
    """T60: tied, clipped and trained by AdamW, its replicas stay in step with dense."""
    run_ranks(gpt_over_two_by_two, 4, group_size=2)


# Mistakes of order


ADVICE = (
    "DistributedDataParallel treats ParallelLinear.weight, a shard, as equal on all ranks, and"
    " has overwritten it with rank 0's. Call"
    " torchshard.register_ddp_parameters_to_ignore(model) before wrapping the model, and load"
    " its weights again."
)


def even():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 2)).double()
    return ts.parallelize(model, {"0.0": "column", "1": "row"})


def mistakes():
    x = torch.ones(2, 3, dtype=torch.float64)
    rank = dist.get_rank()
    forgotten = DistributedDataParallel(even())
    model = even()
    late = DistributedDataParallel(model)
    ts.register_ddp_parameters_to_ignore(model)
    model = even()
    ts.register_ddp_parameters_to_ignore(model)
    inside = DistributedDataParallel(nn.Sequential(model))
    for wrapped in (forgotten, late, inside):
        with pytest.raises(GroupError) as raised:
            wrapped(x)
        assert str(raised.value) == ADVICE, rank
    # Registering what is wrapped is right, whatever was registered before.
    dense, model = pair()
    ts.register_ddp_parameters_to_ignore(model)
    outer = nn.Sequential(model)
    ts.register_ddp_parameters_to_ignore(outer)
    wrapped = DistributedDataParallel(outer, find_unused_parameters=True)
    train_alike(wrapped, dense, 2)
    expect_same(whole_state(model), whole_state(dense))


def test_r19_wrapping_in_the_wrong_order_is_an_error():
    """R19: the first forward tells that the shards were overwritten, and what to call before."""
    run_ranks(mistakes, 2)


def names_are_added():
    _, model = pair()
    name = "_ddp_params_and_buffers_to_ignore"
    setattr(model, name, ["spare.weight"])
    ts.register_ddp_parameters_to_ignore(model)
    expected = ["head.0.hidden.bias", "head.0.hidden.weight", "head.1.weight"]
    assert list(getattr(model, name)) == [*expected, "spare.weight"]


def test_names_that_are_ignored_already_stay_so():
    """The shards' names are added to the model's own list."""
    run_ranks(names_are_added, 2)


# Copies


def copies(group_size):
    dense, model = pair()
    ts.register_ddp_parameters_to_ignore(model)
    average = copy.deepcopy(model)
    name = "_ddp_params_and_buffers_to_ignore"
    assert getattr(average, name) == getattr(model, name)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    expected = whole_state(dense)
    for _ in range(2):
        train_alike(wrapped, dense, group_size, steps=1)
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
            with torch.no_grad():
                ours.lerp_(theirs, 0.25)
        state = whole_state(dense)
        expected = {
            key: value.lerp(state[key], 0.25) for key, value in expected.items()
        }
    assert ts.collect_state_dict(average)["head.0.hidden.weight"].shape == (7, 6)
    expect_same(whole_state(average), expected)
    # A copy is trained like the original, and so are parameters that loading has replaced.
    dense.load_state_dict(ts.collect_state_dict(average))
    average.load_state_dict(average.state_dict(), assign=True)
    average.head[1].weight.requires_grad_(False)
    dense.head[1].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(average, find_unused_parameters=True)
    train_alike(wrapped, dense, group_size)
    average.head[1].weight.requires_grad_(True)
    dense.head[1].weight.requires_grad_(True)
    train_alike(wrapped, dense, group_size)
    expect_same(whole_state(average), whole_state(dense))


@pytest.mark.parametrize("world_size", [2, 4])
def test_r17_t55_copies_keep_layouts_and_ignored_names(world_size):
    """R17, T55: a moving average of the weights is a deep copy that collects and trains."""
    run_ranks(copies, world_size, 2, group_size=2)


# Collectives


def pooled_collectives():
    dense, model = pair()
    x = samples([2])[0]
    features = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    layer = model.head[0]["hidden"]
    with CommDebugMode() as counted:
        y = layer(features)
    assert sorted(str(op) for op in counted.get_comm_counts()) == [
        "c10d_functional.all_gather_into_tensor"
        if "functional" in str(next(iter(counted.get_comm_counts())))
        else "c10d._allgather_base_"
    ]
    forward = counted.get_total_counts()
    with CommDebugMode() as counted:
        y.to_local().sum().backward()
    counts = {str(op): n for op, n in counted.get_comm_counts().items()}
    assert counts == {"c10d._reduce_scatter_base_": 1}, counts
    return forward, x.shape, dense is not None


def test_pooling_and_summing_are_one_reduce_scatter():
    """A column-parallel head that pools the batch sums and splits its gradient in one go."""
    results = run_ranks(pooled_collectives, 2)
    # the ranks' sizes, then their samples
    assert [result[0] for result in results] == [2, 2]


# Checkpointing and FSDP2


class Checkpointed(Nested):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed(group_size):
    for _ in range(2):
        dense, model = pair(Checkpointed)
        ts.register_ddp_parameters_to_ignore(model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        train_alike(wrapped, dense, group_size)
        expect_same(whole_state(model), whole_state(dense))


def test_checkpointed_layers_train_as_dense():
    """Non-reentrant checkpointing repeats the forward's collectives and the same gradients come."""
    run_ranks(checkpointed, 2, 2)


def fsdp():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dense, model = pair()
    model.head[0]["hidden"].gather_batch = False
    data = ts.distributed.get_mesh()["data"]
    for part in (model.backbone, model.head[0]["hidden"], model.head[1]):
        fully_shard(part, mesh=data)
    fully_shard(model, mesh=data)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, dense)]
    mine = dist.get_rank() // 2
    for batch in range(3):
        x, target, _, _ = own_samples(batch, 1)
        for module, which in ((model, [mine]), (dense, [0, 1])):
            losses = [
                nn.functional.cross_entropy(module(x[r]), target[r]) for r in which
            ]
            (sum(losses) / len(losses)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        layer = model.get_submodule(name.rpartition(".")[0])
        value = parameter.full_tensor().detach()
        if isinstance(layer, ts.ParallelLayer):
            value = gathered(value, layer, name.rpartition(".")[2])
        gap = (value - dense.get_parameter(name)).abs().max().item()
        assert gap < 1e-10, (name, gap)


def test_fsdp2_shards_over_the_data_axis():
    """`fully_shard` on the data axis cuts the shards once more and trains as dense."""
    run_ranks(fsdp, 4, group_size=2)


def sums_of_two_processes():
    """T59: the recipe's step by hand, against one process on the global batch."""
    torch.manual_seed(0)
    dense = Classifier(gather=False).double()
    model = copy.deepcopy(dense)
    model.gather = True
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=1)
    ts.register_ddp_parameters_to_ignore(model)
    wrapped = DistributedDataParallel(model)
    sizes, rank = SIZES[: dist.get_world_size()], dist.get_rank()
    x, target = (part.split(sizes)[rank] for part in samples(sizes))
    target = ts.distributed.gather(target, dim=0)
    ts.nn.ParallelCrossEntropyLoss()(wrapped(x), target).backward()
    dense_step(dense, sizes, range(len(sizes)), "mean").backward()
    expect_gradients(model, dense)


@pytest.mark.parametrize("world_size", [2, 3])
def test_t59_gathered_batches_give_the_global_gradient(world_size):
    """T59: no factor of the world size, with batches of different sizes."""
    run_ranks(sums_of_two_processes, world_size)


def test_the_table_of_the_recipe(monkeypatch):
    """The example's table runs, and no ratio of gradients differs from 1."""
    monkeypatch.setattr(recipe_table, "WORLDS", {"2": (2, -1)})
    shown, worst = recipe_table.table()
    assert shown.row_count == 6
    assert worst < recipe_table.TOLERANCE


def test_gather_batch_of_a_layer_without_inputs_raises():
    """A layer that declares no inputs has nothing to pool, and says so."""
    loss = ts.nn.ParallelCrossEntropyLoss()
    loss.gather_batch = True
    with pytest.raises(LayoutError, match="declares no inputs that could be pooled"):
        loss(torch.zeros(2, 3), torch.tensor([0, 1]))


def collected_under_fully_shard():
    from torch.distributed.fsdp import fully_shard

    dense = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 3))
    model = ts.parallelize(copy.deepcopy(dense), {"0": "column", "2": "row"})
    for part in (model[0], model[2], model[3], model):
        fully_shard(part, mesh=ts.distributed.get_mesh()["data"])
    state = ts.collect_state_dict(model)
    for key, want in dense.state_dict().items():
        assert type(state[key]) is torch.Tensor, key
        assert torch.equal(state[key], want), key
    if ts.distributed.get_world_size() > 1:
        with pytest.raises(StateError, match="DTensor: fully_shard has cut"):
            ts.sharded_state_dict(model)
    with pytest.raises(
        LayoutError, match="fully_shard has made the parameters DTensors"
    ):
        ts.to_dense(model)


@pytest.mark.parametrize("group_size", [1, 2])
def test_state_is_collected_under_fully_shard(group_size):
    """Shards that are cut once more, and whole parameters, come out whole; or it is refused."""
    run_ranks(collected_under_fully_shard, 2 * group_size, group_size=group_size)
