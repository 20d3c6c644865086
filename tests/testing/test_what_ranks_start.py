"""Bodies may start processes of their own, which end with their rank and its launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchshard.errors import RankError
from torchshard.testing import run_ranks
from torchshard.testing.ranks import tell


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index**2


def loaded(context):
    loader = DataLoader(
        Squares(), batch_size=2, num_workers=2, multiprocessing_context=context
    )
    return torch.cat(list(loader)).tolist()


@pytest.mark.parametrize(
    "context",
    [
        None,
        *(pytest.param(n, marks=pytest.mark.prove) for n in ("forkserver", "spawn")),
    ],
)
def test_a_data_loader_may_have_workers(context):
    """Whatever starts them."""
    expected = [0, 1, 4, 9, 16, 25]
    assert run_ranks(loaded, 1, context, timeout_s=100) == [expected]


def start_a_child():
    child = subprocess.Popen(["sleep", "600"])
    tell(child.pid)
    return child


def waits_with_a_child():
    start_a_child().wait()


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split()[2] == "Z"


def expect_gone(pids):
    deadline = time.monotonic() + 10
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)


def test_what_a_rank_started_is_killed_with_it():
    """At the timeout nothing is left behind."""
    pids = []
    with pytest.raises(RankError):
        run_ranks(
            waits_with_a_child,
            2,
            timeout_s=3.0,
            on_told=lambda _, pid: pids.append(pid),
        )
    assert len(pids) == 2
    expect_gone(pids)


LAUNCHER = """
import sys
sys.path.insert(0, {folder!r})
import test_what_ranks_start as body
from torchshard.testing import run_ranks
run_ranks(body.waits_with_a_child, 2, on_told=lambda _, pid: print(pid, flush=True))
"""


def test_ranks_end_with_a_launcher_that_is_killed():
    """Killed outright, it can no longer end them itself."""
    script = LAUNCHER.format(folder=os.path.dirname(__file__))
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    expect_gone(pids)


TEST = """
import pytest
import torch
import torchshard as ts
from torchshard.testing import Case, Floats, check_cases, run_ranks
from {package} import Doubled


class Own(Doubled):
    pass


def body(layer_class):
    layer = layer_class(6)
    return type(layer).__module__, ts.distributed.gather(layer(torch.ones(6))).tolist()


@pytest.mark.parametrize("layer_class", [Doubled, Own])
def test_runs(layer_class):
    assert run_ranks(body, 2, layer_class) == [(layer_class.__module__, [2.0] * 6)] * 2


def test_is_checked():
    case = Case(Own, args=(6,), inputs=(Floats((2, 6)),))
    run_ranks(check_cases, 2, [case])
"""

PACKAGE = """
import torchshard as ts


class Doubled(ts.ParallelLayer):
    def __init__(self, size, *, group=None, device=None, dtype=None):
        super().__init__(group)
        spec = ts.ParameterSpec((size,), ts.Shard(0, "size"), ts.Constant(2.0))
        self.declare(
            axes={"size": ts.Axis(size)},
            parameters={"weight": spec},
            inputs={"x": ts.Shard(-1, "size")},
            output=ts.Shard(-1, "size"),
            device=device,
            dtype=dtype,
        )

    def local_forward(self, x):
        return x * self.weight
"""


PYTEST = """
import sys

sys.path.remove("")  # as the command `pytest`, for which the folder is no place of modules
import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""


def project(folder, package):
    """A package under src, named in the conftest or in the settings, and two tests of one name."""
    (folder / "src" / package).mkdir(parents=True)
    (folder / "src" / package / "__init__.py").write_text(PACKAGE)
    for part in ("a", "b"):
        (folder / "tests" / part).mkdir(parents=True)
        (folder / "tests" / part / "test_doubled.py").write_text(
            TEST.format(package=package)
        )
    return folder


@pytest.mark.parametrize(
    "is_in_conftest", [pytest.param(True, marks=pytest.mark.prove), False]
)
def test_bodies_are_found_under_importlib_mode(tmp_path, is_in_conftest):
    """Test modules that no name imports, of a package under src: bodies and layers of theirs."""
    folder = project(tmp_path, "of_ones_own")
    settings = "[pytest]\n"
    if is_in_conftest:
        path = "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent / 'src'))"
        (folder / "conftest.py").write_text(path)
    else:
        settings += "pythonpath = src\n"
    (folder / "pytest.ini").write_text(settings)
    expect_passes(folder, "--import-mode=importlib", "tests")


@pytest.mark.prove
def test_bodies_are_found_under_prepend_mode(tmp_path):
    """The mode that pytest takes without a word."""
    folder = project(tmp_path, "of_ones_own")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    expect_passes(folder, "tests/a")


def expect_passes(folder, *arguments):
    command = [sys.executable, "-c", PYTEST, "-qp", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
