"""How sure was the model of each token, and what else might it have said?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pp_protocol import CommittedTokens, Local, PPCapableObserver, TensorPayload, TensorSpec
from torch import Tensor

__all__ = ["Alternatives", "Confidence", "ConfidenceObserver", "TokenConfidence"]


@dataclass(frozen=True)
class TokenConfidence:
    """What the first stage hears of one committed token."""

    token_id: int
    margin: float
    """Logits between the likeliest token and the next one."""
    alternatives: tuple[int, ...]
    """Ids of the likeliest tokens, likeliest first; empty where they were not asked for."""


Report = Callable[[Any, TokenConfidence], None]


class Alternatives(TensorPayload):
    """The likeliest tokens of each row."""

    ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", "k"))]
    logits: Annotated[Tensor, TensorSpec(torch.float32, ("batch", "k"))]


class Confidence(TensorPayload):
    """What travels in one step."""

    margin: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    alternatives: Alternatives | None
    report: Annotated[Report, Local()]

    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None:
        """Report each committed token; `commits` is aligned with `batch.reqs` and the rows."""
        margins = self.margin.tolist()
        ids = self.alternatives.ids.tolist() if self.alternatives else [[]] * len(margins)
        rows = zip(batch.reqs, commits, margins, ids, strict=True)
        for request, commit, margin, likeliest in rows:
            for token_id in commit.token_ids if commit is not None else ():
                self.report(request, TokenConfidence(token_id, margin, tuple(likeliest)))


class ConfidenceObserver(PPCapableObserver[Confidence]):
    """Sends the margin of every row, and the likeliest tokens where `k` is not 0."""

    def __init__(self, k: int = 3, report: Report | None = None) -> None:
        self.k = k
        self.report: Report = report or (lambda request, confidence: None)

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[Tensor, Tensor]:
        top = logits.float().topk(max(self.k, 2), dim=-1)  # copies: the mask goes into `logits`
        return top.values, top.indices

    def after_sample(self, state: tuple[Tensor, Tensor], token_ids: Tensor) -> Confidence:
        values, ids = state
        likeliest = Alternatives(ids[:, : self.k], values[:, : self.k]) if self.k else None
        return Confidence(values[:, 0] - values[:, 1], likeliest, self.report)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Confidence:
        return Confidence.from_pp_tensors(tensors, report=self.report)
