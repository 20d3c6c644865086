"""What is installed, and that it works as a wheel, as an editable install and uninstalled.

Everything is built from a clean copy of the tree: a stale `build` folder would add files.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
from binaryornot.check import is_binary
from cli_project import working_in, write_template

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("cli", "layer_zoo", "templates", "torchshard")
INSTALLED = {"cli": "torchshard_cli", "templates": "torchshard_templates"}


@pytest.fixture(scope="module")
def project():
    """The table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clean copy of the tree, with a template of which the content is known."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignore, dirs_exist_ok=True)
    write_template(copy / "templates", "tiny")
    (copy / "templates" / "tiny" / "__pycache__").mkdir()
    (copy / "templates" / "tiny" / "__pycache__" / "x.cpython-311.pyc").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """The wheel of that copy."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", folder, checkout)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--target", folder, wheel)
    return folder


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def run(module, *arguments, path, cwd, home):
    """Run a command line where only `path` is importable beside what is installed."""
    environment = {**os.environ, "PYTHONPATH": str(path), "HOME": str(home)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, check=True, capture_output=True, text=True
    ).stdout


def source_files(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_package_is_declared(project):
    """The list in pyproject.toml is the list of folders that hold an `__init__.py`."""
    found = {
        path.parent.relative_to(ROOT)
        for name in SHIPPED
        for path in (ROOT / name).rglob("__init__.py")
    }
    names = {
        ".".join((INSTALLED.get(path.parts[0], path.parts[0]), *path.parts[1:]))
        for path in found
    }
    assert sorted(names) == project["tool"]["setuptools"]["packages"]


def test_the_constraints_pin_every_package_that_is_installed(project):
    """And each of them exactly, so that an environment can be made again."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = project["project"]["dependencies"]
    wanted += project["project"]["optional-dependencies"]["test"]
    names = {name.split(">")[0].split("=")[0].lower() for name in wanted}
    assert names <= {name.lower() for name in pins}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel, checkout):
    """Every file of the four folders, under its installed name, and no compiled file."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{INSTALLED.get(folder, folder)}/{path}"
        for folder in SHIPPED
        for path in source_files(checkout / folder)
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "torchshard_templates/_shared/macros.j2" in names
    assert any("{{cookiecutter.__layer}}" in name for name in names)


def test_the_wheel_brings_the_command(wheel):
    """And the licence."""
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert archive.read(entry_points).decode().split("\n") == [
        "[console_scripts]",
        "torchshard = torchshard_cli.main:main",
        "",
        "[pytest11]",
        "torchshard = torchshard_cli.pytest_plugin",
        "",
    ]
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


def test_an_installed_wheel_generates_a_layer(installed, tmp_path):
    """From any folder, with an empty home that stays empty."""
    home = tmp_path / "home"
    target = tmp_path / "target"
    home.mkdir()
    target.mkdir()
    where = {"path": installed, "cwd": target, "home": home}
    shown = run("torchshard_cli", "new-layer", "ParallelTiny", "--json", **where)
    assert json.loads(shown)["written"] is True
    assert (target / "parallel_tiny.py").is_file()
    assert list(home.iterdir()) == []
    code = (
        "import torchshard_cli, torchshard_templates\n"
        "print(torchshard_cli.__file__, torchshard_templates.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    paths = subprocess.check_output(command, cwd=target, env=environment, text=True)
    assert all(path.startswith(str(installed)) for path in paths.split())


def test_the_command_works_in_a_checkout_with_nothing_installed(checkout, tmp_path):
    """As `python -m cli`, from the root of the checkout."""
    where = {"path": "", "cwd": checkout, "home": tmp_path}
    shown = run("cli", "new-layer", "ParallelTiny", "--dry-run", "--json", **where)
    assert json.loads(shown)["files"][0]["status"] == "create"
    assert run("cli", "--help", **where).startswith("Usage: torchshard ")


def test_an_editable_install_uses_the_checkout(checkout, tmp_path):
    """Its finder maps the two folders, and no name is taken that is not ours."""
    site = tmp_path / "site"
    pip(
        *("install", "--no-build-isolation", "--no-deps", "--target", site),
        *("--editable", checkout),
    )
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import importlib.util, torchshard_cli.template.catalogue as catalogue\n"
        "print(catalogue.bundled_templates())\n"
        "print(importlib.util.find_spec('templates'))\n"
        "print(importlib.util.find_spec('cli'))\n"
    )
    dependencies = str(Path(click.__file__).parent.parent)
    command = [sys.executable, "-S", "-c", code]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), dependencies]),
    }
    shown = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert shown.split() == [str(checkout / "templates"), "None", "None"]


def test_cookiecutter_takes_no_template_file_for_a_binary():
    """It would be copied, unrendered and without a warning."""
    with working_in(ROOT):
        files = [path for path in Path("templates").rglob("*") if path.is_file()]
        binary = [path for path in files if is_binary(str(path))]
    assert [path for path in binary if "__pycache__" not in path.parts] == []
