"""What every test finds, whoever started pytest: interrupts, and a compiler at hand.

A test that is run at several sizes of the group is run on two and four ranks by `make prove`
alone, if three are among them. Three ranks divide unevenly, and hold nothing of a dim of two, as
four do; a test for one size only, such as of two replicas of two, is always run.
"""

import importlib
import signal
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of what its compiler imports
    # Ranks that compile then find it imported: see `torchshard.testing.run_ranks`.
    importlib.import_module("torch._inductor.compile_fx")

_COMPILED = {"test_compiles", "test_compiled_as_one_graph"}
_ALWAYS_COMPILED = {"test_parallel_multihead_attention.py", "test_attention.py"}


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive():
    """Take SIGINT, which a shell's background jobs ignore, and so would all they start."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what others stand for as `prove`."""
    sizes: dict[str, set[object]] = {}
    for item in items:
        sizes.setdefault(_swept(item), set()).add(_world_size(item))
    for item in items:
        others = sizes[_swept(item)]
        # On one rank nothing is marked, and a rule of tests/tensor is not reached.
        covered = {1, 2} if item.path.parent.name == "tensor" else {2}
        is_covered = 3 in others and _world_size(item) in covered
        if item.name in _COMPILED and item.path.name not in _ALWAYS_COMPILED:
            is_covered = True
        if is_covered or (_world_size(item) == 4 and others & {2, 3}):
            item.add_marker("prove")


def _world_size(item: pytest.Item) -> object:
    return getattr(item, "callspec", None) and item.callspec.params.get("world_size")


def _swept(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
