"""The mean of the shards' gradients over their replicas, once each backward.

Where M data-parallel groups each hold a model, the gradient of a shard is the mean over its M
replicas, those included that did not use the layer, as torch's DistributedDataParallel with
`find_unused_parameters` gives for what every rank holds. It is taken when a backward ends, of
all shards of the model in their order: one small all-reduce that says who has a gradient at
all, and one for every 25 MiB of gradients.

A gradient that arrives at an output of the model starts it, also on a replica that leaves
layers out, or, in a compiled model, one that arrives at a shard. Nothing is exchanged for a
forward under `no_sync`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from torchshard import owners
from torchshard.distributed.groups import get_data_parallel_group, model_group

_BUCKET_BYTES = 25 * 2**20
_DENSE, _SPARSE = 1, 2

_managed: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()
_means: WeakKeyDictionary[nn.Module, _ReplicaMean] = WeakKeyDictionary()
_watched = WeakIdKeyDictionary()
"""Shards with a hook, and the mean that they belong to."""


def average_over_replicas(model: nn.Module) -> None:
    """Have every backward through `model` end with the mean of its shards' gradients."""
    if _begin not in model._forward_hooks.values():
        model.register_forward_hook(_begin)


def managed_by(wrapper: DistributedDataParallel) -> set[int]:
    """Return the parameters that the wrapper averages, by id; it keeps them all alive."""
    if wrapper not in _managed:
        _managed[wrapper] = {id(parameter) for parameter in wrapper._module_parameters}
    return _managed[wrapper]


def _begin(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Watch where the gradients of this forward will arrive."""
    group = get_data_parallel_group()
    if group is None or group.size() == 1 or torch.compiler.is_compiling():
        return
    if not torch.is_grad_enabled():
        return
    if model not in _means:
        _means[model] = _ReplicaMean(model)
    mean = _means[model]
    mean.begin(DistributedDataParallel._get_active_ddp_module())  # type: ignore[no-untyped-call]
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(mean.arrived)  # type: ignore[no-untyped-call]


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from _tensors(vars(leaf))


def _arrived_at(parameter: Tensor) -> None:
    mean = _watched[parameter]()
    if mean is not None:
        mean.arrived()


class _ReplicaMean:
    """The mean for one model: whether this backward has asked for it, and how it is taken."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._managed: set[int] = set()
        self._is_due = False
        self._syncs = True

    def begin(self, wrapper: DistributedDataParallel | None) -> None:
        """Note what the wrapper around this forward leaves to do."""
        self._is_due = False  # a backward that raised never ended
        self._syncs = wrapper is None or wrapper.require_backward_grad_sync
        self._managed = set() if wrapper is None else managed_by(wrapper)
        for shard in self._shards():
            if shard not in _watched:
                shard.register_post_accumulate_grad_hook(_arrived_at)  # type: ignore[no-untyped-call]
            _watched[shard] = weakref.ref(self)

    def arrived(self, grad: Tensor | None = None) -> None:
        """Have the running backward end with the mean."""
        if self._is_due or not self._syncs:
            return
        self._is_due = True
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._average)

    def _shards(self) -> list[nn.Parameter]:
        """Return the shards over the model group that no wrapper averages, in one order."""
        model = self._model()
        return [
            parameter
            for parameter in ([] if model is None else model.parameters())
            if parameter.requires_grad
            and id(parameter) not in self._managed
            and _is_replicated(parameter)
        ]

    @torch.no_grad()
    def _average(self) -> None:
        self._is_due = False
        group, shards = get_data_parallel_group(), self._shards()
        if group is None or not shards:
            return
        kinds = torch.tensor([_kind(shard.grad) for shard in shards])
        kinds = kinds.to(shards[0].device)
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=group)
        used = [pair for pair in zip(shards, kinds.tolist(), strict=True) if pair[1]]
        for shard, kind in used:
            if shard.grad is None:
                shard.grad = _no_gradient(shard, kind)
        dense = [x.grad for x, _ in used if x.grad is not None and not x.grad.is_sparse]
        for bucket in _buckets(dense):
            _mean_of(bucket, group)
        for shard, _ in used:
            if shard.grad is not None and shard.grad.is_sparse:
                dist.all_reduce(shard.grad, group=group)
                shard.grad.div_(group.size())


def _is_replicated(parameter: nn.Parameter) -> bool:
    place = owners.shard_owner_of(parameter)
    return place is not None and place[0].group == model_group()


def _kind(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    return _SPARSE if grad.is_sparse else _DENSE


def _no_gradient(shard: Tensor, kind: int) -> Tensor:
    """Return the gradient of a shard that this replica did not use."""
    if kind == _DENSE:
        return torch.zeros_like(shard)
    return torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.long, device=shard.device),
        torch.zeros(0, *shard.shape[1:], dtype=shard.dtype, device=shard.device),
        shard.shape,
    )


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of gradients of one kind, of 25 MiB or a single one."""
    bucket: list[Tensor] = []
    room = _BUCKET_BYTES
    for grad in grads:
        size = grad.numel() * grad.element_size()
        is_alike = bucket and (grad.dtype, grad.device) == (
            bucket[0].dtype,
            bucket[0].device,
        )
        if bucket and (not is_alike or size > room):
            yield bucket
            bucket, room = [], _BUCKET_BYTES
        bucket.append(grad)
        room -= size
    if bucket:
        yield bucket


def _mean_of(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Set the gradients to their mean over the group, in one all-reduce."""
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        grads[0].div_(group.size())
        return
    flat = _flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
    dist.all_reduce(flat, group=group)
    flat.div_(group.size())
    means = _unflatten_dense_tensors(flat, grads)  # type: ignore[no-untyped-call]
    for grad, mean in zip(grads, means, strict=True):
        grad.copy_(mean)


__all__ = ["average_over_replicas", "managed_by"]
