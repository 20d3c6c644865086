"""Which module's forward is running, for errors that say where. Read from the stack: no cost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from types import FrameType


def running_modules() -> list[nn.Module]:
    """Return the modules whose forward runs in this thread, the outermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


_CALL = nn.Module._wrapped_call_impl.__code__


def where_it_runs() -> str:
    """Return " in " and the innermost module that runs, as the outermost knows it, or ""."""
    modules = running_modules()
    return f" in {named(modules[-1], modules[0])}" if modules else ""


def named(module: nn.Module, root: nn.Module) -> str:
    """Return the class of `module` and its path in `root`."""
    kind = type(module).__name__
    paths = (path for path, part in root.named_modules() if part is module)
    path = next(paths, "")
    return f"{kind} {path!r}" if path else kind
