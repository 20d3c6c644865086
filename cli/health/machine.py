"""Cores, threads, memory that processes share, temporary files, and the environment."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding

_SUBJECT = "machine"
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 256 * 2**20
"""A container's default of 64 MiB is what data loaders and NCCL run out of."""
_LEAST_TEMPORARY = 64 * 2**20
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "TMPDIR"),
)
_PREFIXES = ("GLOO_", "NCCL_", "TORCHSHARD_", "TORCH_")


def machine_findings() -> Iterator[Finding]:
    """What the machine gives to several ranks."""
    yield Finding(_SUBJECT, "cores", _cores())
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding(_SUBJECT, "OMP_NUM_THREADS", threads)
    if _SHARED_MEMORY.is_dir():
        yield _shared_memory()
    yield _temporary_files()
    yield from _environment()


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return str(total) if usable == total else f"{usable} of {total} for this process"


def _shared_memory() -> Finding:
    usage = shutil.disk_usage(_SHARED_MEMORY)
    value = f"{_SHARED_MEMORY}: {size_text(usage.total)}, {size_text(usage.free)} free"
    if usage.free >= _LEAST_SHARED:
        return Finding(_SUBJECT, "shared memory", value)
    problem = (
        f"Only {size_text(usage.free)} of {_SHARED_MEMORY} is free; data loaders and NCCL"
        " keep what they exchange there."
    )
    remedy = "in a container: docker run --shm-size=1g; else remove old files there"
    return Finding(_SUBJECT, "shared memory", value, problem, remedy)


def _temporary_files() -> Finding:
    """Ranks meet through a temporary file, and talk through a socket beside it."""
    name = "temporary files"
    asked = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        problem = f"No temporary file can be written: {error}."
        remedy = "export TMPDIR=DIR, a folder that you may write to, with room in it"
        return Finding(_SUBJECT, name, "none", problem, remedy)
    value = f"{folder}: {size_text(free)} free"
    if asked and Path(asked).resolve() != Path(folder).resolve():
        problem = f"TMPDIR is {asked}, where no file can be written."
        remedy = "make that folder, or unset TMPDIR"
        return Finding(_SUBJECT, name, value, problem, remedy)
    if free < _LEAST_TEMPORARY:
        problem = f"Only {size_text(free)} are free in {folder}."
        remedy = f"remove files from {folder}, or export TMPDIR=DIR with more room"
        return Finding(_SUBJECT, name, value, problem, remedy)
    return Finding(_SUBJECT, name, value)


def _environment() -> Iterator[Finding]:
    """The variables that decide how ranks find each other, as they are set."""
    names = [
        name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES)
    ]
    for name in sorted(names):
        yield Finding(_SUBJECT, name, os.environ[name] or "empty")


def size_text(num_bytes: float) -> str:
    """`512 MiB`, `23.6 GiB`."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
