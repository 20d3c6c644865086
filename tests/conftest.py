"""What every test finds, whoever started pytest: interrupts, and a compiler at hand."""

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
