"""Names: which class and module names are usable, and how one becomes the other."""

import builtins
import difflib
import keyword
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError
from .torch_names import TORCH_NN_CLASSES

MAX_LENGTH = 64

# Words that mix cases inside one word; written with one capital before the split.
_MIXED_CASE = re.compile(
    r"(?<![A-Z])(QLoRA|LoRA|MoE|RoPE|ALiBi|SwiGLU|GeGLU|ReGLU|PReLU|ReLU|SiLU)(?![a-z])"
)
# Never between a digit and a lone capital: Conv2D is one word.
_WORD_STARTS = re.compile(
    r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[0-9])(?=[A-Z][a-z])"
)
_WINDOWS_DEVICES = frozenset(
    ["aux", "con", "nul", "prn"]
    + [f"{device}{number}" for device in ("com", "lpt") for number in range(1, 10)]
)
# What a generated layer and its test import, so must not find beside them instead.
_IMPORTED = frozenset(["layer_zoo", "numpy", "pytest", "torch", "torchshard"])


def snake_case(name: str) -> str:
    """The module name of a class: `ParallelQKVLinear` gives `parallel_qkv_linear`."""
    name = _MIXED_CASE.sub(lambda match: match[0].capitalize(), name)
    return _WORD_STARTS.sub("_", name).lower()


def check_class_name(name: str, *, allow_shadow: bool = False) -> None:
    """Accept `name` as the class of a new layer.

    Raises:
        UsageError: If it is not an ASCII CapWords identifier, or if it hides a class of
            torch.nn or a builtin and `allow_shadow` is false.
    """
    reason = _unusable(name)
    if reason:
        raise UsageError(
            f"'{name}' is not a usable Python class name ({reason}). "
            f"Try: {suggested_class(name)}"
        )
    hidden = _hidden(name)
    if hidden and not allow_shadow:
        raise UsageError(
            f"'{name}' would shadow {hidden}; "
            f"use {suggested_class(name)} or --allow-shadow"
        )


def _unusable(name: str) -> str:
    """Why `name` cannot name a class; empty if it can."""
    if keyword.iskeyword(name):
        return "keyword"
    if not name.isidentifier():
        return "not an identifier"
    if not name.isascii():
        return "not ASCII"
    if not re.fullmatch("[A-Z][A-Za-z0-9]*", name):
        return "not in CapWords"
    if len(name) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    return ""


def _hidden(name: str) -> str:
    if name in TORCH_NN_CLASSES:
        return f"torch.nn.{name}"
    if hasattr(builtins, name):
        return f"the builtin {name}"
    return ""


def suggested_class(name: str) -> str:
    """A usable class name near `name`: `Parallel` and what can be kept of it."""
    words = re.findall("[A-Za-z0-9]+", name)
    joined = "".join(word[:1].upper() + word[1:] for word in words)
    prefix = "" if joined.startswith("Parallel") else "Parallel"
    return (prefix + (joined or "Layer"))[:MAX_LENGTH]


def check_module_name(module: str, folder: Path, *, in_package: bool) -> None:
    """Accept `module` as the name of a new file in `folder`.

    Raises:
        UsageError: If it cannot be imported, is a reserved file name on Windows, differs
            only in case from a file that is there, or, outside a package, hides a module
            that Python or the layer imports.
    """
    reason = _unusable_module(module) or _clash(module, folder, in_package)
    if reason:
        raise UsageError(
            f"'{module}' is not a usable module name ({reason}). "
            "Choose another with --module NAME"
        )


def _unusable_module(module: str) -> str:
    if not re.fullmatch("[a-z_][a-z0-9_]*", module):
        return "not a lower-case identifier; it names a module, not a path"
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        return "keyword"
    if module in _WINDOWS_DEVICES:
        return "a device name on Windows"
    if module.startswith("test_") or module == "conftest":
        return "pytest would collect it"
    if module.startswith("__"):
        return "reserved by Python"
    return ""


def _clash(module: str, folder: Path, in_package: bool) -> str:
    if not in_package and (module in sys.stdlib_module_names or module in _IMPORTED):
        return f"it would hide the module {module} that others import"
    for path in folder.iterdir():
        if path.stem.lower() == module and path.name != f"{module}.py":
            if path.suffix.lower() == ".py":
                return f"it differs from {path.name} in case alone"
            if path.is_dir() and path.name == module:
                return "a folder has that name"
    return ""


def did_you_mean(word: str, possible: Iterable[str]) -> str:
    """A sentence that offers the nearest of `possible`, or nothing."""
    nearest = difflib.get_close_matches(word, list(possible), n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""
