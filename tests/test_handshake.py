"""Promises of verify_pipeline: one verdict on all ranks, in time, with the names of the guilty."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import sys
from typing import Any

import handshake_ranks
import pytest
from handshake_ranks import CannotRebuild, Good, NoHook, Receiver, scenarios

from pp_protocol import (
    CompositeSamplingObserver,
    HandshakeError,
    PipelineReport,
    RankReport,
    verify_pipeline,
)
from pp_protocol.handshake import judged
from pp_protocol.payload import payload_schema
from pp_protocol.reference import LogprobObserver

TOLD = {  # of each scenario, what the error says on all ranks; {r} is the guilty rank
    "no observer": "rank {r} (stage 0) has no observer, and rank {last} (stage {last}) has",
    "cannot rebuild": "rank {r} (stage {r}): handshake_ranks.CannotRebuild has from_pp_tensors set",
    "no hook": "rank {r} (stage {r}): handshake_ranks.NoHook has after_sample set to None",
    "other schema": "differs from that of rank 0 in entropy: float16 [batch]; entropy: float32",
    "raises": "(stage {r}): checking handshake_ranks.Good raised MemoryError: in the check",
    "missing": "rank {r} did not call verify_pipeline within 2.5 s",
    "no stage": "rank {r} gave no stage, and other ranks did",
}


def expected(name: str, rank: int, size: int) -> str:
    only_on = {"no observer": 0, "no hook": size - 1}
    if name not in TOLD or only_on.get(name, rank) != rank:
        return ""
    if name == "light":
        return ""
    return TOLD[name].format(r=rank, last=size - 1)


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_fault_on_each_rank_is_the_same_error_on_all_of_them(size: int) -> None:
    found = handshake_ranks.run(size)
    cases = list(scenarios(size))
    assert sorted(found) == list(range(size))
    assert len(cases) == 9 * size + 1
    for number, (name, rank, how) in enumerate(cases):
        outcomes = [one for rank_found in found.values() for one in rank_found if one[0] == number]
        assert len(outcomes) == size
        errors = {error for _, error, _, _ in outcomes}
        reports = {report for _, _, report, _ in outcomes}
        assert (len(errors), len(reports)) == (1, 1), (name, rank, errors)
        (error,), (report,) = errors, reports
        told = expected(name, rank, size)
        if name == "light" and rank == size - 1:
            told = "handshake_ranks.Receiver has no is_active"
        assert bool(error) == bool(told), (name, rank, error)
        assert told in error, (name, rank, error)
        if error:
            assert error.startswith("pipeline ranks do not agree on their sampling observers")
        read = PipelineReport.from_json(report)
        assert read.ok == (not error)
        assert read.missing == ((rank,) if name == "missing" else ())
        longest = how.get("timeout", 0) + how.get("sleep", 0)
        assert max(seconds for *_, seconds in outcomes) < longest + 5, (name, rank)


def test_no_verdict_is_taken_from_the_store_for_that_of_another_call() -> None:
    from torch.distributed import HashStore

    from pp_protocol.handshake import _agreed, _own

    store = HashStore()  # which outlives a group, as that of a launcher does
    for observer, ok in ((Good(), True), (CannotRebuild(), False), (Good(), True)):
        assert _agreed(store, _own(observer, 0, 0), 1, 5.0).ok is ok


def ranks(*observers: Any, stages: Any = None) -> list[RankReport]:
    from pp_protocol.handshake import _own

    stages = stages or [None] * len(observers)
    return [_own(one, rank, stages[rank]) for rank, one in enumerate(observers)]


def test_a_light_receiver_and_other_types_are_warnings() -> None:
    report = judged(ranks(Receiver(), Good()), 2)
    assert report.ok
    (differs,) = report.warnings
    assert differs == (
        "observer differs between the ranks: handshake_ranks.Receiver on ranks [0],"
        " handshake_ranks.Good on ranks [1]"
    )
    silent = judged(ranks(Good(), None), 2)
    assert silent.ok
    assert silent.warnings == ("stage 1 has no observer: nothing will be sent",)
    assert judged(ranks(None, None), 2).warnings == ()
    assert judged(ranks(Good(), None, Good()), 3).ok  # nothing is asked of the middle


def test_with_tensor_parallelism_every_rank_of_a_stage_is_held_to_its_part() -> None:
    stages = [0, 0, 1, 1]
    assert judged(ranks(Receiver(), Receiver(), Good(), Good(), stages=stages), 4).ok
    report = judged(ranks(Receiver(), None, Good(), NoHook(), stages=stages), 4)
    assert [text.split(":")[0] for text in report.problems] == [
        "rank 1 (stage 0) has no observer, and rank 2 (stage 1) has handshake_ranks.Good",
        "rank 3 (stage 1)",
    ]


def test_all_problems_are_listed_and_the_report_prints_and_travels() -> None:
    report = judged(ranks(None, CannotRebuild(), NoHook()), 4, 3)
    assert [text.split(" ")[1] for text in report.problems] == ["3", "1"]
    report = judged(ranks(None, CannotRebuild(), Good(), NoHook()), 4, 3)
    assert len(report.problems) == 3
    assert PipelineReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["ranks"][1]["observer"] == "handshake_ranks.CannotRebuild"
    text = str(report)
    assert text.count("problem:") == 3
    assert "rank 0: no observer" in text


def test_without_a_process_group_the_rank_is_checked_alone() -> None:
    report = verify_pipeline(LogprobObserver())
    assert report.ok
    assert report.ranks[0].package in ("pp-protocol 0.1.0", "pp_protocol 0.1.0")  # not installed
    assert verify_pipeline(None).ok
    for observer in (NoHook(), CannotRebuild(), Receiver()):
        with pytest.raises(HandshakeError) as caught:
            verify_pipeline(observer)
        assert caught.value.code == "handshake"
        assert caught.value.report.problems
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ValueError, match="timeout has to be positive"):
        verify_pipeline(LogprobObserver(), timeout=0)


def test_a_schema_is_known_of_payloads_and_composites_of_them() -> None:
    lines = ("entropy: float32 [batch]", "more: any dtype any shape or absent")
    assert payload_schema(Good()) == lines
    assert payload_schema(Receiver()) is None
    both = CompositeSamplingObserver({"scores": Good(), "plain": handshake_ranks.Observer()})
    assert payload_schema(both) == (
        "plain/(unknown)",
        *(f"scores/{line}" for line in lines),
    )

    class ByStaticMethod:
        from_pp_tensors = staticmethod(handshake_ranks.Scores.from_pp_tensors)

    assert payload_schema(ByStaticMethod()) == payload_schema(Good())
    assert "top_ids: int64 [batch, k]" in (payload_schema(LogprobObserver()) or ())


class Exits(Good):
    from_pp_tensors = property(lambda self: sys.exit("from a property"))


class Busy(Good):
    """Has children that are no observers."""

    @property
    def children(self) -> Any:
        raise RuntimeError("not started")


def raises_at_length(self: object) -> None:
    raise ValueError("x" * 9_000_000)


def test_whatever_a_rank_trips_over_is_told_to_the_others() -> None:
    from pp_protocol.handshake import _own

    (told,) = _own(Exits(), 0, None).cannot_rebuild
    assert "raised SystemExit when it was read" in told
    assert payload_schema(Busy()) == payload_schema(Good())
    wrong = type("Wrong", (Good,), {"from_pp_tensors": property(raises_at_length)})
    assert len(json.dumps(dataclasses.asdict(_own(wrong(), 0, None)))) < 10_000
    assert _own(Good(), 0, "1").failed.startswith("TypeError: 'str' object")
    assert _own(Good(), 0, True).stage == 1
    report = judged(ranks(Good(), Good(), stages=[1, 2]), 2)
    assert report.problems == ("no rank gave stage 0, and one gave 1: the first stage is 0",)


def test_what_is_not_known_of_a_child_is_not_held_against_it() -> None:
    def both(child: Any) -> CompositeSamplingObserver:
        return CompositeSamplingObserver({"scores": child, "more": Good()})

    assert judged(ranks(both(handshake_ranks.Observer()), both(Good())), 2).ok
    report = judged(ranks(both(handshake_ranks.Other()), both(Good())), 2)
    (told,) = report.problems
    assert "scores/entropy: float16 [batch]; scores/entropy: float32 [batch]" in told


def test_a_rank_that_did_not_come_is_not_made_up_for_by_another() -> None:
    report = judged(ranks(Good(), NoHook(), stages=[0, 1]), 3, 5)
    assert [text.split(" did")[0] for text in report.problems] == ["rank 2"]
    report = judged(ranks(Good(), None, stages=[0, 1]), 3, 5)  # rank 2 may be the one that sends
    assert report.warnings == ()


def test_a_report_of_another_version_can_be_read() -> None:
    report = judged(ranks(Good()), 1)
    read = json.loads(report.to_json())
    read["ranks"][0]["colour"] = "blue"
    assert PipelineReport.from_json(json.dumps(read)) == report


def alone_in_its_group(port: int, results: Any) -> None:
    import torch.distributed as dist

    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    results.put(verify_pipeline(LogprobObserver()).ok)
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_world_of_one_is_checked_locally() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=alone_in_its_group, args=(0, results))
    process.start()
    try:
        assert results.get(timeout=60) is True
        process.join(30)
    finally:
        process.kill()
