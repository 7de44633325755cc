"""Promises of pp_protocol.static and formats: what mypy finds, where, and what is not checked."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from pp_protocol import check, formats, static
from pp_protocol.cli import main

pytestmark = pytest.mark.processes
ROOT = pathlib.Path(__file__).parent.parent
PLUGIN = """
from __future__ import annotations
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from torch import Tensor
from pp_protocol import PPCapableObserver

class Output:
    def to_pp_tensors(self) -> dict[str, Tensor]: return {}
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Output: return self
    def consume(self, batch: Any, commits: Sequence[Any]) -> None: ...

class Good:
    def is_active(self, sampling_info: Any) -> bool: return True
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any: return logits
    def after_sample(self, state: Any, token_ids: Tensor) -> Output | None: return None
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output: return Output()

class Optional_(Good):
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output | None:  # type: ignore
        return None

class CannotSend(Good):
    def after_sample(self, state: Any, token_ids: Any) -> Local | None: return None  # type: ignore

class Local:
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Output: return Output()

class Talkative(Good):
    def is_active(self, sampling_info: Any) -> bool: return not print("for nobody")
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any: return logits.sum(-1)
    def after_sample(self, state: Any, token_ids: Tensor) -> Output | None: return None

class Unannotated:
    def is_active(self, sampling_info): return True
    def before_grammar(self, logits, sampling_info): return logits
    def after_sample(self, state, token_ids): return None
    def from_pp_tensors(self, tensors): return None

class Derived(PPCapableObserver[Output]):
    def is_active(self, sampling_info: Any) -> bool: return True
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any: return logits
    def after_sample(self, state: Any, token_ids: Tensor) -> Output | None: return None
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output | None: return None

class Half(Good):
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]): return Output()

def untyped(function): return function

class Decorated(Good):
    @untyped
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output: return Output()

def factory() -> Good: return Good()
def perhaps() -> Good | None: return Good()
def untyped_factory(): return Good()
instance = Good()
broken: int = "elsewhere"
"""


@pytest.fixture
def user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A user's directory with a plug-in in it; the same for all, so that mypy reads torch once."""
    tmp_path = tmp_path_factory.getbasetemp() / "user"
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    (tmp_path / "static_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "static_plugin", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(ROOT / ".mypy_cache" / "user"))
    return tmp_path


def part_of(target: str, *require: str) -> check.Part:
    part = check.Part("static")
    observer = check.make_observer(target)
    check._static(target, observer, check.Options(require=require), part, lambda line: None)
    return part


@pytest.mark.parametrize("target", ["Good", "factory", "instance"])
def test_a_right_observer_has_no_finding(target: str, user: pathlib.Path) -> None:
    part = part_of(f"static_plugin:{target}", "static")
    assert (part.verdict, part.findings) == ("ok", [])
    assert part.summary == "mypy: no error"
    assert sorted(os.listdir(user)) == ["static_plugin.py"]


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(PLUGIN.splitlines(), 1) if text in line)


WRONG = {
    "Optional_": ("def from_pp_tensors", "Output | None", "Output | None:  # type"),
    "CannotSend": ("def after_sample", "Local | None", "Local | None: return"),
}


@pytest.mark.parametrize("target", WRONG)
def test_a_wrong_one_is_found_on_the_line_of_its_member(target: str, user: pathlib.Path) -> None:
    part = part_of(f"static_plugin:{target}")
    member, got, line = WRONG[target]
    (finding,) = part.findings
    assert part.verdict == "fails"
    assert finding.code == "static"
    for text in (f'"{target}"', '"PPCapableObserver', "Expected:", "Got:", member, got):
        assert text in finding.found
    assert (pathlib.Path(finding.file).name, finding.line) == ("static_plugin.py", line_of(line))


def test_a_wrong_override_of_a_derived_class_decides_as_well(user: pathlib.Path) -> None:
    part = part_of("static_plugin:Derived")
    (finding,) = part.findings
    assert 'incompatible with return type "Output"' in finding.found
    assert finding.line == line_of("class Derived") + 4
    assert part.verdict == "fails"


def test_a_factory_that_may_give_none_is_blamed_itself(user: pathlib.Path) -> None:
    (finding,) = part_of("static_plugin:perhaps").findings
    assert '"Good | None"' in finding.found
    assert finding.line == line_of("def perhaps")


def test_a_module_that_mypy_does_not_follow_is_unseen(user: pathlib.Path) -> None:
    (user / "mypy.ini").write_text("[mypy]\nignore_errors = True\n")
    part = part_of("static_plugin:Optional_")
    assert part.verdict == "ok"
    assert "silences" in part.summary


def test_the_cache_is_the_user_s_and_this_directory_s(
    user: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = static.cache_directory()
    assert str(here).startswith(str(ROOT / ".mypy_cache" / "user"))
    (user / "other").mkdir()
    monkeypatch.chdir(user / "other")
    assert static.cache_directory() != here
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert static.cache_directory().is_absolute()
    monkeypatch.setattr(pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert static.cache_directory().is_absolute()


def test_an_error_elsewhere_in_the_module_is_a_warning_with_its_place(user: pathlib.Path) -> None:
    part = part_of("static_plugin:Good")
    warning = part.warnings[-1]
    assert 'expression has type "str"' in warning.found
    assert (pathlib.Path(warning.file).name, warning.line) == (
        "static_plugin.py",
        line_of("broken"),
    )


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("Unannotated", "not all is annotated of is_active, before_grammar, after_sample, "),
        ("untyped_factory", "mypy takes it, or a result, for Any"),
        ("Half", "not all is annotated of from_pp_tensors"),
        ("Decorated", "mypy takes it, or a result, for Any"),
    ],
)
def test_what_mypy_cannot_see_is_said_and_fails_where_static_is_required(
    target: str, why: str, user: pathlib.Path
) -> None:
    part = part_of(f"static_plugin:{target}")
    assert part.verdict == "ok"
    assert part.summary.startswith(f"not checked: {why}")
    assert "static-unseen" in [warning.code for warning in part.warnings]
    required = part_of(f"static_plugin:{target}", "static")
    assert required.verdict == "fails"
    assert [finding.code for finding in required.findings] == ["static-unseen"]


def test_the_user_s_own_configuration_applies(user: pathlib.Path) -> None:
    (user / "mypy.ini").write_text("[mypy]\ndisable_error_code = assignment, override\n")
    part = part_of("static_plugin:Optional_")
    assert (part.verdict, part.findings, part.warnings) == ("ok", [], [])


def test_a_configuration_that_mypy_refuses_is_not_the_observer_s_fault(user: pathlib.Path) -> None:
    (user / "mypy.ini").write_text("[mypy]\npython_version = 1.0\nplugins = no_such_plugin\n")
    part = part_of("static_plugin:Good")
    assert part.verdict == "ok"
    assert part.summary == "not run: mypy failed"
    assert "no_such_plugin" in part.warnings[0].found
    assert part_of("static_plugin:Good", "static").verdict == "cannot"


def test_without_mypy_it_is_not_run_which_is_exit_2_where_it_is_required(
    user: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "mypy_is_there", lambda: False)
    part = part_of("static_plugin:Good")
    assert (part.verdict, part.summary) == ("ok", "not run: mypy is not installed")
    required = part_of("static_plugin:Good", "static")
    assert required.verdict == "cannot"
    assert "pp-protocol[mypy]" in required.findings[0].advice


def test_all_parts_are_run_and_the_formats_say_the_same(
    user: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", "static_plugin:Optional_", "--steps", "1"]
    assert main([*command, "--format", "json"]) == 1
    caught = capsys.readouterr()
    report = json.loads(caught.out)
    assert "pipeline" in caught.err
    assert (report["version"], report["status"]) == (1, 1)
    (target,) = report["targets"]
    assert (target["target"], target["verdict"]) == ("static_plugin:Optional_", "fails")
    parts = {part["name"]: part for part in target["parts"]}
    assert list(parts) == ["load", "static", "conformance", "pipeline"]
    assert set(parts["static"]) == {
        *("name", "verdict", "summary", "seconds", "findings", "warnings"),
    }
    (finding,) = parts["static"]["findings"]
    assert set(finding) == {"code", "found", "advice", "file", "line"}
    assert finding["line"] == line_of("Output | None:  # type")
    assert parts["pipeline"]["findings"][0]["code"] == "no-output"


def test_what_an_observer_prints_is_no_part_of_the_json(user: pathlib.Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pp_protocol", "check", "static_plugin:Talkative"),
            *("--steps", "1", "--format", "json"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert json.loads(done.stdout)["status"] == done.returncode == 2
    assert "for nobody" in done.stderr


def test_without_a_target_there_is_an_object_too(
    user: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--format", "json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"version": 1, "status": 2, "targets": []}


def test_annotations_are_on_the_user_s_file_and_line_and_escaped(user: pathlib.Path) -> None:
    part = check.Part("pipeline", "fails", "", [check.Finding("c", "100%\nof", "it", "a,b.py", 3)])
    part.warnings.append(check.Finding("w", "found", "advice"))
    text = formats.as_annotations({"m:X": [part]}, 1)
    assert text.splitlines() == [
        "::error file=a%2Cb.py,line=3,title=pp-protocol c::m:X: 100%25%0Aof%0Ato do: it",
        "::warning title=pp-protocol w::m:X: found%0Ato do: advice",
    ]
    assert formats.as_annotations({"m:X": [check.Part("load")]}, 0) == (
        "::notice title=pp-protocol::m:X conforms"
    )


def test_the_hooks_of_pre_commit_run_in_the_author_s_environment(user: pathlib.Path) -> None:
    source = user / "hooks"
    source.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", source)
    (user / "static_plugin.py").write_text(PLUGIN[: PLUGIN.index("class Optional_")])
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PRE_COMMIT_HOME": str(user / "pre-commit"),
    }

    def git(*arguments: str, at: pathlib.Path) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=at, check=True, capture_output=True)

    for place in (source, user):
        git("init", "-q", at=place)
    git("add", ".", at=source)
    git("commit", "-qm", "hooks", at=source)
    git("add", "static_plugin.py", at=user)
    for hook, text in (
        ("pp-protocol-check", "nothing of yours was checked"),
        ("pp-protocol-mypy", "Passed"),
    ):
        tried = subprocess.run(
            [sys.executable, "-m", "pre_commit", "try-repo", str(source), hook, "--all-files"],
            cwd=user,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert text in tried.stdout, tried.stdout + tried.stderr
