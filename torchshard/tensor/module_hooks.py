"""Full backward hooks of modules, which are given gradients of shards as what they are.

torch registers them on nodes of the graph, which hand on this rank's part without a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import hooks
from torchshard.distributed.groups import at_destroy
from torchshard.distributed.transforms import is_marked

_class: Any = hooks.BackwardHook
_ON_TENSORS: Any = hooks.BackwardHook._apply_on_tensors


def mark_gradients_for_hooks() -> None:
    """Let full backward hooks see marked gradients, until `torchshard.destroy_process_group`."""
    if _class._apply_on_tensors is not _on_tensors:
        _class._apply_on_tensors = _on_tensors
        at_destroy(_restore)


def _restore() -> None:
    _class._apply_on_tensors = _ON_TENSORS


def _on_tensors(
    self: hooks.BackwardHook, found: Callable[[Any], None], args: Any
) -> Any:
    """Take the tensors that go into a module or come out of it, as torch's own does.

    `found` is given the node whose gradients are theirs, to register a hook on.
    """
    tensors: list[Any] = [x for x in args if isinstance(x, Tensor)]
    shardings = [x.sharding if is_marked(x) else None for x in tensors]
    if any(shardings):
        return _ON_TENSORS(
            self, lambda node: found(_MarkingNode(node, shardings)), args
        )
    return _ON_TENSORS(self, found, args)


class _MarkingNode:
    """A node of the graph whose hooks get its gradients marked."""

    def __init__(self, node: Any, shardings: Sequence[Any]) -> None:
        self.node, self.shardings = node, shardings

    def register_hook(self, hook: Callable[..., Any]) -> None:
        def marking(*grads: Any) -> Any:
            given = [_marked(part, self.shardings) for part in grads]
            result = hook(*given)
            return None if result is None else tuple(map(_local, result))

        self.node.register_hook(marking)


def _marked(grads: Sequence[Any], shardings: Sequence[Any]) -> tuple[Any, ...]:
    from torchshard.tensor.sharded import mark

    pairs = zip(grads, shardings, strict=True)
    return tuple(
        grad
        if grad is None or sharding is None or is_marked(grad)
        else mark(grad, sharding)
        for grad, sharding in pairs
    )


def _local(value: Any) -> Any:
    return value.to_local() if is_marked(value) else value
