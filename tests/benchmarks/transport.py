"""What do add and pop cost beside the released engine's own? Run it: make bench

Ours and stock in one process, interleaved, as ratios of medians; and both over the floor: the same
dict operations without any check. The table is Markdown, as it stands in README.md.
"""

from __future__ import annotations

import pathlib
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

import beartype
import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
from engine import ENGINE_VERSION, engine_path  # noqa: E402  # found by the line above

sys.path.insert(0, str(engine_path()))
import sglang.srt.sampling.sampling_observer_pp as stock  # noqa: E402

import pp_protocol  # noqa: E402

PREFIX = pp_protocol.PREFIX
Run = Callable[[], object]


class Output:
    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def to_pp_tensors(self) -> Any:
        return self.tensors

    def copy_to_host(self, copy_tensor: Any) -> Any: ...


class Observer:
    def from_pp_tensors(self, tensors: Any) -> Output:
        return Output(tensors)


class Floor:
    """The dict operations alone."""

    @staticmethod
    def add_auxiliary_output_to_pp_tensors(tensors: Any, output: Any) -> None:
        for name, tensor in output.to_pp_tensors().items():
            tensors[PREFIX + name] = tensor

    @staticmethod
    def pop_auxiliary_output_from_pp_tensors(tensors: Any, observer: Any) -> Any:
        payload = {k[len(PREFIX) :]: v for k, v in tensors.items() if k.startswith(PREFIX)}
        if not payload:
            return None
        output = observer.from_pp_tensors(payload)
        for name in payload:
            del tensors[PREFIX + name]
        return output


def foreign(count: int) -> dict[str, Any]:
    """Keys of others: those that the engine sends, and more where more are wanted."""
    engine: dict[str, Any] = {
        "next_token_ids": 0,
        "__msg_type__": "output",
        "__mb_slot__": 0,
        "hidden_states": 0,
        "residual": 0,
        "extend_input_len": 0,
    }
    return {**engine, **{f"key{i}": i for i in range(count - len(engine))}}


def empty_pop(side: Any, keys: int) -> Run:
    tensors, observer = foreign(keys), Observer()
    return lambda: side.pop_auxiliary_output_from_pp_tensors(tensors, observer)


def round_trip(side: Any, count: int) -> Run:
    tensors, observer = foreign(6), Observer()
    output = Output({f"t{i}": torch.randn(4, 8) for i in range(count)})
    add, pop = (
        side.add_auxiliary_output_to_pp_tensors,
        side.pop_auxiliary_output_from_pp_tensors,
    )

    def run() -> None:
        add(tensors, output)
        pop(tensors, observer)

    return run


def refused(side: Any, _: int) -> Run:
    tensors = {**foreign(6), PREFIX + "x": torch.ones(1)}

    def run() -> None:
        try:
            side.pop_auxiliary_output_from_pp_tensors(tensors, object())
        except RuntimeError:
            return

    return run


def medians(runs: list[Run], rounds: int, calls: int) -> list[float]:
    """Nanoseconds a call, of each; the runs take turns, so that noise meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, into in zip(runs, times, strict=True):
            into.append(timeit.timeit(run, number=calls) / calls * 1e9)
    return [statistics.median(each) for each in times]


def over_a_hop(rank: int, port: int, results: Any) -> None:
    """A round trip of three tensors with a real hop over gloo between add and pop."""
    import os

    import torch.distributed as dist

    from pp_protocol.codec import recv_tensor_dict, send_tensor_dict
    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    output, observer = Output({f"t{i}": torch.randn(4, 8) for i in range(3)}), Observer()
    times: list[list[float]] = [[], []]
    for turn in range(3000):
        side = (pp_protocol, stock)[turn % 2]
        started = timeit.default_timer()
        if rank == 0:
            tensors = foreign(6)
            side.add_auxiliary_output_to_pp_tensors(tensors, output)
            send_tensor_dict(tensors, 1).wait()
            recv_tensor_dict(1)
        else:
            received = recv_tensor_dict(0)
            side.pop_auxiliary_output_from_pp_tensors(received, observer)
            send_tensor_dict({"done": 1}, 0).wait()
        times[turn % 2].append(timeit.default_timer() - started)
    if rank == 0:
        results.put([statistics.median(each[100:]) * 1e9 for each in times])
        results.close()
        results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def hop() -> list[float]:
    import multiprocessing

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public; not marked

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [
        context.Process(target=over_a_hop, args=(rank, store.port, results)) for rank in (0, 1)
    ]
    try:
        for peer in peers:
            peer.start()
        found: list[float] = results.get(timeout=120)
        for peer in peers:
            peer.join(30)
    finally:
        for peer in peers:
            peer.kill()
    return found


def import_seconds(statement: str) -> float:
    command = [sys.executable, "-W", "ignore", "-c", statement]
    return min(
        timeit.timeit(lambda: subprocess.run(command, check=True), number=1) for _ in range(5)
    )


def main() -> None:
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, beartype"
        f" {beartype.__version__}, SGLang {ENGINE_VERSION}, {platform.machine()}\n"
    )
    print("| | ours, ns | stock, ns | ours over stock | ours over the floor |")
    print("|---|---|---|---|---|")
    rows: list[tuple[str, Any, int, int]] = [
        ("empty pop, 6 keys", empty_pop, 6, 2000),
        ("empty pop, 64 keys", empty_pop, 64, 1000),
        ("empty pop, 640 keys", empty_pop, 640, 200),
        ("round trip, 1 tensor", round_trip, 1, 500),
        ("round trip, 3 tensors", round_trip, 3, 400),
        ("round trip, 32 tensors", round_trip, 32, 60),
        ("a wrong observer, refused", refused, 0, 200),
    ]
    for what, make, size, calls in rows:
        sides = (pp_protocol, stock) if make is refused else (pp_protocol, stock, Floor)
        ours, theirs, *floor = medians([make(side, size) for side in sides], 60, calls)
        over = f"{ours / floor[0]:.2f}" if floor else ""
        print(f"| {what} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} | {over} |")
    ours, theirs = hop()
    print(
        f"| round trip, 3 tensors, there and back over gloo | {ours:.0f} | {theirs:.0f} |"
        f" {ours / theirs:.2f} | |"
    )
    names = "import torch, pp_protocol; pp_protocol.add_auxiliary_output_to_pp_tensors"
    print(f"\nimport over torch's: {import_seconds(names) - import_seconds('import torch'):.2f} s")


if __name__ == "__main__":
    main()
