"""How does a stage live and die, and what does its parent process hear of it?"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

from .errors import PPProtocolError, type_name

HOOKS = frozenset(
    {
        *("observer", "is_active", "before_grammar", "after_sample", "to_pp_tensors"),
        *("from_pp_tensors", "copy_to_host", "consume"),
    }
)
"""Phases in which the code that runs is the observer's."""


@dataclass(frozen=True)
class Plan:
    """What every stage is told."""

    target: str | Callable[[], Any]
    stages: int
    steps: int
    seed: int
    port: int
    timeout: float
    inputs: str | None = None
    tp: int = 1
    """How many tensor-parallel ranks each stage has; rank = stage * tp + TP rank."""


class Fault(Exception):  # noqa: N818  # of the observer, not of this program
    """Something that the pipeline itself found to be wrong with the observer."""

    def __init__(self, code: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.code, self.advice = code, advice


class PeerLost(Exception):  # noqa: N818  # says what happened
    """Another stage is gone; what happened is for that one to tell."""


class Place:
    """Where a stage is; tells its parent of every change."""

    def __init__(self, channel: connection.Connection) -> None:
        self._channel = channel
        self.phase, self.step = "start", -1
        self.requests: list[str] = []

    def at(self, phase: str, step: int | None = None, requests: list[str] | None = None) -> None:
        """Be in a phase; step and requests stay what they were unless they are given."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.requests = self.requests if requests is None else requests
        self.tell("at")

    def tell(self, kind: str, **more: Any) -> None:
        """Send the place, and what else there is to say, as JSON."""
        place = {"phase": self.phase, "step": self.step, "requests": self.requests}
        self._channel.send_bytes(json.dumps({"kind": kind, **place, **more}).encode())

    def tell_of(self, error: BaseException) -> None:
        """Tell of an exception in plain data, since the parent may not know its class."""
        if isinstance(error, PeerLost):
            self.tell("peer-lost", message=str(error))
            return
        code, where, advice = "stage", _frames_of_the_user(error), ""
        name, message = type_name(error), shortened(_text_of(error))
        if isinstance(error, PPProtocolError) and type(error.code) is str:
            code, where, advice = error.code, [], error.advice
            message = message.removesuffix(f" {advice} [pp-protocol explain {code}]")
        elif isinstance(error, Fault):
            code, where, advice, name = error.code, [], error.advice, ""
        elif self.phase in HOOKS:
            code = "observer-raised"
        elif self.phase == "inputs":
            code = "inputs"
        self.tell(
            "failed",
            code=code,
            error=name,
            message=message,
            advice=advice,
            notes=_notes_of(error),
            where=where,
        )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # it is the user's code that makes the text
        return f"(its message cannot be read: {type_name(second)})"


def _notes_of(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", ())
    if type(notes) not in (list, tuple):
        return []
    return [shortened(note) for note in notes if type(note) is str]


def shortened(text: str, most: int = 2000) -> str:
    """The text, or its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"


def _frames_of_the_user(error: BaseException) -> list[str]:
    here = os.path.dirname(__file__)
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and (os.path.dirname(frame.filename) != here or frame.filename.endswith("reference.py"))
    ]


def stage_main(rank: int, plan: Plan, channel: connection.Connection) -> None:
    """The process of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    place = Place(channel)
    try:
        place.at("import torch")
        quiet_torch()
        place.tell("done", summary=_run(rank, plan, place))
    except BaseException as error:
        place.tell_of(error)
        raise SystemExit(1) from None
    finally:
        channel.close()


def quiet_torch() -> None:
    """Have torch not complain at import that numpy is absent, which is no dependency of ours."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")


def _run(rank: int, plan: Plan, place: Place) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from .codec import TensorParallel
    from .stage import FirstStage, LastStage, Stage

    stage, tp_rank = divmod(rank, plan.tp)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    place.at("join")
    timeout = timedelta(seconds=2 * plan.timeout)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public; torch marks no export
            "127.0.0.1", plan.port, is_master=False, timeout=timeout
        )
        group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]  # the same
        dist.init_process_group(
            "gloo", store=group, rank=rank, world_size=plan.stages * plan.tp, timeout=timeout
        )
        groups = [  # every rank makes the groups of all stages
            dist.new_group([one * plan.tp + other for other in range(plan.tp)])
            for one in range(plan.stages if plan.tp > 1 else 0)
        ]
    except RuntimeError as error:
        raise PeerLost(f"joining the process group: {error}") from error
    role = FirstStage if stage == 0 else LastStage if stage == plan.stages - 1 else Stage
    tp = TensorParallel(tp_rank, plan.tp, groups[stage] if groups else None)
    summary = role(stage, plan, place, store, tp).run()
    place.at("leave")
    dist.destroy_process_group()
    return summary


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _die_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
