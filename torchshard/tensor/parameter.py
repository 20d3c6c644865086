"""ShardedParameter: a parameter of which this rank holds a shard, as code sees it that holds it.

Its layer computes with the shard. Other code may hold it too, a parent, an initialiser, a
penalty, an optimizer, and knows nothing of shards. What it gets depends on who asks for what:

    who asks for what                                   what it works on
    a layer, in its forward                             the shard
    torch's own keepers: optimizers, `Module.to`, distributed wrappers, saving     the shard
    anyone: shape, dtype, storage, `detach()`                                      the shard
    anyone: gradients, `zeros_like`                 the shard, which knows what it is a part of
    `torch.nn.init`; `normal_` and other random fills   the whole: its fans, its random stream
    clipping and gradient scalers of torch              gradients that know they are shards
    anyone else: what computes                          the whole, by the rules of `ShardedTensor`

The type is the mark, so nothing is watched: it costs a microsecond or two where the parameter
itself is an argument of an operation. Under `torch.compile` it is the same, without the graph
being broken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_map
from torchshard.distributed import collectives, ops
from torchshard.distributed.transforms import (
    expect_asked,
)
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.optimizer_state import watch_state
from torchshard.tensor import elementwise
from torchshard.tensor.asker import (
    INIT,
    KEEPERS,
    NORM_TAKERS,
    asking_module,
    calling_frame,
    counts_fans,
    inside,
    runs_a_layer_again,
)
from torchshard.tensor.attributes import OF_THE_SHARD, getter
from torchshard.tensor.backward import run_backward
from torchshard.tensor.compiler import compiler_looks, uncompiled
from torchshard.tensor.dtensors import in_form, wanted_form
from torchshard.tensor.filling import FILLS, filled, initialised
from torchshard.tensor.gradient import (
    LIKES,
    ShardedGradient,
    gradient_marked,
    hook_of_gradient,
    known_as_gradient,
    known_as_plain,
    made_like,
)
from torchshard.tensor.sharded import (
    ANSWERS_FIRST,
    RULES,
    ShardedTensor,
    Sharding,
    bound,
    compiled_call,
    local_call,
    mark,
    mixes,
    whole,
    whole_shape,
)

if TYPE_CHECKING:
    from types import FrameType

_NEW = "new new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()
_LOCAL = OF_THE_SHARD.union(_NEW, LIKES)
_VECTORS = "torch.nn.utils.convert_parameters"
"""It lays parameters end to end in a vector, and back."""
_PRUNE = "torch.nn.utils.prune"
_WHOLE_FACTS = frozenset(["size", "__len__", "numel", "nelement"])


class ShardedParameter(nn.Parameter):
    """A layer's parameter of which this rank holds a shard.

    An `nn.Parameter` whose storage, shape and gradient are the shard's, as for every optimizer
    and wrapper, and that operations outside its layer take for the whole: `F.linear(h, weight)`,
    `weight.norm()` and `nn.init.xavier_uniform_(weight)` are those of the whole weight, on all
    ranks that share it, which must all call them. What has no rule raises `ShardedOpError`.
    Layers make them, where several ranks share a layer.

    Attributes:
        sharding: The sharded dim, who holds what of it, and the group.
    """

    sharding: Sharding

    def to_local(self) -> Tensor:
        """Return the shard as a plain tensor. The caller now minds who holds what."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.view_as(self)

    def full(self) -> Tensor:
        """Return the whole parameter, on every rank; each rank must ask."""
        return whole(marked(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copied = self.detach().clone(memory_format=torch.preserve_format)
            parameter = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = known_as_shard(parameter, self.sharding)
        return cast(ShardedParameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter; the layer that is unpickled knows what it is a shard of."""
        state: tuple[Any, ...] = (self.detach(), self.requires_grad, OrderedDict())
        return torch._utils._rebuild_parameter, state

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if compiler_looks():
            return local_call(func, args, kwargs)
        if isinstance(func, torch._ops.OpOverload):
            return compiled_call(func, args, kwargs)
        name = func.__name__
        if inside.depth or runs_a_layer_again():
            return _inside_a_layer(func, types, args, kwargs)
        expect_asked(name)
        if name in _LOCAL:
            return _fact(func, args, kwargs)
        if name == "__get__":
            return _attribute(func, args, kwargs)
        if name == "__set__":
            return _set_attribute(func, args, kwargs)
        if name in ("backward", "grad"):
            return run_backward(func, args, kwargs)
        asker = asking_module()
        if asker.startswith(KEEPERS):
            return local_call(func, args, kwargs)
        if asker == _VECTORS:
            return _as_vector(func, args)
        if getattr(func, "__module__", None) == INIT:
            return initialised(func, args, kwargs)
        if name in FILLS and isinstance(args[0], ShardedParameter):
            return filled(func, args, kwargs)
        if asker == INIT and RULES.get(name) is elementwise.in_place:
            return local_call(func, args, kwargs)
        return _computed(func, args, kwargs)


uncompiled(ShardedParameter)
ANSWERS_FIRST.add(ShardedParameter)


def known_as_shard(parameter: nn.Parameter, sharding: Sharding) -> ShardedParameter:
    """Return `parameter`, the same object, known as a shard from now on."""
    parameter.__class__ = ShardedParameter
    shard = cast(ShardedParameter, parameter)
    shard.sharding = sharding
    return shard


def known_as_whole(parameter: nn.Parameter) -> nn.Parameter:
    """Return `parameter`, the same object, a plain parameter from now on."""
    parameter.__class__ = nn.Parameter
    parameter.__dict__.pop("sharding", None)
    return parameter


# torch's optimizers take the loops over all parameters at once for types that they know.
_foreach_supported_types.append(ShardedParameter)


def marked(parameter: ShardedParameter) -> Tensor:
    """Return the shard as a `ShardedTensor`, whose gradient arrives in the parameter."""
    sharding, shard = parameter.sharding, parameter.to_local()
    if sharding.ranges.overlaps:
        place = (sharding.dim, sharding.ranges, sharding.group)
        shard = ops.sum_over_holders(shard, *place)
    return mark(shard, sharding)


def _plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, ShardedParameter) else value


def _marked(value: Any) -> Any:
    if isinstance(value, ShardedParameter):
        return marked(value)
    return gradient_marked(value)


def _inside_a_layer(
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `func` on the shards; other marked arguments go by their own rules."""
    if any(issubclass(kind, ShardedTensor) for kind in types):
        return _by_rule(func, tree_map(_plain, args), tree_map(_plain, kwargs))
    return local_call(func, args, kwargs)


def _by_rule(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `func` on marked tensors; a plain call, in a traced graph, sees the shards alone."""
    return ShardedTensor.__torch_function__(func, (), args, kwargs)


def _as_vector(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
    """Return the whole parameter as a vector, or a part of a vector in its whole shape.

    Raises:
        ShardedOpError: If `torch.nn.utils.prune` asks, whose masks are the shard's.
    """
    frame = calling_frame()
    caller = None if frame is None else frame.f_back
    if caller is not None and caller.f_globals.get("__name__") == _PRUNE:
        sharding = next(x.sharding for x in args if isinstance(x, ShardedParameter))
        raise mixes("prune", sharding, "compares parameters whose masks are shards")
    if isinstance(args[0], ShardedParameter):
        return cast(Tensor, func(args[0].full(), *args[1:]))
    return cast(Tensor, args[0].view(whole_shape(marked(args[1]))))


def _fact(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if func.__name__ in _WHOLE_FACTS and _wants_whole(asking_module()):
        return _by_rule(func, (marked(args[0]), *args[1:]), kwargs)
    if func is torch.Tensor.register_hook and not asking_module().startswith(KEEPERS):
        parameter, hook = bound(args, kwargs, self=None, hook=None)
        args, kwargs = (parameter, hook_of_gradient(hook, parameter.sharding)), {}
    value = local_call(func, args, kwargs)
    if func.__name__ in LIKES and not asking_module().startswith(KEEPERS):
        return made_like(value, args[0].sharding)
    if func is torch.Tensor.detach and asking_module() == "torch.nn.modules.module":
        # A plain module saves what it shares with a layer.
        return in_form(value, args[0].sharding, wanted_form())
    return value


def _wants_whole(asker: str) -> bool:
    return asker == _VECTORS or counts_fans(asker)


def _attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Attributes are the shard's, but for who takes norms of gradients or counts fans."""
    (parameter,) = args
    if func == _SHAPE:
        asker = asking_module()
        if counts_fans(asker):
            return _by_rule(func, (marked(parameter),), {})
        if asker == "torch.nn.utils.parametrize":
            raise ShardedOpError(
                "torch.nn.utils.parametrize was given a parameter of which this rank holds a"
                " shard; a parametrization would see that alone. Work it out of the whole in"
                " the forward of a module around the layer, from weight.full(), or leave the"
                " layer whole."
            )
    if func in _VIEWS:
        return _by_rule(func, (marked(parameter),), {})
    value = local_call(func, args, kwargs)
    if func == _IS_LEAF and asking_module() == "torch.optim.optimizer":
        _become_known(calling_frame())
    if func not in (_GRAD, _DATA) or torch.compiler.is_compiling():
        return value
    asker = asking_module()
    if func == _GRAD and type(value) in (Tensor, ShardedGradient):
        return _gradient_for(asker, value, parameter.sharding)
    if func == _DATA and not asker.startswith("torch"):
        return known_as_shard(nn.Parameter(value, False), parameter.sharding)
    return value


def _gradient_for(asker: str, grad: Tensor, sharding: Sharding) -> Tensor:
    """Return the gradient as the module that asks for it takes it.

    Raises:
        ShardedOpError: If torch's own gradient scaler asks for a sparse one, of which it would
            look for infinities on this rank alone.
    """
    if asker in NORM_TAKERS and not grad.is_sparse:
        return mark(grad.view_as(grad), sharding)
    if asker == "torch.amp.grad_scaler":
        frame = calling_frame()
        scaler = None if frame is None else frame.f_locals.get("self")
        if type(scaler).__module__.startswith("torch."):
            raise ShardedOpError(
                "torch.amp.GradScaler was given a parameter of which this rank holds a shard"
                " and whose gradient is sparse: an overflow in it would skip the step on"
                " this rank alone. Use torchshard.amp.GradScaler, with the same arguments."
            )
    if asker in NORM_TAKERS or asker.startswith(KEEPERS):
        return known_as_plain(grad)
    return known_as_gradient(grad, sharding)


def _set_attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """`weight.data = ...` takes a shard, or its part of a whole; of torch itself, what comes."""
    parameter, value = args
    sharding = parameter.sharding
    if isinstance(value, ShardedTensor) and value.sharding == sharding:
        value = value.to_local()  # what was kept of it: `old = weight.data.clone()`
    if func == torch.Tensor.data.__set__ and isinstance(value, Tensor):  # type: ignore[attr-defined]
        own, asker = local_call(_SHAPE, (parameter,), {}), asking_module()
        if asker == _VECTORS or value.shape == whole_shape(marked(parameter)):
            place = (sharding.dim, sharding.ranges, sharding.group)
            value = collectives.own_shard(value, *place)
        if value.shape != own and not asker.startswith("torch"):
            raise ShapeError(
                f"weight.data = ... was given shape {tuple(value.shape)}. Expected the"
                f" whole parameter's, {tuple(whole_shape(marked(parameter)))}, or this"
                f" rank's shard's, {tuple(own)}."
            )
    value = known_as_plain(value) if isinstance(value, ShardedGradient) else value
    local_call(func, (parameter, _plain(value)), kwargs)


def _become_known(frame: FrameType | None) -> None:
    """Tell the optimizer that takes the parameter in, which asks whether it is a leaf."""
    optimizer = None if frame is None else frame.f_locals.get("self")
    if isinstance(optimizer, torch.optim.Optimizer):
        watch_state(optimizer)


_SHAPE, _GRAD, _DATA, _IS_LEAF = map(getter, ("shape", "grad", "data", "is_leaf"))
_VIEWS = list(map(getter, ("T", "mT", "H", "mH", "real", "imag")))


def _computed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `func` on the parameters marked, by the rules of `ShardedTensor`."""
    rule, compares = RULES.get(func.__name__), func.__name__ in ("equal", "allclose")
    if (rule is elementwise.in_place or compares) and _are_kin(args, kwargs):
        return local_call(func, args, kwargs)
    if rule in (elementwise.pointwise, elementwise.in_place):
        args, kwargs = _with_kin_marked(args, kwargs)
    result = _by_rule(func, tree_map(_marked, args), tree_map(_marked, kwargs))
    writes = rule is elementwise.in_place and isinstance(args[0], ShardedParameter)
    return args[0] if writes else result


def _are_kin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors are shards of parameters, of a shard's shape, or numbers."""
    tensors = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
    if any(isinstance(x, ShardedTensor) for x in tensors):
        return False
    shapes = {local_call(_SHAPE, (x,), {}) for x in tensors}
    return len(shapes - {torch.Size()}) == 1


def _with_kin_marked(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Mark what stands beside a parameter and has the shard's shape.

    Its gradient, an optimizer's or an average's state of it: those are shards by contract.
    """
    parameter = next(
        value
        for value in [*args, *kwargs.values()]
        if isinstance(value, ShardedParameter)
    )
    own, sharding = local_call(_SHAPE, (parameter,), {}), parameter.sharding

    def kin(value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and not isinstance(
            value, ShardedTensor | ShardedParameter
        )
        return (
            mark(value.view_as(value), sharding)
            if is_plain and value.shape == own
            else value
        )

    return tuple(kin(v) for v in args), {k: kin(v) for k, v in kwargs.items()}


__all__ = [
    "ShardedParameter",
    "known_as_shard",
    "known_as_whole",
    "marked",
]
