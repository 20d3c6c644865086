"""The public names: every package's `__all__`, and the layers under both of their names."""

import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torchshard as ts

import layer_zoo

PACKAGES = [
    "torchshard",
    "torchshard.distributed",
    "torchshard.nn",
    "torchshard.nn.functional",
    "torchshard.testing",
    "torchshard.tensor",
    "torchshard.errors",
    "layer_zoo",
]


def defined(package):
    """Return what the package's own text binds and does not hide."""
    module = importlib.import_module(package)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "annotations"
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", package).split(".")[0]
        in (
            "torchshard",
            "layer_zoo",
        )
    }


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "torchshard.errors"])
def test_all_lists_the_public_names(package):
    """`__all__` is sorted and holds what the package defines, no more and no less."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if name != "__version__"]
    aliases = {"GroupLike", "Layout", "Reduction", "RULES"}  # carry no __module__
    modules = {name for name in names if isinstance(getattr(module, name), ModuleType)}
    expected = defined(package) | modules | aliases & set(names)
    assert set(names) == expected
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    """Each class and function that one can import says what it is."""
    module = importlib.import_module(package)
    assert module.__doc__
    for name in getattr(module, "__all__", defined(package)):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name


@pytest.mark.parametrize("package", PACKAGES)
def test_r30_star_import(package):
    """R30: `from package import *` binds every name of `__all__`."""
    names = {}
    exec(f"from {package} import *", names)
    module = importlib.import_module(package)
    assert set(getattr(module, "__all__", [])) <= names.keys()


BOTH_ORDERS = """
import {first}
import {second}
import torchshard as ts
import layer_zoo
from torchshard.nn import ParallelLinear
names = layer_zoo.__all__
assert names
assert all(getattr(ts.nn, name) is getattr(layer_zoo, name) for name in names)
assert ParallelLinear is layer_zoo.ParallelLinear
assert set(names) <= set(dir(ts.nn))
"""


@pytest.mark.parametrize(
    "first",
    ["torchshard", "layer_zoo", pytest.param("torchshard.nn", marks=pytest.mark.prove)],
)
def test_the_layers_are_the_same_in_both_orders_of_import(first):
    """`ts.nn.X` is `layer_zoo.X`, whichever is imported first, in a fresh interpreter."""
    second = "layer_zoo" if first != "layer_zoo" else "torchshard"
    code = BOTH_ORDERS.format(first=first, second=second)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_an_unknown_layer():
    """The error names what torchshard.nn has."""
    with pytest.raises(AttributeError) as raised:
        ts.nn.ParallelLiner  # noqa: B018  # the access is what raises
    assert str(raised.value) == (
        "torchshard.nn has no layer 'ParallelLiner'. It has"
        f" {', '.join(layer_zoo.__all__)}."
    )
    with pytest.raises(ImportError, match="ParallelLiner"):
        exec("from torchshard.nn import ParallelLiner")


def test_every_error_is_caught_as_torchs_and_as_ours():
    """Errors derive from TorchShardError and from the builtin one would catch."""
    for name in defined("torchshard.errors") - {"TorchShardError"}:
        error = getattr(ts.errors, name)
        assert issubclass(error, ts.errors.TorchShardError)
        builtin = error.__mro__[2:]
        assert any(base.__module__ == "builtins" for base in builtin[:-3]), name
