"""Does an observer work on a real pipeline of processes, and if not, where does it fail?"""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from .stage_process import HOOKS, Plan, quiet_torch, stage_main

GRACE = 1.0
"""Seconds in which, after one stage has failed, the others can tell what they know."""

CANNOT_CHECK = frozenset({"inputs", "stage"})
"""Codes that say nothing about the observer."""


@dataclass(frozen=True)
class StageFault:
    """What went wrong, and where."""

    code: str
    stage: int
    phase: str
    """The hook, or what else the stage was doing."""
    step: int
    """From 0; -1 before the first."""
    requests: tuple[str, ...]
    error: str
    """Name of the error class; empty where there was no exception."""
    message: str
    advice: str = ""
    """What to do, where more is known than what the catalogue says of the code."""
    notes: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Frames of the traceback outside of this package, innermost last."""
    tp_rank: int | None = None
    """The tensor-parallel rank; None where each stage has one."""

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step >= 0 else ""
        requests = f", requests {' '.join(self.requests)}" if self.requests else ""
        error = f"{self.error}: " if self.error else ""
        rank = "" if self.tp_rank is None else f" TP rank {self.tp_rank}"
        place = f"stage {self.stage}{rank}, {self.phase}{step}{requests}"
        extra = "".join(f"\n  {line}" for line in (*self.notes, *self.where[-3:]))
        return f"[{self.code}] {place}: {error}{self.message}{extra}"


@dataclass
class RunReport:
    """What a run of the pipeline has shown."""

    stages: int
    steps: int
    seconds: float = 0.0
    faults: list[StageFault] = field(default_factory=list)
    """At most one a rank; the first is the cause, the rest followed from it."""
    warnings: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    outputs: int = 0
    """How many auxiliary outputs the last stage sent; the first consumed as many."""
    asked: int = 0
    """In how many steps the observer was asked whether it is active; the others go by without."""
    active: int = 0
    """In how many of those it was."""
    with_state: int = 0
    """In how many of those before_grammar gave a state, so that after_sample was called."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each name, the dtypes and the shapes that travelled."""
    tp: int = 1
    """How many tensor-parallel ranks each stage had."""

    @property
    def ok(self) -> bool:
        """Whether every step ran and every tensor arrived as it was sent."""
        return not self.faults


def run_pipeline(
    target: str | Callable[[], Any],
    *,
    stages: int = 2,
    steps: int = 12,
    seed: int = 0,
    inputs: str | None = None,
    timeout: float = 60.0,
    tp: int = 1,
    progress: Callable[[int], None] | None = None,
) -> RunReport:
    """Run an observer on a pipeline of processes over gloo on the loopback address.

    Each stage is a process of its own, started anew (spawn), and makes the observer itself: the
    first and the last stage share nothing but what travels between them.

    Args:
        target: `module:attribute`, or a class or function that makes the observer and that can be
            pickled by reference.
        stages: how many processes, at least 2.
        steps: how many batches to sample, at least 1; two are under way at any time.
        seed: of the weights, the requests and the sampler.
        inputs: `module:callable`, called as `(step, batch_size)` on the first and the last stage;
            returns a dict with any of `logits` (float [batch_size, vocabulary]), `sampling_info`
            and `batch` (with `reqs`, of batch_size requests), in place of the pipeline's own.
        timeout: seconds without any sign of life from any stage after which the run is ended.
        tp: tensor-parallel ranks of each stage, each a process of its own that makes the observer
            itself; the dict crosses the stages as in the engine, which sends a slice from each
            rank and gathers, so that an output has to be the same on all of them.
        progress: called with the number of steps finished, as it grows.

    Raises:
        ValueError: fewer than 2 stages, no step, no time, no rank, or a seed that is not
            below 2**32.
    """
    if stages < 2 or steps < 1 or tp < 1 or timeout <= 0 or not 0 <= seed < 2**32:
        raise ValueError("a pipeline has at least 2 stages, 1 step, some time, and a 32-bit seed")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public; not marked

    quiet_torch()
    started = time.monotonic()
    report = RunReport(stages, steps, tp=tp)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plan = Plan(target, stages, steps, seed, store.port, timeout, inputs, tp)
    with _processes(plan) as watched:
        report.faults = _watch(watched, timeout, report, progress)
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Watched:
    stage: int
    process: multiprocessing.process.BaseProcess
    channel: connection.Connection
    tp_rank: int | None
    last: dict[str, Any] = field(default_factory=lambda: {"phase": "start", "step": -1})
    over: bool = False

    def fault(self, code: str, message: str, **more: Any) -> StageFault:
        return StageFault(
            code,
            self.stage,
            self.last["phase"],
            self.last["step"],
            tuple(self.last.get("requests", ())),
            more.get("error", ""),
            message,
            more.get("advice", ""),
            tuple(more.get("notes", ())),
            tuple(more.get("where", ())),
            self.tp_rank,
        )


@contextmanager
def _processes(plan: Plan) -> Iterator[list[_Watched]]:
    context = multiprocessing.get_context("spawn")
    watched: list[_Watched] = []
    try:
        for rank in range(plan.stages * plan.tp):
            stage, tp_rank = divmod(rank, plan.tp)
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=stage_main, args=(rank, plan, sending), name=f"rank-{rank}"
            )
            with _interrupt_ignored():  # inherited; the parent ends the run
                process.start()
            sending.close()
            told = tp_rank if plan.tp > 1 else None
            watched.append(_Watched(stage, process, receiving, told))
        yield watched
    finally:
        with _interrupt_ignored():  # or a second Ctrl-C would leave stages behind
            _end([one.process for one in watched])
            for one in watched:
                one.channel.close()


@contextmanager
def _interrupt_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """Leave no process behind, within a few seconds, whatever the observer does."""
    for wait, act in ((0.5, "terminate"), (1.0, "kill"), (5.0, "")):
        until = time.monotonic() + wait
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in processes:
            if process.is_alive() and act:
                getattr(process, act)()


def _watch(
    watched: list[_Watched],
    timeout: float,
    report: RunReport,
    progress: Callable[[int], None] | None,
) -> list[StageFault]:
    faults: list[StageFault] = []
    lost: list[StageFault] = []
    deadline = time.monotonic() + timeout
    while running := [one for one in watched if not one.over]:
        left = deadline - time.monotonic()
        signs: list[Any] = [sign for one in running for sign in (one.channel, one.process.sentinel)]
        ready = connection.wait(signs, max(0.0, min(left, 0.5)))
        # a process that the stage has forked holds its channel and its sentinel open
        heard = [one for one in running if one.channel in ready or one.process.exitcode is not None]
        for one in heard:
            _hear(one, report, faults, lost, progress)
        if not heard:
            if time.monotonic() < deadline:
                continue
            if not faults and not lost:
                faults.append(_stalled(running, timeout))
            break
        failed = bool(faults or lost)
        deadline = min(deadline, time.monotonic() + GRACE) if failed else time.monotonic() + timeout
    faults.sort(key=lambda fault: fault.code in CANNOT_CHECK)  # what followed comes last
    return faults or lost


def _hear(
    one: _Watched,
    report: RunReport,
    faults: list[StageFault],
    lost: list[StageFault],
    progress: Callable[[int], None] | None,
) -> None:
    try:
        if not one.channel.poll():  # its process is gone, but somebody holds the channel open
            raise EOFError
        message = json.loads(one.channel.recv_bytes())
    except EOFError:
        one.over = True
        one.process.join(1.0)
        faults.append(one.fault("stage-died", _how_it_died(one.process.exitcode)))
        return
    kind = message.pop("kind")
    one.last = message
    if kind == "failed":
        one.over = True
        told = ("code", "message", "error", "advice", "notes", "where")
        faults.append(one.fault(**{key: message[key] for key in told}))
    elif kind == "peer-lost":
        one.over = True
        lost.append(one.fault("stage", message["message"]))
    elif kind == "done":
        one.over = True
        for name, value in message["summary"].items():
            if hasattr(report, name):
                setattr(report, name, value)
        report.warnings.update(message["summary"].get("warned", {}))
    elif one.stage == 0 and not one.tp_rank and progress is not None:
        progress(message["step"])


def _how_it_died(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:  # a real-time signal has none
            name = f"signal {-exitcode}"
        return f"the process was ended by {name}"
    return f"the process ended without a word, exit code {exitcode}"


def _stalled(running: list[_Watched], timeout: float) -> StageFault:
    """The stage that the others wait for: one inside a hook, or it is not the observer's fault."""
    guilty = next((one for one in running if one.last["phase"] in HOOKS), running[-1])
    others = ", ".join(
        f"stage {one.stage} in {one.last['phase']}" for one in running if one is not guilty
    )
    waiting = f" ({others})" if others else ""
    code = "stalled" if guilty.last["phase"] in HOOKS else "stage"
    return guilty.fault(code, f"no sign of life for {timeout:g} s{waiting}")
