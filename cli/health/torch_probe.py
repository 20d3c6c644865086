"""What the doctor asks torch, in a process of its own. The one module here that imports it."""

import time
from typing import Any

import torch
import torch.distributed as dist


def build() -> dict[str, Any]:
    """What torch was built with, and what it sees."""
    can_distribute = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "distributed": can_distribute,
        "backends": {
            "gloo": can_distribute and dist.is_gloo_available(),
            "nccl": can_distribute and dist.is_nccl_available(),
            "mpi": can_distribute and dist.is_mpi_available(),
        },
        "devices": [_device(i) for i in range(torch.cuda.device_count())],
    }


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory": properties.total_memory}


def round_trip(backend: str, world_size: int, timeout_s: float) -> dict[str, float]:
    """Sum a tensor over ranks; the seconds until they were there, and for one sum."""
    from torchshard.testing import run_ranks

    start = time.monotonic()
    seconds = run_ranks(_summed, world_size, backend, timeout_s=timeout_s)
    return {"total_s": time.monotonic() - start, "sum_s": max(seconds)}


def _summed(backend: str) -> float:
    """In a rank: the seconds that a sum over all ranks takes, once it is warm."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    group = dist.new_group(backend=backend)
    for _ in range(2):
        x = torch.full((1024,), dist.get_rank() + 1.0, device=device)
        start = time.monotonic()
        dist.all_reduce(x, group=group)
        total = x[-1].item()  # waits for the device
        seconds = time.monotonic() - start
    size = dist.get_world_size()
    if total != size * (size + 1) / 2:
        raise RuntimeError(f"the ranks' sum is {total}, not {size * (size + 1) / 2}")
    return seconds
