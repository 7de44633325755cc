"""Promises of pp_protocol.cli: exit status, what is printed, and nothing left behind."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from pp_protocol import static
from pp_protocol.catalogue import CATALOGUE
from pp_protocol.cli import main

TESTS = pathlib.Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}


def pp_protocol(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp_protocol", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One working directory, and so one cache of mypy, for all commands that are run."""
    return tmp_path_factory.mktemp("working-directory")


@pytest.mark.processes
@pytest.mark.parametrize("stages", [2, 4])
def test_the_reference_passes(stages: int, shared: pathlib.Path) -> None:
    done = pp_protocol("check", "--reference", "--stages", str(stages), cwd=shared)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pp_protocol.reference:LogprobObserver" in done.stdout
    for part in ("load", "conformance", "pipeline"):
        assert re.search(rf"^  {part} +ok +\d+\.\d s  ", done.stdout, re.MULTILINE)
    assert re.search(r"^  pipeline +step \d+ of 12$", done.stdout, re.MULTILINE)
    last = done.stdout.splitlines()[-1]
    assert f"{stages} stages, 10 outputs (tensors of 4 names) in 10 of 12 steps" in last
    assert last.endswith("equal bit for bit")


@pytest.mark.processes
def test_a_wrong_observer_is_exit_1_and_a_table_says_what_to_do(shared: pathlib.Path) -> None:
    targets = ["pipeline_observers:AliasedOutput", "pipeline_observers:RaisesInFrom"]
    done = pp_protocol("check", *targets, "--steps", "2", cwd=shared)
    assert done.returncode == 1
    table = done.stdout[done.stdout.rindex("\n\n") :]
    for text in (
        "fails   pipeline_observers:AliasedOutput: 2 stages: stage 1 failed",
        "[aliased-output] stage 1, after_sample, step 0, requests r0 r1 r2",
        f"to do: {CATALOGUE['aliased-output'].fix[:40]}",
        "fails   pipeline_observers:RaisesInFrom: 2 stages: stage 0 failed",
        "LookupError: no such request",
    ):
        assert text in " ".join(table.split()) or text in table
    if sys.version_info >= (3, 11):  # which has add_note
        assert "raised by pipeline_observers.RaisesInFrom.from_pp_tensors, given 'logs" in table
    assert max(len(line) for line in table.splitlines() if "/" not in line) <= 100


@pytest.mark.processes
def test_a_warning_is_printed_and_does_not_fail(shared: pathlib.Path) -> None:
    done = pp_protocol("check", "pipeline_observers:AliasedState", "--steps", "2", cwd=shared)
    assert done.returncode == 0
    assert "[aliased-state] warning:" in done.stdout


@pytest.mark.processes
def test_an_observer_without_any_output_is_exit_2(shared: pathlib.Path) -> None:
    done = pp_protocol("check", "pipeline_observers:Inactive", "--steps", "2", cwd=shared)
    assert done.returncode == 2
    assert "active in 0, before_grammar gave a state in 0" in " ".join(done.stdout.split())
    assert "[no-output] nothing was transported" in done.stdout


@pytest.mark.processes
def test_inputs_are_supplied_and_their_fault_is_exit_2(shared: pathlib.Path) -> None:
    observer = "pipeline_observers:NeedsInputs"
    good = pp_protocol("check", observer, "--inputs", "pipeline_observers:inputs", cwd=shared)
    assert (good.returncode, good.stderr) == (0, "")
    wrong = "pipeline_observers:raising_inputs"
    bad = pp_protocol("check", observer, "--inputs", wrong, cwd=shared)
    assert bad.returncode == 2
    assert "[inputs]" in bad.stdout
    assert "no recording to be found" in bad.stdout


@pytest.fixture
def modules(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.chdir(tmp_path)
    # its own tests are in test_static; each new directory would make mypy read torch anew
    monkeypatch.setattr(static, "mypy_is_there", lambda: False)
    path, loaded = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - loaded:
        if pathlib.Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


MODULE = """
import sys
def nothing(): pass
def a_class(): return Wrong
class Exits:
    def __init__(self): sys.exit(0)
class NeedsArguments:
    def __init__(self, vocabulary): ...
class Raises:
    def __init__(self): raise OSError("no device")
class Wrong:
    def is_active(self, sampling_info): return True
    async def before_grammar(self, logits, sampling_info): ...
    def after_sample(self, state): ...
"""
CANNOT = {
    "no colon": ("a_module", "'a_module' is not of the form module:attribute"),
    "no module": ("no_such_module:X", "ModuleNotFoundError: No module named 'no_such_module'"),
    "no attribute": ("a_module:Absent", "AttributeError: module 'a_module' has no attribute"),
    "raises on import": ("raising:X", "importing raising raised ValueError: at import"),
    "exits on import": ("exiting:X", "importing exiting raised SystemExit: 3"),
    "needs arguments": ("a_module:NeedsArguments", "TypeError: NeedsArguments.__init__() missing"),
    "raises on construction": ("a_module:Raises", "OSError: no device at"),
    "exits on construction": ("a_module:Exits", "raised SystemExit: 0 at"),
    "exits when it is read": ("reading:X", "reading reading:X raised SystemExit: 0"),
    "gives None": ("a_module:nothing", "called without arguments, gave NoneType"),
    "gives a class": ("a_module:a_class", "gave class a_module.Wrong"),
    "a path": ("./a_module.py:Wrong", "is not of the form module:attribute"),
}


@pytest.mark.parametrize(("target", "part"), CANNOT.values(), ids=CANNOT)
def test_a_target_that_cannot_be_had_is_exit_2_and_says_why(
    target: str, part: str, modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "a_module.py").write_text(MODULE)
    (modules / "raising.py").write_text("raise ValueError('at import')")
    (modules / "exiting.py").write_text("raise SystemExit(3)")
    (modules / "reading.py").write_text("def __getattr__(name): raise SystemExit(0)")
    assert main(["check", target]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert f"cannot {target}: the target cannot be had" in out
    assert "[target] " in out
    assert part in out
    assert "to do: " in out


def test_every_member_that_cannot_be_called_is_named_at_once(
    modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "a_module.py").write_text(MODULE)
    assert main(["check", "a_module:Wrong"]) == 1
    out = capsys.readouterr().out
    assert "1 of 4 members can be called" in out
    assert "[unsupported-hook] a_module.Wrong has a before_grammar that is async" in out
    assert "[unsupported-hook] a_module.Wrong has an after_sample that takes too few" in out
    assert "[unsupported-observer] a_module.Wrong has no from_pp_tensors" in out
    assert "  pipeline" not in out


def test_a_derived_class_that_forgets_a_method_does_not_conform(
    modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "pipeline_observers:Abstract"]) == 1
    out = capsys.readouterr().out
    assert "[unsupported-hook] class pipeline_observers.Abstract does not define before_gram" in out
    assert "[unsupported-observer] class pipeline_observers.Abstract does not define from_" in out


@pytest.mark.parametrize("inputs", ["no_such_module:inputs", "a_module:absent", "a_module:sys"])
def test_inputs_that_cannot_be_had_are_not_called_the_target(
    inputs: str, modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "a_module.py").write_text(MODULE)
    assert main(["check", "pipeline_observers:Good", "--inputs", inputs]) == 2
    out = capsys.readouterr().out
    assert "what --inputs names cannot be had" in out
    assert f"[inputs] {'importing' if 'such' in inputs else inputs}" in out


def test_output_that_nobody_reads_is_no_traceback(tmp_path: pathlib.Path) -> None:
    command = f"{sys.executable} -m pp_protocol check no_such_module:X | true"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_one_that_fails_among_others_that_cannot_be_checked_is_exit_1(
    modules: pathlib.Path,
) -> None:
    (modules / "a_module.py").write_text(MODULE)
    assert main(["check", "no_such_module:X", "a_module:Wrong"]) == 1


CONFIGURATIONS = {
    "none": (None, "name a TARGET"),
    "none of ours": ("[project]\nname = 'x'", "list targets under [tool.pp-protocol]"),
    "an empty list": ("[tool.pp-protocol]\ntargets = []", "list targets under"),
    "no list": ("[tool.pp-protocol]\ntargets = 'a:b'", "targets is a list of strings"),
    "a misspelt key": ("[tool.pp-protocol]\ntarget = ['a:b']", "takes targets, not target"),
    "a misspelt table": ("[tool.pp_protocol]\ntargets = ['a:b']", "with a hyphen"),
    "no table": ("[tool]\npp-protocol = 3", "tool.pp-protocol is no table"),
    "no tools": ("tool = 3", "list targets under [tool.pp-protocol]"),
    "no TOML": ("[tool", "pyproject.toml"),
}


@pytest.mark.parametrize(("text", "part"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_without_any_target_nothing_was_checked_and_that_is_exit_2(
    text: str | None, part: str, modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (modules / "pyproject.toml").write_text(text)
    assert main(["check"]) == 2
    caught = capsys.readouterr()
    assert "nothing of yours was checked" in caught.err
    assert part in caught.err
    assert caught.out == ""


def test_targets_may_stand_in_pyproject(
    modules: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "a_module.py").write_text(MODULE)
    (modules / "pyproject.toml").write_text('[tool.pp-protocol]\ntargets = ["a_module:Wrong"]')
    assert main(["check"]) == 1
    assert "a_module:Wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--stages", "1"], ["--steps", "0"], ["--stages", "x"], ["--timeout", "0"], ["--seed", "-1"]],
)
def test_arguments_that_make_no_sense_are_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "--reference", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


HELP = [["--help"], ["check", "--help"], ["--version"], ["check"], ["explain"], ["explain", "wire"]]


@pytest.mark.parametrize("arguments", HELP)
def test_help_needs_no_torch(arguments: list[str], tmp_path: pathlib.Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pp_protocol.cli import main
        try: main(sys.argv[1:])
        except SystemExit: pass
        heavy = {"torch", "beartype"} & set(sys.modules)
        sys.exit(f"imported: {heavy}" if heavy else 0)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def _children(pid: int) -> set[int]:
    direct = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in direct} | {c for d in direct for c in _children(int(d))}


def _alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


ENDINGS = {
    "Ctrl-C": (signal.SIGINT, True, 130),
    "Ctrl-C twice": (signal.SIGINT, True, 130),
    "SIGTERM": (signal.SIGTERM, False, 143),
    "SIGKILL": (signal.SIGKILL, False, -9),
}


@pytest.mark.processes
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="looks into /proc")
@pytest.mark.parametrize("how", ENDINGS)
def test_an_end_from_outside_leaves_nothing_behind(how: str, shared: pathlib.Path) -> None:
    number, group, status = ENDINGS[how]
    twice = "twice" in how
    command = [sys.executable, "-m", "pp_protocol", "check", "pipeline_observers:Slow"]
    process = subprocess.Popen(
        command,
        cwd=shared,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("step 3 of 12" in line for line in process.stdout)
        children = _children(process.pid)
        assert len(children) >= 2
        (os.killpg if group else os.kill)(process.pid, number)
        if "twice" in how:
            time.sleep(0.2)  # while the first is being handled
            os.killpg(process.pid, number)
        if twice:
            time.sleep(0.2)  # while the first is being handled
            os.killpg(process.pid, number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == status
        if number == signal.SIGINT:
            assert err == "pp-protocol: interrupted; no process is left\n"
        until = time.monotonic() + 10
        while any(map(_alive, children)) and time.monotonic() < until:
            time.sleep(0.1)  # until the next look
        assert not [pid for pid in children if _alive(pid)]
    finally:
        process.kill()
        process.communicate()
