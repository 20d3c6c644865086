"""What a plan of module names would do to a model, settled whole before anything is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from torch import nn
from torchshard.errors import LayoutError
from torchshard.layer import ParallelLayer
from torchshard.packing import Packing

LayerClass: TypeAlias = type[ParallelLayer]


@dataclass(frozen=True)
class Column(Packing):
    """A plan's rule: divide the output features, and keep together what `Packing` says."""

    split: ClassVar[str] = "column"


@dataclass(frozen=True)
class Row(Packing):
    """A plan's rule: divide the input features, and keep together what `Packing` says."""

    split: ClassVar[str] = "row"


Rule: TypeAlias = "str | Column | Row | Mapping[str, Any] | None"


@dataclass
class ConversionPlan:
    """What `parallelize` would do to a model.

    Attributes:
        layers: For each module to convert, its paths in the model, its new class and the
            arguments that say how it is divided.
        unused: Patterns of the plan that match no module.
        untouched: Paths of modules that could be divided and that no rule names.
    """

    layers: list[Conversion] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [str(conversion) for conversion in self.layers]
        lines += [f"{path}: stays whole" for path in self.untouched]
        lines += [f"rule {pattern!r} matches no module" for pattern in self.unused]
        return "\n".join(lines)


@dataclass
class Conversion:
    """One module to convert: where it is in the model, and how it is to be divided."""

    module: nn.Module
    layer_class: LayerClass
    sharding: dict[str, Any]
    paths: list[str]

    def __str__(self) -> str:
        how = ", ".join(f"{key}={value!r}" for key, value in self.sharding.items())
        new = f"{self.layer_class.__name__}({how})"
        names = " = ".join(shown_name(path) for path in self.paths)
        return f"{names}: {type(self.module).__name__} -> {new}"


def plan_conversion(
    model: nn.Module,
    plan: Mapping[str, Rule],
    *,
    layers: Iterable[LayerClass] | None = None,
) -> ConversionPlan:
    """Return what `parallelize(model, plan)` would do, without doing it.

    Args:
        model: A model of torch.nn layers.
        plan: As for `parallelize`.
        layers: As for `parallelize`.

    Raises:
        LayoutError: If a rule names a module that cannot be divided so.
    """
    classes = classes_by_dense(layers)
    found = ConversionPlan(unused=list(plan))
    for module, paths in modules_by_paths(model):
        rules = {}
        for path in paths:
            pattern = _matching(path, plan)
            if pattern is not None:
                rules[path] = plan[pattern]
                found.unused = [other for other in found.unused if other != pattern]
        whole = _inside(paths[0], found.layers)
        if any(rule is not None for rule in rules.values()):
            if whole is not None:
                raise LayoutError(
                    f"{paths[0]} is a part of {whole}, which the plan converts whole."
                    " Leave one of them out."
                )
            found.layers.append(_settled(module, paths, rules, classes))
        elif not rules and type(module) in classes and whole is None:
            found.untouched += paths
    return found


def _matching(path: str, plan: Mapping[str, Rule]) -> str | None:
    """Return the first pattern that matches; the model itself is named by "" alone."""
    if not path:
        return "" if "" in plan else None
    return next((p for p in plan if p and fnmatch.fnmatchcase(path, p)), None)


def modules_by_paths(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield every module once, with all its paths."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    yield from paths.items()


def _settled(
    module: nn.Module,
    paths: list[str],
    rules: Mapping[str, Rule],
    classes: Mapping[type[nn.Module], LayerClass],
) -> Conversion:
    """Return how the module is divided, at all of its paths, as the rules for some say."""
    (first, rule), *others = rules.items()
    for path, other in others:
        if other != rule:
            raise LayoutError(
                f"{path} and {first} are one module, but the plan divides it both as"
                f" {other!r} and as {rule!r}."
            )
    layer_class, sharding = _resolved(first, module, rule or {}, classes)
    return Conversion(module, layer_class, sharding, paths)


def _inside(path: str, conversions: list[Conversion]) -> str | None:
    """Return the module, to be converted whole, of which `path` is a part."""
    whole = (parent for conversion in conversions for parent in conversion.paths)
    inside = (name for name in whole if not name or path.startswith(f"{name}."))
    return next((shown_name(name) for name in inside), None)


def classes_by_dense(
    layers: Iterable[LayerClass] | None = None,
) -> dict[type[nn.Module], LayerClass]:
    """Return the sharded class of each dense one: the zoo's, and those in `layers`.

    Raises:
        LayoutError: If one of `layers` stands for no dense class.
    """
    import layer_zoo

    known = [getattr(layer_zoo, name) for name in layer_zoo.__all__]
    own = list(layers or ())
    for cls in own:
        if cls.dense_class is None:
            raise LayoutError(
                f"{cls.__name__} in layers=[...] has no dense_class. Set it to the class of"
                " the modules that it stands for."
            )
    classes = [*known, *own]
    return {cls.dense_class: cls for cls in classes if cls.dense_class is not None}


def _resolved(
    path: str,
    module: nn.Module,
    rule: str | Column | Row | Mapping[str, Any],
    classes: Mapping[type[nn.Module], LayerClass],
) -> tuple[LayerClass, dict[str, Any]]:
    """Return the class and the arguments for dividing `module` as `rule` says."""
    if type(module) not in classes:
        raise LayoutError(f"{shown_name(path)}: {why_not(module, classes)}")
    layer_class = classes[type(module)]
    if isinstance(rule, Mapping):
        return layer_class, dict(rule)
    packing = {} if isinstance(rule, str) else _settings(rule)
    name = rule if isinstance(rule, str) else rule.split
    if name not in layer_class.splits:
        known = [f"{one!r} ({way.divides})" for one, way in layer_class.splits.items()]
        raise LayoutError(
            f"{shown_name(path)}: {layer_class.__name__} cannot be divided as {name!r}."
            f" Expected {', '.join([*known, 'or a dict of its arguments'])}."
        )
    chosen = {"dim": name} if layer_class.splits[name].dims else {}
    return layer_class, {**chosen, **packing}


def _settings(packing: Packing) -> dict[str, Any]:
    """Return what was set of `packing`, as a constructor's arguments."""
    return {name: value for name, value in asdict(packing).items() if value != 1}


def why_not(module: nn.Module, classes: Mapping[type[nn.Module], LayerClass]) -> str:
    """Return why `module` cannot be divided, and what to do instead."""
    name = type(module).__name__
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"{name} has no sizes yet. Run the model once, then convert it."
    if isinstance(module, ParallelLayer):
        return f"{name} is divided already."
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return (
            "this Linear is a part of MultiheadAttention, which reads its weight itself."
            " Convert the attention whole, with 'heads'."
        )
    parent = next((cls for cls in classes if isinstance(module, cls)), None)
    if parent is not None:
        name, other = distinct_names(type(module), parent)
        return (
            f"{name} is a subclass of {other}; dividing it as one would drop what"
            " it adds. Write a ParallelLayer for it and pass layers=[...]."
        )
    same = next((cls for cls in classes if cls.__name__ == name), None)
    if same is not None:
        name, _ = distinct_names(type(module), same)
    known = sorted(distinct_names(cls, type(module))[0] for cls in classes)
    return (
        f"{name} has no sharded class. Expected one of {', '.join(known)}, or a layer of your own in"
        " layers=[...], with its dense_class set."
    )


def distinct_names(first: type, second: type) -> tuple[str, str]:
    """Return the names of two classes, in full where they share one."""
    if first.__name__ != second.__name__:
        return first.__name__, second.__name__
    full = [f"{cls.__module__}.{cls.__qualname__}" for cls in (first, second)]
    return full[0], full[1]


def shown_name(path: str) -> str:
    """Return the module's path as a report shows it."""
    return path or "the model"
