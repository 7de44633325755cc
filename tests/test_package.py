"""Promises of the package as a whole: what it imports, what it exports, what holds it up."""

from __future__ import annotations

import ast
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys

import pytest

import pp_protocol
from pp_protocol import boundary, errors
from pp_protocol.catalogue import CATALOGUE

TESTS = pathlib.Path(__file__).parent
PACKAGE = TESTS.parent / "pp_protocol"
MODULES = sorted(
    path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__main__", "pytest_plugin")
)


def run_python(program: str, *flags: str, path: pathlib.Path = TESTS.parent) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_all_of_it_imports_nothing_but_its_three_dependencies() -> None:
    program = f"""
import importlib, sys
import torch, torch.distributed, typing_extensions, beartype, beartype.vale
import _strptime  # of the standard library, and taken by what torch brings on some versions
before = set(sys.modules)
for name in {MODULES}:
    importlib.import_module("pp_protocol" if name == "__init__" else f"pp_protocol.{{name}}")
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names) - {{"pp_protocol", "torch", "beartype"}}))
"""
    assert run_python(program).strip() == "[]"


def test_what_usable_means_needs_no_torch_and_no_beartype() -> None:
    program = """
import sys
from pp_protocol import is_pp_observer, PPCapableObserver, PPProtocolError
from pp_protocol import catalogue, cli, targets
print(sorted({"torch", "beartype"} & set(sys.modules)))
"""
    assert run_python(program).strip() == "[]"


def test_importing_it_starts_no_thread_and_no_process() -> None:
    program = f"""
import importlib, threading, multiprocessing
for name in {MODULES}:
    importlib.import_module("pp_protocol" if name == "__init__" else f"pp_protocol.{{name}}")
print(threading.active_count(), multiprocessing.active_children())
"""
    assert run_python(program).strip() == "1 []"


def test_every_public_name_is_there_documented_and_listed() -> None:
    assert pp_protocol.__all__ == sorted(pp_protocol.__all__)
    for name in pp_protocol.__all__:
        value = getattr(pp_protocol, name)
        assert name in dir(pp_protocol)
        assert isinstance(value, str) or value.__doc__
        assert isinstance(value, str) or value.__module__.startswith("pp_protocol.")
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        pp_protocol.absent  # noqa: B018  # that it raises is what is asked
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert typed == set(pp_protocol.__all__)


def test_the_version_is_that_of_the_project() -> None:
    text = (TESTS.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"', text, re.MULTILINE)[1] == pp_protocol.__version__


ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, pp_protocol.PPProtocolError)
]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_errors_pickle_with_all_they_carry(kind: type[pp_protocol.PPProtocolError]) -> None:
    error = kind.about("module.Class", "has no such thing", "Do it.", tensor="x")
    clone = pickle.loads(pickle.dumps(error))
    assert type(clone) is kind
    assert str(clone) == str(error)
    parts = ("module.Class", "has no such thing", "Do it.", "x")
    assert (clone.subject, clone.found, clone.advice, clone.tensor) == parts
    assert clone.code == kind.code


def test_every_code_that_can_be_raised_or_found_is_in_the_catalogue() -> None:
    raised = {kind.code for kind in ALL_ERRORS} - {pp_protocol.PPProtocolError.code}
    found = set()
    for path in PACKAGE.glob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'(?:Fault|_add|\.fault)\(\s*(?:part, )?"([a-z-]+)"', text))
        found |= set(re.findall(r'(?:code = )"([a-z-]+)"', text))
        found |= set(re.findall(r'code = .* else "([a-z-]+)"', text))
        found |= set(re.findall(r'Finding\(\s*"([a-z-]+)"', text))
        found |= set(re.findall(r'warned\["([a-z-]+)"\]', text))
        found |= set(re.findall(r'code, where, advice = "([a-z-]+)"', text))
    assert found > raised
    assert (found | raised) - {"pp-protocol"} == set(CATALOGUE)
    for entry in CATALOGUE.values():
        for text in (entry.when, *entry.causes, entry.fix, entry.prevent):
            assert text.strip()
            assert text.endswith((".", "'"))


def test_beartype_holds_the_pop_boundary_unless_it_is_off() -> None:
    assert boundary.beartype_is_off() is not __debug__
    assert hasattr(boundary.rebuild, "__wrapped__") is __debug__


@pytest.mark.parametrize("how", ["-O", "PYTHONOPTIMIZE set late"])
def test_the_boundary_holds_where_beartype_is_off(how: str) -> None:
    program = f"""
import os
if {how != "-O"}:
    os.environ["PYTHONOPTIMIZE"] = "1"  # beartype reads it live, and is off from then on
import pp_protocol, torch
from pp_protocol import boundary
print(boundary.beartype_is_off())
class Wrong:
    def from_pp_tensors(self, tensors): return None
for observer in (None, object(), Wrong()):
    try:
        pp_protocol.pop_auxiliary_output_from_pp_tensors(
            {{pp_protocol.PREFIX + "x": torch.ones(1)}}, observer)
    except pp_protocol.PPProtocolError as error:
        print(error.code)
"""
    flags = ["-O"] if how == "-O" else []
    expected = ["True", "missing-observer", "unsupported-observer", "reconstruction"]
    assert run_python(program, *flags).split() == expected


MUTATIONS = {
    "without the decorator": ("boundary.py", "\n@beartype\ndef rebuild", "\ndef rebuild", []),
    "without the branch for -O": ("boundary.py", "if beartype_is_off():", "if False:", ["-O"]),
    "add that changes first": (
        "transport.py",
        "        staged[key] = tensor\n",
        "        tensors[key] = tensor\n",
        [],
    ),
    "pop that removes first": (
        "transport.py",
        "    try:\n        output = rebuild(",
        "    tensors, old = dict(tensors), tensors\n    old.clear()\n"
        "    try:\n        output = rebuild(",
        [],
    ),
    "a tensor as it is": ("transport.py", "tensor = _wire_form(output, name, tensor)", "pass", []),
    "a guard by name alone": (
        "conformance.py",
        "    name = member.name\n    define =",
        "    return None if hasattr(obj, member.name) else Finding('has no ' + member.name, '.')\n"
        "    name = member.name\n    define =",
        [],
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize(("file", "old", "new", "flags"), MUTATIONS.values(), ids=MUTATIONS)
def test_breaking_the_code_turns_tests_red(file, old, new, flags, tmp_path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pp_protocol")
    shutil.copytree(TESTS, tmp_path / "tests")
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    source = tmp_path / "pp_protocol" / file
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))
    done = subprocess.run(
        [
            *(sys.executable, *flags, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("-k", "refuses or table or wire_form", "-m", "not processes"),
            *("tests/test_transport.py", "tests/test_conformance.py", "tests/test_wire.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout


CLAWED = """
import importlib, sys
from beartype.claw import beartype_package
beartype_package("pp_protocol")
if __name__ == "__main__":
    for name in {modules}:
        importlib.import_module("pp_protocol" if name == "__init__" else f"pp_protocol.{{name}}")
    from pp_protocol.cli import main
    raise SystemExit(main(["check", "--reference", "--steps", "6"]))
"""


@pytest.mark.processes
def test_all_of_it_runs_under_beartype_claw(tmp_path: pathlib.Path) -> None:
    """Its stages too: a process that is spawned imports the script again, and the hook with it."""
    (tmp_path / "clawed.py").write_text(CLAWED.format(modules=MODULES))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "clawed.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_assertions_of_test_modules_run_under_optimization_too() -> None:
    failed = False
    try:
        assert failed
    except AssertionError:
        failed = True
    if not failed:
        pytest.fail("asserts do not run")
