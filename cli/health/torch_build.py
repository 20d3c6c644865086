"""torch: what it was built with, the devices it sees, and whether ranks reach each other."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .finding import Finding
from .machine import size_text
from .probe import ProbeError, probe

_SUBJECT = "torch"
_RANKS = "ranks"
_REINSTALL = (
    "install a build of torch for this machine: https://pytorch.org/get-started"
)


def torch_findings(timeout_s: float) -> Iterator[Finding]:
    """What torch says of itself; then two gloo ranks, and NCCL ones where there is CUDA."""
    try:
        facts = probe("build", timeout_s=timeout_s)
    except ProbeError as error:
        problem = f"torch cannot be imported and asked: {error}."
        yield Finding(_SUBJECT, "build", "no answer", problem, _REINSTALL)
        return
    yield from build_findings(facts)
    if facts["backends"]["gloo"]:
        yield round_trip("gloo", 2, timeout_s)
    if facts["backends"]["nccl"] and facts["devices"]:
        yield round_trip("nccl", min(2, len(facts["devices"])), timeout_s)


def build_findings(facts: dict[str, Any]) -> Iterator[Finding]:
    """The findings that follow from what torch says of itself."""
    kind = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    kind = f"ROCm {facts['hip']}" if facts["hip"] else kind
    yield Finding(_SUBJECT, "build", f"{facts['version']}, {kind}")
    yield Finding(_SUBJECT, "threads", str(facts["threads"]))
    yield _backends(facts)
    yield from _devices(facts)


def _backends(facts: dict[str, Any]) -> Finding:
    there = [name for name, is_there in facts["backends"].items() if is_there]
    missing = [name for name in facts["backends"] if name not in there]
    value = " and ".join(there) or "none"
    value += f" (no {', no '.join(missing)})" if missing else ""
    problem = ""
    if not facts["distributed"]:
        problem = "This torch was built without torch.distributed."
    elif "gloo" not in there:
        problem = "This torch has no gloo, through which ranks on the CPU talk."
    elif "nccl" not in there and facts["cuda"] and facts["devices"]:
        problem = "This torch has no NCCL, through which ranks on GPUs talk."
    return Finding(_SUBJECT, "backends", value, problem, _REINSTALL if problem else "")


def _devices(facts: dict[str, Any]) -> Iterator[Finding]:
    for index, device in enumerate(facts["devices"]):
        value = f"{device['name']}, {size_text(device['memory'])}"
        yield Finding(_SUBJECT, f"device {index}", value)
    if facts["devices"]:
        return
    problem, remedy = "", ""
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    if facts["cuda"] and not is_hidden and any(Path("/dev").glob("nvidia[0-9]*")):
        problem = "This machine has an NVIDIA device that torch cannot use."
        remedy = (
            f"run nvidia-smi: the driver must work, and know CUDA {facts['cuda']} or"
            " later"
        )
    yield Finding(_SUBJECT, "devices", "no CUDA device", problem, remedy)


def round_trip(backend: str, world_size: int, timeout_s: float) -> Finding:
    """Whether ranks on this machine start, meet, and sum a tensor."""
    name = f"{backend}, {world_size} rank{'s' if world_size > 1 else ''}"
    # The ranks' own limit comes first: it names the rank that was waiting.
    args = (backend, world_size, 0.8 * timeout_s)
    try:
        took = probe("round_trip", *args, timeout_s=timeout_s)
    except ProbeError as error:
        problem = f"{world_size} ranks do not sum a tensor over {backend}: {error}"
        return Finding(
            _RANKS, name, "no answer", f"{problem.rstrip('.')}.", _remedy(str(error))
        )
    value = f"started in {took['total_s']:.1f} s, a sum in {took['sum_s'] * 1e3:.2f} ms"
    return Finding(_RANKS, name, value)


def _remedy(said: str) -> str:
    """What mends the start of ranks, going by what was said."""
    if "AF_UNIX" in said:
        return "export TMPDIR=/tmp: the path of a socket may have some 100 letters only"
    if "No space left" in said or "Read-only" in said:
        return "export TMPDIR=DIR, a folder with room that you may write to"
    if "did not finish" in said or "no answer" in said:
        return (
            "allow processes of this machine to talk over the loopback interface, or give"
            " a slow machine more time: torchshard doctor --timeout 300"
        )
    return (
        "processes must be allowed to start others (multiprocessing's fork server) and to"
        " open sockets; a sandbox or a container's limits may forbid it"
    )
