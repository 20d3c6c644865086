"""Optimizers that are not torch's: right on shards, or refused before their first step."""

import copy
import io

import pytest
import torch
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.optim import Optimizer
from torchshard.errors import GroupError
from torchshard.testing import run_ranks


class Own(Optimizer):
    """Momentum, and what a subclass makes of the update."""

    def __init__(self, params, lr=0.1, power=1.0):
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                p.add_(self.update(p, p.grad, state["mean"]), alpha=-group["lr"])

    def update(self, p, grad, mean):
        return mean.sign()


class Lars(Own):
    def update(self, p, grad, mean):
        return grad * (p.norm() / (grad.norm() + 1e-6))


class Decayed(Own):
    def update(self, p, grad, mean):
        return grad + 0.1 * p.data


class ByState(Own):
    """As LAMB: the norm of state that is made like the parameter."""

    def update(self, p, grad, mean):
        return mean / (mean.norm() + 1e-6)


class Cautious(Own):
    def update(self, p, grad, mean):
        mask = (mean * grad > 0).to(grad.dtype)
        return mean * mask / mask.mean().clamp(min=1e-3)


class Clipped(Own):
    """A ratio that is one where weights are large."""

    def update(self, p, grad, mean):
        return mean * (p.norm() / (mean.norm() + 1e-6)).clamp(max=1.0)


class Orthogonal(Own):
    def update(self, p, grad, mean):
        return torch.linalg.qr(mean)[0] if mean.dim() == 2 else mean


class ByRow(Own):
    """A mean along one dim."""

    def update(self, p, grad, mean):
        return mean - mean.mean(-1, keepdim=True) if mean.dim() == 2 else mean


class OfTorchs(torch.optim.Adam):
    """A subclass of one's own."""


class ByPlainState(Own):
    """The norm of a tensor that knows nothing of shards."""

    def update(self, p, grad, mean):
        own = self.state[p].setdefault("own", torch.zeros(p.shape, dtype=p.dtype))
        own.add_(grad)
        return own / (own.norm() + 1e-6)


class ByPlainRow(Own):
    """Right where columns are whole, wrong where they are divided."""

    def update(self, p, grad, mean):
        rows = grad.detach().numpy().mean(-1, keepdims=True)
        return mean - torch.from_numpy(rows) if mean.dim() == 2 else mean


RIGHT = [Own, Lars, Decayed, OfTorchs, ByState, Cautious, Clipped, ByRow]
REFUSED = [Orthogonal, ByPlainState, ByPlainRow]


def twins(plan):
    torch.manual_seed(4)
    dense = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3)).double()
    model = copy.deepcopy(dense)
    ts.parallelize(model, plan)
    return dense, model


def trained(model, optimizer):
    for seed in range(3):
        optimizer.zero_grad()
        model(randoms((5, 4), seed)).square().sum().backward()
        optimizer.step()


def is_right(cls):
    dense, model = twins({"0": "column", "2": "row"})
    for each in (dense, model):
        optimizer = cls(each.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it binds step
        before = torch.get_rng_state()
        trained(each, optimizer)
        assert torch.equal(torch.get_rng_state(), before)
        assert {id(p) for p in optimizer.state} == {id(p) for p in each.parameters()}
        scheduler.step()
    for key, value in ts.collect_state_dict(model).items():
        close(value, dense.state_dict()[key], key)


@pytest.mark.parametrize("cls", RIGHT)
def test_what_is_right_on_shards_trains(cls):
    """Element by element, or by norms of the parameter and its gradient."""
    run_ranks(is_right, 3, cls)


def is_refused(cls):
    _, model = twins({"0": "column", "2": "row"})
    before = copy.deepcopy(model.state_dict())
    optimizer = cls(model.parameters())
    with pytest.raises(GroupError) as error:
        trained(model, optimizer)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not optimizer.state
    return str(error.value)


@pytest.mark.parametrize("cls", REFUSED)
def test_what_is_not_is_refused_before_its_first_step(cls):
    """On all ranks alike; neither weights nor state have changed."""
    messages = run_ranks(is_refused, 2, cls)
    assert messages[0] == messages[1]
    name = f"{cls.__module__}.{cls.__name__}"
    assert messages[0].startswith(f"{name} was given parameters of which this rank")
    assert "Use an optimizer that works element by element" in messages[0]


def resumed(way):
    """State comes from a file, or from before the model was divided; then it trains on."""
    dense, model = twins({"0": "column", "2": "row"})
    if way == "divided late":
        model = copy.deepcopy(dense)
    optimizers = [ByState(each.parameters()) for each in (dense, model)]
    for each, optimizer in zip((dense, model), optimizers, strict=True):
        trained(each, optimizer)
    if way == "divided late":
        ts.parallelize(model, {"0": "column", "2": "row"})
        resumed, own = optimizers[1], model
    else:
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizers[1].state_dict()], file)
        file.seek(0)
        states = torch.load(file)
        own = twins({"0": "column", "2": "row"})[1]
        own.load_state_dict(states[0])
        resumed = ByState(own.parameters())
        resumed.load_state_dict(states[1])
    trained(dense, optimizers[0])
    trained(own, resumed)
    for key, value in ts.collect_state_dict(own).items():
        close(value, dense.state_dict()[key], f"{way}, {key}")


@pytest.mark.parametrize("way", ["saved", "divided late"])
def test_state_knows_what_it_is_a_part_of_again(way):
    """As far as it was made like the parameter, by an optimizer that takes norms of it."""
    run_ranks(resumed, 2, way)


class Lookahead(Optimizer):
    """Holds another optimizer, which does the work."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def step(self, closure=None):
        return self.base.step(closure)


class NeedsClosure(Own):
    def step(self, closure=None):
        closure()
        super().step()


def holders():
    _, model = twins({"0": "column"})
    trained(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(GroupError, match="ByPlainState"):
        trained(model, Lookahead(ByPlainState(model.parameters())))
    optimizer = NeedsClosure(model.parameters())
    model(randoms((5, 4), 1)).square().sum().backward()
    with pytest.warns(UserWarning, match="NeedsClosure could not be tried on divided"):
        optimizer.step(lambda: None)


def test_holders_of_optimizers_and_what_cannot_be_tried():
    """The one within is tried; one that needs a closure is left to its user, with a warning."""
    run_ranks(holders, 2)


def row_divided():
    dense, model = twins({"0": "column"})
    for each in (dense, model):
        trained(each, ByPlainRow(each.parameters()))
    for key, value in ts.collect_state_dict(model).items():
        close(value, dense.state_dict()[key], key)


def test_it_is_tried_as_the_model_is_divided():
    """Means of rows are right while rows are whole."""
    run_ranks(row_divided, 2)
