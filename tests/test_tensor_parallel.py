"""Promises of TP x PP in the pipeline: as the engine slices and gathers, and what that mixes up."""

from __future__ import annotations

import json

import pytest
import tp_observers

from pp_protocol.cli import main
from pp_protocol.pipeline import run_pipeline

pytestmark = pytest.mark.processes


def test_the_reference_passes_and_the_command_says_on_how_many_ranks(capsys) -> None:
    assert main(["check", "--reference", "--tp", "2", "--steps", "4", "--format", "json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    (part,) = (part for part in target["parts"] if part["name"] == "pipeline")
    assert part["summary"].startswith("2 stages of 2 TP ranks, 3 outputs (tensors of 4 names)")
    assert part["summary"].endswith("equal bit for bit")


def test_an_observer_that_adds_its_rank_fails_with_the_name_of_the_tensor(capsys) -> None:
    target = "tp_observers:AddsItsRank"
    assert main(["check", target, "--tp", "2", "--format", "json"]) == 1
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    (finding,) = target["parts"][-1]["findings"]
    assert finding["code"] == "not-replicated"
    assert "stage 1 TP rank 0, compare, step 0" in finding["found"]
    assert "'ranked' of TP rank 0 and of TP rank 1 differ" in finding["found"]
    assert "'right'" not in finding["found"]
    assert "from gathered logits" in finding["advice"]


# for each, of batches of 3, 1, 4, ... rows: what is said, and of which step
FOUND = {
    "AddsItsRank": "the engine would send its 3 elements whole, other ones to each rank",
    "AddsItsRankToAScalar": "the engine would send its 1 elements whole",
    "InAnotherOrder": "the order of the names on TP rank 1 is a, b, on TP rank 0 b, a: the engine",
    "OnOneRankOnly": "'more' is absent on TP rank 0, float32 [3] on TP rank 1: the engine's",
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_engine_would_do_to_it_is_said(name: str) -> None:
    report = run_pipeline(getattr(tp_observers, name), tp=2, steps=3)
    (fault,) = report.faults
    assert (fault.code, fault.stage, fault.tp_rank) == ("not-replicated", 1, 0)
    assert FOUND[name] in fault.message


def test_slices_are_told_of_as_a_mixture() -> None:
    from pp_protocol.codec import TensorParallel, TensorRecord
    from pp_protocol.stage import _differs

    one, other = (TensorRecord("x", "float32", (4,), digest) for digest in "ab")
    text = _differs("x", [one, other, one], TensorParallel(0, 2, None))
    assert text == (
        "'x' of TP ranks 0, 2 and of TP rank 1 differ: the engine would send one slice of its 4"
        " elements from each rank and gather a mixture"
    )
    assert _differs("x", [one, one], TensorParallel(0, 2, None)) == ""


@pytest.mark.parametrize(("stages", "tp"), [(3, 2), (2, 3)])
def test_every_kind_of_tensor_crosses_the_stages(stages: int, tp: int) -> None:
    report = run_pipeline(tp_observers.AllKinds, stages=stages, tp=tp, steps=3)
    assert report.ok, [str(fault) for fault in report.faults]
    assert len(report.tensors) == 8
    assert report.tp == tp


def test_a_fault_on_one_rank_is_that_rank_s() -> None:
    report = run_pipeline(tp_observers.RaisesOnOneRank, tp=2, steps=2)
    (fault,) = report.faults
    assert (fault.code, fault.stage, fault.tp_rank) == ("observer-raised", 1, 1)
    assert "stage 1 TP rank 1, after_sample" in str(fault)


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="a pipeline has at least"):
        run_pipeline(tp_observers.AllKinds, tp=0)
