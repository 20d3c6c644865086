"""`--from MODULE:CLASS`: what a dense class asks of the templates. Imports torch when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..project.layer import Layer
from ..proof.cases import load_class
from ..template.catalogue import Catalogue
from ..template.template import Template

TEMPLATE = "dense"
"""The template that renders from a reading, and from nothing else."""


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


def find_dense(
    target: str, shards: Sequence[str], settings: Sequence[str], templates: Catalogue
) -> Dense:
    """What the class `target`, a `MODULE:CLASS`, asks for.

    Raises:
        UsageError: If it cannot be imported, read, built or divided as asked.
    """
    owner = load_class(target)
    family = _family(owner)
    if family:
        template, options = _template_of(family, shards, templates)
        reason = f"{owner.__name__} is torch.nn.{family.__name__}"
        return Dense(template, (*options, *settings), reason=reason)
    return _read(owner, target, shards, settings)


def _template_of(
    family: type, shards: Sequence[str], templates: Catalogue
) -> tuple[str, list[str]]:
    """The template of a class of torch.nn, and the options with which it is of that class.

    What `auto` reads in a class's name is read in that of the finished layer.
    """
    name = f"Parallel{family.__name__}"
    template = templates.infer(name)
    options = template.options.values()
    settings = [
        f"{one.name}={one.named_in(name)}" for one in options if one.default == "auto"
    ]
    return template.name, settings + _split(family, shards, template)


def _split(family: type, shards: Sequence[str], template: Template) -> list[str]:
    """The option that says what `--shard` says."""
    from ..dense.reading import read_split

    if not shards:
        return []
    split = read_split(family, shards)
    option = template.options.get("split")
    for choice in option.choices if option else ():
        if str(choice) in split:
            return [f"split={choice}"]
    raise UsageError(
        f"--shard {' '.join(shards)} is none of the ways in which the template"
        f" '{template.name}' divides; see: torchshard templates show {template.name}"
    )


def found_again(
    recorded: Layer | None,
    shards: Sequence[str],
    settings: Sequence[str],
    templates: Catalogue,
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
    target = str(options["dense"])
    return find_dense(target, shards or before, [*kept, *settings], templates)


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


def _family(owner: type) -> type | None:
    """The class of torch.nn that `owner` is but for its name, if there is a finished layer."""
    from torch import nn

    import layer_zoo

    for base in owner.__mro__:
        name = base.__name__
        is_torchs = base is getattr(nn, name, None)
        if is_torchs and f"Parallel{name}" in layer_zoo.__all__:
            return base
        if set(vars(base)) - {"__module__", "__qualname__", "__doc__"} - _BOOKKEEPING:
            return None
    return None


_BOOKKEEPING = {"__annotations__", "__firstlineno__", "__static_attributes__"}
"""What Python puts into a class that adds nothing."""
