"""`new-layer --from`: dense modules of twenty kinds, read, divided and proved."""

import importlib
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import dense_modules
import pytest
import torchshard as ts
from cli_project import contents, working_in
from click.testing import CliRunner, Result
from torch import nn
from torchshard.testing import Floats, check_cases, run_ranks
from torchshard_cli.main import main

HERE = Path(__file__).resolve().parent


def classes_of(module: ModuleType) -> list[str]:
    """Return the names of the dense modules that `module` defines."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]


TWENTY = classes_of(dense_modules)
ODD_AND_PROVED = [
    "Attention",
    "Branches",
    "Buffers",
    "Checkpointed",
    "Convolution",
    "FromFactories",
    "GroupedConvolution",
    "ObjectDefaults",
    "Opaque",
    "OptionalParts",
    "Properties",
    "ReadFromOutside",
    "SameName",
    "Sequence",
    "Tied",
    "Transformed",
]


ALSO_COMPILED = ["ResidualMLPHead", "VectorQuantizer", "NetVLAD"]
ODD_AND_LEFT = [
    "CallsSuper",
    "Finishing",
    "Fixed",
    "Grouped",
    "Hooked",
    "KeepsMode",
    "Named",
    "Parametrized",
]


def takes_long(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.prove)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def read(name: str, module: str, *words: str) -> Result:
    """Generate `Parallel{name}` here from the class `name`."""
    return run("new-layer", f"Parallel{name}", "--from", f"{module}:{name}", *words)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sharded layer of every module, and what each run said, by name."""
    folder = tmp_path_factory.mktemp("generated")
    said = {}
    with working_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for module, names in (
            ("dense_modules", TWENTY),
            ("odd_dense_modules", [*ODD_AND_PROVED, *ODD_AND_LEFT]),
        ):
            path = HERE / f"{module}.py"
            shutil.copy(path, folder)  # so that ruff takes it for the project's own
            for name in names:
                result = read(name, module)
                assert result.exit_code == 0, (name, result.output)
                said[name] = result.output
        (folder / "said.json").write_text(json.dumps(said), "utf-8")
        yield folder


def said(folder: Path, name: str) -> str:
    text: str = json.loads((folder / "said.json").read_text("utf-8"))[name]
    return " ".join(text.split())


def test_there_are_twenty() -> None:
    """As many kinds as the page promises."""
    assert len(TWENTY) == 20


@pytest.mark.parametrize("sizes", [(3,), takes_long((1, 2, 4))], ids=str)
@pytest.mark.parametrize(
    "name",
    [*TWENTY[::2], *(takes_long(n) for n in (*TWENTY[1::2], *ODD_AND_PROVED))],
)
def test_the_layer_equals_its_dense_class(
    generated: Path, name: str, sizes: tuple[int, ...]
) -> None:
    """As generated, it passes what `torchshard verify` runs, on 1 to 4 ranks."""
    cases = cases_of(generated, name)
    for world_size in sizes:
        run_ranks(check_cases, world_size, cases)


def cases_of(folder: Path, name: str) -> list[ts.testing.Case]:
    (path,) = [
        path
        for path in folder.glob("test_*.py")
        if f"import Parallel{name}\n" in path.read_text("utf-8")
    ]
    for module in (path.stem, path.stem.removeprefix("test_")):
        sys.modules.pop(module, None)  # another folder may have had one of that name
    return list(importlib.import_module(path.stem).CASES)


@pytest.mark.parametrize("name", ["CosineClassifier", *map(takes_long, ALSO_COMPILED)])
def test_the_layer_compiles(generated: Path, name: str) -> None:
    """One graph of torch.compile gives the dense results."""
    run_ranks(check_cases, 2, cases_of(generated, name)[:1], True)


def test_a_rule_decides_by_what_it_sees(generated: Path) -> None:
    """Built with groups, of which nothing was tried, the layer is right or refuses."""
    (case, *_) = cases_of(generated, "GroupedConvolution")
    grouped = replace(case, args=(6, 10), options={"groups": 2}, inputs=[IMAGES])
    for world_size in (1, 2, 3, 4):
        run_ranks(expect_right_or_refused, world_size, grouped)


IMAGES = Floats((4, 6, 5, 7))


def expect_right_or_refused(case: ts.testing.Case) -> None:
    import torch

    try:
        case.build()(torch.ones(IMAGES.shape))
    except ts.errors.ShardedOpError:
        return
    check_cases([case])


@pytest.mark.parametrize("name", TWENTY)
def test_the_forward_is_the_authors(generated: Path, name: str) -> None:
    """Its text stands in the generated class as it was written."""
    source = inspect.getsource(getattr(dense_modules, name).forward)
    module = importlib.import_module(cases_of(generated, name)[0].layer.__module__)
    text = Path(str(module.__file__)).read_text("utf-8")
    assert source.replace("def forward(", "def dense_forward(") in text


def test_the_cases_divide_something(generated: Path) -> None:
    """Each of the twenty holds less on one of two ranks than the dense module."""
    for name in TWENTY:
        case = cases_of(generated, name)[0]
        whole = sum(one.numel() for one in case.build_dense().parameters())
        (held,) = run_ranks(number_held, 2, case)[:1]
        assert held < whole, name


def number_held(case: ts.testing.Case) -> int:
    return sum(one.numel() for one in case.build().parameters())


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--isolated", "--select", "E4,E7,E9,F,I"],
        ["ruff", "format", "--isolated", "--check"],
    ],
)
def test_generated_code_is_clean(generated: Path, command: list[str]) -> None:
    """It is laid out and imported as ruff has it."""
    paths = sorted(map(str, generated.glob("*parallel_*.py")))
    result = subprocess.run(
        [sys.executable, "-m", *command, *paths],
        cwd=generated,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "PrototypeHead",
            "log_temperature: whole on every rank",
        ),
        ("Fixed", "drop drops with p=0.5, which no argument turns off"),
        ("Named", "forward returns a dict, of which the test compares nothing"),
        ("CallsSuper", "write dense_forward: forward calls super()"),
        ("Finishing", "write dense_forward: forward reads self.finish, a name that"),
        ("Grouped", "write dense_forward: forward reads self.group, a name that"),
        ("Hooked", "write dense_forward: its constructor registers hooks"),
        ("Parametrized", "write dense_forward: a parametrization computes"),
        ("KeepsMode", "KeepsMode.train is not carried over"),
        (
            "ReadFromOutside",
            "fc.weight, fc.bias: whole on every rank (Linear); it cannot be divided:"
            " its fc.weight is read as if it were whole",
        ),
    ],
)
def test_what_is_left_is_said_in_words(generated: Path, name: str, words: str) -> None:
    """The command prints it, and the file holds it."""
    assert f"Left to you: {words}" in said(generated, name)
    (path,) = [
        path
        for path in generated.glob("parallel_*.py")
        if f"class Parallel{name}(" in path.read_text("utf-8")
    ]
    assert words in " ".join(path.read_text("utf-8").split())


def test_where_the_rule_covers_all_nothing_is_said(generated: Path) -> None:
    """No remark for a layer that is divided to the last parameter."""
    assert "Left" not in said(generated, "CosineClassifier")


def test_a_forward_that_cannot_be_carried_is_left_to_write(generated: Path) -> None:
    """The layer is built on one rank and on two, and says on its first call what it lacks."""
    for world_size in (1, 2):
        words = run_ranks(what_a_call_says, world_size)
        assert all("forward calls super()" in one for one in words)


def what_a_call_says() -> str:
    import torch

    module = importlib.import_module("parallel_calls_super")
    layer = module.ParallelCallsSuper(5, 7)
    with pytest.raises(NotImplementedError) as raised:
        layer(torch.ones(4, 5))
    return str(raised.value)


def test_check_and_update_import_nothing_of_the_user(
    generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They render from the lock, in a process where the dense modules are not to be found."""
    command = [sys.executable, "-m", "torchshard_cli"]
    for words in (["check"], ["update", "--all"]):
        result = subprocess.run(
            [*command, *words], cwd=generated, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert "as generated" in result.stdout or "nothing to" in result.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def header_of(path: Path) -> str:
    return "".join(path.read_text("utf-8").splitlines(keepends=True)[:5])


@pytest.mark.parametrize(
    ("target", "words", "expected"),
    [
        ("torch.nn:Linear", [], "template=linear@"),
        ("torch.nn:Linear", ["--shard", "weight=1"], '"split":"row"'),
        ("torch.nn:Linear", ["--shard", "bias=0"], '"split":"column"'),
        ("torch.nn:Embedding", ["--shard", "weight=0"], '"split":"vocabulary"'),
        ("torch.nn:Embedding", ["--shard", "weight=1"], '"split":"dim"'),
        ("torch.nn:Conv3d", [], '"num_dims":"3"'),
        ("torch.nn:MultiheadAttention", [], "template=attention@"),
        ("torch.nn:CrossEntropyLoss", ["--set", "reduction=sum"], '"reduction":"sum"'),
        ("odd_dense_modules:Plain", [], "template=linear@"),
        ("dense_modules:TemperatureClassifier", [], "template=dense@"),
    ],
)
def test_a_family_with_a_template_takes_it(
    here: Path, target: str, words: list[str], expected: str
) -> None:
    """A class of torch.nn, and one that adds nothing to it, is what the template is for."""
    result = run("new-layer", "ParallelMine", "--from", target, *words)
    assert result.exit_code == 0, result.output
    assert expected in header_of(here / "parallel_mine.py")


def test_shard_says_what_is_divided(here: Path) -> None:
    """The dim that is asked for, and what is to stay whole."""
    result = read(
        "BilinearHead", "dense_modules", "--shard", "weight=1", "--shard", "bias=whole"
    )
    assert result.exit_code == 0, result.output
    text = (here / "parallel_bilinear_head.py").read_text("utf-8")
    assert 'self.take_over(dense, {"weight": 1})' in text
    assert "bias    whole" in text
    assert '"shards":"weight=1 bias=whole"' in header_of(
        here / "parallel_bilinear_head.py"
    )
    run_ranks(check_cases, 3, cases_of(here, "BilinearHead"))


def test_shard_of_a_layer_inside_says_how_that_is_divided(here: Path) -> None:
    """`fc1.weight=1` makes it a row-parallel one."""
    result = read("ResidualMLPHead", "dense_modules", "--shard", "fc1.weight=1")
    assert result.exit_code == 0, result.output
    assert '"fc1": "row"' in (here / "parallel_residual_mlp_head.py").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("dense_modules:FiLN", [], "Did you mean 'FiLM'?"),
        ("dense_modules", [], "is not of the form MODULE:CLASS"),
        ("no_such_module:Head", [], "no module 'no_such_module'"),
        ("odd_dense_modules:NotAModule", [], "is not a subclass of torch.nn.Module"),
        ("odd_dense_modules:NoForward", [], "has no forward to carry over"),
        ("odd_dense_modules:NoParameters", [], "there is nothing to divide"),
        ("odd_dense_modules:Lazy", [], "belongs to a lazy layer"),
        ("odd_dense_modules:TakesGroup", [], "has an argument 'group'"),
        ("torch.nn:LazyLinear", [], "is lazy"),
        ("torchshard:ParallelLayer", [], "is a sharded layer already"),
        (
            "dense_modules:FiLM",
            ["--shard", "weight"],
            "is not of the form PARAMETER=DIM",
        ),
        ("dense_modules:FiLM", ["--shard", "w=0"], "there is no parameter 'w'"),
        (
            "dense_modules:FiLM",
            ["--shard", "project.wait=0"],
            "Did you mean 'project.weight'?",
        ),
        ("dense_modules:FiLM", ["--shard", "project.weight=2"], "has no dim 2"),
        (
            "dense_modules:SwiGLU",
            ["--shard", "up.weight=0", "--shard", "up.weight=1"],
            "is given twice",
        ),
        (
            "dense_modules:DepthwiseBlock",
            ["--shard", "norm.weight=0"],
            "(BatchNorm2d) stays whole",
        ),
        ("torch.nn:Linear", ["--shard", "bias=whole"], "is none of the ways"),
        ("torch.nn:Linear", ["--shard", "weight=2"], "has no dim 2"),
        ("torch.nn:Embedding", ["--shard", "bias=0"], "there is no parameter 'bias'"),
        (
            "torch.nn:MultiheadAttention",
            ["--shard", "in_proj_weight=1"],
            "a MultiheadAttention is divided by heads",
        ),
        (
            "odd_dense_modules:Transformed",
            ["--shard", "weight=0"],
            "computes with shards past torch's functions",
        ),
        (
            "odd_dense_modules:Opaque",
            ["--shard", "fc.weight=0"],
            "_Centred computes with shards past torch's functions",
        ),
        ("dense_modules:FiLM", ["-t", "linear"], "leave out -t linear"),
        ("dense_modules:FiLM", ["--set", "arguments=5, x"], "are not literals"),
        (
            "dense_modules:FiLM",
            ["--set", "arguments=5, 7", "--set", "inputs=Ints(3)"],
            "is not a list such as",
        ),
        ("dense_modules:FiLM", ["--set", "arguments=5"], "FiLM(5) failed: TypeError"),
    ],
)
def test_what_cannot_be_read_is_one_message(
    here: Path, name: str, words: list[str], message: str
) -> None:
    """It says what is wrong, ends in exit code 2, and nothing is written."""
    result = run("new-layer", "ParallelMine", "--from", name, *words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert contents(here) == {}


def test_an_error_in_the_users_module_is_its_last_line(here: Path) -> None:
    """The class of the error, what it says and where it was raised."""
    (here / "broken_heads.py").write_text("import torch\n\nx = 1 / 0\n", "utf-8")
    result = run("new-layer", "ParallelHead", "--from", "broken_heads:Head")
    assert result.exit_code == 2
    assert result.output == (
        "Error: importing 'broken_heads' failed: ZeroDivisionError: division by zero"
        " (broken_heads.py, line 3)\n"
    )


def test_shard_without_from_is_refused(here: Path) -> None:
    """It divides what is read, and nothing was."""
    result = run("new-layer", "ParallelLinear", "--shard", "weight=0")
    assert result.exit_code == 2
    assert "--shard divides what --from MODULE:CLASS reads" in result.output
    result = run("new-layer", "ParallelMine", "-t", "dense")
    assert result.exit_code == 2
    assert "name it with --from MODULE:CLASS" in result.output


def test_a_dry_run_writes_nothing_and_json_holds_what_is_left(here: Path) -> None:
    """All views of the plan work for it."""
    result = read("PrototypeHead", "dense_modules", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert not plan["written"]
    assert plan["template"] == "dense"
    assert plan["options"]["dense"] == "dense_modules:PrototypeHead"
    assert plan["left"] == ["log_temperature: whole on every rank"]
    assert contents(here) == {}


HEAD = '''\
import torch
from torch import Tensor, nn


class Head(nn.Module):
    """A head."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T
'''


@pytest.mark.prove
def test_a_class_that_changed_is_read_again_on_demand(here: Path) -> None:
    """`--from` again gives an update; without it the layer is as it was read."""
    command = [sys.executable, "-m", "torchshard_cli"]
    words = ["new-layer", "ParallelHead", "--from", "my_heads:Head"]

    def generate(*words: str) -> str:
        result = subprocess.run(
            [*command, *words], cwd=here, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    (here / "my_heads.py").write_text(HEAD, "utf-8")
    generate(*words)
    changed = HEAD.replace("self.weight.T", "self.weight.T * 2")
    (here / "my_heads.py").write_text(changed, "utf-8")
    assert "nothing to write" in generate("new-layer", "ParallelHead")
    assert "  update     parallel_head.py" in generate(*words)
    assert "@ self.weight.T * 2\n" in (here / "parallel_head.py").read_text("utf-8")
    # The header says what to read where the lock is lost.
    (here / ".torchshard" / "lock.json").unlink()
    before = (here / "parallel_head.py").read_bytes()
    assert "identical  parallel_head.py" in generate("new-layer", "ParallelHead")
    assert (here / "parallel_head.py").read_bytes() == before


def test_a_package_gets_the_layer_too(here: Path) -> None:
    """`--into` and `--module` mean what they mean for other templates."""
    (here / "zoo").mkdir()
    (here / "zoo" / "__init__.py").write_text('"""The zoo."""\n', "utf-8")
    result = read(
        "CosineClassifier", "dense_modules", "--into", "zoo", "--module", "cosine"
    )
    assert result.exit_code == 0, result.output
    assert (here / "zoo" / "cosine.py").is_file()
    test = (here / "zoo" / "test_cosine.py").read_text("utf-8")
    assert "from zoo.cosine import ParallelCosineClassifier\n" in test
    assert "cosine" in (here / "zoo" / "__init__.py").read_text("utf-8")


def test_help_names_the_options() -> None:
    """Both are in the command's own help, which imports no torch."""
    output = run("new-layer", "--help").output
    assert "--from MODULE:CLASS" in output
    assert "--shard PARAM=DIM" in output


PAGE = HERE.parents[1] / "docs" / "from_a_dense_layer.md"


def test_the_page_shows_what_the_command_prints_and_writes(here: Path) -> None:
    """The module of the page gives the output and the forward of the page."""
    page = PAGE.read_text("utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    (here / "heads.py").write_text(blocks[0], "utf-8")
    command, _, shown = page.partition("$ torchshard ")[2].partition("\n")
    words = [sys.executable, "-m", "torchshard_cli", *command.split()]
    result = subprocess.run(words, cwd=here, capture_output=True, text=True)
    assert result.stdout == shown.partition("```")[0], result.stderr
    written = (here / "parallel_cosine_head.py").read_text("utf-8")
    for block in blocks[1:]:
        for piece in block.split("        ...\n"):
            assert piece in written
