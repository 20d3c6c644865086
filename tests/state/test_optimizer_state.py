"""An optimizer's state of shards: through torch.distributed.checkpoint, and loaded for what it is."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torchshard.errors import StateError
from torchshard.testing import run_ranks


class Tied(nn.Module):
    """A table that is read as the head too, and a Linear pair; 7 and 5 divide by no group."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(7, 4)
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, ids):
        h = self.down(self.up(self.table(ids)).tanh())
        return F.linear(h, self.table.weight)


PLAN = {"table": "vocabulary", "up": "column", "down": "row"}
OPTIMIZERS = {
    "adam": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def built(seed, optimizer="adam", divides=True):
    model = Tied(seed).double()
    if divides:
        ts.parallelize(model, PLAN)
    return model, OPTIMIZERS[optimizer](model.parameters())


def step(model, optimizer, seed):
    ids = torch.tensor([0, 6, 3, seed])
    y = model(ids)
    y = ts.distributed.gather(y) if isinstance(y, ts.ShardedTensor) else y
    (y * randoms(y.shape, seed)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def expect_equal(pair, dense_pair):
    """The same weights, and after one more step too: then the state was the same."""
    for seed in (None, 5):
        for each in (pair, dense_pair):
            if seed is not None:
                step(*each, seed)
        want = dense_pair[0].state_dict()
        for key, value in ts.collect_state_dict(pair[0]).items():
            close(value, want[key], key)


def saved_and_loaded(folder, optimizer, options):
    options = torch_state.StateDictOptions(**options)
    pair, dense = built(1, optimizer), built(1, optimizer, divides=False)
    step(*pair, 1)
    step(*dense, 1)
    model_state, state = torch_state.get_state_dict(*pair, options=options)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    for divides in (True, False):
        other = built(2, optimizer, divides)
        step(*other, 3)
        model_state, state = torch_state.get_state_dict(*other, options=options)
        states = {"model": model_state, "optimizer": state}
        dcp.load(states, checkpoint_id=folder)
        torch_state.set_state_dict(
            *other,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=options,
        )
        expect_equal(other, copy.deepcopy(dense))


@pytest.mark.parametrize(
    "options",
    [{}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}, "full"],
    ids=["plain", "offload", "flat", "full"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_checkpoints_the_state_of_shards(tmp_path, optimizer, options):
    """get_state_dict, dcp.save and load, set_state_dict; a dense model loads it as well."""
    options = {"full_state_dict": True} if options == "full" else options
    world_size = 3 if optimizer == "adam" else 2
    run_ranks(saved_and_loaded, world_size, str(tmp_path), optimizer, options)


class Training(dcp.stateful.Stateful):
    """What torch's tutorial has users write, with state dicts that were not made for it."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state_dict):
        self.model.load_state_dict(state_dict["model"])


def own_stateful(folder):
    dcp.save({"training": Training(built(1)[0])}, checkpoint_id=folder)
    other, dense = built(2)[0], built(1, divides=False)[0]
    dcp.load({"training": Training(other)}, checkpoint_id=folder)
    for key, value in ts.collect_state_dict(other).items():
        close(value, dense.state_dict()[key], key)


def test_state_that_a_checkpoint_asks_for_is_whole_in_chunks(tmp_path):
    """Whoever calls state_dict() on its behalf."""
    run_ranks(own_stateful, 2, str(tmp_path))


def whole_state_loaded():
    dense, pair = built(1, divides=False), built(1)
    step(*dense, 1)
    pair[0].load_state_dict(dense[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(dense[1].state_dict()))
    expect_equal(pair, dense)
    file = io.BytesIO()
    torch.save(pair[1].state_dict(), file)
    file.seek(0)
    again = built(2)
    again[0].load_state_dict(pair[0].state_dict())
    again[1].load_state_dict(torch.load(file, weights_only=True))
    expect_equal(again, dense)


def test_whole_state_and_own_state_load():
    """A dense model's optimizer state is cut; this rank's comes back from a file."""
    run_ranks(whole_state_loaded, 3)


def rank_0s(stripped):
    pair = built(1)
    step(*pair, 1)
    state = pair[1].state_dict()
    if stripped:
        state.pop("torchshard")
    box = [state]
    dist.broadcast_object_list(box, src=0)
    before = copy.deepcopy(pair[1].state_dict())
    with pytest.raises(StateError) as error:
        pair[1].load_state_dict(box[0])
    for key, held in before["state"].items():
        for name, value in held.items():
            assert torch.equal(pair[1].state_dict()["state"][key][name], value)
    return str(error.value)


def test_one_ranks_state_is_refused_on_the_others():
    """The recipe of TorchShard 0.1.0 saved rank 0's and loaded it everywhere."""
    (message, _) = run_ranks(rank_0s, 2, False)
    assert message == (
        "rank 1 of 2, whose parameter 0 is a shard of (7, 4), was given the state of rank 0"
        " of 2's shard of (7, 4). Load on every rank what its optimizer saved itself, or"
        " state of the whole parameters."
    )


def test_so_it_is_where_the_note_is_lost():
    """A trainer may keep the state alone."""
    (message, _) = run_ranks(rank_0s, 2, True)
    assert message == (
        "rank 1: exp_avg of parameter 0 has shape (4, 4), that of another rank's shard of"
        " (7, 4); expected (3, 4). Load on every rank what its optimizer saved itself, or"
        " state of the whole parameters."
    )


def rank_0s_of_even_shards():
    torch.manual_seed(1)
    layer = ts.nn.ParallelLinear(4, 6, dim=1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(randoms((3, 4), 1).float()).to_local().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    box = [{key: state[key] for key in ("state", "param_groups")}]
    dist.broadcast_object_list(box, src=0)
    with pytest.raises(StateError, match="the ranks were given the same tensors"):
        optimizer.load_state_dict(box[0])


def test_even_shards_are_compared():
    """Where all shards have one shape, values tell them apart."""
    run_ranks(rank_0s_of_even_shards, 2)


def resumed_and_saved(folder):
    """State that is loaded and saved again, without a step between."""
    pair, other = built(1), built(2)
    step(*pair, 1)
    other[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
    other[0].load_state_dict(pair[0].state_dict())
    model_state, state = torch_state.get_state_dict(*other)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    third = built(3)
    model_state, state = torch_state.get_state_dict(*third)
    states = {"model": model_state, "optimizer": state}
    dcp.load(states, checkpoint_id=folder)
    torch_state.set_state_dict(
        *third, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    dense = built(1, divides=False)
    step(*dense, 1)
    expect_equal(third, dense)


def test_an_optimizer_is_known_before_its_first_step(tmp_path):
    """torch has no hook for one that is built."""
    run_ranks(resumed_and_saved, 2, str(tmp_path))
