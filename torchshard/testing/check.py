"""check_layer: prove that a sharded layer equals its dense twin, on the ranks that run it.

Everything is compared with dense torch in float64: output, input gradients, parameter
gradients in full layout, a step, state both ways. Exactly, where values only move.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchshard.distributed import collectives
from torchshard.distributed.groups import ShardGroup, model_group
from torchshard.errors import CheckError
from torchshard.layer import ParallelLayer
from torchshard.state import collect_state_dict, gathered, sharded_entries
from torchshard.tensor import whole
from torchshard.testing.case import Case, Feed
from torchshard.testing.ranks import tell

TOLERANCE = 1e-10
"""Largest difference between float64 results that are summed in different orders."""
_BFLOAT16_TOLERANCE = 0.1
"""bfloat16 keeps 8 bits; sums of the test layers' sizes differ by a few units of the last."""


@dataclass(frozen=True)
class Checked:
    """One check that passed: its name, and the worst difference that it met."""

    name: str
    difference: float


@dataclass(frozen=True)
class Step:
    """Where a rank stands: in a check, or behind one that passed.

    Attributes:
        case: The case's place in the list, from 1.
        check: Name of the check.
        difference: The worst difference that it met; None before it ran.
    """

    case: int
    check: str
    difference: float | None = None


def num_steps(num_cases: int, *, compiled: bool = False) -> int:
    """Return how many checks a rank makes of that many cases."""
    return num_cases * (len(_CHECKS) + compiled)


def check_layer(case: Case, *, compiled: bool = False) -> list[Checked]:
    """Check `case` on the model group of this process. Every rank calls it.

    Args:
        case: The layer, its dense twin and what to feed them.
        compiled: Whether to check `torch.compile` as well, which takes seconds.

    Returns:
        The checks, in order. The first that fails raises.

    Raises:
        CheckError: If the layer differs from its twin; the text names the case, the rank,
            the check, and the worst difference.
    """
    return _checked(case, 1, compiled)


def check_cases(cases: Sequence[Case], compiled: bool = False) -> list[list[Checked]]:
    """Check each case in turn, as `check_layer` does. A body for `run_ranks`.

    Tells the launch of each check, before and after, as a `Step`.
    """
    return [_checked(case, number, compiled) for number, case in enumerate(cases, 1)]


def _checked(case: Case, number: int, compiled: bool) -> list[Checked]:
    results = []
    for check in [*_CHECKS, _compile] if compiled else _CHECKS:
        name = check.__name__.removeprefix("_").replace("_", " ")
        tell(Step(number, name))
        try:
            results.append(Checked(name, check(case)))
        except CheckError as error:
            group = model_group()
            place = f"rank {group.rank} of {group.size}"
            raise CheckError(f"{case}, {place}, {name}: {error}") from None
        tell(Step(number, name, results[-1].difference))
    return results


def _initial_values(case: Case) -> float:
    """The same seed gives the dense layer's values and leaves the same random stream."""
    torch.manual_seed(case.seed_for(11))
    dense = case.build_dense()
    after = torch.get_rng_state()
    torch.manual_seed(case.seed_for(11))
    layer = case.build()
    if not torch.equal(after, torch.get_rng_state()):
        raise CheckError(
            "the random stream does not stand where the dense layer leaves it"
        )
    return _same_state(layer, dense, tolerance=0.0)


def _whole_parameters_alike(case: Case) -> float:
    """Parameters that are not sharded are equal on ranks with different seeds."""
    group = model_group()
    torch.manual_seed(case.seed_for(100 + group.rank))
    worst = 0.0
    for key, tensor in _whole_tensors(case.build()):
        first = collectives.broadcast(tensor.detach(), group)
        worst = max(worst, _same(f"{key} against rank 0's", tensor, first, 0.0))
    return worst


def _whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what the sharded layers hold whole, declared or not."""
    for layer in _layers(model):
        sharded = {key for key, _, _ in sharded_entries(layer)}
        for name, tensor in layer.state_dict().items():
            if name not in sharded:
                yield name, tensor


def _state(case: Case) -> float:
    """Whole state loads, collects and loads again; local state does too."""
    layer, dense = _twins(case)
    worst = _same_state(layer, dense, tolerance=0.0)
    again = case.build().double()
    again.load_state_dict(layer.state_dict())
    worst = max(worst, _same_state(again, dense, tolerance=0.0))
    dense.load_state_dict(collect_state_dict(layer))
    return worst


def _meta_device(case: Case) -> float:
    """Built on the meta device and reset, the layer has the values of a usual one, reset."""
    if not isinstance(case.build(), ParallelLayer) or not _takes_device(case):
        return 0.0
    late = cast(ParallelLayer, case.build(device="meta").to_empty(device="cpu"))
    torch.manual_seed(case.seed_for(12))
    late.reset_parameters()
    usual = cast(ParallelLayer, case.build())
    torch.manual_seed(case.seed_for(12))
    usual.reset_parameters()
    return _same_tensors(dict(late.state_dict()), dict(usual.state_dict()), 0.0)


def _takes_device(case: Case) -> bool:
    try:
        case.build(device="cpu")
    except TypeError:
        return False
    return True


def _output_and_gradients(case: Case) -> float:
    """Output, input gradients and every parameter gradient are the dense layer's."""
    layer, dense = _twins(case)
    return _trained_alike(case, layer, dense)


def _trained_alike(case: Case, layer: nn.Module, dense: nn.Module) -> float:
    feed, dense_feed = case.draw(torch.float64), case.draw(torch.float64)
    before = [tensor.detach().clone() for tensor in feed.tensors]
    output, dense_output = feed.into_sharded(layer), dense_feed.into(dense)
    worst = _same_outputs(output, dense_output)
    _backward(case, output)
    _backward(case, dense_output)
    worst = max(worst, _same_input_grads(feed, dense_feed))
    for tensor, value in zip(feed.tensors, before, strict=True):
        _same("the caller's input after the call", tensor, value, 0.0)
    return max(worst, _same_parameter_grads(layer, dense))


def _backward(case: Case, output: Any) -> None:
    """Send a fixed random cotangent back through every output."""
    tensors = [y for y in _outputs(output) if y.requires_grad]
    if not tensors:
        return
    generator = torch.Generator().manual_seed(case.seed_for(21))
    grads = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        for y in tensors
    ]
    torch.autograd.backward(tensors, grads)


def _outputs(output: Any) -> list[Tensor]:
    """Return the tensors of an output, whole: of tuples, lists and dicts too."""
    return [whole(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _same_outputs(output: Any, dense_output: Any) -> float:
    mine, theirs = _outputs(output), _outputs(dense_output)
    if not theirs:
        raise CheckError(
            "the dense layer returns no tensor, so there is nothing to equal"
        )
    if len(mine) != len(theirs):
        raise CheckError(
            f"it returns {len(mine)} tensors, the dense layer {len(theirs)}"
        )
    pairs = zip(mine, theirs, strict=True)
    return max(
        (
            _same(f"output {i}", y, dense_y, TOLERANCE)
            for i, (y, dense_y) in enumerate(pairs)
        ),
        default=0.0,
    )


def _same_input_grads(feed: Feed, dense_feed: Feed) -> float:
    pairs = zip(feed.leaves, dense_feed.leaves, strict=True)
    return max(
        (
            _same(f"gradient of input {i}", x.grad, dense_x.grad, TOLERANCE)
            for i, (x, dense_x) in enumerate(pairs)
        ),
        default=0.0,
    )


def _same_parameter_grads(layer: nn.Module, dense: nn.Module) -> float:
    expected = dict(dense.named_parameters(remove_duplicate=False))
    worst = 0.0
    for key, grad in _whole_grads(layer):
        if key not in expected:
            raise CheckError(f"the dense layer has no parameter {key}")
        worst = max(
            worst, _same(f"gradient of {key}", grad, expected[key].grad, TOLERANCE)
        )
    return worst


def _whole_grads(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each parameter's gradient in full layout. Collective, so alike on all ranks."""
    owners = {key: (layer, name) for key, layer, name in sharded_entries(model)}
    named = dict(model.named_parameters(remove_duplicate=False))
    by_group: dict[ShardGroup, list[str]] = {}
    for key in named:
        group = owners[key][0].group if key in owners else model_group()
        by_group.setdefault(group, []).append(key)
    trained: set[str] = set()
    for group, keys in by_group.items():
        trained |= _trained({key: named[key] for key in keys}, group)
    for key, parameter in named.items():
        if key not in trained:
            yield key, None
        elif key not in owners:
            yield key, parameter.grad
        else:
            yield key, gathered(_own_grad(parameter), *owners[key])


def _trained(parameters: Mapping[str, Tensor], group: ShardGroup) -> set[str]:
    """Return the parameters that have a gradient: each on all ranks or on none.

    An optimizer skips what has none, so that such a rank's replica, or shard, would go
    another way under weight decay and momentum. An empty shard has nothing to lose.
    """
    own = list(parameters.values())
    has = [one.grad is not None for one in own]
    good = [one.grad is not None or not one.numel() for one in own]
    flags = collectives.stack(torch.tensor([has, good], dtype=torch.int32), group)
    have, may = (flags[:, i].T.tolist() for i in range(2))
    for key, ranks_have, ranks_may in zip(parameters, have, may, strict=True):
        if any(ranks_have) and not all(ranks_may):
            without = [str(rank) for rank, has_it in enumerate(ranks_may) if not has_it]
            raise CheckError(
                f"gradient of {key} is missing on rank {', '.join(without)}, while other"
                " ranks have it"
            )
    return {
        key for key, ranks_have in zip(parameters, have, strict=True) if any(ranks_have)
    }


def _own_grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return _dense_grad(parameter.grad)


def _dense_grad(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _step(case: Case) -> float:
    """Two steps of SGD leave the state of the dense layer."""
    layer, dense = _twins(case)
    worst = 0.0
    for model, is_sharded in ((layer, True), (dense, False)):
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
        for _ in range(2):
            feed = case.draw(torch.float64)
            output = feed.into_sharded(model) if is_sharded else feed.into(model)
            model.zero_grad()
            _backward(case, output)
            if optimizer is not None:
                optimizer.step()
    return max(worst, _same_state(layer, dense, TOLERANCE))


def _expanded_gradient(case: Case) -> float:
    """A gradient of stride 0, as `output.sum().backward()` sends, gives the dense gradients."""
    layer, dense = _twins(case)
    feed, dense_feed = case.draw(torch.float64), case.draw(torch.float64)
    for output in (feed.into_sharded(layer), dense_feed.into(dense)):
        trained = [y.sum() for y in _outputs(output) if y.requires_grad]
        if trained:
            torch.autograd.backward(trained)
    worst = _same_input_grads(feed, dense_feed)
    return max(worst, _same_parameter_grads(layer, dense))


def _frozen_parameters(case: Case) -> float:
    """Frozen parameters get no gradient, and the inputs still get theirs."""
    layer, dense = _twins(case)
    layer.requires_grad_(False)
    dense.requires_grad_(False)
    worst = _trained_alike(case, layer, dense)
    if any(parameter.grad is not None for parameter in layer.parameters()):
        raise CheckError("a frozen parameter has a gradient")
    return worst


def _copies(case: Case) -> float:
    """A deep copy and a pickled layer compute, train and collect like the layer itself."""
    worst = 0.0
    for duplicate in (copy.deepcopy, _pickled):
        layer, dense = _twins(case)
        copied = duplicate(layer)
        worst = max(worst, _trained_alike(case, copied, dense))
        worst = max(worst, _same_state(copied, dense, TOLERANCE))
    return worst


def _pickled(layer: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    return cast(nn.Module, torch.load(stream, weights_only=False))


def _autocast(case: Case) -> float:
    """Under bfloat16 autocast the output has the dense layer's dtype and is close to it."""
    layer, dense = _twins(case, torch.float32)
    feed, dense_feed = case.draw(torch.float32), case.draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mine = _outputs(feed.into_sharded(layer))
        theirs = _outputs(dense_feed.into(dense))
    worst = 0.0
    for y, dense_y in zip(mine, theirs, strict=True):
        if y.dtype != dense_y.dtype:
            raise CheckError(
                f"the output is {y.dtype}, the dense layer's {dense_y.dtype}"
            )
        worst = max(worst, _same("output", y, dense_y, _BFLOAT16_TOLERANCE))
    return worst


def _number_of_collectives(case: Case) -> float:
    """Forward and backward take as many collectives as the case says."""
    if case.collectives is None or model_group().size == 1:
        return 0.0
    layer, _ = _twins(case)
    feed = case.draw(torch.float64)
    with _Counting() as forward:
        output = feed.into_sharded(layer)
    leaves = [y for y in tree_leaves(output) if isinstance(y, Tensor)]
    local = [_local(y) for y in leaves if y.requires_grad]
    with _Counting() as backward:
        if local:
            torch.autograd.backward(local, [torch.ones_like(y) for y in local])
    # What backward owes to the case's own scattering is none of the layer's.
    in_backward = backward.number - _scattered_inputs(case)
    counted, expected = (forward.number, in_backward), case.collectives
    if counted != tuple(expected):
        raise CheckError(
            f"{counted[0]} collectives forward and {counted[1]} backward, expected"
            f" {expected[0]} and {expected[1]}"
        )
    return 0.0


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, as torch's CommDebugMode, whose import takes as long as torch's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.number += "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def _scattered_inputs(case: Case) -> int:
    """Return how many all-gathers backward owes to the case's own scattering of inputs."""
    values = [*case.inputs, *case.keywords.values()]
    return sum(getattr(value, "shard", None) is not None for value in values)


def _local(y: Tensor) -> Tensor:
    from torchshard.tensor import ShardedTensor

    return y.to_local() if isinstance(y, ShardedTensor) else y


def _compile(case: Case) -> float:
    """`torch.compile(fullgraph=True)` gives the output and gradients of the dense layer."""
    layer, dense = _twins(case)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    feed, dense_feed = case.draw(torch.float64), case.draw(torch.float64)
    with _any_graph_input():
        output = feed.into_sharded(compiled)
    dense_output = dense_feed.into(dense)
    worst = _same_outputs(output, dense_output)
    _backward(case, output)
    _backward(case, dense_output)
    worst = max(worst, _same_input_grads(feed, dense_feed))
    return max(worst, _same_parameter_grads(layer, dense))


def _any_graph_input() -> AbstractContextManager[Any]:
    """Let a compiled graph take a ShardedTensor as its input.

    On a graph's first run torch 2.13 looks for custom operators that alias their inputs, and
    refuses every tensor subclass while it does.
    """
    config = torch._functorch.config
    if "check_custom_op_aliasing" not in config.get_config_copy():
        return nullcontext()
    return cast(
        AbstractContextManager[Any], config.patch(check_custom_op_aliasing=False)
    )


_CHECKS: list[Callable[[Case], float]] = [
    _initial_values,
    _whole_parameters_alike,
    _state,
    _meta_device,
    _output_and_gradients,
    _step,
    _expanded_gradient,
    _frozen_parameters,
    _copies,
    _autocast,
    _number_of_collectives,
]


def _twins(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module]:
    """Return the sharded layer and its dense twin with the same weights."""
    torch.manual_seed(case.seed_for(13))
    dense = case.build_dense().to(dtype)
    torch.manual_seed(case.seed_for(14))
    layer = case.build().to(dtype)
    layer.load_state_dict(dense.state_dict())
    return layer, dense


def _layers(model: nn.Module) -> Iterator[ParallelLayer]:
    return (module for module in model.modules() if isinstance(module, ParallelLayer))


def _same_state(layer: nn.Module, dense: nn.Module, tolerance: float) -> float:
    return _same_tensors(collect_state_dict(layer), dict(dense.state_dict()), tolerance)


def _same_tensors(
    mine: dict[str, Any], theirs: dict[str, Any], tolerance: float
) -> float:
    if mine.keys() != theirs.keys():
        raise CheckError(
            f"its state has the keys {sorted(mine)}, the dense layer's {sorted(theirs)}"
        )
    return max(
        (_same(key, value, theirs[key], tolerance) for key, value in mine.items()),
        default=0.0,
    )


def _same(
    what: str, mine: Tensor | None, theirs: Tensor | None, tolerance: float
) -> float:
    """Return the largest difference of the two, or raise where it is above `tolerance`."""
    if mine is None or theirs is None:
        if mine is not theirs:
            missing = "the sharded layer" if mine is None else "the dense layer"
            raise CheckError(f"{what} is missing on {missing}")
        return 0.0
    mine, theirs = _dense_grad(mine.detach()), _dense_grad(theirs.detach())
    if mine.shape != theirs.shape:
        raise CheckError(
            f"{what} has shape {tuple(mine.shape)}, the dense layer's"
            f" {tuple(theirs.shape)}"
        )
    both_nan = mine.isnan() & theirs.isnan()
    wide = torch.promote_types(mine.dtype, torch.float64)
    gap = (mine.to(wide) - theirs.to(wide)).abs()
    gap = torch.where(both_nan | (mine == theirs), 0.0, gap)
    worst = gap.max().item() if gap.numel() else 0.0
    if not worst <= tolerance:
        place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
        raise CheckError(
            f"{what} differs by {worst:.3g} at {place}, where the dense layer has"
            f" {theirs[place].item():.6g}; allowed is {tolerance:g}"
        )
    return worst
