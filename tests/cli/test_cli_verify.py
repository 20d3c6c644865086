"""`torchshard verify`: what it shows, what it says, and how it ends."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_project import in_here
from click.testing import CliRunner, Result
from torchshard.errors import RankError
from torchshard.testing.check import Step
from torchshard_cli.main import main
from torchshard_cli.proof.proof import Failure, Listener, Proof
from torchshard_cli.screen.show_proof import VerifyError, ranks_text, show_proof

ROOT = Path(__file__).resolve().parents[2]


def torchshard(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would, in a process of its own."""
    command = [sys.executable, "-m", "torchshard_cli", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def in_process(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", *args])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a layer generated from the blank template."""
    result = in_here(tmp_path, "new-layer", "ParallelDoubled", "-t", "blank")
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


def edited(project: Path, old: str, new: str) -> None:
    layer = project / "parallel_doubled.py"
    text = layer.read_text("utf-8")
    assert old in text
    layer.write_text(text.replace(old, new), "utf-8")


def test_a_wrong_layer_is_named_with_its_difference(project: Path) -> None:
    """Status 1, the case, the rank, the check, the place, the difference, the command."""
    edited(project, "* self.weight", "* 2")
    target = "parallel_doubled:ParallelDoubled"
    result = in_here(project, "verify", target, "--ranks", "2")
    assert result.returncode == 1
    assert re.search(r"^state +exact$", result.stdout, re.M)
    assert re.search(r"^output and gradients +FAILED\Z", result.stdout.rstrip(), re.M)
    assert re.fullmatch(
        r"Error: ParallelDoubled does not equal Dense:\n"
        r"  2 ranks: ParallelDoubled\(7\) of \(4x7\), rank [01] of 2, output and gradients:"
        r" output 0 differs by [0-9.]+ at \(\d, \d\), where the dense layer has"
        r" -?[0-9.]+; allowed is 1e-10\n"
        rf"    again: torchshard verify {target} --ranks 2 --case 1\n",
        result.stderr,
    )


WRONG_ON_RANK_2 = """\
        if self.group.rank == 2 and input.dim() == 3:
            input = input * 1.5
        return input * self.weight"""


def test_the_command_that_is_named_shows_the_same_failure(project: Path) -> None:
    """One case fails on one number of ranks: the command runs it alone, with its numbers."""
    edited(project, "        return input * self.weight", WRONG_ON_RANK_2)
    first = in_here(
        project, "verify", "parallel_doubled:ParallelDoubled", "--seed", "5", "--json"
    )
    assert first.returncode == 1, first.stderr
    proof = json.loads(first.stdout)
    (failure, _) = proof["failures"]
    assert (failure["ranks"], failure["case"]) == (3, 2)
    assert failure["check"] == "output and gradients"
    command = failure["command"]
    assert f"    again: {command}\n" in first.stderr
    words = command.split()
    assert words[0] == "torchshard"
    assert words[-6:] == ["--ranks", "3", "--seed", "5", "--case", "2"]
    again = in_here(project, *words[1:], "--json")
    assert again.returncode == 1
    shown = json.loads(again.stdout)
    assert (shown["cases"], shown["seed"]) == ([2], 5)
    assert without_rank(shown["failures"][0]) == without_rank(failure)
    assert shown["failures"][0]["command"] == command
    other = in_here(project, *words[1:-3], "6", "--case", "2", "--json")
    (different,) = json.loads(other.stdout)["failures"]
    assert without_rank(different) != without_rank(failure)


def without_rank(failure: dict[str, str]) -> str:
    """What it said; which of the ranks that are wrong says it first is chance."""
    return re.sub(r"rank \d of", "rank of", failure["said"])


def test_results_for_programs(project: Path) -> None:
    """Each check on each number of ranks: how it ended, and its worst difference."""
    edited(project, "        return input * self.weight", WRONG_ON_RANK_2)
    target = "parallel_doubled:ParallelDoubled"
    done = in_here(project, "verify", target, "--ranks", "2,3", "--json")
    assert done.returncode == 1
    results = {
        (one["check"], one["ranks"]): (one["result"], one["worst_difference"])
        for one in json.loads(done.stdout)["results"]
    }
    assert results["state", 2] == ("passed", 0.0)
    assert results["compile", 2] == ("passed", 0.0)
    assert results["state", 3] == ("stopped", 0.0)
    assert results["output and gradients", 3] == ("failed", 0.0)
    assert results["compile", 3] == ("not run", None)


def test_a_case_that_is_not_there(project: Path) -> None:
    """The cases are listed by number, and the status is 2."""
    result = in_here(
        project, "verify", "parallel_doubled:ParallelDoubled", "--case", "4"
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: --case 4: test_parallel_doubled.py has 3 cases of ParallelDoubled:\n"
        "  1  ParallelDoubled(7) of (4x7)\n"
        "  2  ParallelDoubled(7, gather_output=True) of (2x3x7)\n"
        "  3  ParallelDoubled(3) of (4x3)\n"
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
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].split() == [
        *("initial", "values"),
        "FAILED",
        "FAILED",
    ]
    assert result.stderr.count("Traceback (most recent call last):") == 1
    words = (
        "LayoutError: Segment('feature') names an axis that is not declared."
        " Expected one of ['features']."
    )
    assert result.stderr.endswith(
        f"torchshard.errors.{words}\n\n"
        f"Error: ParallelDoubled does not equal Dense:\n  1 and 2 ranks: {words}\n"
        "    again: torchshard verify parallel_doubled:ParallelDoubled --ranks 1 --case 1\n"
    )


def proof_of(**failures: str) -> Proof:
    by_size = {int(size[1:]): Failure(said) for size, said in failures.items()}
    return Proof("Own", "Dense", "test_own.py", failures=by_size)


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


def test_the_worst_of_all_cases_and_ranks_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For each check; and where the rank stands that failed first."""
    begun: list[tuple[int, str]] = []
    listener = Listener([4, 7], lambda number, check: begun.append((number, check)))
    for rank, step in [
        (0, Step(1, "output")),
        (1, Step(1, "output")),
        (1, Step(1, "output", 3e-12)),
        (0, Step(1, "output", 1e-12)),
        (0, Step(2, "output")),
        (0, Step(2, "output", 2e-12)),
        (0, Step(2, "state")),
    ]:
        listener(rank, step)
    assert begun == [(4, "output"), (7, "output"), (7, "state")]
    error = RankError("body: rank 0 of 2 failed first.")
    assert listener.failure(error) == Failure(str(error), 4, "output")  # the slowest
    error.rank = 0
    failure = listener.failure(error)
    assert failure == Failure(str(error), 7, "state")
    proof = Proof("Own", "Dense", "test_own.py", numbers=[4, 7])
    proof.worst[2], proof.failures[2] = listener.worst, failure
    with pytest.raises(VerifyError):
        show_proof(proof, as_json=False)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[2:] == [["output", "3.0e-12"], ["state", "FAILED"]]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([1], "1 rank"), ([2], "2 ranks"), ([1, 2, 4], "1, 2 and 4 ranks")],
)
def test_ranks_in_words(sizes: list[int], text: str) -> None:
    """As one would say it."""
    assert ranks_text(sizes) == text


def test_one_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    """One case, one rank."""
    proof = proof_of()
    proof.worst[1] = {"output": 0.0}
    show_proof(proof, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Own: 1 case of test_own.py"
    assert lines[-1] == "Own equals Dense on 1 rank."


def test_help_is_whole() -> None:
    """The example stays a line of its own; no summary of a command is cut."""
    shown = in_process("--help").output
    assert "\n  Examples:\n    torchshard verify parallel_embedding:Parallel" in shown
    for words in (["--help"], ["templates", "--help"]):
        summaries = CliRunner().invoke(main, words).output.partition("Commands:")[2]
        assert "\n" in summaries
        assert "..." not in summaries


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "a:B", "--case", "two"], "'--case': 'two' is not a valid number."),
        (["verify", "a:B", "--seed", "-1"], "'--seed': -1 is not in the range x>=0."),
        (
            ["doctor", "--timeout", "soon"],
            "'--timeout': 'soon' is not a valid number of seconds.",
        ),
        (
            ["completion", "tcsh"],
            "'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish'.",
        ),
    ],
)
def test_values_are_refused_in_words(words: list[str], said: str) -> None:
    """As a person would say it, not as click's classes are called."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert result.output.endswith(f"Error: Invalid value for {said}\n")


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


def test_cases_where_the_tests_mirror_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases of a module of `mirrored` are found in `tests/mirrored`."""
    lay_out(
        tmp_path,
        {
            "mirrored/__init__.py": "",
            "mirrored/gate.py": "class Gate:\n    pass\n",
            "tests/mirrored/test_gate.py": "CASES = []\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = in_process("mirrored.gate:Gate")
    source = tmp_path / "tests" / "mirrored" / "test_gate.py"
    assert result.output == f"Error: no case in {source} is of Gate\n"


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
    source = ROOT / "tests" / "layer_zoo" / "test_parallel_linear.py"
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


LAYER = """\
import torchshard as ts
from torch import nn
{imports}

class Dense(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, input):
        return 2 * input


class ParallelOwn(ts.ParallelLayer):
    def __init__(self, *, group=None, device=None, dtype=None):
        super().__init__(group)
        self.declare(
            axes={{"features": ts.Axis(7)}},
            parameters={{}},
            inputs={{"input": ts.Shard(-1, "features")}},
            output=ts.Shard(-1, "features"),
            device=device,
            dtype=dtype,
        )

    def local_forward(self, input):
        return FACTOR * input

"""
CASES = """\
from torchshard.testing import Case, Floats
{imports}

CASES = [Case(ParallelOwn, Dense, inputs=[Floats((3, 7))])]
"""
PROVED = "ParallelOwn equals Dense on 2 ranks."


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def package(name: str = "") -> dict[str, str]:
    """A package with its tests inside, both with relative imports."""
    return {
        f"{name}/__init__.py": "",
        f"{name}/factor.py": "FACTOR = 2\n",
        f"{name}/own.py": LAYER.format(imports="from .factor import FACTOR\n"),
        f"{name}/tests/__init__.py": "",
        f"{name}/tests/test_own.py": CASES.format(
            imports="from ..own import Dense, ParallelOwn\n"
        ),
    }


@pytest.mark.parametrize(
    "target",
    [
        "strange.own:ParallelOwn",
        pytest.param("strange/own.py:ParallelOwn", marks=pytest.mark.prove),
    ],
)
def test_a_package_that_is_not_installed(tmp_path: Path, target: str) -> None:
    """Found from the working directory, by module or by path; its test imports relatively."""
    lay_out(tmp_path, package("strange"))
    result = in_here(tmp_path, "verify", target, "--ranks", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == PROVED


@pytest.mark.prove
@pytest.mark.parametrize("cases", ["strange/tests/test_own.py", "tests/test_own.py"])
def test_a_package_elsewhere_on_the_path(
    cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an editable install leaves it, and though an installed package is called tests."""
    lay_out(tmp_path / "far", package("strange"))
    lay_out(tmp_path / "installed", {"tests/__init__.py": "raise RuntimeError\n"})
    outer = {
        "tests/__init__.py": "",
        "tests/test_own.py": (
            CASES.format(imports="from strange.own import Dense, ParallelOwn\n")
        ),
    }
    lay_out(tmp_path / "far", outer)
    (tmp_path / "here").mkdir()
    for folder in ("far", "installed"):  # each before all others
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / folder), prepend=os.pathsep)
    result = torchshard(
        tmp_path / "here",
        *("verify", "strange.own:ParallelOwn", "--ranks", "2"),
        *("--cases", str(tmp_path / "far" / cases)),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == PROVED


@pytest.mark.parametrize(
    "name", ["train-it", pytest.param("train-it.py", marks=pytest.mark.prove)]
)
def test_a_class_in_a_script(tmp_path: Path, name: str) -> None:
    """With its cases in the same file, what runs below `__main__` left alone."""
    text = LAYER.format(imports="FACTOR = 2\n") + CASES.format(imports="")
    script = f"{text}\nif __name__ == '__main__':\n    raise SystemExit('trained')\n"
    lay_out(tmp_path, {"train-it.py": script})
    result = in_here(tmp_path, "verify", f"{name}:ParallelOwn", "--ranks", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == PROVED


def test_a_module_of_a_package_by_itself(tmp_path: Path) -> None:
    """From inside the package: where to run it, and as what."""
    lay_out(tmp_path, package("strange"))
    result = in_here(tmp_path / "strange", "verify", "own:ParallelOwn")
    assert result.returncode == 2
    assert result.stderr.endswith(
        f"it is part of a package: from {tmp_path}, it is strange.own\n"
    )


def test_a_class_imported_by_another_name(tmp_path: Path) -> None:
    """The cases are of the same file's class as another module: the one is named."""
    files = package("strange")
    files["strange/own.py"] = LAYER.format(imports="FACTOR = 2\n")
    lay_out(tmp_path, files)
    cases = tmp_path / "strange" / "tests" / "test_own.py"
    result = in_here(
        tmp_path / "strange", "verify", "own:ParallelOwn", "--cases", str(cases)
    )
    assert (result.returncode, result.stderr) == (
        2,
        f"Error: no case in {cases} is of ParallelOwn as own defines it, but of"
        " strange.own's; torchshard verify strange.own:ParallelOwn\n",
    )


def test_a_file_whose_name_leads_elsewhere(tmp_path: Path) -> None:
    """A test that another module hides is not silently taken for it."""
    lay_out(
        tmp_path, {"own.py": LAYER.format(imports="FACTOR = 2\n"), "far/json.py": ""}
    )
    result = in_here(tmp_path, "verify", "own:ParallelOwn", "--cases", "far/json.py")
    assert result.returncode == 2
    assert re.match(
        r"Error: importing 'json' gives \S+, not far/json.py", result.stderr
    )


def test_a_case_that_cannot_be_sent(tmp_path: Path) -> None:
    """A lambda is refused in words before any rank starts."""
    text = LAYER.format(imports="FACTOR = 2\n") + CASES.format(imports="")
    text = text.replace("(3, 7))]", "(3, 7)), lambda: 1]")
    lay_out(tmp_path, {"own.py": text})
    result = in_here(tmp_path, "verify", "own:ParallelOwn")
    assert result.returncode == 2
    assert result.stderr.startswith("Error: own.py: ParallelOwn() of (3x7, <function ")
    assert result.stderr.endswith(
        ". Use classes and functions from the top level of a module\n"
    )


SLEEPER = """\
import sys, time
import torchshard as ts
from torch import nn
from torchshard.testing import Case


class Sleeper(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(60)


CASES = [Case(Sleeper)]
"""


def test_a_layer_that_hangs(tmp_path: Path) -> None:
    """The ranks that did not finish, the check, and the command with the same limit."""
    lay_out(tmp_path, {"sleeper.py": SLEEPER})
    result = in_here(
        tmp_path, "verify", "sleeper:Sleeper", "--ranks", "2", "--timeout", "8"
    )
    assert result.returncode == 1
    assert re.search(r"^\S.* +FAILED$", result.stdout, re.M)
    assert (
        "  2 ranks: check_cases: rank 0, 1 of 2 did not finish within 8 s and was killed."
    ) in result.stderr
    assert result.stderr.endswith(
        "    again: torchshard verify sleeper:Sleeper --timeout 8 --ranks 2 --case 1\n"
    )


@pytest.mark.prove
def test_ctrl_c(tmp_path: Path) -> None:
    """Off a terminal, from all processes of the group at once: a word, 130, no traceback."""
    lay_out(tmp_path, {"sleeper.py": SLEEPER})
    command = [sys.executable, "-m", "torchshard_cli", "verify", "sleeper:Sleeper"]
    with subprocess.Popen(
        [*command, "--ranks", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("asleep")
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    assert (process.returncode, shown) == (130, "")
    # The ranks' own lines may lie in one another.
    assert said.replace("asleep", "").split() == ["Interrupted."]


def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    """The bar is wiped, the cursor shown again, and the status is 130."""
    lay_out(
        tmp_path, {"sleeper.py": SLEEPER.replace('print("asleep"', 'print("asleep!"')}
    )
    command = [sys.executable, "-m", "torchshard_cli", "verify", "sleeper:Sleeper"]
    status, shown = on_a_terminal(command, tmp_path, until="asleep!", then="\x03")
    assert status == 130
    assert "1 rank, case 1, initial values" in shown
    assert "Traceback" not in shown
    assert "\x1b[?25h" in shown  # the cursor
    assert shown.endswith("\r\nInterrupted.\r\n")


def on_a_terminal(
    command: list[str], folder: Path, until: str, then: str
) -> tuple[int, str]:
    """Run a command at a terminal; once it shows `until`, wait for a picture and type."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
    shown, is_typed = b"", False
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the terminal is closed
            read = b""
        if not read:
            break
        shown += read
        if not is_typed and until.encode() in shown and b"initial values" in shown:
            os.write(terminal, then.encode())
            is_typed = True
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()
