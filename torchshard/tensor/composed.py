"""Functions of torch that are Python code made of others, each of which has a rule or not.

Such a function first asks its arguments whether one of them answers for it. Its code without
that question, given marked tensors, asks the rules about each step instead: the whole is
right if every step is, and is refused where one is. No function needs a rule just for this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

_MODULES = frozenset(["torch.nn.functional", "torch.functional"])
_QUESTIONS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)


def _never(*args: Any) -> bool:
    return False


@cache
def python_code(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `func` without its question for overrides; None if it is not such code."""
    if not isinstance(func, FunctionType) or func.__module__ not in _MODULES:
        return None
    if not set(_QUESTIONS) & set(func.__code__.co_names):
        return None
    silent = func.__globals__ | dict.fromkeys(_QUESTIONS, _never)
    code = FunctionType(
        func.__code__, silent, func.__name__, func.__defaults__, func.__closure__
    )
    code.__kwdefaults__ = func.__kwdefaults__
    return code
