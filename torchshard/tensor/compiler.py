"""What torch.compile has to be told of tensors that answer for functions of torch themselves.

Each workaround is for torch 2.13 and names what ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torchshard.distributed.groups import at_destroy


def uncompiled(marked: type[Tensor]) -> None:
    """Keep torch.compile from making a graph of the class' own dispatch, behind a graph break.

    Inside a graph it is traced as any function is. As a frame of its own, it would be entered
    again by what its compiled form reads of its arguments (torch 2.13).
    """
    code = marked.__torch_function__.__func__.__code__  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if "skip_code" in dir(frames):  # before torch 2.8
        frames.skip_code(code)
        return
    skip = frames._FrameAction.SKIP  # this frame, and what it calls
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def seen_in_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Have torch.compile ask the rules about functions that torch does not list (2.13).

    They ask for overrides as all do, and are missing where torch says which do.
    """
    listed = torch.overrides.get_overridable_functions()[torch]
    functions = list(functions)
    listed.extend(functions)
    compiler = sys.modules.get("torch._dynamo.variables.torch")
    if compiler is not None:  # it has read the list
        compiler.get_overridable_functions().update(functions)


_CHECK = "check_custom_op_aliasing"


def take_marked_inputs() -> None:
    """Let compiled graphs have marked tensors for inputs, as behind a graph break.

    On a graph's first run torch checks what custom operators alias, by a mode that refuses every
    tensor class but its own. The check is off until `torchshard.destroy_process_group`.
    """
    if getattr(functorch_config, _CHECK, False):  # torch 2.6 has no such check
        setattr(functorch_config, _CHECK, False)
        at_destroy(lambda: setattr(functorch_config, _CHECK, True))


def compiler_looks() -> bool:
    """Return whether torch.compile itself asks, to describe the storage of a graph's input.

    False inside the graph, where user code asks: there `is_dynamo_compiling` is True.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
