"""What a person should know of a generated layer, and what is left to do, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .choice import Chosen
from .sample import Sample


def remarks(
    sample: Sample,
    module: nn.Module,
    chosen: Chosen | None,
    problem: str,
) -> list[str]:
    """Sentences, each on one thing; none if the rule covers all of the layer."""
    if chosen is None:
        return [f"write dense_forward: {problem}"]
    return [
        *_undivided(module, chosen),
        *_overridden(type(module)),
        *_dropout(module),
        *_output(module(*sample.draw())),
    ]


def _undivided(module: nn.Module, chosen: Chosen) -> Iterator[str]:
    divided = chosen.division
    if not divided.modules and not divided.parameters:
        yield "nothing is divided: no division of its parameters could be computed with"
    for path, part in module.named_modules():
        if any(f"{path}.".startswith(f"{one}.") for one in divided.modules):
            continue
        own = [name for name, _ in part.named_parameters(recurse=False)]
        whole = [name for name in own if path or name not in divided.parameters]
        if whole:
            names = ", ".join(f"{path}.{name}".lstrip(".") for name in whole)
            kind = f" ({type(part).__name__})" if path else ""
            reasons = [chosen.reasons.get(path or name) for name in whole]
            why = next(
                (f"; it cannot be divided: {reason}" for reason in reasons if reason),
                "",
            )
            yield f"{names}: whole on every rank{kind}{why}"


_NOT_CARRIED = (
    "train",
    "state_dict",
    "load_state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_apply",
    "__call__",
)


def _overridden(owner: type[nn.Module]) -> Iterator[str]:
    for name in _NOT_CARRIED:
        if getattr(owner, name) is not getattr(nn.Module, name):
            yield f"{owner.__name__}.{name} is not carried over; write it again if it matters"


def _dropout(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p and part.training:
            yield (
                f"{path} drops with p={part.p}, which no argument turns off: the cases of the"
                " test compare different random masks; add such an argument"
            )


def _output(output: Any) -> Iterator[str]:
    """What the test does not compare."""
    values = output if isinstance(output, tuple) else (output,)
    others = {type(value).__name__ for value in values if not isinstance(value, Tensor)}
    for kind in sorted(others - {"NoneType"}):
        yield (
            f"forward returns a {kind}, of which the test compares nothing: it compares"
            " tensors and tuples of them"
        )
