"""What does a fingerprint cost beside a copy of the same tensor? Run it: make bench"""

from __future__ import annotations

import pathlib
import platform
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
from transport import medians  # noqa: E402  # found by the line above

from pp_protocol import fingerprint  # noqa: E402  # as above


def main() -> None:
    torch.set_num_threads(1)  # as engines do; on two busy cores, two threads wait for each other
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one thread\n")
    print("| one tensor of | clone, us | fingerprint, us | ratio |")
    print("|---|---|---|---|")
    for name, size in (("1 KiB", 1 << 10), ("64 KiB", 1 << 16), ("1 MiB", 1 << 20)):
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
        tensors = {"x": tensor}
        copy, mark = medians([tensor.clone, lambda t=tensors: fingerprint.of_sent(t)], 60, 20)
        print(f"| {name} | {copy / 1000:.1f} | {mark / 1000:.1f} | {mark / copy:.1f} |")


if __name__ == "__main__":
    main()
