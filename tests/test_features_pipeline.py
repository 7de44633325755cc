"""Promises of what makes observers short, on a real two-stage pipeline of processes."""

from __future__ import annotations

import json

import feature_observers
import pytest

from pp_protocol.cli import main
from pp_protocol.pipeline import run_pipeline

pytestmark = pytest.mark.processes

FEATURES = {
    "PayloadObserver": {"entropy", "token", "mean", "top.ids", "top.logits"},
    "composite": {
        "inner/even/logsumexp",
        *(f"inner/payload/{name}" for name in ("entropy", "token", "mean")),
        *("inner/payload/top.ids", "inner/payload/top.logits"),
        *(f"logprobs/{name}" for name in ("token_logprobs", "entropies", "top_ids")),
        "logprobs/top_logprobs",
    },
    "Combining": {
        "one/logsumexp",
        *(f"two/{name}" for name in ("token_logprobs", "entropies", "top_ids", "top_logprobs")),
    },
    "wrapped": {"sums"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_every_tensor_arrives_bit_for_bit_and_is_consumed(name: str) -> None:
    report = run_pipeline(getattr(feature_observers, name), steps=6)
    assert report.ok, [str(fault) for fault in report.faults]
    assert set(report.tensors) == FEATURES[name]
    assert report.outputs == report.asked > 0
    assert report.warnings == {}


def test_the_command_takes_a_composite_and_a_wrapped_observer(capsys) -> None:
    targets = ["feature_observers:composite", "feature_observers:wrapped"]
    assert main(["check", *targets, "--steps", "3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["targets"]
    assert [one["verdict"] for one in found] == ["ok", "ok"]
    for one in found:
        assert one["parts"][-1]["summary"].endswith("equal bit for bit")
