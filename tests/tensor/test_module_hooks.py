"""Hooks on modules, beside dense torch: gradients of shards come marked, changed ones go on."""

import pytest
import torch
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint
from torchshard.errors import RankError
from torchshard.tensor import whole
from torchshard.testing.ranks import run_ranks


class Twice(nn.Module):
    """Takes several tensors and gives several, of which one may be plain."""

    def forward(self, x, scale, y):
        return x * scale + y, x - y

    def extra_repr(self):
        return "two in, two out"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 3)
        self.act, self.two, self.soft = nn.GELU(), Twice(), nn.Softmax(-1)

    def forward(self, x):
        h = self.act(self.first(x))
        scale = torch.full((7,), 3.0, dtype=x.dtype)
        a, b = self.two(h, scale, h * h)
        return self.last(self.soft(a) + b)


def models():
    for plan in (None, {"first": "column", "last": "row"}):
        torch.manual_seed(4)
        model = Model().double()
        yield ts.parallelize(model, plan) if plan else model


def seen_by(register, backward=lambda loss: loss.backward()):
    """Return, of the dense and the divided model, what hooks saw and the input's gradient."""
    results = []
    for model in models():
        seen = []
        handles = register(model, seen)
        x = randoms((5, 4), 1).requires_grad_()
        backward((model(x) * randoms((5, 3), 2)).sum())
        for handle in handles:
            handle.remove()
        results.append([*map(whole, seen), x.grad])
    return results


def expect_alike(case, dense, mine):
    assert len(mine) == len(dense) > 1, case
    for one, other in zip(mine, dense, strict=True):
        close(one, other, case)


def on_every_module(hook_of, method):
    def register(model, seen):
        parts = [*model.children(), model]
        return [getattr(part, method)(hook_of(seen)) for part in parts]

    return register


def noting(seen):
    return lambda module, *grads: seen.extend(
        grad for part in grads for grad in part if grad is not None
    )


def changing(seen):
    """By a number of the whole gradient."""

    def hook(module, grads, *outputs):
        seen.extend(grad for grad in grads if grad is not None)
        return tuple(g if g is None else g / (1 + g.norm()) for g in grads)

    return hook


def every_hook():
    for name, hook_of in (("noting", noting), ("changing", changing)):
        for method in (
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        ):
            register = on_every_module(hook_of, method)
            expect_alike(f"{name}, {method}", *seen_by(register))
    expect_alike(
        "of all modules",
        *seen_by(lambda m, seen: [register_module_full_backward_hook(noting(seen))]),
    )


def backward_again():
    """The gradient of a gradient; a backward that is run twice; one inside a checkpoint."""
    register = on_every_module(noting, "register_full_backward_hook")
    expect_alike(
        "retained",
        *seen_by(register, lambda y: [y.backward(retain_graph=True) for _ in "12"]),
    )
    for reentrant in (False, True):
        results = []
        for model in models():
            seen = []
            model.soft.register_full_backward_hook(noting(seen))
            x = randoms((5, 4), 1).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant)
            (y * randoms((5, 3), 2)).sum().backward()
            results.append([*map(whole, seen), x.grad])
        expect_alike(f"in a checkpoint, reentrant: {reentrant}", *results)
    results = []
    for model in models():
        seen = []
        model.act.register_full_backward_hook(changing(seen))
        x = randoms((5, 4), 1).requires_grad_()
        y = (model(x) * randoms((5, 3), 2)).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        results.append([whole(seen[0].detach()), x.grad])
    expect_alike("differentiated again", *results)


def after_destroying():
    """torch's own is back."""
    from torch.utils.hooks import BackwardHook

    ts.nn.ParallelLinear(4, 6, dim=1)
    assert BackwardHook._apply_on_tensors.__module__.startswith("torchshard")
    ts.destroy_process_group()
    assert BackwardHook._apply_on_tensors.__module__ == "torch.utils.hooks"


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_see_and_change_gradients_of_the_whole(world_size):
    """Full backward hooks and their kin, of one module or of all."""
    run_ranks(every_hook, world_size)


def test_hooks_hold_in_every_backward():
    """Beside checkpoints, and where gradients are differentiated again."""
    run_ranks(backward_again, 3)


def test_torch_s_hooks_are_put_back():
    """With the group."""
    run_ranks(after_destroying, 2)


def old_hook():
    model = list(models())[1]
    model.act.register_backward_hook(lambda *given: None)
    model(randoms((5, 4), 1))


def test_hooks_that_torch_deprecates_are_refused():
    """They get the gradients of some node; the error says which to use."""
    with pytest.raises(RankError, match="Call register_full_backward_hook"):
        run_ranks(old_hook, 2)
