"""`torchshard verify`: what it shows, what it says, and how it ends."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torchshard_cli.main import main
from torchshard_cli.verify import Proof, _ranks, _show

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


def test_a_wrong_declaration_is_told_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One traceback on stderr, then one line for all numbers of ranks, and status 1."""
    layer = project / "parallel_doubled.py"
    text = layer.read_text("utf-8")
    layer.write_text(text.replace('Shard(0, "features")', 'Shard(0, "feature")'))
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    result = in_process("parallel_doubled:ParallelDoubled", "--ranks", "1,2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("Traceback (most recent call last):") == 1
    words = (
        "LayoutError: Segment('feature') names an axis that is not declared."
        " Expected one of ['features']."
    )
    assert result.stderr.endswith(
        f"torchshard.errors.{words}\n\n"
        f"Error: ParallelDoubled does not equal Dense:\n  1 and 2 ranks: {words}\n"
    )


def proof_of(**failures: str) -> Proof:
    by_size = {int(size[1:]): failure for size, failure in failures.items()}
    return Proof("Own", "Dense", "test_own.py", 1, worst={}, failures=by_size)


def test_failures_are_told_apart_by_their_error() -> None:
    """Ranks and paths in a traceback make no difference; the error's words do."""
    failure = (
        "body: rank {} failed.\n\nTraceback (most recent call last):\n  File x\n{}\n"
    )
    shape = "torchshard.errors.ShapeError: first line\nsecond line"
    proof = proof_of(
        _1=failure.format(0, shape),
        _2=failure.format(1, "ValueError"),
        _3=failure.format(2, shape),
        _4="Own(7), rank 1 of 4: output 0 differs",
    )
    assert proof.sizes_by_failure == {
        "ShapeError: first line\nsecond line": [1, 3],
        "ValueError": [2],
        "Own(7), rank 1 of 4: output 0 differs": [4],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import sys\n\nsys.exit(3)\n", "SystemExit: 3 (broken.py, line 3)"),
        ("x = 1\n{}['a']\n", "KeyError: 'a' (broken.py, line 2)"),
        (
            "import nowhere_to_be\n",
            "ModuleNotFoundError: No module named 'nowhere_to_be' (broken.py, line 1)",
        ),
        ("raise RuntimeError\n", "RuntimeError (broken.py, line 1)"),
    ],
)
def test_a_module_that_fails_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    """What it said and where, without a traceback; a file of cases alike; status 2."""
    broken = tmp_path / "broken.py"
    broken.write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for arguments in (
        ["broken:Broken"],
        ["layer_zoo:ParallelLinear", "--cases", "broken.py"],
    ):
        result = in_process(*arguments)
        assert (result.exit_code, result.output) == (
            2,
            f"Error: importing 'broken' failed: {words}\n",
        )


def test_a_package_below_src_asks_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the layer's own or one that the layer imports."""
    (tmp_path / "src" / "packed").mkdir(parents=True)
    (tmp_path / "lonely.py").write_text("import packed.layer\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hint = "; src/packed can be imported once installed: pip install -e .\n"
    result = in_process("packed.layer:Layer")
    assert (result.exit_code, result.output) == (
        2,
        f"Error: no module 'packed.layer' in {tmp_path} or among the installed ones{hint}",
    )
    result = in_process("lonely:Layer")
    assert (result.exit_code, result.output) == (
        2,
        "Error: importing 'lonely' failed: ModuleNotFoundError:"
        f" No module named 'packed' (lonely.py, line 1){hint}",
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([1], "1 rank"), ([2], "2 ranks"), ([1, 2, 4], "1, 2 and 4 ranks")],
)
def test_ranks_in_words(sizes: list[int], text: str) -> None:
    """As one would say it."""
    assert _ranks(sizes) == text


def test_one_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    """One case, one rank."""
    proof = proof_of()
    proof.worst[1] = {"output": 0.0}
    _show(proof, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Own: 1 case of test_own.py"
    assert lines[-1] == "Own equals Dense on 1 rank."


def test_help_is_whole() -> None:
    """The example stays a line of its own; no summary of a command is cut."""
    shown = in_process("--help").output
    assert "\n  Example:\n    torchshard verify parallel_embedding:Parallel" in shown
    assert "..." not in CliRunner().invoke(main, ["--help"]).output.partition("Comm")[2]


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
