from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pp_protocol import CommittedTokens, PayloadError
from pp_protocol.pytest_plugin import assert_pp_capable
from token_confidence import Confidence, ConfidenceObserver, TokenConfidence

LOGITS = torch.tensor([[0.0, 4.0, 1.0], [5.0, 2.0, 3.0]])


def without_alternatives() -> ConfidenceObserver:
    return ConfidenceObserver(k=0)


def test_nothing_of_the_contract_is_missing() -> None:
    assert_pp_capable(ConfidenceObserver())


@pytest.mark.parametrize("make", [ConfidenceObserver, without_alternatives])
def test_values_survive_the_trip(make: Any, pp_round_trip: Any) -> None:
    output = pp_round_trip(make, LOGITS)
    assert isinstance(output, Confidence)
    assert output.margin.tolist() == [3.0, 2.0]
    if output.alternatives is not None:
        assert output.alternatives.ids.tolist() == [[1, 2, 0], [0, 2, 1]]


def test_committed_tokens_are_reported_and_aborted_ones_are_not(pp_round_trip: Any) -> None:
    heard: list[tuple[str, TokenConfidence]] = []

    def make() -> ConfidenceObserver:
        return ConfidenceObserver(report=lambda request, told: heard.append((request.rid, told)))

    host = pp_round_trip(make, LOGITS).copy_to_host(torch.clone)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    host.consume(batch, [CommittedTokens(0, (1,)), None])
    assert heard == [("a", TokenConfidence(1, 3.0, (1, 2, 0)))]


def test_another_version_on_the_other_rank_is_one_clear_error() -> None:
    with pytest.raises(PayloadError, match=r"'margin' is torch\.float16, not torch\.float32"):
        ConfidenceObserver().from_pp_tensors({"margin": torch.ones(2).half()})


@pytest.mark.parametrize("make", [ConfidenceObserver, without_alternatives])
def test_on_a_real_pipeline(make: Any, pp_pipeline: Any) -> None:
    assert pp_pipeline(make, steps=3).outputs == 3
