"""What every test finds, whoever started pytest: interrupts, and a compiler at hand.

A test that is run at several sizes of the group is run on four ranks by `make prove` alone.
Three ranks divide unevenly, and hold nothing of a dim of two, as four do; a test for four ranks
only, such as of two replicas of two, is always run.
"""

import importlib
import signal
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of what its compiler imports
    # Ranks that compile then find it imported: see `torchshard.testing.run_ranks`.
    importlib.import_module("torch._inductor.compile_fx")


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
    """Mark the four-rank runs of what is also run on fewer ranks as `prove`."""
    fewer = {_swept(item) for item in items if _world_size(item) in (2, 3)}
    for item in items:
        if _world_size(item) == 4 and _swept(item) in fewer:
            item.add_marker("prove")


def _world_size(item: pytest.Item) -> object:
    return getattr(item, "callspec", None) and item.callspec.params.get("world_size")


def _swept(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
