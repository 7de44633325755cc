"""Promises under faults: every run ends in time, names the cause, and leaves no process behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faulty_observers import Faulty
from observers import Observer, Output
from torch import Tensor

from pp_protocol import FingerprintError, HandshakeError, codec, verify_pipeline
from pp_protocol.pipeline import RunReport, run_pipeline

pytestmark = pytest.mark.processes
BOUND = 60.0
"""Seconds, most of which go into starting torch twice on a busy machine."""


def run(fault: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> RunReport:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PP_PROTOCOL_FINGERPRINT", "1")
    started = time.monotonic()
    report = run_pipeline(Faulty, **{"steps": 6, "timeout": 30.0, **options})
    assert time.monotonic() - started < BOUND
    assert multiprocessing.active_children() == []
    return report


def test_without_a_fault_all_is_consumed_and_a_slow_receiver_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fault in ("", "slow from_pp_tensors", "slow consume"):
        report = run(fault, monkeypatch)
        assert report.ok, [str(one) for one in report.faults]
        assert report.outputs == 5


KILLED = {  # where a stage is killed, and which it is
    "observer": (0, "observer"),
    "after_sample": (1, "after_sample"),
    "between": (1, "send"),
    "from_pp_tensors": (0, "from_pp_tensors"),
    "consume": (0, "consume"),
}


@pytest.mark.parametrize("where", KILLED)
def test_a_stage_that_is_killed_is_named_with_what_it_was_doing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(f"kill {where}", monkeypatch)
    stage, phase = KILLED[where]
    dead = [one for one in report.faults if one.code == "stage-died"]
    assert dead == report.faults
    assert (stage, phase) in [(one.stage, one.phase) for one in dead]
    assert all(one.message == "the process was ended by SIGKILL" for one in dead)


HOOKS = {
    "observer": 0,
    "is_active": 1,
    "before_grammar": 1,
    "after_sample": 1,
    "to_pp_tensors": 1,
    "from_pp_tensors": 0,
    "copy_to_host": 0,
    "consume": 0,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_stage_that_raises_in_a_hook_is_named_with_it(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(f"raise {hook}", monkeypatch)
    assert {one.code for one in report.faults} == {"observer-raised"}
    fault = report.faults[0]
    assert fault.phase == hook
    assert hook == "observer" or fault.stage == HOOKS[hook]
    assert f"in {hook}" in fault.message


@pytest.mark.parametrize("how", ["drop", "double", "swap"])
def test_messages_that_are_dropped_doubled_or_swapped_are_not_taken_for_others(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(how, monkeypatch)
    (fault,) = report.faults
    came, wanted = {"drop": (3, 2), "double": (2, 3), "swap": (3, 2)}[how]
    assert (fault.code, fault.stage) == ("stage", 0)
    assert fault.message == f"the result of step {came} came for step {wanted}"


# Tensors that are mixed up inside of messages, by a transport that does so on purpose.

STEPS = 60


def value(step: int, name: str) -> Tensor:
    return torch.full((4,), float(step)) + {"x": 0.0, "y": 0.25}[name]


def mixing_rank(rank: int, port: int, results: Any) -> None:
    """Rank 0 sends, and mixes up some; rank 1 receives, and consumes what the pop lets through."""
    import torch.distributed as dist

    from pp_protocol import (
        add_auxiliary_output_to_pp_tensors,
        pop_auxiliary_output_from_pp_tensors,
    )
    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mixed, found, wrong = set(), set(), 0
    messages = []
    for step in range(STEPS):
        tensors: dict[str, Any] = {"step": step}
        output = Output({name: value(step, name) for name in "xy"})
        add_auxiliary_output_to_pp_tensors(tensors, output, fingerprint=True)
        messages.append(tensors)
    if rank == 0:
        mixed = set(mix_up(messages))
        for message in messages:
            codec.send_tensor_dict(message, 1).wait()
        results.put(sorted(mixed))
    else:
        for _ in range(STEPS):
            received = codec.recv_tensor_dict(0)
            step = received["step"]
            try:
                output = pop_auxiliary_output_from_pp_tensors(received, Observer())
            except FingerprintError:
                found.add(step)
                continue
            wrong += any(not torch.equal(output.tensors[n], value(step, n)) for n in "xy")
        results.put((sorted(found), wrong))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def mix_up(messages: list[dict[str, Any]]) -> Iterator[int]:
    """Drop, double or swap tensors between microbatches; gives the steps that are wrong then."""
    dice = random.Random(3)
    x, y = "__sampling_observer_output__.x", "__sampling_observer_output__.y"
    for step in range(1, STEPS - 1, 3):
        how = dice.choice(["drop", "double", "swap"])
        if how == "drop":  # the buffer of the step before is taken again
            messages[step][x] = messages[step - 1][x]
            yield step
        elif how == "double":  # one tensor comes twice
            messages[step][y] = messages[step][x]
            yield step
        else:
            one, other = messages[step], messages[step + 1]
            one[y], other[y] = other[y], one[y]
            yield from (step, step + 1)


def test_no_wrong_value_is_consumed_where_there_is_a_fingerprint() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = [context.Queue(), context.Queue()]
    ranks = [
        context.Process(target=mixing_rank, args=(rank, store.port, results[rank]))
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            process.start()
        mixed = results[0].get(timeout=BOUND)
        found, wrong = results[1].get(timeout=BOUND)
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    assert len(mixed) > 20
    assert (found, wrong) == (mixed, 0)


# The handshake, with a rank that is killed before it or in it.


def wait_until_gone(store: Any) -> None:
    """Until the rank that hosts the store is dead, which it is soon: it waits for nobody else."""
    until = time.monotonic() + BOUND
    with contextlib.suppress(RuntimeError):
        while time.monotonic() < until:
            store.check(["anything"])
            time.sleep(0.1)  # until the next look


def verifying_rank(rank: int, port: int, fault: str, results: Any) -> None:
    import torch.distributed as dist

    from pp_protocol import handshake
    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    hosts = fault.endswith("host")
    store = dist.TCPStore("127.0.0.1", port, is_master=hosts and rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    killed = 0 if hosts else 1
    dist.barrier()
    time.sleep(0.5)  # until all are out of the barrier
    if hosts and rank != killed:
        wait_until_gone(store)
    if rank == killed and fault.startswith("before"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == killed:  # when it waits for the others
        handshake.time.sleep = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]  # on purpose
    try:
        verify_pipeline(Observer(), timeout=4.0)
        results.put((rank, ""))
    except HandshakeError as error:
        results.put((rank, str(error)))
    os._exit(0)  # a group of which a rank is dead cannot be left in order


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("before", "rank 1 did not call verify_pipeline within 4 s"),
        ("before, host", "cannot reach the store of the group"),
        ("during, host", "cannot reach the store of the group"),
    ],
)
def test_a_rank_that_is_killed_around_the_handshake_is_told_by_the_others(
    fault: str, told: str
) -> None:
    import socket

    from torch.distributed import TCPStore

    store = None
    if fault.endswith("host"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=verifying_rank, args=(rank, port, fault, results))
        for rank in range(3)
    ]
    started = time.monotonic()
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(BOUND)
        assert all(process.exitcode is not None for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - started < BOUND
    said = dict(results.get() for _ in range(2))
    assert sorted(one.exitcode for one in ranks) == [-signal.SIGKILL, 0, 0]
    assert all(told in text for text in said.values()), said
