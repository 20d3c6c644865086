"""`torchshard verify`: what it shows, what it says, and how it ends."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torchshard_cli.main import main

ROOT = Path(__file__).resolve().parent.parent


def torchshard(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would, in a process of its own."""
    command = [sys.executable, "-m", "torchshard_cli", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def in_process(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", *args])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a layer generated from the blank template."""
    result = torchshard(tmp_path, "new-layer", "ParallelDoubled", "-t", "blank")
    assert result.returncode == 0, result.stderr
    return tmp_path


def test_a_right_layer_is_proved(project: Path) -> None:
    """A table with a column for each number of ranks, a sentence, and status 0."""
    result = torchshard(
        project, "verify", "parallel_doubled:ParallelDoubled", "--ranks", "1,2"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "ParallelDoubled: 3 cases of test_parallel_doubled.py"
    assert lines[1] == "worst difference 1 rank 2 ranks"
    assert lines[2] == "initial values exact exact"
    assert lines[-2] == "compile - exact"
    assert lines[-1] == "ParallelDoubled equals Dense on 1, 2 ranks."


def test_a_wrong_layer_is_named_with_its_difference(project: Path) -> None:
    """Status 1, the case, the rank, the check, the place and the difference."""
    layer = project / "parallel_doubled.py"
    layer.write_text(layer.read_text("utf-8").replace("* self.weight", "* 2"), "utf-8")
    result = torchshard(
        project, "verify", "parallel_doubled:ParallelDoubled", "--ranks", "2", "--json"
    )
    assert result.returncode == 1
    proof = json.loads(result.stdout)
    assert proof["worst"] == {}
    assert list(proof["failures"]) == ["2"]
    assert re.fullmatch(
        r"Error: ParallelDoubled does not equal Dense:\n"
        r"  2 ranks: ParallelDoubled\(7\) of \(4x7\), rank [01] of 2, output and gradients:"
        r" output 0 differs by [0-9.]+ at \(\d, \d\), where the dense layer has"
        r" -?[0-9.]+; allowed is 1e-10\n",
        result.stderr,
    )


def test_a_module_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module and the folder are named, and the status is 2."""
    monkeypatch.chdir(tmp_path)
    result = in_process("parallel_nowhere:ParallelNowhere")
    assert result.exit_code == 2
    assert result.output == (
        f"Error: no module 'parallel_nowhere' in {tmp_path} or among the installed ones\n"
    )


def test_a_class_that_is_not_there() -> None:
    """The nearest class of the module is offered."""
    result = in_process("layer_zoo:ParalelLinear")
    assert result.exit_code == 2
    assert result.output == (
        "Error: module 'layer_zoo' has no class 'ParalelLinear'."
        " Did you mean 'ParallelLinear'?\n"
    )


def test_a_target_of_another_form() -> None:
    """The form is shown by an example."""
    result = in_process("layer_zoo.ParallelLinear")
    assert result.exit_code == 2
    assert result.output == (
        "Error: 'layer_zoo.ParallelLinear' is not of the form MODULE:CLASS, such as"
        " parallel_embedding:ParallelEmbedding\n"
    )


def test_a_target_that_is_no_class() -> None:
    """A function is refused before anything is launched."""
    result = in_process("torchshard.layout:balanced")
    assert result.exit_code == 2
    assert result.output == "Error: torchshard.layout:balanced is not a class\n"


def test_ranks_that_are_no_numbers() -> None:
    """The list of ranks is read before the module is imported."""
    result = in_process("layer_zoo:ParallelLinear", "--ranks", "two")
    assert result.exit_code == 2
    assert result.output == (
        "Error: --ranks two is not a list of numbers of ranks, such as 1,2,3,4\n"
    )


def test_a_layer_without_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no test lies near, the way to name one is told."""
    module = tmp_path / "lonely_layer.py"
    module.write_text("class LonelyLayer:\n    pass\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = in_process("lonely_layer:LonelyLayer")
    assert result.exit_code == 2
    assert result.output == (
        f"Error: no test_lonely_layer.py beside {module} or in a tests folder above it;"
        " name the file that holds the list CASES with --cases\n"
    )


def test_a_test_without_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test file that has no CASES says what they are."""
    (tmp_path / "empty_layer.py").write_text("class EmptyLayer:\n    pass\n", "utf-8")
    test = tmp_path / "test_empty_layer.py"
    test.write_text("", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = in_process("empty_layer:EmptyLayer")
    assert result.exit_code == 2
    assert result.output == (
        f"Error: {test} has no list CASES of torchshard.testing.Case, which says how to"
        " build the layer, what it must equal, and what to feed it\n"
    )


def test_cases_of_another_layer() -> None:
    """Cases are those of the class that was asked for."""
    source = ROOT / "tests" / "test_parallel_linear.py"
    result = in_process("layer_zoo:ParallelEmbedding", "--cases", str(source))
    assert result.exit_code == 2
    assert result.output == f"Error: no case in {source} is of ParallelEmbedding\n"


def test_help_imports_no_torch() -> None:
    """`verify --help` starts as fast as the other commands."""
    code = (
        "import sys; from torchshard_cli.main import main\n"
        "try: main(['verify', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
