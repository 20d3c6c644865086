"""Hooks of a template, its own programs around the rendering, kept to themselves."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_hooks(scratch: Path) -> Iterator[None]:
    """Let hooks run, for a while.

    What they print goes to stderr, as stdout may be JSON; the copies that cookiecutter
    makes of them go to `scratch`, as it leaves them behind; and a traceback that it logs of
    one that fails goes nowhere, as the error itself is told.
    """
    logger = logging.getLogger("cookiecutter.hooks")
    before = tempfile.tempdir, logger.disabled
    tempfile.tempdir, logger.disabled = str(scratch), True
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        tempfile.tempdir, logger.disabled = before
