"""What the generated constructor takes over from the dense module, and what it declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from . import text
from .choice import Chosen
from .constructor import Constructor
from .sample import Sample
from .source import Method


def divided(chosen: Chosen | None) -> str:
    """The call that divides the layers of torch.nn inside."""
    if chosen is None or not chosen.division.modules:
        return ""
    plan = [f'"{path}": "{split}"' for path, split in chosen.division.modules.items()]
    line = f"ts.parallelize(dense, {{{', '.join(plan)}}}, group=self.group)"
    if len(line) + 8 <= text.WIDTH:
        return f"        {line}"
    middle = f"            dense, {{{', '.join(plan)}}}, group=self.group"
    if len(middle) <= text.WIDTH:
        return f"        ts.parallelize(\n{middle}\n        )"
    rows = "".join(f"                {one},\n" for one in plan)
    return (
        "        ts.parallelize(\n            dense,\n            {\n"
        f"{rows}            }},\n            group=self.group,\n        )"
    )


def axes(shards: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each axis once, with a parameter that tells its size; one that is always there."""
    names = list(dict.fromkeys(one["axis"] for one in shards))
    for name in names:
        holders = [one for one in shards if one["axis"] == name]
        holder = min(holders, key=lambda one: one["is_optional"])
        yield {"name": name, "of": holder["name"], "dim": holder["dim"]}


def first_dims(module: nn.Module) -> dict[str, int]:
    """For a layer without a forward yet: dim 0 of every parameter of its own."""
    named = module.named_parameters(recurse=False)
    return {name: 0 for name, parameter in named if parameter.dim()}


def shard(
    name: str,
    dim: int,
    modules: Sequence[nn.Module],
    constructor: Constructor,
    sample: Sample,
) -> dict[str, Any]:
    """What the template needs to declare the parameter `name`, divided along `dim`."""
    tensors = [getattr(module, name, None) for module in modules]
    size = tensors[0].shape[dim] if tensors[0] is not None else 0
    return {
        "name": name,
        "dim": dim,
        "axis": constructor.name_of(size, sample) or f"{name}_{dim}",
        "is_optional": any(tensor is None for tensor in tensors),
        "is_frozen": any(one is not None and not one.requires_grad for one in tensors),
    }


def _taken_over(name: str) -> str:
    if name.isidentifier():
        return f"self.{name} = dense.{name}"
    return f'self.add_module("{name}", dense.get_submodule("{name}"))'


def attributes(
    modules: Sequence[nn.Module], methods: Sequence[Method], shards: Iterable[str]
) -> list[str]:
    """The lines that take over what the dense module holds, apart from the shards."""
    module = modules[0]
    lines = [_taken_over(name) for name in module._modules]
    whole = [name for name in module._parameters if name not in shards]
    lines += [f'self.adopt("{name}", dense.{name})' for name in whole]
    for name in module._buffers:
        is_kept = name not in module._non_persistent_buffers_set
        options = "" if is_kept else ", persistent=False"
        lines.append(f'self.register_buffer("{name}", dense.{name}{options})')
    held = {*module._modules, *module._parameters, *module._buffers}
    reads = {name for method in methods for name in method.own_reads}
    carried = {method.name for method in methods}
    for name in sorted(reads - held - carried):
        is_ours = hasattr(nn.Module, name) or name in ("training", "forward")
        if hasattr(module, name) and not is_ours:
            lines.append(f"self.{name} = dense.{name}")
    return lines


def held(
    module: nn.Module, chosen: Chosen | None, parameters: Mapping[str, int]
) -> list[str]:
    """What each rank holds of every parameter, a line to each."""
    named = dict(module.named_parameters())
    width = max(map(len, named), default=0)
    return [
        f"{name:{width}}  {_how(name, parameter, chosen, parameters)}"
        for name, parameter in named.items()
    ]


def _how(
    name: str,
    parameter: nn.Parameter,
    chosen: Chosen | None,
    parameters: Mapping[str, int],
) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    if name in parameters:
        is_gathered = chosen is not None and name in chosen.outcome.gathered
        gathered = ", gathered where it is used" if is_gathered else ""
        return f"its part of dim {parameters[name]}{gathered}{frozen}"
    for path, split in chosen.division.modules.items() if chosen else ():
        if name.startswith(f"{path}."):
            return f"its part, in a layer divided by {split}{frozen}"
    return f"whole{frozen}"


def typical(shards: Sequence[Mapping[str, Any]]) -> str:
    """The parameter whose device and dtype the others have: one that is always there."""
    names = [one["name"] for one in shards if not one["is_optional"]]
    return f"dense.{names[0]}" if names else "next(dense.parameters())"
