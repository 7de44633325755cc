"""Observers that go wrong, or have the transport go wrong, in the way that the variable FAULT says.

The processes of the stages inherit the variable; each of them makes the observer itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from observers import Observer, Output
from torch import Tensor

from pp_protocol import codec, stage

LAST = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Cut(codec.Pending):
    """Sends the metadata of an output, and dies before its tensors."""

    def __init__(self, tensors: list[Tensor], dst: int) -> None:
        if dist.get_rank() == LAST:
            super().__init__(tensors[:2], dst)
            self.wait()
            time.sleep(0.5)  # so that the receiver waits for the first tensor
            die()
        super().__init__(tensors, dst)


class Messages:
    """Stands between the last stage and the first: drops, doubles or swaps whole messages."""

    def __init__(self, how: str) -> None:
        self.how, self.count, self.held = how, 0, []

    def send(self, message: Mapping[str, Any], dst: int, *more: Any) -> Any:
        self.count += 1
        third = self.count == 3
        if self.how == "drop" and third:
            return codec.Pending([], dst)
        if self.how == "double" and third:
            codec.send_tensor_dict(message, dst, *more).wait()
        if self.how == "swap" and third:
            self.held = [message]
            return codec.Pending([], dst)
        pending = codec.send_tensor_dict(message, dst, *more)
        if self.held:
            pending.wait()
            pending = codec.send_tensor_dict(self.held.pop(), dst, *more)
        return pending


class Faulty(Observer):
    """Right, but for what FAULT says."""

    def __init__(self) -> None:
        self.fault = os.environ.get("FAULT", "")
        self.at("observer")
        if self.fault == "kill between":
            codec.Pending = Cut  # type: ignore[misc]  # in this process only
        if self.fault in ("drop", "double", "swap") and dist.get_rank() == LAST:
            stage.send_tensor_dict = Messages(self.fault).send  # type: ignore[assignment]  # the same

    def at(self, hook: str) -> None:
        if self.fault == f"raise {hook}":
            raise LookupError(f"in {hook}")
        if self.fault == f"kill {hook}":
            die()
        if self.fault == f"slow {hook}":
            time.sleep(0.4)  # longer than a step takes

    def is_active(self, sampling_info: Any) -> bool:
        self.at("is_active")
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        self.at("before_grammar")
        return logits.float().logsumexp(-1)

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        self.at("after_sample")
        return FaultyOutput(self, {"logsumexp": state})

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        self.at("from_pp_tensors")
        return FaultyOutput(self, tensors)


class FaultyOutput(Output):
    def __init__(self, observer: Faulty, tensors: Any) -> None:
        super().__init__(tensors)
        self.observer = observer

    def to_pp_tensors(self) -> Any:
        self.observer.at("to_pp_tensors")
        return self.tensors

    def copy_to_host(self, copy_tensor: Any) -> Output:
        self.observer.at("copy_to_host")
        copies = {name: copy_tensor(tensor) for name, tensor in self.tensors.items()}
        return FaultyOutput(self.observer, copies)

    def consume(self, batch: Any, commits: Any) -> None:
        self.observer.at("consume")
