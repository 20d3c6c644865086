"""Optimizers of other code on shards: each is tried once, beside the whole, before its first step.

An optimizer that works element by element is right on a shard as it stands. One that takes a norm,
a mean or a product of a matrix may be, where it asks the parameter or its gradient, and is not where
it asks its own state, which knows of no shards. Nobody can tell by looking at it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchshard.distributed import collectives
from torchshard.distributed.agreement import from_all_ranks
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import GroupError, TorchShardError
from torchshard.layout import balanced_ranges
from torchshard.owners import shard_owner_of
from torchshard.tensor import Sharding
from torchshard.tensor.gradient import ShardedGradient, known_as_gradient
from torchshard.tensor.parameter import ShardedParameter, known_as_shard

_tried: WeakSet[Optimizer] = WeakSet()
_alike: WeakKeyDictionary[Optimizer, set[str]] = WeakKeyDictionary()
"""What of an optimizer's state is made like its parameters, by name."""
_OURS_AND_TORCHS = ("torch.", "torchshard.")
_LARGEST_DIM = 256
_TRIALS = 4
_WEIGHT_SCALE = 0.01
_GRAD_SCALES = (1.0, 0.1, 0.01, 3.0, 0.1)
"""Small weights, for ratios that are clipped above; a momentum that comes to oppose gradients."""
_TOLERANCE = 1e-5
"""Of the largest change of an element, in float64."""


class _Trial(NamedTuple):
    """A tensor like one that the optimizer holds a shard of."""

    options: Mapping[str, Any]
    shape: tuple[int, ...]
    dim: int
    group: ShardGroup
    device: torch.device


def expect_right_on_shards(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a step, try an optimizer that is not torch's on a small divided tensor.

    Steps of it, with gradients of our own, on a whole tensor and on this rank's part of it: both
    must come to the same. Some milliseconds, once.

    Raises:
        GroupError: On every rank, if they do not.
    """
    is_known = type(optimizer).__module__.startswith(_OURS_AND_TORCHS)
    if torch.compiler.is_compiling() or is_known or optimizer in _tried:
        return
    trials = list(islice(_trials(optimizer), _TRIALS))
    if not trials:
        return
    _tried.add(optimizer)
    if _holds_more(optimizer):
        return
    group = trials[0].group
    _alike[optimizer] = set()
    for trial in trials:
        faults = from_all_ranks(_fault(optimizer, trial), group)
        if any(faults):
            raise GroupError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} was given"
                " parameters of which this rank holds a shard, and tried on one of"
                f" {trial.shape} {next(fault for fault in faults if fault)} Nothing has"
                " been changed yet. Use an optimizer that works element by element, such"
                " as SGD, Adam or AdamW, for shards."
            )


def keep_state_known(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a step, let state that was loaded or cut know what it is a part of, as in the trial."""
    keys = None if torch.compiler.is_compiling() else _alike.get(optimizer)
    if not keys:
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedParameter):
            for key in keys & state.keys():
                if type(state[key]) is Tensor:
                    state[key] = known_as_gradient(state[key], parameter.sharding)


def _trials(optimizer: Optimizer) -> Iterator[_Trial]:
    """Yield one trial for each group of parameters, number of dims and divided dim."""
    for options in optimizer.param_groups:
        seen = set()
        for tensor in options["params"]:
            place = shard_owner_of(tensor)
            if place is not None and not tensor.is_meta:
                spec = place[0].specs[place[1]]
                if (kind := (len(spec.shape), spec.sharded_dim)) not in seen:
                    seen.add(kind)
                    shape = tuple(min(size, _LARGEST_DIM) for size in spec.shape)
                    where = place[0].group, tensor.device
                    yield _Trial(options, shape, spec.sharded_dim, *where)


def _holds_more(optimizer: Optimizer) -> bool:
    """Return whether it holds tensors or an optimizer beside its groups and state.

    A twin of it would step those. An optimizer within is tried when it steps itself.
    """
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and any(
            isinstance(leaf, Tensor | nn.Module | Optimizer)
            for leaf in tree_leaves(value)
        ):
            return True
    return False


def _fault(optimizer: Optimizer, trial: _Trial) -> str:
    """Return what went wrong, or nothing."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> Tensor:
        x = torch.randn(trial.shape, generator=generator, dtype=torch.float64)
        return x.to(trial.device)

    start = numbers() * _WEIGHT_SCALE
    grads = [numbers() * scale for scale in _GRAD_SCALES]
    ranges = balanced_ranges(trial.shape[trial.dim], trial.group.size)

    def own(x: Tensor) -> Tensor:
        return collectives.own_shard(x, trial.dim, ranges, trial.group).clone()

    whole = nn.Parameter(start.clone())
    shard = known_as_shard(
        nn.Parameter(own(start)), Sharding(trial.dim, ranges, trial.group)
    )
    try:
        _step(optimizer, trial.options, whole, grads)
    except Exception as error:
        warnings.warn(
            f"{type(optimizer).__name__} could not be tried on divided parameters:"
            f" {error}",
            stacklevel=2,
        )
        return ""
    try:
        state = _step(optimizer, trial.options, shard, [own(grad) for grad in grads])
    except TorchShardError as error:
        return f"does what has no rule for shards: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}."
    is_alike = {key for key, x in state.items() if isinstance(x, ShardedGradient)}
    _alike[optimizer].update(is_alike)
    change = (whole.detach() - start).abs().max()
    difference = (own(whole.detach()) - shard.to_local().detach()).abs()
    is_right = not difference.numel() or difference.max() <= _TOLERANCE * change
    return "" if is_right else "gave other numbers than for the whole."


def _step(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: nn.Parameter,
    grads: list[Tensor],
) -> dict[str, Any]:
    """Have a twin of the optimizer step the parameter with each gradient; return its state."""
    twin = _twin(optimizer, options, parameter)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for grad in grads:
            parameter.grad = grad.clone()
            twin.step()
    return dict(twin.state[parameter])


def _twin(
    optimizer: Optimizer, options: Mapping[str, Any], parameter: nn.Parameter
) -> Optimizer:
    """Return an optimizer of the same class and attributes, of one parameter, without state."""
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        is_bound = getattr(value, "__self__", None) is optimizer or name == "step"
        if not is_bound:  # as a scheduler binds `step`
            twin.__dict__[name] = OrderedDict() if name.endswith("_hooks") else value
    twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": [parameter]}]
    return twin
