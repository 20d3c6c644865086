"""`--from MODULE:CLASS`: what a dense class asks of the templates. Imports torch when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..project.layer import Layer
from ..proof.cases import load_class

TEMPLATE = "dense"
"""The template that renders from a reading, and from nothing else."""

_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Linear": ("linear", ()),
    "Embedding": ("embedding", ()),
    "Conv1d": ("conv", ("num_dims=1",)),
    "Conv2d": ("conv", ("num_dims=2",)),
    "Conv3d": ("conv", ("num_dims=3",)),
    "MultiheadAttention": ("attention", ()),
    "CrossEntropyLoss": ("cross_entropy", ()),
}
"""The classes of torch.nn that a template of their own exists for, and its options."""
_SPLITS = {
    ("linear", "weight=0"): "split=column",
    ("linear", "weight=1"): "split=row",
    ("embedding", "weight=0"): "split=vocabulary",
    ("embedding", "weight=1"): "split=dim",
}


@dataclass(frozen=True)
class Dense:
    """What was found of a dense class.

    Attributes:
        template: The template for it.
        settings: Options of that template, each `key=value`.
        reading: What was read of it, for the template `dense`.
        reason: Why that template.
    """

    template: str
    settings: tuple[str, ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def find_dense(target: str, shards: Sequence[str], settings: Sequence[str]) -> Dense:
    """What the class `target`, a `MODULE:CLASS`, asks for.

    Raises:
        UsageError: If it cannot be imported, read, built or divided as asked.
    """
    owner = load_class(target)
    family = _family(owner)
    if family:
        template, options = _FAMILIES[family]
        split = _split(template, shards)
        reason = f"{owner.__name__} is torch.nn.{family}"
        return Dense(template, (*options, *split, *settings), reason=reason)
    return _read(owner, target, shards, settings)


def found_again(
    recorded: Layer | None, shards: Sequence[str], settings: Sequence[str]
) -> Dense:
    """What a layer of the template `dense` was rendered from, read again where that is due.

    Raises:
        UsageError: If nothing says of which class, or as `find_dense`.
    """
    options = recorded.options if recorded and recorded.template == TEMPLATE else {}
    if not options.get("dense"):
        raise UsageError(
            f"the template '{TEMPLATE}' renders what was read of a class; name it with"
            " --from MODULE:CLASS"
        )
    if recorded and recorded.reading and not shards and not settings:
        return Dense(TEMPLATE, reading=recorded.reading)
    before = str(options.get("shards", "")).split()
    named = {setting.partition("=")[0] for setting in settings}
    kept = [
        f"{name}={options[name]}"
        for name in ("arguments", "inputs")
        if options.get(name) and name not in named
    ]
    return find_dense(str(options["dense"]), shards or before, [*kept, *settings])


def _read(
    owner: type, target: str, shards: Sequence[str], settings: Sequence[str]
) -> Dense:
    from ..dense.reading import read_dense

    given = dict(setting.partition("=")[::2] for setting in settings)
    reading = read_dense(
        owner,
        target.partition(":")[0],
        shards,
        given.get("arguments", ""),
        given.get("inputs", ""),
    )
    own = (f"dense={target}", f"shards={' '.join(shards)}")
    return Dense(TEMPLATE, (*own, *settings), reading, f"reads {target}")


def _family(owner: type) -> str:
    """The class of torch.nn that `owner` is but for its name; empty if it is none."""
    from torch import nn

    for base in owner.__mro__:
        name = base.__name__
        if name in _FAMILIES and base is getattr(nn, name):
            return name
        if set(vars(base)) - {"__module__", "__qualname__", "__doc__"} - _BOOKKEEPING:
            return ""
    return ""


_BOOKKEEPING = {"__annotations__", "__firstlineno__", "__static_attributes__"}
"""What Python puts into a class that adds nothing."""


def _split(template: str, shards: Sequence[str]) -> tuple[str, ...]:
    """The option that says what `--shard` says."""
    if not shards:
        return ()
    split = _SPLITS.get((template, " ".join(shards)))
    if split is None:
        raise UsageError(
            f"--shard {' '.join(shards)} is none of the ways in which the template"
            f" '{template}' divides; see: torchshard templates show {template}"
        )
    return (split,)
