"""What does a complete observer look like? One that says how sure the model was of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from .contract import CommittedTokens
from .payload import Local, TensorPayload, TensorSpec


@dataclass(frozen=True)
class TokenScores:
    """How the model saw one committed token, before the grammar mask; natural logarithms."""

    output_index: int
    """Position among the output tokens of the request, from 0."""
    token_id: int
    logprob: float
    """Log-probability of the token; -inf where the model excluded it."""
    entropy: float
    """Entropy of the whole distribution, in nats."""
    top_ids: tuple[int, ...]
    """The likeliest tokens, likeliest first; none that the model excluded."""
    top_logprobs: tuple[float, ...]


OnToken = Callable[[Any, TokenScores], None]


class LogprobOutput(TensorPayload):
    """The scores of one step, on the device and, after `copy_to_host`, on the host."""

    token_logprobs: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    entropies: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    top_ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", "k"))]
    top_logprobs: Annotated[Tensor, TensorSpec(torch.float32, ("batch", "k"))]
    on_token: Annotated[OnToken, Local()]

    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None:
        """Report the scores of each committed token, with its request from `batch.reqs`.

        Raises:
            ValueError: the rows are not those of this batch, or a request has committed several
                tokens in one step, as with speculative decoding.
        """
        rows = zip(
            self.token_logprobs.tolist(),
            self.entropies.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        )
        scored = list(rows)
        if not len(scored) == len(commits) == len(batch.reqs):
            raise ValueError(
                f"{len(scored)} rows of scores for {len(batch.reqs)} requests with"
                f" {len(commits)} commits"
            )
        for commit in commits:
            if commit is not None and len(commit.token_ids) != 1:
                raise ValueError(
                    f"{len(commit.token_ids)} tokens committed in one step, but one was scored"
                )
        for request, commit, (logprob, entropy, ids, logprobs) in zip(
            batch.reqs, commits, scored, strict=True
        ):
            if commit is None:
                continue
            likeliest = [(i, x) for i, x in zip(ids, logprobs, strict=True) if x != -math.inf]
            scores = TokenScores(
                commit.output_index,
                commit.token_ids[0],
                logprob,
                entropy,
                tuple(i for i, _ in likeliest),
                tuple(x for _, x in likeliest),
            )
            self.on_token(request, scores)


class LogprobObserver:
    """Log-probability and entropy of each sampled token, and the likeliest tokens beside it.

    They are those of the model's own distribution: of the logits before the grammar mask, the
    temperature and the other sampling parameters, computed in float32 (in float64 for float64
    logits). Entries of -inf have the probability 0; a row of nothing else gives NaN, and so does
    one with +inf. One token for each request and step: not for speculative decoding.

    Args:
        top_k: how many of the likeliest tokens to report; no more than the vocabulary has.
        on_token: called on the first stage with the request and its `TokenScores`, for each
            committed token. Without it they are kept by `request.rid`, until `take(rid)`: call
            that for aborted requests too, or they are kept for ever.

    Raises:
        ValueError: `top_k` is below 1.
    """

    def __init__(self, top_k: int = 5, on_token: OnToken | None = None) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        self.top_k = top_k
        self._kept: dict[Any, list[TokenScores]] = {}
        self._on_token = on_token or self._keep

    def is_active(self, sampling_info: Any) -> bool:
        """Always: every request is scored."""
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[Tensor, ...]:
        """Compute everything that does not need the token; `logits` is float [batch, vocabulary].

        Nothing that is kept is a view of `logits`, which the engine masks in place afterwards.
        """
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.log_softmax(logits, dim=-1, dtype=dtype)
        # 0 * -inf would be NaN; an excluded token adds nothing to the entropy
        products = logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)
        entropies = -products.sum(-1) + 0.0  # + 0.0 so that it is never -0.0
        top = logprobs.topk(min(self.top_k, logprobs.shape[-1]), dim=-1)
        return logprobs, entropies, top.values, top.indices

    def after_sample(self, state: tuple[Tensor, ...], token_ids: Tensor) -> LogprobOutput:
        """Look up the sampled tokens; `token_ids` is int [batch] or [batch, 1]."""
        logprobs, entropies, top_logprobs, top_ids = state
        chosen = logprobs.gather(-1, token_ids.reshape(-1, 1).long()).squeeze(-1)
        return LogprobOutput(
            token_logprobs=chosen.float(),
            entropies=entropies.float(),
            top_ids=top_ids,
            top_logprobs=top_logprobs.float(),
            on_token=self._on_token,
        )

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> LogprobOutput:
        """Rebuild the output on the first stage.

        Raises:
            PayloadError: the tensors are not the four of `LogprobOutput`.
        """
        return LogprobOutput.from_pp_tensors(tensors, on_token=self._on_token)

    def take(self, rid: Any) -> list[TokenScores]:
        """Remove and return what is kept for a request, in order; call it when that is finished."""
        return self._kept.pop(rid, [])

    def _keep(self, request: Any, scores: TokenScores) -> None:
        self._kept.setdefault(request.rid, []).append(scores)
