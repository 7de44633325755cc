"""Promises of pp_protocol.pipeline: real processes, every fault found, named, and ended in time."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import sys
import time

import pipeline_observers
import pytest

from pp_protocol.catalogue import CATALOGUE
from pp_protocol.pipeline import RunReport, run_pipeline

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert multiprocessing.active_children() == []


def run(observer: str, **options) -> RunReport:
    return run_pipeline(f"pipeline_observers:{observer}", **options)


NOTE = ("given 'logsumexp'",) if sys.version_info >= (3, 11) else ()  # add_note came then
FAULTS = {
    # observer: code, stage, phase, step, what the report says
    "AliasedOutput": ("aliased-output", 1, "after_sample", 0, ("observers.Output is a view of",)),
    "StridedAlias": ("aliased-output", 1, "after_sample", 0, ("observers.Output is a view of",)),
    "HiddenAlias": ("aliased-output", 1, "compare", 0, ("'hidden' is a view of the logits",)),
    "WritesLogits": ("altered-logits", 1, "before_grammar", 0, ("wrote into the logits",)),
    "RaisesUnreadable": ("observer-raised", 1, "is_active", 0, ("Unreadable", "cannot be read")),
    "RealTimeSignal": ("stage-died", 1, "is_active", 0, ("ended by signal 40",)),
    "DiesAndLeavesAChild": ("stage-died", 1, "is_active", 0, ("ended by SIGKILL",)),
    "CopiesMeta": ("observer-raised", 0, "copy_to_host", 0, ("meta",)),
    "Unsupported": (
        "unsupported-observer",
        0,
        "from_pp_tensors",
        0,
        ("Unsupported has from_pp_tensors set to None", "UnsupportedObserverError"),
    ),
    "NotRebuilt": ("reconstruction", 0, "from_pp_tensors", 0, ("NotRebuilt returned None",)),
    "NoHostOutput": ("host-output", 0, "copy_to_host", 0, ("NoneType, which has no consume",)),
    "Sparse": ("unsupported-tensor", 1, "to_pp_tensors", 0, ("'scores' cannot be", "sparse_coo")),
    "RaisesBeforeGrammar": (
        "observer-raised",
        1,
        "before_grammar",
        0,
        ("KeyError: 'temperature'", "pipeline_observers.py", "in before_grammar"),
    ),
    "RaisesInFrom": (
        "observer-raised",
        0,
        "from_pp_tensors",
        0,
        ("LookupError: no such request", *NOTE),
    ),
    "RaisesInConsume": ("observer-raised", 0, "consume", 0, ("ZeroDivisionError",)),
    "Exits": ("observer-raised", 1, "is_active", 0, ("SystemExit: from a hook",)),
    "DiesSilently": ("stage-died", 1, "after_sample", 0, ("exit code 7",)),
    "Killed": ("stage-died", 0, "from_pp_tensors", 0, ("ended by SIGKILL",)),
    "Tampering": ("altered-in-transit", 0, "compare", 1, ("'victim'",)),
    "NeedsArguments": ("observer-raised", 0, "observer", -1, ("TypeError", "vocabulary")),
}


@pytest.mark.parametrize("observer", FAULTS)
def test_a_fault_ends_the_run_and_is_named_with_stage_step_request_and_cause(observer) -> None:
    code, stage, phase, step, parts = FAULTS[observer]
    report = run(observer)
    assert not report.ok
    (first, *others) = report.faults
    if observer == "NeedsArguments":  # both ends make it
        assert [fault.code for fault in others] in ([], [code])
        assert {first.stage} | {fault.stage for fault in others} <= {0, 1}
    else:
        assert others == []
        assert (first.stage, first.requests) == (stage, first.requests or ("",))
    assert (first.code, first.phase) == (code, phase)
    assert code in CATALOGUE
    if observer == "Tampering":  # the first message is sent before the damage is done, or not
        assert first.step in (0, 1)
    else:
        assert first.step == step
    text = str(first)
    for part in (*parts, f"stage {first.stage}", phase):
        assert part in text
    if step >= 0:
        assert f"step {first.step}, requests r" in text


def test_a_stage_that_waits_for_ever_is_named_and_ended() -> None:
    report = run("Stubborn", timeout=20)
    (fault,) = report.faults
    assert (fault.code, fault.stage, fault.phase) == ("stalled", 1, "after_sample")
    assert "no sign of life for 20 s" in fault.message
    assert "stage 0 in recv" in fault.message


def test_a_machine_that_is_too_slow_is_not_the_observer_s_fault() -> None:
    (fault,) = run("Good", timeout=0.2).faults
    assert fault.code == "stage"
    assert "no sign of life for 0.2 s" in fault.message


def test_a_failing_stage_ends_the_run_within_ten_seconds_though_a_peer_does_not_listen() -> None:
    started = time.monotonic()
    report = run("FailsWhileAPeerIsStubborn", stages=3)
    assert (report.faults[0].error, report.faults[0].message) == ("ValueError", "enough")
    assert report.faults[0].stage == 2
    # three starts of torch, and the second that the observer waits, are in it as well
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("stages", [2, 3])
def test_batches_of_all_sizes_arrive_aligned_with_their_requests(
    stages, tmp_path: pathlib.Path, monkeypatch
) -> None:
    record = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(record))
    finished = []
    report = run("Recorder", stages=stages, steps=20, progress=finished.append)
    assert report.ok
    assert report.faults == []
    lines = [tuple(map(int, line.split())) for line in record.read_text().splitlines()]
    assert len(lines) == report.outputs == 16  # every fifth step goes by unobserved
    assert {rows for rows, _, _ in lines} == {1, 2, 3, 4, 5}
    assert any(missing for _, missing, _ in lines)
    assert all(aligned for _, _, aligned in lines)
    assert report.requests > 5
    assert report.tokens > 20
    assert report.tensors["logsumexp"]["dtypes"] == ["float32"]
    assert sorted(report.tensors["logsumexp"]["shapes"]) == [[1], [2], [3], [4], [5]]
    assert finished[-1] == 19


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    one, same, other = (run("Good", seed=seed, steps=8) for seed in (1, 1, 2))
    assert (one.requests, one.tokens, one.tensors) == (same.requests, same.tokens, same.tensors)
    assert (one.requests, one.tokens) != (other.requests, other.tokens)


def test_values_are_there_in_consume_and_not_before() -> None:
    assert run("LooksTooEarly", steps=3).ok


def test_a_state_that_is_a_view_of_the_logits_is_a_warning() -> None:
    report = run("AliasedState", steps=3)
    assert report.ok
    assert list(report.warnings) == ["aliased-state"]
    assert set(report.warnings) <= set(CATALOGUE)


@pytest.mark.parametrize("kept", ["AliasedAttribute", "AliasedNamespace"])
def test_a_view_of_the_logits_is_found_wherever_it_is_kept(kept) -> None:
    assert list(run(kept, steps=1).warnings) == ["aliased-state"]


@pytest.mark.parametrize("state", ["SlottedState", "CyclicState"])
def test_a_state_of_any_shape_is_no_fault(state) -> None:
    report = run(state, steps=2)
    assert (report.faults, report.warnings, report.outputs) == ([], {}, 2)


@pytest.mark.parametrize("observer", ["Swaps", "Forgets"])
def test_a_rebuilt_output_that_names_something_else_is_a_warning(observer) -> None:
    report = run(observer, steps=1)
    assert report.ok
    assert list(report.warnings) == ["rebuilt-otherwise"]
    assert "'two'" in report.warnings["rebuilt-otherwise"]


def test_an_observer_that_is_never_active_gives_no_output() -> None:
    report = run("Inactive", steps=5)
    assert report.ok
    assert (report.asked, report.active, report.with_state, report.outputs) == (4, 0, 0, 0)
    report = run("NoState", steps=5)
    assert (report.asked, report.active, report.with_state, report.outputs) == (4, 4, 0, 0)


def test_inputs_bring_the_engine_s_own_objects() -> None:
    report = run("NeedsInputs", inputs="pipeline_observers:inputs")
    assert report.ok, report.faults
    assert report.tensors["logits"]["dtypes"] == ["bfloat16"]


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ("raising_inputs", "no recording to be found"),
        ("wrong_inputs", "float32 [4, 7], not a float tensor [3"),
    ],
)
def test_inputs_that_fail_are_not_the_observer_s_fault(inputs, part) -> None:
    report = run("Good", inputs=f"pipeline_observers:{inputs}")
    assert report.faults[0].code == "inputs"
    assert part in report.faults[0].message


def test_a_class_or_a_factory_can_be_given_instead_of_its_name() -> None:
    assert run_pipeline(pipeline_observers.Good, steps=1).outputs == 1
    assert run_pipeline(pipeline_observers.factory, steps=1).outputs == 1


@pytest.mark.parametrize("options", [{"stages": 1}, {"steps": 0}, {"timeout": 0}, {"seed": -1}])
def test_a_pipeline_that_cannot_be_is_refused(options) -> None:
    with pytest.raises(ValueError, match="at least 2 stages"):
        run("Good", **options)


def test_pids_of_a_failed_run_are_gone(tmp_path, monkeypatch) -> None:
    seen = []
    start = multiprocessing.process.BaseProcess.start

    def starting(process):
        start(process)
        seen.append(process.pid)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starting)
    run("Sparse", stages=3)
    assert len(seen) == 3
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
