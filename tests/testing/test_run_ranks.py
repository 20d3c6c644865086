"""run_ranks: results by rank, and failures that name the rank and the reason."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchshard.distributed import groups
from torchshard.errors import RankError
from torchshard.testing.ranks import run_ranks, tell


def place_and_double(x):
    return groups.get_rank(), dist.get_world_size(), torch.get_num_threads(), x * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(world_size):
    """Each rank gets the arguments and one thread, and returns its own result."""
    results = run_ranks(place_and_double, world_size, torch.tensor([1.5, -2.0]))
    assert [result[:3] for result in results] == [
        (rank, world_size, 1) for rank in range(world_size)
    ]
    assert all(result[3].tolist() == [3.0, -4.0] for result in results)


def model_place():
    return dist.get_rank(), groups.get_rank(), groups.get_world_size()


def test_group_size_arranges_the_ranks():
    """Four ranks in groups of two."""
    results = run_ranks(model_place, 4, group_size=2)
    assert results == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]


def raise_on_rank_1():
    if groups.get_rank() == 1:
        raise ValueError("a reason of its own")
    dist.barrier()


def test_the_first_failure_is_named_with_its_traceback():
    """The rank that raised is named first, with file, function and reason; peers follow."""
    with pytest.raises(RankError) as error:
        run_ranks(raise_on_rank_1, 3, timeout_s=30)
    text = str(error.value)
    assert text.startswith("raise_on_rank_1: rank 1 of 3 failed first.\n")
    assert re.search(r"Rank (0, 2|2, 0|0|2) (failed after it|was still waiting)", text)
    assert "Traceback (most recent call last):" in text
    assert text.endswith("ValueError: a reason of its own\n")
    assert "in raise_on_rank_1" in text


def all_raise():
    raise KeyError(groups.get_rank())


def test_all_failing_ranks_are_counted():
    """When every rank raises, one traceback is shown and all ranks are named."""
    with pytest.raises(RankError) as error:
        run_ranks(all_raise, 2)
    first = re.match(r"all_raise: rank (\d) of 2 failed first\.\n", str(error.value))
    other = 1 - int(first[1])
    assert f"\nRank {other} failed after it.\n\nTraceback" in str(error.value)


def die_on_rank_0():
    if groups.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def exit_on_rank_0():
    if groups.get_rank() == 0:
        os._exit(7)
    time.sleep(600)


@pytest.mark.parametrize(("body", "code"), [(die_on_rank_0, -9), (exit_on_rank_0, 7)])
def test_a_rank_that_dies_is_named_with_its_exit_code(body, code):
    """Killed from outside or gone by itself: no hang, the whole text, the code."""
    with pytest.raises(RankError) as error:
        run_ranks(body, 2, timeout_s=60)
    assert str(error.value) == (
        f"{body.__name__}: rank 0 of 2 failed first.\n"
        f"Rank 1 was still waiting and was killed.\n\ndied with exit code {code}"
    )


def skip_a_collective():
    if groups.get_rank() != 1:
        dist.barrier()
        time.sleep(600)


def test_a_hang_is_killed_in_time_and_its_ranks_named():
    """Ranks that do not finish are killed at the timeout and listed."""
    with pytest.raises(RankError) as error:
        run_ranks(sleep_but_on_rank_1, 3, timeout_s=3)
    assert str(error.value) == (
        "sleep_but_on_rank_1: rank 0, 2 of 3 did not finish within 3 s and was killed. A"
        " rank that skips a collective leaves the others waiting."
    )


def sleep_but_on_rank_1():
    if groups.get_rank() != 1:
        time.sleep(600)


def test_a_skipped_collective_is_an_error():
    """The ranks left waiting fail or are killed; either way the launch ends and raises."""
    with pytest.raises(RankError, match=r"^skip_a_collective: rank "):
        run_ranks(skip_a_collective, 2, timeout_s=3)


def exit_by_system_exit():
    raise SystemExit("a script's way out")


def test_system_exit_is_a_failure_of_the_rank():
    """A body may not end its rank without a result."""
    with pytest.raises(RankError, match=r"SystemExit: a script's way out"):
        run_ranks(exit_by_system_exit, 1)


def unpicklable():
    return lambda: None


def test_a_result_that_does_not_pickle_is_named():
    """The rank says so instead of hanging."""
    with pytest.raises(RankError, match=r"^unpicklable: rank 0 of 1 failed first"):
        run_ranks(unpicklable, 1)


def pid_and_folder():
    return os.getpid()


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """No process, zombie or temporary folder survives, also after a failure."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids = run_ranks(pid_and_folder, 3)
    with pytest.raises(RankError):
        run_ranks(raise_on_rank_1, 2, timeout_s=20)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(tmp_path.glob("torchshard-*")) == []


SCRIPT = """
from torchshard.distributed import get_rank
from torchshard.testing import run_ranks

def speak():
    print("rank", get_rank(), "speaks")

if __name__ == "__main__":
    run_ranks(speak, 2)
"""


def test_what_ranks_print_is_shown(tmp_path):
    """Output that a rank has buffered is not lost when it ends."""
    script = tmp_path / "speaking.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, str(script)],
        # Unbuffered ranks would write word by word, and their lines could mix.
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(shown.stdout.split("\n")) == ["", "rank 0 speaks", "rank 1 speaks"]
    assert shown.stderr == ""


def tell_where_it_stands():
    tell(("begins", groups.get_rank()))
    dist.barrier()
    if groups.get_rank() == 1:
        raise ValueError("halfway")
    tell("goes on")
    dist.barrier()


def test_what_ranks_tell_is_heard_while_they_run():
    """From each rank, before it ends; the error names the rank that failed by number."""
    heard = []
    with pytest.raises(RankError) as error:
        run_ranks(
            tell_where_it_stands,
            2,
            timeout_s=30,
            on_told=lambda *told: heard.append(told),
        )
    assert error.value.rank == 1
    assert sorted(heard, key=str) == [
        (0, "goes on"),
        (0, ("begins", 0)),
        (1, ("begins", 1)),
    ]
    run_ranks(tell, 2, "to nobody")
    tell("in no rank")
