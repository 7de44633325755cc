"""Promises of pp_protocol.reference: right numbers, aligned with the tokens that are committed."""

from __future__ import annotations

import math
import types

import pytest
import torch

from pp_protocol import (
    CommittedTokens,
    PayloadError,
    PPCapableObserver,
    PPCapableOutput,
    add_auxiliary_output_to_pp_tensors,
    pop_auxiliary_output_from_pp_tensors,
)
from pp_protocol.reference import LogprobObserver, TokenScores


def by_hand(row: list[float]) -> tuple[list[float], float]:
    """Log-probabilities and entropy of one row, in float64 and by math alone."""
    top = max(row)
    total = math.fsum(math.exp(x - top) for x in row)
    logprobs = [x - top - math.log(total) for x in row]
    return logprobs, -math.fsum(math.exp(x) * x for x in logprobs if x != -math.inf)


def random_logits(vocabulary: int, excluded: int = 0, scale: float = 4.0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(vocabulary + excluded)
    logits = torch.randn(4, vocabulary, generator=dice) * scale
    for row in logits:
        row[torch.randperm(vocabulary, generator=dice)[:excluded]] = -torch.inf
    return logits


LOGITS = {
    "float32": random_logits(50),
    "a large vocabulary": random_logits(20_000),
    "excluded tokens": random_logits(50, excluded=30),
    "one token left": random_logits(50, excluded=49),
    "one token": random_logits(1),
    "fewer than top_k": random_logits(3),
    "far apart": random_logits(50, scale=500.0),
    "all equal": torch.zeros(2, 64),
    "float16": random_logits(50).half(),
    "bfloat16": random_logits(50).bfloat16(),
    "float16 with excluded tokens": random_logits(50, excluded=20).half(),
    "float64": random_logits(50).double(),
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_the_numbers_are_those_of_a_float64_computation(logits: torch.Tensor) -> None:
    sender, seen = LogprobObserver(top_k=5), []
    receiver = LogprobObserver(top_k=5, on_token=lambda request, scores: seen.append(scores))
    before = logits.clone()
    state = sender.before_grammar(logits, None)
    logits.fill_(torch.nan)  # as the mask, and the next step, write into it
    token_ids = before.float().argmax(-1)
    tensors = {}
    add_auxiliary_output_to_pp_tensors(tensors, sender.after_sample(state, token_ids))
    output = pop_auxiliary_output_from_pp_tensors(tensors, receiver)
    rows = len(before)
    batch = types.SimpleNamespace(reqs=list(range(rows)))
    commits = [CommittedTokens(7, (int(token),)) for token in token_ids]
    output.copy_to_host(torch.clone).consume(batch, commits)
    logits.copy_(before)
    assert len(seen) == rows
    for row, scores in zip(before.double().tolist(), seen, strict=True):
        logprobs, entropy = by_hand(row)
        assert scores.output_index == 7
        assert scores.logprob == pytest.approx(logprobs[scores.token_id], abs=2e-5)
        assert scores.entropy == pytest.approx(entropy, abs=2e-5)
        likeliest = [x for x in sorted(logprobs, reverse=True)[:5] if x != -math.inf]
        assert list(scores.top_logprobs) == pytest.approx(likeliest, rel=1e-5, abs=2e-5)
        assert [logprobs[i] for i in scores.top_ids] == pytest.approx(likeliest, abs=2e-5)
        assert not math.copysign(1, scores.entropy) < 0


def test_an_excluded_token_has_log_probability_minus_infinity() -> None:
    observer = LogprobObserver(top_k=1)
    state = observer.before_grammar(torch.tensor([[0.0, -torch.inf]]), None)
    output = observer.after_sample(state, torch.tensor([1], dtype=torch.int32))
    assert output.token_logprobs.tolist() == [-math.inf]
    assert output.entropies.tolist() == [0.0]


def test_scores_are_kept_by_request_until_they_are_taken() -> None:
    observer = LogprobObserver(top_k=2)
    batch = types.SimpleNamespace(reqs=[types.SimpleNamespace(rid=rid) for rid in "abc"])
    for step in range(2):
        state = observer.before_grammar(torch.randn(3, 9), None)
        output = observer.after_sample(state, torch.tensor([[1], [2], [3]]))
        commits = [CommittedTokens(step, (1,)), None, CommittedTokens(step + 5, (3,))]
        output.copy_to_host(torch.clone).consume(batch, commits)
    taken = observer.take("a")
    assert [(scores.output_index, scores.token_id) for scores in taken] == [(0, 1), (1, 1)]
    assert all(isinstance(scores, TokenScores) for scores in taken)
    assert observer.take("a") == []
    assert observer.take("b") == []
    assert [scores.output_index for scores in observer.take("c")] == [5, 6]


def test_copy_to_host_copies_each_tensor_once() -> None:
    observer, copied = LogprobObserver(), []
    state = observer.before_grammar(torch.randn(2, 9), None)
    output = observer.after_sample(state, torch.tensor([1, 2]))
    host = output.copy_to_host(lambda tensor: copied.append(tensor) or tensor.clone())
    assert [id(t) for t in copied] == [id(t) for t in output.to_pp_tensors().values()]
    assert not {id(t) for t in copied} & {id(t) for t in host.to_pp_tensors().values()}


def test_what_does_not_fit_the_batch_is_refused() -> None:
    observer = LogprobObserver()
    state = observer.before_grammar(torch.randn(2, 9), None)
    host = observer.after_sample(state, torch.tensor([1, 2])).copy_to_host(torch.clone)
    batch = types.SimpleNamespace(reqs=[1, 2])
    with pytest.raises(ValueError, match="2 rows of scores for 2 requests with 1 commits"):
        host.consume(batch, [None])
    with pytest.raises(ValueError, match="2 tokens committed in one step"):
        host.consume(batch, [CommittedTokens(0, (1, 2)), None])
    with pytest.raises(PayloadError, match="is missing"):
        observer.from_pp_tensors({"entropies": torch.ones(1)})
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        LogprobObserver(top_k=0)


def test_it_is_what_the_contract_asks_for() -> None:
    observer = LogprobObserver()
    assert observer.is_active(None)
    assert isinstance(observer, PPCapableObserver)
    state = observer.before_grammar(torch.randn(1, 9), None)
    assert isinstance(observer.after_sample(state, torch.tensor([0])), PPCapableOutput)
