"""Promises of the stubs: right code is accepted by every checker, each wrong line is found."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable

import pytest
from conftest import build
from engine import ENGINE_VERSION, engine_path

import pp_protocol

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).parent.parent
CASES = ROOT / "tests" / "typing"
BIN = pathlib.Path(sys.executable).parent
MARK = re.compile(r"# reject: \w")


def run(*command: object, cwd: pathlib.Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "MYPYPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


def mypy(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN, version: str = "") -> str:
    extra = [f"--python-version={version}"] if version else []
    cache = ROOT / ".mypy_cache" / "typing"
    return run(
        *(BIN / "mypy", "--strict", "--no-error-summary", f"--cache-dir={cache}", *extra),
        *(f"--python-executable={python / 'python'}", *files),
        cwd=cwd,
    )


def lines_of(text: str, pattern: str) -> set[tuple[str, int]]:
    found = re.findall(pattern, text, re.MULTILINE)
    return {(pathlib.Path(file).name, int(line)) for file, line in found}


def by_mypy(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN, version: str = ""):
    text = mypy(cwd, *files, python=python, version=version)
    return lines_of(text, r"^(\S+?):(\d+): error:"), text


def by_basedpyright(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN):
    text = run(
        *(BIN / "basedpyright", "--level", "error", "--outputjson"),
        *("--pythonpath", python / "python", *files),
        cwd=cwd,
    )
    found = json.loads(text)["generalDiagnostics"]
    return {(pathlib.Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in found}, text


def by_pyrefly(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN):
    text = run(
        *(BIN / "pyrefly", "check", "--output-format", "min-text", "--preset", "default"),
        *("--python-interpreter-path", python / "python", *files),
        cwd=cwd,
    )
    return lines_of(text, r"^ERROR (\S+?):(\d+):"), text


def by_ty(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN):
    text = run(
        *(BIN / "ty", "check", "--output-format", "concise", "--python", python.parent, *files),
        cwd=cwd,
    )
    return lines_of(text, r"^(\S+?):(\d+):\d+: error"), text


def by_zuban(cwd: pathlib.Path, *files: str, python: pathlib.Path = BIN):
    text = run(
        *(BIN / "zuban", "check", "--strict", "--python-executable", python / "python", *files),
        cwd=cwd,
    )
    return lines_of(text, r"^(\S+?):(\d+): error:"), text


Checker = Callable[..., tuple[set[tuple[str, int]], str]]
CHECKERS: dict[str, Checker] = {
    "mypy": by_mypy,
    "basedpyright": by_basedpyright,
    "pyrefly": by_pyrefly,
    "ty": by_ty,
    "zuban": by_zuban,
}


def marked() -> set[tuple[str, int]]:
    lines = (CASES / "rejects.py").read_text().splitlines()
    return {("rejects.py", n) for n, line in enumerate(lines, 1) if MARK.search(line)}


@pytest.fixture
def elsewhere(tmp_path: pathlib.Path) -> pathlib.Path:
    """A user's directory: the checkers see the installed package and its stubs, not the sources."""
    for file in ("accepts.py", "rejects.py"):
        shutil.copy(CASES / file, tmp_path)
    # what pyright does by default; basedpyright's own default is a matter of taste
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return tmp_path


def assert_exact(found: set[tuple[str, int]], text: str) -> None:
    extra, absent = sorted(found - marked()), sorted(marked() - found)
    assert (extra, absent) == ([], []), text
    assert len(marked()) > 40


@pytest.mark.parametrize("checker", CHECKERS)
def test_with_the_wheel_errors_are_exactly_on_the_marked_lines(
    checker: str, elsewhere: pathlib.Path, installed: pathlib.Path
) -> None:
    assert_exact(*CHECKERS[checker](elsewhere, "accepts.py", "rejects.py", python=installed))


@pytest.mark.parametrize("checker", CHECKERS)
def test_with_an_editable_install_they_are_as_well(checker: str, elsewhere: pathlib.Path) -> None:
    # it takes stub packages of a .pth directory only when told
    told = [f"--search-path={ROOT / 'stubs'}"] if checker == "pyrefly" else []
    assert_exact(*CHECKERS[checker](elsewhere, *told, "accepts.py", "rejects.py"))


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_mypy_says_the_same_for_other_versions_of_python(
    version: str, elsewhere: pathlib.Path, installed: pathlib.Path
) -> None:
    assert_exact(*by_mypy(elsewhere, "accepts.py", "rejects.py", python=installed, version=version))


def test_what_a_plug_in_author_reads_is_the_golden_file(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    """Each message names the observer and the Protocol; written anew with UPDATE_GOLDEN=1."""
    shutil.copy(CASES / "mistakes.py", tmp_path)
    said = mypy(tmp_path, "mistakes.py", python=installed)
    golden = CASES / "mistakes.mypy.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(said)
    assert said == golden.read_text()


def test_every_public_name_occurs_in_a_type_test() -> None:
    text = (CASES / "accepts.py").read_text() + (CASES / "rejects.py").read_text()
    assert {name for name in pp_protocol.__all__ if not re.search(rf"\b{name}\b", text)} == set()


CONTRACT, TRANSPORT = "pp_protocol-stubs/contract.pyi", "pp_protocol-stubs/transport.pyi"
GUARDS = "pp_protocol-stubs/conformance.pyi"
ENGINE_PP = "sglang-stubs/srt/sampling/sampling_observer_pp.pyi"
ENGINE_OUTPUT = "sglang-stubs/srt/managers/auxiliary_output.pyi"
ENGINE_HOOKS = "sglang-stubs/srt/sampling/sampling_observer.pyi"
SECOND = "def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> DeviceAuxiliaryOutput"
ABSTRACT = "@abstractmethod\n    "
LOOSENED = {
    "pop takes anything": (TRANSPORT, "observer: PipelineParallelSamplingObserver | None", "observer: Any"),
    "pop takes what rebuilds anything": (TRANSPORT, SECOND, SECOND.replace("DeviceAuxiliaryOutput", "Any")),
    "pop takes any dict": (TRANSPORT, "tensors: MutableMapping[str, Any], observer: _Reb", "tensors: Any, observer: _Reb"),
    "pop gives anything": (TRANSPORT, ") -> _OutputT | None", ") -> Any"),
    "add takes anything": (TRANSPORT, "output: PipelineParallelAuxiliaryOutput | None", "output: Any"),
    "from_pp_tensors gives anything": (CONTRACT, "/) -> OutputT_co: ...", "/) -> Any: ..."),
    "from_pp_tensors takes a dict": (CONTRACT, "tensors: Mapping[str, Tensor], /", "tensors: dict[str, Tensor], /"),
    "from_pp_tensors has a name for it": (CONTRACT, "tensors: Mapping[str, Tensor], /", "tensors: Mapping[str, Tensor]"),
    "from_pp_tensors may be forgotten": (CONTRACT, ABSTRACT + "def from_pp_tensors", "def from_pp_tensors"),
    "copy_to_host gives anything": (CONTRACT, "-> HostAuxiliaryOutput: ...", "-> Any: ..."),
    "copy_to_host may be forgotten": (CONTRACT, ABSTRACT + "def copy_to_host", "def copy_to_host"),
    "consume may be forgotten": (CONTRACT, ABSTRACT + "def consume", "def consume"),
    "to_pp_tensors names anything": (CONTRACT, "-> Mapping[str, Tensor]", "-> Mapping[str, Any]"),
    "after_sample gives what cannot travel": (CONTRACT, "-> PPCapableOutput | None", "-> DeviceAuxiliaryOutput | None"),
    "the guard does not narrow": (GUARDS, "-> TypeIs[PipelineParallelSamplingObserver]", "-> bool"),
    "the output guard does not narrow": (GUARDS, "-> TypeIs[PipelineParallelAuxiliaryOutput]", "-> bool"),
    "require forgets its argument": (GUARDS, "(obj: _ObserverT, /) -> _ObserverT", "(obj: _ObserverT, /) -> Any"),
    "the engine's pop takes anything": (ENGINE_PP, "observer: PipelineParallelSamplingObserver | None", "observer: Any"),
    "the engine's add takes anything": (ENGINE_PP, "output: PipelineParallelAuxiliaryOutput | None", "output: Any"),
    "the engine's observer gives anything": (ENGINE_PP, "/) -> DeviceAuxiliaryOutput: ...", "/) -> Any: ..."),
    "the engine's output gives anything": (ENGINE_OUTPUT, "/) -> HostAuxiliaryOutput: ...", "/) -> Any: ..."),
    "the engine has tokens of its own": (ENGINE_OUTPUT, "from pp_protocol.contract import CommittedTokens as CommittedTokens", "@dataclass(frozen=True)\nclass CommittedTokens:\n    output_index: int\n    token_ids: tuple[int, ...]"),
    "the engine's observer needs no hooks": (ENGINE_HOOKS, "class SamplingObserver(Protocol):", "class SamplingObserver(Protocol):\n    def __hash__(self) -> int: ...\nclass _Hooks(Protocol):"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOOSENED)
def test_a_loosened_signature_turns_the_type_tests_red(
    what: str, elsewhere: pathlib.Path, installed: pathlib.Path
) -> None:
    file, strict, loose = LOOSENED[what]
    shutil.copytree(installed.parent, elsewhere / "venv", symlinks=True)
    (stub,) = (elsewhere / "venv").glob(f"lib/python3.*/site-packages/{file}")
    text = stub.read_text()
    assert text.count(strict) == 1
    stub.write_text(text.replace(strict, loose))
    # mypy does not mind the names of parameters
    checker = by_basedpyright if "has a name" in what else by_mypy
    found, said = checker(elsewhere, "accepts.py", "rejects.py", python=elsewhere / "venv" / "bin")
    assert found != marked(), said


UNSEEN = {
    "unannotated": (
        "class Unseen:\n    def from_pp_tensors(self, tensors): ...\n",
        "returned None from from_pp_tensors",
    ),
    "*args: Any": (
        "from typing import Any\nclass Unseen:\n"
        "    def from_pp_tensors(self, *args: Any) -> Any: ...\n",
        "returned None from from_pp_tensors",
    ),
    "__getattr__ -> Any": (
        "from typing import Any\nclass Unseen:\n    def __getattr__(self, name: str) -> Any: ...\n",
        "only through __getattr__",
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_mypy_cannot_see_is_known_and_caught_at_run_time(
    case: str, tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    text, found = UNSEEN[case]
    call = (
        "import pp_protocol, torch\n"
        "wire: dict[str, object] = {pp_protocol.PREFIX + 'x': torch.ones(1)}\n"
        "pp_protocol.pop_auxiliary_output_from_pp_tensors(wire, Unseen())\n"
    )
    (tmp_path / "unseen.py").write_text(text + call)
    said = run(
        *(BIN / "mypy", "--no-error-summary", f"--cache-dir={ROOT / '.mypy_cache' / 'typing'}"),
        *(f"--python-executable={installed / 'python'}", "unseen.py"),
        cwd=tmp_path,
    )
    assert said == ""
    ran = subprocess.run(
        [installed / "python", "-W", "ignore", "unseen.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    assert found in ran.stderr


def test_without_torch_values_are_not_checked_and_the_run_time_does(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    """Tensor is Any then, in mypy without a word if missing imports are ignored."""
    text = (
        "import pp_protocol\n"
        "class Output:\n"
        "    def to_pp_tensors(self) -> dict[str, float]:\n"
        "        return {'x': 1.0}\n"
        "pp_protocol.add_auxiliary_output_to_pp_tensors({}, Output())\n"
    )
    (tmp_path / "values.py").write_text(text)
    for package in ("pp_protocol-stubs", "sglang-stubs"):
        shutil.copytree(ROOT / "stubs" / package, tmp_path / package)
    arguments = ("--no-error-summary", "--ignore-missing-imports", "pp_protocol-stubs", "values.py")
    alone = run(BIN / "mypy", "--no-site-packages", *arguments, cwd=tmp_path)
    assert "values.py" not in alone
    assert "values.py:5: error" in mypy(tmp_path, "values.py", python=installed)
    ran = subprocess.run(
        [installed / "python", "-W", "ignore", "values.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "auxiliary PP output 'x' is not a tensor" in ran.stderr


def test_nothing_else_of_an_absent_engine_is_an_error(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    (tmp_path / "uses.py").write_text(
        "import sglang\n"
        "from sglang.srt.managers import schedule_batch\n"
        "import sglang.srt.model_executor.model_runner as runner\n"
        "sglang.Engine(model_path='x')\n"
        "print(runner.ModelRunner, schedule_batch.Req)\n"
    )
    assert "import-not-found" not in mypy(tmp_path, "uses.py", python=installed)


def stubtest(*arguments: object, python: pathlib.Path, cwd: pathlib.Path, path: str = "") -> str:
    done = subprocess.run(
        [python / "python", "-W", "ignore", "-m", "mypy.stubtest", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout if done.returncode else ""


def test_stubtest_finds_no_drift_from_the_package_and_the_released_engine(
    tmp_path: pathlib.Path, installed: pathlib.Path
) -> None:
    modules = [
        "pp_protocol",
        "sglang.srt.managers.auxiliary_output",
        "sglang.srt.sampling.sampling_observer",
        "sglang.srt.sampling.sampling_observer_pp",
    ]
    allowed = [f"--allowlist={file}" for file in CASES.glob("stubtest_allowlist*.txt")]
    assert len(allowed) == 2
    said = stubtest(*(*modules, *allowed), python=installed, cwd=tmp_path, path=str(engine_path()))
    assert said == ""
    stub = (ROOT / "stubs" / "sglang-stubs" / "__init__.pyi").read_text()
    assert f"SGLang {ENGINE_VERSION}" in stub


def test_every_allowlist_entry_has_its_reason() -> None:
    for file in CASES.glob("stubtest_allowlist*.txt"):
        for line in filter(None, file.read_text().splitlines()):
            assert re.search(r"  # \w\S* .*\w", line), (file.name, line)


def test_the_wheel_holds_the_package_and_both_stub_packages(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as built:
        held = {name for name in built.namelist() if ".dist-info/" not in name}
        assert built.read("pp_protocol-stubs/py.typed") == b"partial\n"
        assert built.read("sglang-stubs/py.typed") == b"partial\n"
    expected = set()
    for folder in (ROOT / "pp_protocol", *(ROOT / "stubs").iterdir()):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".pyi", ".typed"):
                expected.add(path.relative_to(folder.parent).as_posix())
    assert held == expected
    assert {"pp_protocol/py.typed", "pp_protocol-stubs/transport.pyi"} < held


def test_the_wheel_built_from_the_checkout_is_the_same(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    build("--wheel", "--outdir", tmp_path, ROOT)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
