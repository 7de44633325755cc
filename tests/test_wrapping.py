"""Promises of with_pp_transport: a plain observer, or a proxy of one, gets both halves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from observers import Output

from pp_protocol import (
    ConformanceError,
    PPCapableObserver,
    PPCapableOutput,
    UnsupportedObserverError,
    UnsupportedOutputError,
    add_auxiliary_output_to_pp_tensors,
    check_observer,
    check_output,
    is_pp_observer,
    is_pp_output,
    pop_auxiliary_output_from_pp_tensors,
    require_pp_observer,
    with_pp_transport,
)
from pp_protocol.pipeline import run_pipeline


class PlainOutput:
    def __init__(self, sums: Any) -> None:
        self.sums = sums

    def copy_to_host(self, copy_tensor: Any) -> Any:
        return Output({"sums": copy_tensor(self.sums)})


class Plain:
    threshold = 3

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Any, sampling_info: Any) -> Any:
        return logits.sum(-1)

    def after_sample(self, state: Any, token_ids: Any) -> Any:
        return PlainOutput(state)

    def __repr__(self) -> str:
        return "the plain one"


class Handle:
    """A remote handle: it answers to every name."""

    def __init__(self, target: Any) -> None:
        self.__dict__["target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def rebuild(tensors: Any) -> PlainOutput:
    return PlainOutput(tensors["sums"])


def name_tensors(output: PlainOutput) -> dict[str, Any]:
    return {"sums": output.sums}


def wrapped() -> Any:
    return with_pp_transport(Plain(), rebuild, name_tensors)


def wrapped_handle() -> Any:
    return with_pp_transport(Handle(Plain()), rebuild, name_tensors)


@pytest.mark.parametrize("make", [wrapped, wrapped_handle])
def test_what_is_wrapped_makes_the_round_trip(make: Any) -> None:
    observer = make()
    assert isinstance(observer, PPCapableObserver)
    assert is_pp_observer(observer)
    assert require_pp_observer(observer) is observer
    assert check_observer(observer).problems == ()
    assert observer.is_active(None)
    state = observer.before_grammar(torch.ones(2, 3), None)
    output = observer.after_sample(state, torch.tensor([1, 2]))
    assert isinstance(output, PPCapableOutput)
    assert is_pp_output(output)
    assert check_output(output).ok
    tensors: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(tensors, output)
    again = pop_auxiliary_output_from_pp_tensors(tensors, make())
    assert again.sums.tolist() == [3, 3]
    assert output.copy_to_host(torch.clone).tensors["sums"].tolist() == [3, 3]


@pytest.mark.processes
@pytest.mark.parametrize("make", ["wrapped", "wrapped_handle"])
def test_it_passes_a_real_pipeline(make: str) -> None:
    report = run_pipeline(f"test_wrapping:{make}", steps=3)
    assert (report.faults, report.outputs) == ([], 3)


def test_the_rest_is_the_wrapped_observer_s() -> None:
    observer = wrapped()
    assert repr(observer) == "the plain one"
    assert observer.threshold == 3
    with pytest.raises(AttributeError):
        observer.absent  # noqa: B018  # that it raises is what is asked
    for clone in (pickle.loads(pickle.dumps(observer)), copy.deepcopy(observer)):
        assert type(clone) is type(observer)
        assert clone.from_pp_tensors({"sums": torch.ones(1)}).sums.item() == 1
        assert clone.threshold == 3


def test_outputs_that_can_be_sent_already_and_none_are_left_alone() -> None:
    class Sends(Plain):
        output: Any = Output({"sums": torch.ones(1)})

        def after_sample(self, state: Any, token_ids: Any) -> Any:
            return self.output

    inner = Sends()
    observer = with_pp_transport(inner, rebuild, name_tensors)
    assert observer.after_sample(None, None) is inner.output
    inner.output = None
    assert observer.after_sample(None, None) is None


def test_without_the_sending_half_an_output_is_refused_by_add() -> None:
    output = with_pp_transport(Plain(), rebuild).after_sample(torch.ones(1), None)
    with pytest.raises(UnsupportedOutputError, match="has no to_pp_tensors"):
        add_auxiliary_output_to_pp_tensors({}, output)


@pytest.mark.parametrize("wrong", [None, "rebuild", lambda: None, lambda tensors, more: None])
def test_functions_that_cannot_be_called_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(UnsupportedObserverError, match="with_pp_transport"):
        with_pp_transport(Plain(), wrong)
    if wrong is not None:
        with pytest.raises(UnsupportedOutputError, match="with_pp_transport"):
            with_pp_transport(Plain(), rebuild, wrong)


@pytest.mark.parametrize("broken", ["None", "a class", "async", "missing"])
def test_an_observer_without_its_hooks_is_refused(broken: str) -> None:
    async def later(self: object, logits: object, info: object) -> None: ...

    class Async(Plain):
        before_grammar = later

    observers = {"None": None, "a class": Plain, "async": Async(), "missing": object()}
    with pytest.raises(ConformanceError, match="with_pp_transport of"):
        with_pp_transport(observers[broken], rebuild)


def test_attributes_are_written_to_the_wrapped_observer() -> None:
    plain = Plain()
    wrapped = with_pp_transport(plain, rebuild)
    wrapped.level = 2
    assert plain.level == 2
    del wrapped.level
    assert not hasattr(plain, "level")
