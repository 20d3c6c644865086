"""What `--shard` asks for: parameters and dims, and the ways to divide that they mean."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

import torchshard as ts
from torch import nn

from ..errors import UsageError
from ..naming.names import did_you_mean
from .division import Item, Way, splits_of


def parsed_shards(texts: Sequence[str]) -> dict[str, int | None]:
    """What `--shard weight=0` and `--shard bias=whole` ask for.

    Raises:
        UsageError: If one has another form, or names a parameter twice.
    """
    asked: dict[str, int | None] = {}
    for text in texts:
        match = re.fullmatch(r"([\w.]+)=(-?\d+|whole)", text)
        if match is None:
            raise UsageError(
                f"--shard {text} is not of the form PARAMETER=DIM, such as weight=0, or"
                " PARAMETER=whole"
            )
        if match[1] in asked:
            raise UsageError(f"--shard {match[1]} is given twice")
        asked[match[1]] = None if match[2] == "whole" else int(match[2])
    return asked


def split_asked(
    part: nn.Module, asked: Mapping[str, int | None], group: ts.ShardGroup
) -> str:
    """The split of a layer of torch.nn that does what is asked for; empty for whole.

    Raises:
        UsageError: If none does.
    """
    items = [Item("", splits_of(part), 1)]
    return str(ways_asked(part, items, asked, group)[""] or "")


def ways_asked(
    module: nn.Module,
    items: Sequence[Item],
    asked: Mapping[str, int | None],
    group: ts.ShardGroup,
) -> dict[str, Way]:
    """The way in which each item that `asked` names is to go, by path.

    Args:
        module: The dense module.
        items: What of it may be divided.
        asked: For parameters, by dotted name, the dim that is asked for, or None for whole.
        group: Ranks to try splits on.

    Raises:
        UsageError: If there is no such parameter or way.
    """
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
    by_path = {item.path: item for item in items}
    fixed: dict[str, Way] = {}
    for name, dim in asked.items():
        if name not in shapes:
            raise UsageError(
                f"--shard {name}: there is no parameter '{name}'."
                f"{did_you_mean(name, shapes)} It has {', '.join(shapes) or 'none'}"
            )
        if dim is not None and not -len(shapes[name]) <= dim < len(shapes[name]):
            raise UsageError(
                f"--shard {name}={dim}: its shape {shapes[name]} has no dim {dim}"
            )
        place = None if dim is None else dim % len(shapes[name])
        path, way = _way(module, name, place, by_path, group)
        if path in fixed and fixed[path] != way:
            raise UsageError(f"--shard asks for two ways to divide {path}")
        fixed[path] = way
    return fixed


def _way(
    module: nn.Module,
    name: str,
    dim: int | None,
    items: Mapping[str, Item],
    group: ts.ShardGroup,
) -> tuple[str, Way]:
    """The item that the parameter belongs to, and the way that cuts that dim of it."""
    if name in items:
        return name, dim
    path, _, leaf = name.rpartition(".")
    if path not in items:
        kind = type(module.get_submodule(path)).__name__
        raise UsageError(
            f"--shard {name}: a parameter of {path or 'it'} ({kind}) stays whole; no rule"
            " divides it"
        )
    if dim is None:
        return path, None
    return path, _split_cutting(module.get_submodule(path), leaf, dim, group)


def _split_cutting(part: nn.Module, name: str, dim: int, group: ts.ShardGroup) -> str:
    """The split of a layer of torch.nn that cuts its parameter `name` along `dim`.

    Raises:
        UsageError: If none does, with those that it has.
    """
    for split in splits_of(part):
        layer = ts.parallelize(copy.deepcopy(part), {"": split}, group=group)
        assert isinstance(layer, ts.ParallelLayer)
        if layer.ranges_of(name) and layer.specs[name].sharded_dim == dim:
            return split
    raise UsageError(
        f"--shard {name}={dim}: a {type(part).__name__} is divided by"
        f" {', '.join(splits_of(part))}"
    )
