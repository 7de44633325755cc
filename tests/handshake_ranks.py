"""The ranks of a handshake, each a process; what every one of them has found goes to the parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import types
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from observers import Observer, Output
from torch import Tensor

from pp_protocol import HandshakeError, TensorPayload, TensorSpec, handshake, verify_pipeline


class Scores(TensorPayload):
    entropy: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    more: Tensor | None

    def consume(self, batch: Any, commits: Any) -> None: ...


class OtherScores(TensorPayload):
    entropy: Annotated[Tensor, TensorSpec(torch.float16, ("batch",))]
    more: Tensor | None

    def consume(self, batch: Any, commits: Any) -> None: ...


class Good(Observer):
    def from_pp_tensors(self, tensors: Any) -> Scores:
        return Scores.from_pp_tensors(tensors)


class Other(Observer):
    def from_pp_tensors(self, tensors: Any) -> OtherScores:
        return OtherScores.from_pp_tensors(tensors)


class CannotRebuild(Good):
    from_pp_tensors = None


class Receiver:
    """A light one, without hooks."""

    def from_pp_tensors(self, tensors: Any) -> Output:
        return Output(tensors)


class NoHook(Good):
    after_sample = None


def scenarios(size: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A name, the rank that it is about, and how that rank and the call differ from the others."""
    for rank in range(size):
        yield "no observer", rank, {"observer": None}
        yield "cannot rebuild", rank, {"observer": CannotRebuild()}
        yield "no hook", rank, {"observer": NoHook()}
        yield "other schema", rank, {"observer": Other()}
        yield "raises", rank, {"raises": True}
        yield "late", rank, {"sleep": 0.5}
        yield "light", rank, {"observer": Receiver()}
        yield "missing", rank, {"timeout": 2.5, "sleep": 3.5}
        yield "no stage", rank, {"stage": False}
    yield "right", -1, {}


def rank_main(rank: int, size: int, port: int, only: str, results: Any) -> None:
    import torch.distributed as dist

    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = []
    for number, (name, whose, how) in enumerate(scenarios(size)):
        if only and name != only:
            continue
        dist.barrier()  # the group is as usable as before
        mine = how if whose == rank else {}
        observer = mine.get("observer", Good())
        stage = None if "stage" in mine else rank
        raising = mine.get("raises")
        if "sleep" in mine:
            time.sleep(mine["sleep"])  # to be late
        started = time.monotonic()
        with broken_check() if raising else contextlib.nullcontext():
            try:
                report = verify_pipeline(observer, stage=stage, timeout=how.get("timeout", 30))
                found.append((number, "", report.to_json(), time.monotonic() - started))
            except HandshakeError as error:
                text = "" if error.report is None else error.report.to_json()
                found.append((number, str(error), text, time.monotonic() - started))
    results.put((rank, found))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def broken_check() -> Iterator[None]:
    real = handshake.check_observer

    def check_observer(observer: object) -> types.NoneType:
        raise MemoryError("in the check")

    handshake.check_observer = check_observer  # type: ignore[assignment]  # on purpose
    try:
        yield
    finally:
        handshake.check_observer = real


def run(size: int, only: str = "") -> dict[int, list[Any]]:
    """What each rank found, by rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, size, store.port, only, results))
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=240) for _ in ranks)
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
    return found
