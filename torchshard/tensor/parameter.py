"""ShardedParameter: a parameter of which this rank holds a shard, as code sees it that holds it.

Its layer computes with the shard. Other code may hold it too, a parent, an initialiser, a
penalty, an optimizer, and knows nothing of shards. What it gets depends on who asks for what:

    who asks for what                                   what it works on
    a layer, in its forward                             the shard
    torch's own keepers: optimizers, `Module.to`, distributed wrappers, saving     the shard
    anyone: shape, dtype, storage, `detach()`, `zeros_like`, gradients, hooks      the shard
    `torch.nn.init`; `normal_` and other random fills   the whole: its fans, its random stream
    clipping and gradient scalers of torch              gradients that know they are shards
    anyone else: what computes                          the whole, by the rules of `ShardedTensor`

The type is the mark, so nothing is watched: it costs a microsecond or two where the parameter
itself is an argument of an operation. Under `torch.compile` it is the same, without the graph
being broken.
"""

from __future__ import annotations

import sys
import threading
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
from torchshard.initializer import Part, StreamInitializer
from torchshard.optimizer_state import watch_state
from torchshard.tensor import elementwise
from torchshard.tensor.compiler import compiler_looks, uncompiled
from torchshard.tensor.dtensors import in_form, wanted_form
from torchshard.tensor.gradient import known_as_gradient
from torchshard.tensor.sharded import (
    ANSWERS_FIRST,
    PLAIN,
    RULES,
    ShardedTensor,
    Sharding,
    compiled_call,
    getter,
    is_in_backward,
    local_call,
    mark,
    run_backward,
    whole,
)

if TYPE_CHECKING:
    from types import FrameType

_ALIKE = """
    zeros_like ones_like empty_like full_like new new_empty new_zeros new_ones new_full
    new_tensor new_empty_strided
    """.split()
_FACTS = """
    size __len__ numel nelement detach __repr__ __format__ __deepcopy__ storage _typed_storage
    share_memory_ is_shared type dtype is_same_size as_subclass _has_compatible_shallow_copy_type
    _backward_hooks _make_subclass is_nonzero requires_grad __setstate__ __dlpack_device__ tolist numpy
    """.split()
_LISTS = [
    name
    for name in dir(torch)
    if name.startswith(("_foreach_", "_fused_")) and "norm" not in name
]
"""What an optimizer calls with all parameters at once."""

_LOCAL = frozenset([*PLAIN, *_ALIKE, *_FACTS, *_LISTS])
_WHOLE_FACTS = frozenset(["size", "__len__", "numel", "nelement"])
_FILLS = frozenset(
    """
    uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
    """.split()
)
_STREAMED = frozenset(["uniform_", "normal_"])
"""Fills whose numbers for a tensor are those of its chunks, one after the other."""

_PASSED_THROUGH = frozenset(
    [
        "torch.overrides",
        "torch._tensor",
        "torch.functional",
        "torch.nn.functional",
        __name__,
    ]
)
_KEEPERS = (
    "torch.optim",
    "torch.distributed",
    "torch.nn.modules.module",
    "torch.nn.parameter",
    "torch.nn.parallel",
    "torch.serialization",
    "torch.storage",
    "torch.multiprocessing",
    "torch.testing",
    "torch.amp",
    "torch.cuda",
    "torch._",
    "torchshard",
)
_NORM_TAKERS = frozenset(["torch.nn.utils.clip_grad", "torch.amp.grad_scaler"])
_INIT = "torch.nn.init"
_WHOLE_ONLY = frozenset(
    """
    trunc_normal_ _no_grad_trunc_normal_ orthogonal_ sparse_ eye_ dirac_
    """.split()
)
"""Functions of `torch.nn.init` that do more than fill a tensor by its fans."""


class _Inside(threading.local):
    """How many layers' forwards this thread is inside of."""

    def __init__(self) -> None:
        self.depth = (
            0  # of each thread's own: a compiled graph's guards look for it there
        )


inside = _Inside()


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
        if inside.depth or _runs_a_layer_again():
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
        asker = _asker()
        if asker.startswith(_KEEPERS):
            return local_call(func, args, kwargs)
        if getattr(func, "__module__", None) == _INIT:
            return _initialised(func, args, kwargs)
        if name in _FILLS and isinstance(args[0], ShardedParameter):
            return _filled(func, args, kwargs)
        if asker == _INIT and RULES.get(name) is elementwise.in_place:
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


def _asker() -> str:
    """Return the name of the module that called a function of torch; empty when compiled.

    Raises:
        ShardedOpError: If it is a function of `torch.nn.init` that needs the whole tensor.
    """
    frame = None if torch.compiler.is_compiling() else _calling_frame()
    if frame is None:
        return ""
    name: str = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_name
    if name == _INIT and function in _WHOLE_ONLY:
        public = function.removeprefix("_no_grad_")
        raise ShardedOpError(
            f"torch.nn.init.{public} was given a parameter of which this rank holds a shard,"
            f" and works on whole tensors. Call torchshard.nn.init.{public}, with the same"
            " arguments and the same values on one device."
        )
    return name


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
        frame = frame.f_back
    return frame


def _runs_a_layer_again() -> bool:
    """Return whether backward runs the forward of a layer again, for a checkpoint in it."""
    if torch.compiler.is_compiling() or not is_in_backward():
        return False
    frame = _calling_frame()
    asker = None if frame is None else frame.f_locals.get("self")
    return "local_forward" in dir(type(asker))


def _plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, ShardedParameter) else value


def _marked(value: Any) -> Any:
    return marked(value) if isinstance(value, ShardedParameter) else value


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


def _fact(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if func.__name__ in _WHOLE_FACTS and _asker() == _INIT:
        return _by_rule(func, (marked(args[0]), *args[1:]), kwargs)
    value = local_call(func, args, kwargs)
    if func is torch.Tensor.detach and _asker() == "torch.nn.modules.module":
        # A plain module saves what it shares with a layer.
        return in_form(value, args[0].sharding, wanted_form())
    return value


def _attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Attributes are the shard's, but for who takes norms of gradients or counts fans."""
    (parameter,) = args
    if func == _SHAPE:
        asker = _asker()
        if asker == _INIT:
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
    if func == _IS_LEAF and _asker() == "torch.optim.optimizer":
        _become_known(_calling_frame())
    if func not in (_GRAD, _DATA) or torch.compiler.is_compiling():
        return value
    asker = _asker()
    if func == _GRAD and type(value) is Tensor:
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
    if asker in _NORM_TAKERS and not grad.is_sparse:
        return mark(grad.view_as(grad), sharding)
    if asker == "torch.amp.grad_scaler":
        frame = _calling_frame()
        scaler = None if frame is None else frame.f_locals.get("self")
        if type(scaler).__module__.startswith("torch."):
            raise ShardedOpError(
                "torch.amp.GradScaler was given a parameter of which this rank holds a shard"
                " and whose gradient is sparse: an overflow in it would skip the step on"
                " this rank alone. Use torchshard.amp.GradScaler, with the same arguments."
            )
    return grad if asker.startswith(_KEEPERS) else known_as_gradient(grad, sharding)


def _set_attribute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """`weight.data = ...` takes a shard only, of anyone but torch itself."""
    parameter, value = args
    if func == torch.Tensor.data.__set__ and isinstance(value, Tensor):  # type: ignore[attr-defined]
        own = local_call(_SHAPE, (parameter,), {})
        if value.shape != own and not _asker().startswith("torch"):
            raise ShapeError(
                f"weight.data = ... was given shape {tuple(value.shape)}; the parameter is"
                f" this rank's shard, of shape {tuple(own)}. Load whole values with"
                " layer.load_state_dict, or weight.copy_(whole) under torch.no_grad()."
            )
    local_call(func, (parameter, _plain(value)), kwargs)


def _become_known(frame: FrameType | None) -> None:
    """Tell the optimizer that takes the parameter in, which asks whether it is a leaf."""
    optimizer = None if frame is None else frame.f_locals.get("self")
    if isinstance(optimizer, torch.optim.Optimizer):
        watch_state(optimizer)


_SHAPE, _GRAD, _DATA, _IS_LEAF = map(getter, ("shape", "grad", "data", "is_leaf"))
_VIEWS = list(map(getter, ("T", "mT", "H", "mH", "real", "imag")))


class _Fill(StreamInitializer):
    """The numbers of one of torch's random fills."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def draw(self, buffer: Tensor) -> None:
        self.func(buffer, *self.args, **self.kwargs)


def _part(parameter: ShardedParameter) -> Part:
    sharding = parameter.sharding
    shape = list(parameter.shape)
    shape[sharding.dim] = sharding.ranges.size
    return Part(
        tuple(shape), sharding.dim, sharding.ranges.per_rank[sharding.group.rank]
    )


def _filled(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Fill with this rank's part of the numbers of the whole, drawn on the CPU."""
    parameter, *rest = args
    if func.__name__ in _STREAMED:
        with torch.no_grad():
            _Fill(func, rest, kwargs).fill(_plain(parameter), _part(parameter))
        return cast(Tensor, parameter)
    return fill_as_whole(func, parameter, *rest, **kwargs)


@torch.no_grad()
def fill_as_whole(
    func: Callable[..., Any], parameter: ShardedParameter, *args: Any, **kwargs: Any
) -> Tensor:
    """Set the shard to its part of a whole tensor that `func` fills in place, on the CPU."""
    values = torch.empty(_part(parameter).shape, dtype=parameter.dtype)
    func(values, *args, **kwargs)
    sharding = parameter.sharding
    own = collectives.own_shard(values, sharding.dim, sharding.ranges, sharding.group)
    _plain(parameter).copy_(own)
    return parameter


def _initialised(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Answer those functions of `torch.nn.init` that ask a tensor itself."""
    kwargs = dict(kwargs)
    parameter = kwargs.pop("tensor") if "tensor" in kwargs else args[0]
    rest = args[1:] if "tensor" not in kwargs and not kwargs else ()
    return fill_as_whole(func, parameter, *rest, **kwargs)


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
    own, sharding = parameter.shape, parameter.sharding

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
    "inside",
    "known_as_shard",
    "known_as_whole",
    "marked",
]
