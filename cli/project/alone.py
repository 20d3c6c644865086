"""One writer at a time: a lock on the project's root, held from reading to writing.

The descriptor of the folder itself is locked, so no file is left behind, and the kernel
lets go when a process ends, however it ends. Windows cannot lock a folder: there two runs
at the same moment are not told apart, and the later one wins.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import WriteError
from .journal import finish_interrupted, is_interrupted

if sys.platform != "win32":
    import fcntl

WAIT_S = 10.0
_PAUSE_S = 0.02


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Hold the project at `root`, what a killed run left there finished; others wait.

    Raises:
        WriteError: If another run holds it for longer than `WAIT_S`, or if what a killed
            run left cannot be finished.
    """
    if sys.platform == "win32":
        finish_interrupted(root)
        yield
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _wait_for(descriptor, root)
        finish_interrupted(root)
        yield
    finally:
        os.close(descriptor)


def settle(root: Path) -> None:
    """See to it that no file at `root` is half of what a killed run had decided on.

    For commands that read alone: they wait for nobody but a run that is just writing.
    """
    if is_interrupted(root):
        with alone_in(root):
            pass


def _wait_for(descriptor: int, root: Path) -> None:
    end_s = time.monotonic() + WAIT_S
    while not _is_taken(descriptor):
        if time.monotonic() > end_s:
            raise WriteError(
                f"another torchshard has been writing in {root} for {WAIT_S:g} s; "
                "nothing was written. Try again once it has ended"
            )
        time.sleep(_PAUSE_S)


def _is_taken(descriptor: int) -> bool:
    """Whether the lock is ours now; also where the file system has no locks at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # NFS, for one, locks no folder: better no lock there than no layer.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
    return True
