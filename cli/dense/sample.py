"""Arguments and inputs with which a dense class runs, found by trying small ones.

The sizes are uneven and all different where the class allows it, so that a dim that is taken
for another does not fit.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchshard.testing import Floats, Integers

from ..errors import UsageError

_POOLS = ((5, 7, 9, 11, 13), (6, 10, 14, 18), (8, 12, 16, 20), (8, 8, 8, 8))
"""Sizes for the arguments in turn; the later ones divide by heads, groups and reductions."""
_COUNTS = ("layer", "depth", "reduction", "ratio", "factor", "branch", "rank")
_UNITS = ("head", "group")
_IDS = ("id", "index", "idx", "token", "label", "target", "word", "position", "code")
_LARGEST_DEFAULT = 64
_SEARCH_S = 20.0


@dataclass(frozen=True)
class Sample:
    """One way to build the class and to call it.

    Attributes:
        args: Positional arguments of the constructor.
        options: Its keyword arguments.
        inputs: What `forward` takes: `Floats`, `Integers`, or values.
    """

    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, ...] = ()

    def build(self, owner: type[nn.Module]) -> nn.Module:
        """A new module, drawn from a fixed seed; the caller's random stream is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return owner(*self.args, **self.options)

    def draw(self) -> list[Any]:
        """The inputs, drawn."""
        generator = torch.Generator().manual_seed(4)
        return [
            value.draw(generator, torch.float32)
            if isinstance(value, Floats | Integers)
            else value
            for value in self.inputs
        ]

    @property
    def arguments(self) -> str:
        """The constructor's arguments as they are written in a call."""
        named = [f"{name}={value!r}" for name, value in self.options.items()]
        return ", ".join([*map(repr, self.args), *named])


def parsed_arguments(text: str) -> Sample:
    """The sample whose constructor's arguments are `text`, such as `5, 7, bias=False`.

    Raises:
        UsageError: If they are no literals.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        options = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UsageError(
            f"arguments={text} are not literals as in a call, such as 5, 7, bias=False"
        ) from error
    return Sample(args, options)


def parsed_inputs(text: str) -> tuple[Any, ...]:
    """The inputs that `text` names: `Floats((4, 5)), Integers(9, (2, 3)), None`.

    Raises:
        UsageError: If it is anything else.
    """
    known = {"Floats": Floats, "Integers": Integers}
    try:
        nodes = ast.parse(f"f({text})", mode="eval").body.args  # type: ignore[attr-defined]
        return tuple(
            known[ast.unparse(node.func)](*map(ast.literal_eval, node.args))
            if isinstance(node, ast.Call)
            else ast.literal_eval(node)
            for node in nodes
        )
    except (SyntaxError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"inputs={text} is not a list such as Floats((4, 5)), Integers(9, (2, 3)), True"
        ) from error


def find_samples(owner: type[nn.Module], arguments: str, inputs: str) -> list[Sample]:
    """Samples of `owner`: one that runs, and others like it with one thing changed.

    Args:
        owner: The class.
        arguments: The constructor's arguments, if they were given.
        inputs: The inputs, likewise.

    Raises:
        UsageError: If none is found; the text says what to give.
    """
    given = [parsed_arguments(arguments)] if arguments else list(_guesses(owner))
    problem = "its constructor takes arguments of kinds that cannot be guessed"
    for sample in given:
        try:
            module = sample.build(owner)
        except Exception as error:  # a constructor can run anything
            problem = f"{owner.__name__}({sample.arguments}) failed: {_said(error)}"
            continue
        _expect_eager(module)
        found = _with_inputs(owner, module, sample, inputs)
        if found:
            return [found[0], *_variants(owner, found)]
        problem = f"{owner.__name__}({sample.arguments}) took none of the inputs that were tried"
    hint = "--set inputs='Floats((4, 5))'" if "inputs" in problem else ""
    raise UsageError(
        f"{problem}. Say how it is built and called: --set arguments='5, 7'"
        f"{' ' if hint else ''}{hint}"
    )


def _expect_eager(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UsageError(
                f"{name} belongs to a lazy layer: its shape is not known before that has"
                " run; use the class that it becomes, and say its sizes"
            )


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _guesses(owner: type[nn.Module]) -> Iterator[Sample]:
    """Arguments to try, the most telling sizes first."""
    takes_arguments = owner.__init__ is not nn.Module.__init__
    for pool in _POOLS:
        sizes = iter(pool * 4)
        args: list[Any] = []
        options: dict[str, Any] = {}
        for parameter in inspect.signature(owner).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL and takes_arguments:
                args += pool[:3]
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            value = _guess(parameter, sizes)
            if value is parameter.default:
                continue
            is_positional = parameter.kind is not parameter.KEYWORD_ONLY
            if is_positional and parameter.default is parameter.empty:
                args.append(value)
            else:
                options[parameter.name] = value
        yield Sample(tuple(args), options)


def _guess(parameter: inspect.Parameter, sizes: Iterator[int]) -> Any:
    """A small value for an argument; its own default where that will do."""
    name, default = parameter.name.lower(), parameter.default
    words = str(parameter.annotation)
    if default is not parameter.empty:
        if isinstance(default, float) and "drop" in name:
            return 0.0 if default else default
        is_size = isinstance(default, int) and not isinstance(default, bool)
        return next(sizes) if is_size and default > _LARGEST_DEFAULT else default
    if "tuple" in words.lower() or "Sequence" in words or "list" in words.lower():
        return (next(sizes), next(sizes)) if "int" in words else (0.5, 0.25)
    if "float" in words or any(word in name for word in ("eps", "scale", "temper")):
        return 0.0 if "drop" in name else 0.5
    if "bool" in words:
        return True
    if "kernel" in name:
        return 3
    if "window" in name:
        return 3
    if any(word in name for word in _UNITS):
        return 4
    return 2 if any(word in name for word in _COUNTS) else next(sizes)


def _with_inputs(
    owner: type[nn.Module], module: nn.Module, sample: Sample, inputs: str
) -> list[Sample]:
    """`sample` with inputs that run: those given, or one of each number of dims."""
    if inputs:
        chosen = replace(sample, inputs=parsed_inputs(inputs))
        problem = why_not(owner, chosen)
        if problem:
            raise UsageError(
                f"{owner.__name__}({sample.arguments}) of {inputs}: {problem}"
            )
        return [chosen]
    sizes = _sizes(module, sample)
    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    end_s = time.monotonic() + _SEARCH_S
    found: dict[tuple[int, ...], Sample] = {}
    for values in itertools.product(*(_candidates(one, sizes) for one in required)):
        shape = tuple(len(value.shape) for value in values)
        if shape in found or time.monotonic() > end_s:
            continue
        chosen = replace(sample, inputs=values)
        if not why_not(owner, chosen):
            found[shape] = chosen
            if len(found) == 2 or len(required) > 1:
                break
    return list(found.values())


def _sizes(module: nn.Module, sample: Sample) -> list[int]:
    """Sizes that the module knows: those it was given, then those of its parameters."""
    given = [*sample.args, *sample.options.values()]
    flat = [
        size
        for value in given
        for size in (value if isinstance(value, tuple) else (value,))
    ]
    held = [size for tensor in _tensors(module) for size in reversed(tensor.shape)]
    sizes = [size for size in [*flat, *held] if type(size) is int and 1 < size <= 4096]
    return list(dict.fromkeys(sizes))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _candidates(parameter: inspect.Parameter, sizes: Sequence[int]) -> list[Any]:
    floats = [
        Floats(shape)
        for make in (_matrix, _sequence, _image, _signal)
        for shape in (make(size) for size in sizes or (5,))
    ]
    floats += [Floats((2, size, length, length)) for size in sizes for length in sizes]
    integers = [
        Integers(high, shape)
        for shape in ((2, 3), (4,))
        for high in sorted(sizes or (5,), reverse=True)
    ]
    takes_ids = any(word in parameter.name.lower() for word in _IDS)
    return [*integers, *floats] if takes_ids else [*floats, *integers]


def _matrix(size: int) -> tuple[int, ...]:
    return (4, size)


def _sequence(size: int) -> tuple[int, ...]:
    return (4, 3, size)


def _image(size: int) -> tuple[int, ...]:
    return (4, size, 5, 6)


def _signal(size: int) -> tuple[int, ...]:
    return (4, size, 6)


def why_not(owner: type[nn.Module], sample: Sample) -> str:
    """Why `sample` does not do, in words; empty if it runs and reaches every parameter."""
    try:
        module, inputs = sample.build(owner), sample.draw()
        for value, spec in zip(inputs, sample.inputs, strict=True):
            if isinstance(spec, Integers) and value.numel():
                value.view(-1)[0] = spec.high - 1
        outputs = tensors_in(module(*inputs))
        losses = [output.float().sum() for output in outputs if output.requires_grad]
        if losses:
            torch.autograd.backward(torch.stack(losses).sum())
    except Exception as error:  # a forward can run anything
        return _said(error)
    trained = [one for one in module.parameters() if one.requires_grad]
    is_reached = not trained or any(one.grad is not None for one in trained)
    return "" if outputs and is_reached else "no output depends on a parameter"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an output, however it is nested."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _variants(owner: type[nn.Module], found: Sequence[Sample]) -> Iterator[Sample]:
    """Samples that differ from the first in one thing: other inputs, a switch turned."""
    yield from found[1:]
    first = found[0]
    parameters = inspect.signature(owner).parameters
    switches = [
        name for name, one in parameters.items() if isinstance(one.default, bool)
    ]
    for name in switches[:3]:
        turned = not first.options.get(name, parameters[name].default)
        sample = replace(first, options={**first.options, name: turned})
        if not why_not(owner, sample):
            yield sample
