"""run_ranks: run a function on several gloo ranks of this machine, and fail as one.

Ranks come from a fork server that has torch imported already, so that a pair starts in a
fraction of a second where spawned processes would each import torch. They meet through a
file, not a port: two runs cannot collide. A timeout kills them all and names each rank that
had not finished.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torchshard.distributed import groups
from torchshard.errors import RankError
from torchshard.testing.origins import OriginFinder, Origins, origins_of

_PRELOADED = ["torch", "torch._dynamo", "torchshard.testing"]
"""What `check_layer` needs, compiling too; each rank would import it again."""
_GRACE_S = 3.0
"""How long the other ranks may go on after one has failed, to fail with a word of their own."""
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says on a rank whose neighbour is gone: a consequence, even if seen first."""

_pipe: Connection | None = None
"""In a rank: to the process that launched it."""


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    group_size: int = -1,
    timeout_s: float = 120.0,
    on_told: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call `body(*args)` on `world_size` ranks and return what each returned.

    Each rank has one thread, gloo and `torchshard.distributed.init_process_group` behind it.

    Args:
        body: A function at the top level of a module, so that it pickles by name.
        world_size: Number of ranks.
        *args: Arguments for `body`, pickled.
        group_size: Ranks of one model group; -1 means all of them.
        timeout_s: Seconds until the ranks are killed.
        on_told: Called here with a rank and what `body` gave to `tell` there.

    Returns:
        The results, by rank. They are pickled on the way.

    Raises:
        RankError: If `body` cannot be imported by its name, or a rank raised, died or did
            not finish in time. The message holds the traceback of the rank that failed
            first.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, and the rank's
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *_already_imported()])
    # Plain pickle: multiprocessing's own would share the memory of tensors, and a rank's
    # memory goes with it.
    call = pickle.dumps((_importable(body), args))
    origins = origins_of(call)
    with tempfile.TemporaryDirectory(prefix="torchshard-") as folder:
        place = (str(Path(folder) / "rendezvous"), world_size, group_size, timeout_s)
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(sender, rank, place, call, origins)
                )
                with _without_interrupts():
                    process.start()
                    processes.append(process)  # to be killed, if one comes next
                sender.close()
                pipes.append(receiver)
            told = on_told or (lambda rank, value: None)
            return _results(pipes, processes, body.__name__, timeout_s, told)
        finally:
            _kill(processes)


def _importable(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body`, which a rank can import by its name."""
    name = getattr(body, "__qualname__", "")
    if "<" in name:
        raise RankError(
            f"{name} is a lambda or is defined inside a function. Ranks import what they"
            " run by its name: put it at the top level of a module."
        )
    return body


def tell(value: Any) -> None:
    """In a rank, send `value` to the `on_told` of its `run_ranks`; nothing elsewhere."""
    if _pipe is not None:
        _pipe.send_bytes(pickle.dumps((None, value)))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let what starts here never see Ctrl-C, which a terminal sends to all processes.

    They inherit the mask. Who launched them is interrupted, and kills them; a fork server
    or a rank would print a traceback of its own. An interrupt of the moment is not lost.
    """
    resource_tracker.ensure_running()  # it clears the mask when it starts
    before = signal.getsignal(signal.SIGINT)
    is_handled = callable(before) and current_thread() is main_thread()
    late: list[Any] = []
    if is_handled:  # another thread may take the signal, whatever this one's mask
        signal.signal(signal.SIGINT, lambda *told: late.append(told))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if is_handled:
            signal.signal(signal.SIGINT, before)
    if late and callable(before):
        before(*late[0])


def _already_imported() -> list[str]:
    """Return what ranks would each import, and the fork server can import once for all.

    It does what this process did: torch's compiler and checkpoints take seconds.
    """
    often = ("pytest", "hypothesis", "torch._inductor.compile_fx")
    tensors = ("torch.distributed.tensor", "torch.distributed.tensor.debug")
    databases = ("common_modules", "common_methods_invocations")
    rarely = [f"torch.testing._internal.{name}" for name in databases]
    names = (*often, *tensors, "torch.distributed.checkpoint", *rarely)
    return [name for name in names if name in sys.modules]


def _rank_main(
    sender: Connection,
    rank: int,
    place: tuple[str, int, int, float],
    call: bytes,
    origins: Origins,
) -> None:
    global _pipe
    _pipe = sender
    os.setpgid(0, 0)  # what the body starts, a loader's workers, ends with the rank
    Thread(target=_end_with_launcher, daemon=True).start()
    sys.meta_path.insert(0, OriginFinder(origins))
    path, world_size, group_size, timeout_s = place
    torch.set_num_threads(1)
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(path).as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        groups.init_process_group(group_size)
        # A rank with a short body must not be gone while another still connects to it.
        dist.barrier()
        body, args = pickle.loads(call)
        answer = pickle.dumps((True, body(*args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    # Before the answer: who waits for it may kill this process as soon as it is there.
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(answer)
    for child in multiprocessing.active_children():
        child.kill()
    # A group whose peer is gone may not shut down cleanly; the kernel can.
    os._exit(0)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os.killpg(0, signal.SIGKILL)


def _results(
    pipes: list[Connection],
    processes: list[BaseProcess],
    name: str,
    timeout_s: float,
    on_told: Callable[[int, Any], None],
) -> list[Any]:
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes):
        waiting = [
            pipe
            for rank, pipe in enumerate(pipes)
            if rank not in {**results, **failures}
        ]
        # Once past, not even those that still tell something are heard.
        left = deadline - time.monotonic()
        ready = wait(waiting, left) if left > 0 else []
        if not ready:
            break
        for pipe in ready:
            rank = next(r for r, candidate in enumerate(pipes) if candidate is pipe)
            ok, value = _received(pipes[rank], processes[rank])
            if ok is None:
                on_told(rank, value)
                continue
            (results if ok else failures)[rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if len(results) == len(pipes):
        return [results[rank] for rank in range(len(pipes))]
    raise _error(name, timeout_s, len(pipes), results, failures)


def _received(pipe: Connection, process: BaseProcess) -> tuple[bool | None, Any]:
    """Return what a rank sent: None and what it tells, or whether it came to an end well."""
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(_GRACE_S)
        return False, f"died with exit code {process.exitcode}"
    return ok, value


def _error(
    name: str,
    timeout_s: float,
    world_size: int,
    results: dict[int, Any],
    failures: dict[int, str],
) -> RankError:
    unfinished = [r for r in range(world_size) if r not in {**results, **failures}]
    if not failures:
        return RankError(
            f"{name}: rank {_listed(unfinished)} of {world_size} did not finish within"
            f" {timeout_s:g} s and was killed. A rank that skips a collective leaves the"
            " others waiting."
        )
    causes = [r for r in failures if not any(m in failures[r] for m in _LOST_PEER)]
    first = (causes or list(failures))[0]
    others = [rank for rank in failures if rank != first]
    lines = [f"{name}: rank {first} of {world_size} failed first."]
    if others:
        lines.append(f"Rank {_listed(others)} failed after it.")
    if unfinished:
        lines.append(f"Rank {_listed(unfinished)} was still waiting and was killed.")
    error = RankError("\n".join([*lines, "", failures[first]]))
    error.rank = first
    return error


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(0.0 if process.is_alive() else None)
        if process.is_alive():
            _kill_group(process)
    for process in processes:
        process.join()


def _kill_group(process: BaseProcess) -> None:
    """Kill a rank and what it has started."""
    process.kill()
    if process.pid is not None:
        with suppress(ProcessLookupError):  # it had no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
