"""What does a TensorPayload cost beside the same observer by hand? Run it: make bench

Both go through add and pop and copy_to_host; interleaved, as ratios of medians.
"""

from __future__ import annotations

import pathlib
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
from transport import foreign, medians  # noqa: E402  # found by the line above

import pp_protocol  # noqa: E402  # as above
from pp_protocol import TensorPayload, TensorSpec  # noqa: E402  # as above


@dataclass(frozen=True, eq=False)
class ByHand:
    logprobs: Tensor
    entropies: Tensor
    ids: Tensor

    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {"logprobs": self.logprobs, "entropies": self.entropies, "ids": self.ids}

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> ByHand:
        return ByHand(
            copy_tensor(self.logprobs), copy_tensor(self.entropies), copy_tensor(self.ids)
        )


class ObserverByHand:
    def from_pp_tensors(self, tensors: Any) -> ByHand:
        if tensors.keys() != {"logprobs", "entropies", "ids"}:
            raise ValueError(f"got {sorted(tensors)}")
        return ByHand(tensors["logprobs"], tensors["entropies"], tensors["ids"])


class CheckedByHand:
    def from_pp_tensors(self, tensors: Any) -> ByHand:
        if tensors.keys() != {"logprobs", "entropies", "ids"}:
            raise ValueError(f"got {sorted(tensors)}")
        logprobs, entropies, ids = tensors["logprobs"], tensors["entropies"], tensors["ids"]
        if logprobs.dtype != torch.float32 or entropies.dtype != torch.float32:
            raise ValueError("not float32")
        if ids.dtype != torch.int64:
            raise ValueError("not int64")
        if logprobs.dim() != 1 or entropies.dim() != 1 or ids.dim() != 2:
            raise ValueError("wrong rank")
        batch = logprobs.shape[0]
        if entropies.shape[0] != batch or ids.shape[0] != batch or ids.shape[1] != 2:
            raise ValueError("wrong size")
        return ByHand(logprobs, entropies, ids)


class Payload(TensorPayload):
    logprobs: Tensor
    entropies: Tensor
    ids: Tensor


class CheckedPayload(TensorPayload):
    logprobs: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    entropies: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", 2))]


class WithPayload:
    def from_pp_tensors(self, tensors: Any) -> Payload:
        return Payload.from_pp_tensors(tensors)


class WithCheckedPayload:
    from_pp_tensors = staticmethod(CheckedPayload.from_pp_tensors)


def trip(output: Any, observer: Any) -> Callable[[], object]:
    tensors = foreign(6)

    def run() -> None:
        pp_protocol.add_auxiliary_output_to_pp_tensors(tensors, output)
        received: Any = pp_protocol.pop_auxiliary_output_from_pp_tensors(tensors, observer)
        received.copy_to_host(lambda tensor: tensor)

    return run


def main() -> None:
    tensors = torch.rand(4), torch.rand(4), torch.ones(4, 2, dtype=torch.int64)
    by_hand, payload, checked = ByHand(*tensors), Payload(*tensors), CheckedPayload(*tensors)
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| round trip of 3 tensors | by hand, ns | TensorPayload, ns | ratio |")
    print("|---|---|---|---|")
    for what, *runs in (
        ("nothing declared", trip(by_hand, ObserverByHand()), trip(payload, WithPayload())),
        (
            "dtypes and shapes declared",
            trip(by_hand, CheckedByHand()),
            trip(checked, WithCheckedPayload()),
        ),
    ):
        hand, ours = medians(runs, 80, 400)
        print(f"| {what} | {hand:.0f} | {ours:.0f} | {ours / hand:.2f} |")


if __name__ == "__main__":
    main()
