"""What collectives send, counted as they are called."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

FREE = ("wait_tensor", "_wrap_tensor_autograd")  # they send nothing


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank sends for them around a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return (
                NotImplemented  # taken apart first, it comes again with plain tensors
            )
        size, name = dist.get_world_size(), func._overloadpacket.__name__
        if name in ("allreduce_", "all_reduce", "all_reduce_"):
            self._add(args[0], 2 * (size - 1) / size)
        elif name in ("_allgather_base_", "allgather_"):
            self._add(args[1], size - 1)
        elif name == "all_gather_into_tensor":
            self._add(args[0], size - 1)
        elif func.namespace in ("c10d", "_c10d_functional") and name not in FREE:
            raise NotImplementedError(f"{name} is not counted yet")
        return func(*args, **kwargs or {})

    def _add(self, sent: Tensor | list[Tensor], factor: float) -> None:
        tensors = [sent] if isinstance(sent, Tensor) else sent
        self.calls += 1
        self.bytes += factor * sum(tensor.nbytes for tensor in tensors)
