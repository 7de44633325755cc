"""How do authors of observers test them with pytest?

Loaded by pytest through its entry point. It imports torch only when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from .pipeline import RunReport

RoundTrip = Callable[..., Any]


def assert_pp_capable(observer: object) -> None:
    """Fail with the whole report if an observer lacks anything that the contract asks for."""
    __tracebackhide__ = True
    from .reports import check_observer

    report = check_observer(observer)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)


@pytest.fixture
def pp_wire() -> dict[str, Any]:
    """A dict as an engine sends it between stages, with keys of its own and nothing auxiliary."""
    import torch

    return {"next_token_ids": torch.tensor([3, 1, 2]), "__msg_type__": "output", "__mb_slot__": 0}


@pytest.fixture
def pp_round_trip(pp_wire: dict[str, Any]) -> RoundTrip:
    """Send what an observer makes of `logits` from one instance to another, as on two ranks.

    Called as `pp_round_trip(make, logits, token_ids=…, sampling_info=…)`: `make` makes an observer
    and is called twice, `logits` is a float tensor [batch, vocabulary] (3 by 11 at random if it is
    left out), `token_ids` int [batch] (if left out, the likeliest that the grammar mask allows; it
    forbids every second token). The hooks run as the engine runs them, on a copy of the logits
    that is overwritten afterwards; every tensor travels as its bytes. Returns what the second
    instance rebuilt, or None if the first was not active or gave no output.
    """

    def round_trip(
        make: Callable[[], Any],
        logits: Tensor | None = None,
        token_ids: Tensor | None = None,
        sampling_info: Any = None,
    ) -> Any:
        __tracebackhide__ = True
        import torch

        from .transport import (
            add_auxiliary_output_to_pp_tensors,
            has_auxiliary_output,
            pop_auxiliary_output_from_pp_tensors,
        )

        sender, receiver = make(), make()
        if sender is None:
            pytest.fail("pp_round_trip: make() gave None")
        if sender is receiver:
            pytest.fail("pp_round_trip: make() gave the same observer twice; make it anew")
        if logits is None:
            logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
        buffer = logits.clone()
        if not sender.is_active(sampling_info):
            return None
        state = sender.before_grammar(buffer, sampling_info)
        buffer[:, 1::2] = -torch.inf  # the grammar mask, written where the engine writes it
        if token_ids is None:
            token_ids = buffer.float().argmax(-1)
        output = None if state is None else sender.after_sample(state, token_ids)
        message = dict(pp_wire)
        add_auxiliary_output_to_pp_tensors(message, output)
        buffer.fill_(torch.nan)  # the engine uses its buffers again
        if not has_auxiliary_output(message):
            return None
        received = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in message.items()
        }
        return pop_auxiliary_output_from_pp_tensors(received, receiver)

    return round_trip


@pytest.fixture
def pp_pipeline() -> Callable[..., RunReport]:
    """Run an observer on a real two-stage pipeline of processes, and fail with what was found.

    Called as `pp_pipeline(make, **options)`, with `make` a class or function that the processes
    can import, or "module:attribute", and the options of `pp_protocol.pipeline.run_pipeline`.
    Returns its report.
    """

    def run(make: str | Callable[[], Any], **options: Any) -> RunReport:
        __tracebackhide__ = True
        from .pipeline import run_pipeline

        report = run_pipeline(make, **options)
        if not report.ok:
            pytest.fail("\n".join(map(str, report.faults)), pytrace=False)
        if not report.outputs:
            pytest.fail("the observer gave no output in any step: nothing was checked")
        return report

    return run
