"""Turn the layers of an existing model into sharded ones, by class or by name, and back.

A plan is settled whole before anything is changed, so that a plan that cannot be carried out
leaves the model as it was. A layer keeps its weights, requires_grad, dtype, device, training
mode, hooks and state-dict names, and parameters that are tied stay one parameter. One layer
at a time is cut, so that no second copy of the model exists.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchshard.conversion_plan import (
    Conversion,
    ConversionPlan,
    LayerClass,
    Rule,
    modules_by_paths,
    plan_conversion,
    shown_name,
    why_not,
)
from torchshard.data_parallel import register_ddp_parameters_to_ignore
from torchshard.distributed import collectives
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.errors import LayoutError
from torchshard.layer import ParallelLayer
from torchshard.layout import Shard
from torchshard.optimizer_state import has_changed
from torchshard.state import gathered
from torchshard.tensor.dtensors import is_dtensor
from torchshard.tensor.parameter import known_as_whole

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FUSED: dict[type[nn.Module], dict[str, Any]] = {
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": False},
}
"""What keeps torch's encoders from paths that read the weights of their parts themselves."""


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Rule],
    *,
    layers: Iterable[LayerClass] | None = None,
    group: GroupLike = None,
    gather_batch: bool = False,
    strict: bool = True,
    **options: Any,
) -> nn.Module:
    """Divide the layers of `model` that `plan` names over the ranks, in place.

    Every rank calls it with the same weights, or with weights that are loaded afterwards.
    Parameters that stay whole inside a divided layer are rank 0's on every rank.

    Args:
        model: A model of torch.nn layers.
        plan: For patterns of module names, with `*` for any characters and `""` for the
            model itself, how to divide: `"column"` or `"row"` for linear layers and
            convolutions, `"vocabulary"` or `"embedding_dim"` for embeddings, `"heads"` for
            attention, a dict of arguments of the sharded class, or None to leave the module
            whole. The first that matches
            holds.
        layers: Sharded classes of your own, each with its `dense_class`, beside the zoo's.
        group: The ranks; None is the model group.
        gather_batch: Whether the divided layers get each rank's own samples, under data
            parallelism, and pool them (`ParallelLayer.gather_batch`). For a classifier head.
        strict: Whether a pattern that matches no module is an error.
        options: More arguments for every divided layer, such as `gather_output=True`.

    Returns:
        The model; the new layer, if the model itself is one that is divided.

    Raises:
        LayoutError: If a rule names a module that cannot be divided so, matches none, or
            divides one of several tied parameters. The model is then unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> parallelize(model, {"0": "column", "2": "row"})[0]
        ParallelLinear(rank=0/1, weight=(8, 4) of (8, 4), bias=(8,) of (8,))
    """
    found = plan_conversion(model, plan, layers=layers)
    if strict and found.unused:
        raise LayoutError(
            f"The patterns {found.unused} of the plan match no module. Module names are"
            " those of model.named_modules(); pass strict=False to allow it."
        )
    return _carried_out(model, found, resolve_group(group), gather_batch, options)


def convert_layers(
    model: nn.Module,
    layer_class: LayerClass,
    *,
    group: GroupLike = None,
    gather_batch: bool = False,
    **sharding: Any,
) -> nn.Module:
    """Divide every layer of `model` that `layer_class` is the sharded form of, in place.

    Layers that torch uses as parts of others, and reads the weights of itself, are left
    whole: the output projection of MultiheadAttention.

    Args:
        model: A model of torch.nn layers.
        layer_class: The sharded class; it has a `dense_class`.
        group: The ranks; None is the model group.
        gather_batch: As for `parallelize`.
        sharding: Arguments of `layer_class` that say how it is divided.

    Returns:
        The model; the new layer, if the model itself is one.

    Raises:
        LayoutError: If `layer_class` has no `dense_class`, or one of the layers cannot be
            divided. The model is then unchanged.
    """
    dense = getattr(layer_class, "dense_class", None)
    if dense is None:
        raise LayoutError(
            f"{layer_class.__name__} names no dense_class, so no layer of a model is one to"
            " convert. Expected a sharded class, such as torchshard.nn.ParallelLinear."
        )
    found = ConversionPlan()
    for module, paths in modules_by_paths(model):
        is_lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
        if is_lazy and isinstance(module, dense):
            raise LayoutError(f"{shown_name(paths[0])}: {why_not(module, {})}")
        if type(module) is dense:
            found.layers.append(Conversion(module, layer_class, sharding, paths))
    divided = _carried_out(model, found, resolve_group(group), gather_batch, {})
    register_ddp_parameters_to_ignore(divided)  # as TorchShard 0.1.0 did
    return divided


def _carried_out(
    model: nn.Module,
    found: ConversionPlan,
    group: ShardGroup,
    gather_batch: bool,
    options: Mapping[str, Any],
) -> nn.Module:
    _expect_options_used(found.layers, options)
    blanks = [_blank(conversion, group, options) for conversion in found.layers]
    _expect_ties_alike(model, found.layers, blanks)
    moved: dict[int, nn.Parameter] = {}
    # Taken off the list, so that the whole weights of a layer go when its shards are cut.
    layers, found.layers = found.layers[::-1], []
    for layer in blanks:
        conversion = layers.pop()
        _take_over(layer, conversion.module, moved)
        layer.gather_batch = gather_batch
        for path in conversion.paths:
            if not path:
                return layer
            _put(model, path, layer)
    _leave_fused_paths(model)
    return model


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _expect_options_used(
    conversions: list[Conversion], options: Mapping[str, Any]
) -> None:
    """Check that every option is an argument of one of the layers."""
    classes = {conversion.layer_class for conversion in conversions}
    taken = {name for cls in classes for name in inspect.signature(cls).parameters}
    unknown = sorted(options.keys() - taken)
    if classes and unknown:
        names = ", ".join(sorted(cls.__name__ for cls in classes))
        raise LayoutError(f"The options {unknown} are arguments of none of {names}.")


def _blank(
    conversion: Conversion, group: ShardGroup, options: Mapping[str, Any]
) -> ParallelLayer:
    """Return the new layer without storage: its layouts are known, nothing is drawn."""
    dense, cls = conversion.module, conversion.layer_class
    path = shown_name(conversion.paths[0])
    taken = inspect.signature(cls).parameters.keys()
    unknown = sorted(conversion.sharding.keys() - taken)
    if unknown:
        raise LayoutError(f"{path}: {cls.__name__} takes no arguments {unknown}.")
    extra = {key: value for key, value in options.items() if key in taken}
    arguments = {**cls.dense_arguments(dense), **extra, **conversion.sharding}
    make = cast(Callable[..., ParallelLayer], cls)
    try:
        layer = make(**arguments, group=group, device="meta")
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error
    _expect_same_tensors(path, dense, layer)
    return layer


def _expect_same_tensors(path: str, dense: nn.Module, layer: ParallelLayer) -> None:
    """Check that `dense` holds what its class does, and nothing recomputes its weights."""
    held = {name: tuple(tensor.shape) for name, tensor in _named(dense)}
    expected = {name: spec.shape for name, spec in layer.specs.items()}
    if held != expected:
        raise LayoutError(
            f"{path} holds {held}, but a {type(dense).__name__} to divide holds"
            f" {expected}. Undo what changes its weights (weight_norm, pruning, a"
            " parametrization) before it is divided."
        )


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _expect_ties_alike(
    model: nn.Module, conversions: list[Conversion], blanks: list[ParallelLayer]
) -> None:
    """Check that all holders of a tied parameter are divided in the same way."""
    layouts: dict[int, dict[str, Any]] = {}
    converted = set()
    for conversion, layer in zip(conversions, blanks, strict=True):
        path = conversion.paths[0]
        converted.add(id(conversion.module))
        for name, parameter in conversion.module.named_parameters():
            place = (layer.specs[name].layout, layer.ranges_of(name))
            dim = place[0].dim if isinstance(place[0], Shard) else None
            layouts.setdefault(id(parameter), {})[f"{path}.{name}"] = (dim, place[1])
    for path, module in _outside(model, converted):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in layouts:
                layouts[id(parameter)][f"{path}.{name}"] = (None, None)
    for holders in layouts.values():
        if any(place != next(iter(holders.values())) for place in holders.values()):
            raise LayoutError(
                f"{' and '.join(holders)} are one parameter, but would be divided"
                " differently. Divide all of them alike: an embedding by 'vocabulary' with"
                " a linear head by 'column'."
            )


def _outside(model: nn.Module, converted: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that stay, without those inside a converted one."""
    gone = {
        id(part)
        for module in model.modules()
        if id(module) in converted
        for part in module.modules()
    }
    for path, module in model.named_modules():
        if id(module) not in gone:
            yield path, module


@torch.no_grad()
def _take_over(
    layer: ParallelLayer, dense: nn.Module, moved: dict[int, nn.Parameter]
) -> None:
    """Give `layer` the dense layer's tensors, cut to this rank's part, and all else it had.

    Parameters stay the same objects, so that an optimizer that was built before goes on.
    """
    for name, tensor in _named(dense):
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter and id(tensor) in moved:
            layer.set_tensor(name, tensor)
            continue
        own = tensor
        if layer.ranges_of(name) is None:
            # The same object, which other modules may share.
            if not own.is_meta:
                own.copy_(collectives.broadcast(own.detach(), layer.group))
        elif isinstance(tensor, nn.Parameter):
            _replace_data(tensor, partial(_own_copy, layer, name))
            moved[id(tensor)] = tensor
        else:
            own = _own_copy(layer, name, tensor.detach())
        layer.set_tensor(name, own)
    _take_over_behaviour(layer, dense)


def _replace_data(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """Give the parameter, and its gradient if it has one, changed values."""
    grad = parameter.grad
    parameter.grad = None
    parameter.data = change(parameter.detach())
    if grad is not None:
        grad = grad.detach()
        parameter.grad = change(grad.to_dense() if grad.is_sparse else grad)
    has_changed(parameter)


def _own_copy(layer: ParallelLayer, name: str, whole: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, in storage of its own."""
    own = layer.own_state(name, name, whole)
    return own.clone() if own.shape == whole.shape else own


def _whole_copy(layer: ParallelLayer, name: str, own: Tensor) -> Tensor:
    """Return the whole of which `own` is this rank's shard, in storage of its own."""
    return gathered(own, layer, name).clone()


def _take_over_behaviour(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the training mode and the hooks of `old`."""
    new.train(old.training)
    for hooks in _HOOKS:
        # The dict itself, not a copy: the handle that removes a hook refers to it.
        new.__dict__[hooks] = old.__dict__[hooks]
    new._is_full_backward_hook = old._is_full_backward_hook
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # type: ignore[attr-defined] # torch's wrapper


def _leave_fused_paths(model: nn.Module) -> None:
    for module in model.modules():
        if any(isinstance(part, ParallelLayer) for part in module.modules()):
            for cls, switches in _FUSED.items():
                if isinstance(module, cls):
                    kept = {name: getattr(module, name) for name in switches}
                    module.__dict__.setdefault("_fused_when_dense", kept)
                    module.__dict__.update(switches)


def _restore_fused_paths(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.update(module.__dict__.pop("_fused_when_dense", {}))


@torch.no_grad()
def to_dense(model: nn.Module) -> nn.Module:
    """Turn the sharded layers of `model` back into torch.nn's, with whole weights, in place.

    Every rank calls it, and every rank gets the whole model. Tied parameters stay tied.

    Returns:
        The model; the dense layer, if the model itself is a sharded one.

    Raises:
        LayoutError: If a layer has no `dense_class`. The model is then unchanged.
    """
    places = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ParallelLayer)
    ]
    for path, layer in places:
        if layer.dense_class is None:
            raise LayoutError(
                f"{path}: {type(layer).__name__} has no dense_class to turn back into."
            )
        _expect_all_held(path, layer)
    whole: dict[int, nn.Module] = {}
    moved: dict[int, nn.Parameter] = {}
    for path, layer in places:
        if id(layer) not in whole:
            whole[id(layer)] = _dense_of(layer, moved)
        if not path:
            return whole[id(layer)]
        _put(model, path, whole[id(layer)])
    _restore_fused_paths(model)
    return model


def _expect_all_held(path: str, layer: ParallelLayer) -> None:
    """Check that the layer holds what it declared, as torch.nn holds parameters and buffers."""
    layer.expect_held()
    held = dict(_named(layer))
    if any(is_dtensor(tensor) for tensor in held.values()):
        raise LayoutError(
            f"{shown_name(path)}: fully_shard has made the parameters DTensors. Load"
            " torchshard.collect_state_dict(model) into a dense model instead."
        )
    gone = [name for name in layer.specs if name not in held]
    if gone:
        raise LayoutError(
            f"{shown_name(path)}: {gone} of {type(layer).__name__} are plain attributes."
            " Expected parameters: put nn.Parameter(x) in their place."
        )


def _dense_of(layer: ParallelLayer, moved: dict[int, nn.Parameter]) -> nn.Module:
    dense_class = cast(type[nn.Module], layer.dense_class)
    taken = inspect.signature(dense_class).parameters.keys()
    arguments = layer.dense_arguments(layer)
    given = {key: value for key, value in arguments.items() if key in taken}
    dense = dense_class(**given, device="meta")
    for name, tensor in _named(layer):
        if name not in layer.specs:
            continue
        value = tensor
        if id(tensor) not in moved and layer.ranges_of(name) is not None:
            if isinstance(tensor, nn.Parameter):
                shard = known_as_whole(tensor)
                _replace_data(shard, partial(_whole_copy, layer, name))
                moved[id(tensor)] = shard
            else:
                value = gathered(tensor.detach(), layer, name).clone()
        path, _, leaf = name.rpartition(".")
        part = dense.get_submodule(path)
        if leaf in part._parameters and not isinstance(value, nn.Parameter):
            del part._parameters[leaf]  # a buffer was put in its place
            part.register_buffer(leaf, value)
        else:
            setattr(part, leaf, value)
    _take_over_additions(dense, layer)
    _take_over_behaviour(dense, layer)
    return dense


def _take_over_additions(dense: nn.Module, layer: ParallelLayer) -> None:
    """Give `dense` the buffers and modules that were added to the layer."""
    for name, buffer in layer._buffers.items():
        if name not in layer.specs and name not in dense._buffers:
            is_kept = name not in layer._non_persistent_buffers_set
            dense.register_buffer(name, buffer, persistent=is_kept)
    for name, module in layer._modules.items():
        if name not in dense._modules:
            dense.add_module(name, module)
