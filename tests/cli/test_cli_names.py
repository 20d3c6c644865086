"""Class names, module names and how a template is found from them."""

import inspect

import pytest
from cli_project import TEST, TEST_PATH, Project, write, write_template
from torchshard_cli.errors import UsageError
from torchshard_cli.naming.names import check_class_name, check_module_name, snake_case
from torchshard_cli.naming.torch_names import TORCH_NN_CLASSES
from torchshard_cli.template.catalogue import Catalogue, bundled_templates


@pytest.mark.parametrize(
    ("class_name", "module"),
    [
        ("ParallelEmbedding", "parallel_embedding"),
        ("ParallelConv2d", "parallel_conv2d"),
        ("ParallelConv2D", "parallel_conv2d"),
        ("ParallelConvTranspose2d", "parallel_conv_transpose2d"),
        ("ParallelQKVLinear", "parallel_qkv_linear"),
        ("ParallelRMSNorm", "parallel_rms_norm"),
        ("ParallelMoELayer", "parallel_moe_layer"),
        ("ParallelCrossEntropy2D", "parallel_cross_entropy2d"),
        ("LoRALinear", "lora_linear"),
        ("QLoRALinear", "qlora_linear"),
        ("ParallelSwiGLUMLP", "parallel_swiglu_mlp"),
        ("ParallelPReLU", "parallel_prelu"),
        ("HTTPServer", "http_server"),
        ("GPT2Block", "gpt2_block"),
        ("Parallel3DConv", "parallel3d_conv"),
    ],
)
def test_a_module_is_named_after_its_class(class_name, module):
    """Words are split as people read them: acronyms and `2D` stay whole."""
    assert snake_case(class_name) == module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "class",
            "'class' is not a usable Python class name (keyword). Try: ParallelClass",
        ),
        (
            "2d",
            "'2d' is not a usable Python class name (not an identifier). "
            "Try: Parallel2d",
        ),
        (
            "",
            "'' is not a usable Python class name (not an identifier). "
            "Try: ParallelLayer",
        ),
        (
            "../Escape",
            "'../Escape' is not a usable Python class name (not an identifier). "
            "Try: ParallelEscape",
        ),
        (
            "{{ 7*7 }}",
            "'{{ 7*7 }}' is not a usable Python class name (not an identifier). "
            "Try: Parallel77",
        ),
        (
            "ParallelÉtage",
            "'ParallelÉtage' is not a usable Python class name (not ASCII). "
            "Try: ParallelTage",
        ),
        (
            "parallel_embedding",
            "'parallel_embedding' is not a usable Python class name (not in CapWords). "
            "Try: ParallelEmbedding",
        ),
        (
            "A" * 65,
            f"'{'A' * 65}' is not a usable Python class name "
            f"(longer than 64 characters). Try: Parallel{'A' * 56}",
        ),
        (
            "Linear",
            "'Linear' would shadow torch.nn.Linear; use ParallelLinear or "
            "--allow-shadow",
        ),
        (
            "ValueError",
            "'ValueError' would shadow the builtin ValueError; use ParallelValueError "
            "or --allow-shadow",
        ),
    ],
)
def test_an_unusable_class_name_is_refused(name, message):
    """The message says why and offers a name that would do."""
    with pytest.raises(UsageError) as caught:
        check_class_name(name)
    assert str(caught.value) == message


def test_a_suggested_class_name_is_usable():
    """Whatever is typed, the name that is offered instead is accepted."""
    for name in ("class", "2d", "", "parallel-embedding", "Linear", "x" * 99):
        with pytest.raises(UsageError) as caught:
            check_class_name(name)
        check_class_name(
            str(caught.value).replace("use ", "Try: ").split("Try: ")[1].split(" ")[0]
        )


def test_shadowing_can_be_allowed():
    """`--allow-shadow` accepts the name of a torch.nn class."""
    check_class_name("Linear", allow_shadow=True)


def test_every_class_of_torch_nn_is_known():
    """The list that stands in for the import of torch holds all of its classes."""
    from torch import nn

    found = {
        name
        for name in dir(nn)
        if not name.startswith("_") and inspect.isclass(getattr(nn, name))
    }
    assert found <= TORCH_NN_CLASSES


MODULE_ERROR = (
    "'{}' is not a usable module name ({}). Choose another with --module NAME"
)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("../x", "not a lower-case identifier; it names a module, not a path"),
        ("Upper", "not a lower-case identifier; it names a module, not a path"),
        ("import", "keyword"),
        ("match", "keyword"),
        ("con", "a device name on Windows"),
        ("lpt1", "a device name on Windows"),
        ("test_x", "pytest would collect it"),
        ("conftest", "pytest would collect it"),
        ("__init__", "reserved by Python"),
        ("random", "it would hide the module random that others import"),
        ("torch", "it would hide the module torch that others import"),
        ("layer", "it differs from Layer.py in case alone"),
        ("folder", "a folder has that name"),
    ],
)
def test_an_unusable_module_name_is_refused(tmp_path, module, reason):
    """The message says why and how to choose another."""
    write(tmp_path / "Layer.py", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        check_module_name(module, tmp_path, in_package=False)
    assert str(caught.value) == MODULE_ERROR.format(module, reason)


def test_a_package_may_hold_a_module_named_like_one_of_python(tmp_path):
    """Inside a package nothing is hidden by `random.py`."""
    check_module_name("random", tmp_path, in_package=True)


@pytest.fixture
def templates(tmp_path):
    """Three templates, of which two fit a loss."""
    write_template(tmp_path, "linear", _torchshard={"names": ["*Linear*"]})
    write_template(tmp_path, "loss", _torchshard={"names": ["*CrossEntropy*"]})
    write_template(tmp_path, "blank", _torchshard={"title": "anything"})
    return tmp_path


def test_the_most_specific_pattern_wins(templates):
    """`ParallelLinearCrossEntropyLoss` is a loss, though it is linear too."""
    found = Catalogue(templates).infer("ParallelLinearCrossEntropyLoss")
    assert found.name == "loss"
    assert Catalogue(templates).infer("ParallelQKVLinear").name == "linear"


def test_a_name_that_fits_nothing_is_refused(templates):
    """The message lists what can be picked."""
    with pytest.raises(UsageError) as caught:
        Catalogue(templates).infer("Foo")
    expected = "no template fits 'Foo'. Pick one with -t: blank, linear, loss"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ParallelLinaer", " Did you mean 'ParallelLinear'?"),
        ("CrosEntropy", " Did you mean 'CrossEntropy'?"),
        ("ParallelThing", ""),
    ],
)
def test_a_name_that_nearly_fits_is_mended(templates, name, hint):
    """The nearest name that a template fits is offered; `Parallel` alone is not near."""
    with pytest.raises(UsageError) as caught:
        Catalogue(templates).infer(name)
    assert str(caught.value) == (
        f"no template fits '{name}'.{hint} Pick one with -t: blank, linear, loss"
    )


def test_a_name_that_fits_several_alike_is_refused(templates):
    """Nothing is chosen by chance."""
    write_template(templates, "other", _torchshard={"names": ["Parall*Line"]})
    write_template(templates, "third", _torchshard={"names": ["*ParallLine"]})
    with pytest.raises(UsageError) as caught:
        Catalogue(templates).infer("ParallLine")
    expected = "several templates fit 'ParallLine'. Pick one with -t: other, third"
    assert str(caught.value) == expected


def test_an_unknown_template_is_refused(templates):
    """The message offers the nearest one."""
    with pytest.raises(UsageError) as caught:
        Catalogue(templates).load("linaer")
    expected = (
        "no template 'linaer'. Did you mean 'linear'?  (see: torchshard templates list)"
    )
    assert str(caught.value) == expected


def test_a_template_name_is_no_path(tmp_path):
    """`-t ../x` is a path: a template that lies there is not run, and elsewhere is none."""
    project = Project(tmp_path)
    write_template(tmp_path, "outside")
    result = project.run("new-layer", "ParallelTiny", "-t", "../outside")
    assert result.exit_code == 4
    result = project.run("new-layer", "ParallelTiny", "-t", "../nowhere")
    assert result.exit_code == 2
    message = "Error: no template at ../nowhere; there is no such file or folder\n"
    assert result.stderr == message


@pytest.mark.parametrize(
    ("name", "template", "kind", "path"),
    [
        ("Dense", "blank", "a class", "tests/test_dense.py"),
        ("Floats", "blank", "an import", "tests/test_floats.py"),
        ("CASES", "blank", "a variable", "tests/test_cases.py"),
        ("Tensor", "linear", "an import", "zoo/tensor.py"),
        ("GroupLike", "embedding", "an import", "zoo/group_like.py"),
    ],
)
def test_a_name_that_the_files_use_is_refused(tmp_path, name, template, kind, path):
    """Exit code 2, what it collides with, and a name that will do; nothing is written."""
    project = Project(tmp_path)
    project.templates = bundled_templates()
    before = project.contents()
    result = project.run("new-layer", name, "-t", template)
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: '{name}' is the name of {kind} in the generated {path}; "
        f"use Parallel{name}\n",
    )
    assert project.contents() == before
    result = project.run("new-layer", f"Parallel{name}", "-t", template)
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("import os as ParallelTiny", "an import"),
        ("ParallelTiny = 1", "a variable"),
        ("def f(ParallelTiny): pass", "a function or an argument"),
        ("class ParallelTiny: pass", "a class"),
    ],
)
def test_a_suggested_name_is_not_suggested_again(tmp_path, line, kind):
    """Where the name begins with Parallel already, it takes a person to find another."""
    project = Project(tmp_path)
    write(project.template / TEST_PATH, f"{TEST}\n{line}\n")
    result = project.run("new-layer", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: 'ParallelTiny' is the name of {kind} in the generated "
        "tests/test_parallel_tiny.py; choose another name\n",
    )
