"""What does pp_boundary cost? Run it: python tests/benchmarks/boundary.py"""

from __future__ import annotations

import platform
import statistics
import timeit
from collections.abc import Callable

import beartype
import torch

from pp_protocol import PipelineParallelSamplingObserver as PPObserver
from pp_protocol import PPCapableObserver, pp_boundary
from pp_protocol.reference import LogprobObserver


def bare(observer: PPObserver) -> None: ...
def result(observer: PPObserver) -> PPObserver:
    return observer


def capable(observer: PPCapableObserver) -> None: ...


def cost(function: Callable[..., object], rounds: int = 200, calls: int = 1000) -> float:
    """Nanoseconds that the decorator adds to a call: medians of interleaved rounds."""
    observer, checked = LogprobObserver(), pp_boundary(function)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for which, into in ((function, times[0]), (checked, times[1])):
            into.append(timeit.timeit(lambda f=which: f(observer), number=calls) / calls * 1e9)
    return statistics.median(times[1]) - statistics.median(times[0])


if __name__ == "__main__":
    print(
        f"Python {platform.python_version()}, beartype {beartype.__version__},"
        f" torch {torch.__version__}"
    )
    for what, function in (
        ("one observer parameter", bare),
        ("a parameter and the result", result),
        ("all four members of PPCapableObserver", capable),
    ):
        print(f"{what}: {cost(function):.0f} ns")
