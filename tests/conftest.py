"""What every test finds as it is on a terminal, whoever started pytest."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive():
    """Take SIGINT, which a shell's background jobs ignore, and so would all they start."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)
