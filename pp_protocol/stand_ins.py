"""What stands in for the engine's objects that a hook is given?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import type_name
from .stage_process import Fault
from .targets import load


@dataclass
class Request:
    """One request; `output_ids` grows by each committed token."""

    rid: str
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def finished(self) -> bool:
        """Whether no further token is wanted."""
        return self.aborted or len(self.output_ids) >= self.max_new_tokens


@dataclass
class Batch:
    """The requests of one microbatch; row i of every tensor belongs to `reqs[i]`."""

    reqs: list[Request]

    def batch_size(self) -> int:
        """How many requests there are."""
        return len(self.reqs)


@dataclass
class SamplingInfo:
    """What is plain data in the engine's `SamplingBatchInfo`, under its names."""

    temperatures: Tensor
    """float32 [batch, 1]"""
    top_ps: Tensor
    """float32 [batch]"""
    top_ks: Tensor
    """int32 [batch]"""
    min_ps: Tensor
    """float32 [batch]"""
    vocab_size: int
    is_all_greedy: bool = False
    grammars: list[Any] | None = None

    @classmethod
    def neutral(cls, size: int, vocabulary: int) -> SamplingInfo:
        """Settings for `size` requests that change nothing."""
        return cls(
            torch.ones(size, 1),
            torch.ones(size),
            torch.full((size,), vocabulary, dtype=torch.int32),
            torch.zeros(size),
            vocabulary,
        )


class Inputs:
    """What `--inputs module:callable` supplies for a step, in place of the pipeline's own."""

    KEYS = ("logits", "sampling_info", "batch")

    def __init__(self, target: str | None) -> None:
        self._call = None if target is None else load(target)
        if self._call is not None and not callable(self._call):
            raise Fault("inputs", f"{target} is {type_name(self._call)}, which cannot be called")

    def of(self, step: int, size: int) -> dict[str, Any]:
        """The callable's answer for a step, checked."""
        if self._call is None:
            return {}
        given = self._call(step, size)
        if not isinstance(given, dict):
            raise Fault("inputs", f"it returned {type_name(given)}, not a dict")
        for key in given:
            if key not in self.KEYS:
                raise Fault("inputs", f"it returned {key!r}, which is none of {self.KEYS}")
        logits, batch = given.get("logits"), given.get("batch")
        if logits is not None:
            self._check_logits(logits, size)
        if batch is not None and len(batch.reqs) != size:
            raise Fault("inputs", f"batch.reqs has {len(batch.reqs)} requests, not {size}")
        return given

    @staticmethod
    def _check_logits(logits: object, size: int) -> None:
        seen = type_name(logits)
        if isinstance(logits, Tensor):
            if logits.is_floating_point() and logits.dim() == 2 and len(logits) == size:
                return
            seen = f"{logits.dtype} {list(logits.shape)}"
        raise Fault("inputs", f"logits are {seen}, not a float tensor [{size}, vocabulary]")
