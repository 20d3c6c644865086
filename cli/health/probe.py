"""Call a function of `torch_probe.py` in a process of its own, for a limited time.

There torch may take long, crash or hang, as it does with a broken driver.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """\
import json, sys
sys.path[:] = [folder for folder in sys.path if folder] + [sys.argv[1]]
from {package} import torch_probe
print(json.dumps(torch_probe.{function}(*json.loads(sys.argv[2]))))
"""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ProbeError(Exception):
    """The function raised, its process died, or it took too long."""


def probe(function: str, *args: Any, timeout_s: float) -> Any:
    """Return what the function returns.

    Raises:
        ProbeError: If it does not return in time, with what it said.
    """
    program = _PROGRAM.format(package=__package__, function=function)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(_PACKAGE_ROOT), json.dumps(args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its ranks end with it
    ) as process:
        try:
            shown, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"no answer within {timeout_s:g} s") from None
        finally:
            _end(process)
    if process.returncode:
        raise ProbeError(_last_words(said) or f"died with {process.returncode}")
    return json.loads(shown.splitlines()[-1])


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill the process and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all gone
        process.kill()


def _last_words(said: str) -> str:
    """The last line that is not blank: what a traceback says in the end."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
