"""`torchshard doctor`: what it shows, the faults that it finds, and that it never hangs."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from cli_project import Project, working_in, write
from click.testing import CliRunner
from torchshard_cli.health import machine, network, packages, torch_build
from torchshard_cli.health.finding import Finding
from torchshard_cli.health.probe import ProbeError, probe
from torchshard_cli.main import main


def doctor(folder: Path, *arguments: str, **environment: str) -> dict[str, object]:
    """Run it as a person would; returns what it says as JSON, and `rc`."""
    done = subprocess.run(
        [sys.executable, "-m", "torchshard_cli", "doctor", "--json", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stderr == ""
    return {"rc": done.returncode, **json.loads(done.stdout)}


def before_others(folder: Path) -> str:
    """A PYTHONPATH that begins with `folder`."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def problems(report: dict[str, object]) -> dict[str, tuple[str, str]]:
    return {
        finding["name"]: (finding["problem"], finding["remedy"])
        for finding in report["findings"]
        if finding["problem"]
    }


def test_a_healthy_machine(tmp_path: Path) -> None:
    """Sections of facts, two ranks that talked, a last line, and status 0."""
    done = subprocess.run(
        [sys.executable, "-m", "torchshard_cli", "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    subjects = ["versions", "torch", "ranks", "machine", "network", "project"]
    assert [line for line in lines if line in subjects] == subjects
    facts = dict(line[2:].split("  ", 1) for line in lines if line.startswith("  "))
    assert facts["torch"].strip() == metadata.version("torch")
    assert facts["build"].strip().startswith(torch.__version__)
    assert "gloo" in facts["backends"]
    assert facts["gloo, 2 ranks"].strip().startswith("started in ")
    assert lines[-1] == "All is well."


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """A broken build is a finding with its own words, and the rest is looked at still."""
    write(
        tmp_path / "fake/torch/__init__.py", "raise ImportError('no libcudart.so.13')"
    )
    report = doctor(tmp_path, PYTHONPATH=before_others(tmp_path / "fake"))
    assert (report["rc"], report["healthy"]) == (1, False)
    (said, remedy) = problems(report)["build"]
    assert said == (
        "torch cannot be imported and asked: ImportError: no libcudart.so.13."
    )
    assert "pytorch.org" in remedy
    assert "loopback" in [finding["name"] for finding in report["findings"]]


def test_torch_that_hangs(tmp_path: Path) -> None:
    """A driver that never answers ends in a finding, and no process is left."""
    note = tmp_path / "pid"
    text = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\n"
    write(tmp_path / "fake/torch/__init__.py", f"{text}time.sleep(600)\n")
    report = doctor(
        tmp_path, "--timeout", "3", PYTHONPATH=before_others(tmp_path / "fake")
    )
    assert problems(report)["build"][0].endswith("asked: no answer within 3 s.")
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_fork_server_that_cannot_start(tmp_path: Path) -> None:
    """Where its socket's path is too long, the folder of temporary files is to blame."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    report = doctor(tmp_path, TMPDIR=str(folder))
    said, remedy = problems(report)["gloo, 2 ranks"]
    assert said == (
        "2 ranks do not sum a tensor over gloo: OSError: AF_UNIX path too long."
    )
    assert remedy.startswith("export TMPDIR=/tmp")


def test_ranks_that_do_not_meet(tmp_path: Path) -> None:
    """An interface that is none: gloo's own words, and status 1."""
    report = doctor(tmp_path, "--timeout", "30", GLOO_SOCKET_IFNAME="nowhere0")
    assert report["rc"] == 1
    assert "gloo: " in problems(report)["gloo, 2 ranks"][0]
    findings = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert findings["GLOO_SOCKET_IFNAME"] == "nowhere0"


def test_a_folder_of_temporary_files_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python would use another one in silence."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (finding,) = faults(machine.machine_findings())
    assert finding.problem == (
        f"TMPDIR is {tmp_path / 'gone'}, where no file can be written."
    )


def faults(findings) -> list[Finding]:
    return [finding for finding in findings if finding.problem]


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory and temporary files, each with its own remedy."""
    usage = shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = {finding.name: finding for finding in faults(machine.machine_findings())}
    assert found["shared memory"].problem.startswith("Only 1 MiB of /dev/shm is free")
    assert "--shm-size" in found["shared memory"].remedy
    folder = tempfile.gettempdir()
    assert found["temporary files"].problem == f"Only 1 MiB are free in {folder}."


def test_a_read_only_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written anywhere."""

    def refuse(**keywords: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    (finding,) = faults(machine.machine_findings())
    assert finding.problem == (
        "No temporary file can be written: [Errno 30] Read-only file system."
    )


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name, what the resolver said, and the line for /etc/hosts."""

    def unknown(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "lost")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finding = faults(network.network_findings(5))[0]
    assert finding.problem.startswith(
        "The name of this host, lost, does not resolve: [Errno -2] Name or service"
    )
    assert finding.remedy.startswith("add '127.0.0.1 lost' to /etc/hosts")


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for as long as was said, and its answer comes too late."""

    def slow(*arguments):
        time.sleep(3)
        raise OSError("too late for anyone")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(network, "_echo", lambda: "1")
    (finding,) = faults(network.network_findings(0.2))
    assert "does not resolve: no answer within 0.2 s." in finding.problem


def test_a_loopback_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall's answer is a finding."""

    def refuse(*arguments: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    (finding,) = faults(network.network_findings(5))
    assert finding.problem.startswith(
        "A socket on 127.0.0.1 does not answer: [Errno 111] Connection refused."
    )


@pytest.mark.parametrize(
    ("package", "found", "words"),
    [
        ("torch", "2.5.1+cpu", "torch 2.5.1+cpu is not >=2.6, which torchshard needs."),
        ("cookiecutter", "3.0", "cookiecutter 3.0 is not <3,>=2.7.1, which"),
        ("click", None, "click is not installed; torchshard needs click>=8.1."),
    ],
)
def test_versions_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str | None, words: str
) -> None:
    """The version, the bound, and pip's command."""
    real = metadata.version

    def version(name: str) -> str:
        if name == package and found is None:
            raise metadata.PackageNotFoundError(name)
        return found if name == package else real(name)

    monkeypatch.setattr(packages, "version", version)
    (finding,) = faults(packages.package_findings())
    assert finding.problem.startswith(words)
    assert finding.remedy.startswith(f"pip install --upgrade '{package}")


@pytest.mark.parametrize(
    ("version", "bounds", "is_within"),
    [
        ("2.6", ">=2.6", True),
        ("2.10.0.dev1", ">=2.6", True),
        ("2.7.0", ">=2.7.1,<3", False),
        ("3.0rc1", ">=2.7.1,<3", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_numbers(version: str, bounds: str, is_within: bool) -> None:
    """Ten comes after six."""
    assert packages._is_within(version, bounds) is is_within


FACTS = {
    "version": "2.13.0",
    "cuda": "13.0",
    "hip": None,
    "threads": 8,
    "distributed": True,
    "backends": {"gloo": True, "nccl": True, "mpi": False},
    "devices": [{"name": "GPU One", "memory": 80 * 2**30}],
}


def test_what_torch_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with and without gloo, NCCL and devices that work."""
    found = {finding.name: finding for finding in torch_build.build_findings(FACTS)}
    assert found["device 0"].value == "GPU One, 80.0 GiB"
    assert found["backends"].value == "gloo and nccl (no mpi)"
    assert found["build"].value == "2.13.0, CUDA 13.0"
    assert faults(found.values()) == []

    def fault(**facts: object) -> str:
        (finding,) = faults(torch_build.build_findings({**FACTS, **facts}))
        assert finding.remedy
        return finding.problem

    none = {"gloo": False, "nccl": False, "mpi": False}
    assert "without torch.distributed" in fault(distributed=False, backends=none)
    assert "has no gloo" in fault(backends=none)
    assert "has no NCCL" in fault(backends={**none, "gloo": True})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder]))
    assert "that torch cannot use" in fault(devices=[])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert faults(torch_build.build_findings({**FACTS, "devices": []})) == []


def test_where_there_is_cuda_nccl_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On at most two devices, after gloo; a failure there is told."""
    asked = []

    def answer(function: str, *arguments: object, timeout_s: float) -> object:
        if function == "build":
            return FACTS
        asked.append(arguments[:2])
        if arguments[0] == "nccl":
            raise ProbeError("RuntimeError: unhandled system error")
        return {"total_s": 1.0, "sum_s": 0.001}

    monkeypatch.setattr(torch_build, "probe", answer)
    (finding,) = faults(torch_build.torch_findings(10))
    assert asked == [("gloo", 2), ("nccl", 1)]
    assert finding.name == "nccl, 1 rank"
    assert finding.problem.endswith("over nccl: RuntimeError: unhandled system error.")


def test_a_probe_that_dies() -> None:
    """With the last line that it said."""
    with pytest.raises(ProbeError, match=r"^TypeError: .*takes 0 positional"):
        probe("build", "one", "too", "many", timeout_s=60)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, whose part takes seconds."""
    monkeypatch.setattr(torch_build, "torch_findings", lambda timeout_s: iter(()))


@pytest.mark.usefixtures("quick")
def test_the_project(tmp_path: Path) -> None:
    """Its templates and layers, what is edited, and a lock that cannot be read."""
    project = Project(tmp_path)
    result = project.run("doctor")
    assert "lock             none: nothing is generated in project" in result.output
    project.generate()
    with project.module.open("a") as file:
        file.write("# mine\n")
    result = project.run("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "templates        1 bundled, 0 of this project\n" in result.output
    assert "lock             1 layer; files: 1 edited, 1 ok\n" in result.output
    write(project.lock, "{")
    result = project.run("doctor")
    assert result.exit_code == 1
    assert "\n! lock             unusable\n" in result.output
    assert "\n1 problem:\n! The state of the generated files cannot be told" in (
        result.output
    )
    write(project.root / ".torchshard/templates/tiny/nothing.py", "")
    assert "! templates        unreadable\n" in project.run("doctor").output


@pytest.mark.usefixtures("quick")
def test_a_file_that_hides_a_package(tmp_path: Path) -> None:
    """`torch.py` beside one's scripts is what Python imports from there."""
    write(tmp_path / "torch.py", "")
    write(tmp_path / "rich/__init__.py", "")
    write(tmp_path / "torchshard.txt", "")
    with working_in(tmp_path):
        result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "! torch.py here hides the installed package torch.\n" in result.output
    assert (
        "! rich/__init__.py here hides the installed package rich.\n" in result.output
    )
    assert "\n2 problems:\n" in result.output


@pytest.mark.usefixtures("quick")
def test_it_changes_nothing(tmp_path: Path) -> None:
    """An empty folder is one afterwards."""
    with working_in(tmp_path):
        assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_itself_imports_no_torch() -> None:
    """It is asked in another process, so that a broken one cannot take the doctor along."""
    code = (
        "import sys; from torchshard_cli.main import main\n"
        "try: main(['doctor', '--timeout', '0.01'])\n"
        "except SystemExit as error: assert error.code == 1\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
