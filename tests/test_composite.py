"""Promises of pp_protocol.composite: several observers in one slot, each with its own tensors."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from observers import Observer, Output
from torch import Tensor

from pp_protocol import (
    PREFIX,
    CompositeAuxiliaryOutput,
    CompositeSamplingObserver,
    ConformanceError,
    EmptyOutputError,
    PayloadError,
    ReconstructionError,
    TensorNameError,
    UnsupportedOutputError,
    add_auxiliary_output_to_pp_tensors,
    check_observer,
    check_output,
    pop_auxiliary_output_from_pp_tensors,
)


class Child(Observer):
    """Says what was asked of it; its output is its factor times the sums of the logits."""

    def __init__(self, factor: float = 1.0, *, active: bool = True, quiet: bool = False) -> None:
        self.factor, self.active, self.quiet = factor, active, quiet
        self.asked: list[str] = []
        self.consumed: list[Any] = []

    def is_active(self, sampling_info: Any) -> bool:
        return self.active

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        self.asked.append("before_grammar")
        return None if self.quiet else logits.sum(-1) * self.factor

    def after_sample(self, state: Any, token_ids: Tensor) -> Output | None:
        self.asked.append("after_sample")
        return Output({"sums": state})

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        self.asked.append("from_pp_tensors")
        return Output(tensors)


LOGITS = torch.arange(6.0).reshape(2, 3)


def sent_by(observer: CompositeSamplingObserver) -> dict[str, Any]:
    wire: dict[str, Any] = {"other": 1}
    if observer.is_active(None):
        state = observer.before_grammar(LOGITS, None)
        output = None if state is None else observer.after_sample(state, torch.zeros(2).long())
        add_auxiliary_output_to_pp_tensors(wire, output)
    return wire


def test_each_child_gets_exactly_its_own_tensors_whatever_the_order() -> None:
    wire = sent_by(CompositeSamplingObserver({"low": Child(1), "high": Child(10)}))
    assert set(wire) == {"other", PREFIX + "low/sums", PREFIX + "high/sums"}
    low, high = Child(), Child()
    receiver = CompositeSamplingObserver({"high": high, "low": low})
    output = pop_auxiliary_output_from_pp_tensors(wire, receiver)
    assert wire == {"other": 1}
    assert {name: set(one.tensors) for name, one in output.outputs.items()} == {
        "low": {"sums"},
        "high": {"sums"},
    }
    assert torch.equal(output.outputs["low"].tensors["sums"], LOGITS.sum(-1))
    assert torch.equal(output.outputs["high"].tensors["sums"], LOGITS.sum(-1) * 10)
    assert low.asked == high.asked == ["from_pp_tensors"]


def test_only_active_children_are_asked_and_those_without_output_are_not_called() -> None:
    asleep, quiet, awake = Child(active=False), Child(quiet=True), Child()
    sender = CompositeSamplingObserver({"asleep": asleep, "quiet": quiet, "awake": awake})
    wire = sent_by(sender)
    assert set(wire) == {"other", PREFIX + "awake/sums"}
    assert asleep.asked == []
    assert quiet.asked == ["before_grammar"]
    receivers = {"asleep": Child(), "quiet": Child(), "awake": Child()}
    pop_auxiliary_output_from_pp_tensors(wire, CompositeSamplingObserver(receivers))
    assert [one.asked for one in receivers.values()] == [[], [], ["from_pp_tensors"]]


def test_without_an_active_child_a_state_or_an_output_there_is_nothing() -> None:
    class Silent(Child):
        def after_sample(self, state: Any, token_ids: Tensor) -> Output | None:
            return None

    assert not CompositeSamplingObserver({"a": Child(active=False)}).is_active(None)
    assert sent_by(CompositeSamplingObserver({"a": Child(quiet=True)})) == {"other": 1}
    assert sent_by(CompositeSamplingObserver({"a": Silent()})) == {"other": 1}


def test_composites_nest_and_pickle() -> None:
    def make() -> CompositeSamplingObserver:
        inner = CompositeSamplingObserver({"x": Child(1), "y": Child(2)})
        return CompositeSamplingObserver({"inner": inner, "x": Child(3)})

    wire = sent_by(make())
    assert set(wire) == {"other", *(PREFIX + n for n in ("inner/x/sums", "inner/y/sums", "x/sums"))}
    output = pop_auxiliary_output_from_pp_tensors(wire, pickle.loads(pickle.dumps(make())))
    sums = output.outputs["inner"].outputs["y"].tensors["sums"]
    assert torch.equal(sums, LOGITS.sum(-1) * 2)
    copies: list[Tensor] = []
    host = output.copy_to_host(lambda tensor: copies.append(tensor) or tensor.clone())
    assert len(copies) == 3
    assert set(host.outputs["inner"].outputs) == {"x", "y"}
    assert check_observer(make()).ok
    assert check_output(output).ok
    assert repr(make()).startswith("CompositeSamplingObserver({'inner': pp_protocol.composite.Comp")


@pytest.mark.parametrize(
    "names",
    [{}, {"": Child()}, {"a/b": Child()}, {1: Child()}],
    ids=["none", "empty", "with a slash", "no str"],
)
def test_a_composite_has_children_with_names(names: Any) -> None:
    with pytest.raises(ValueError, match=r"composite has at least one|name of a child"):
        CompositeSamplingObserver(names)
    with pytest.raises(ValueError, match=r"composite has at least one|name of a child"):
        CompositeAuxiliaryOutput(names)


def test_a_wrong_child_is_refused_when_the_composite_is_built_and_named() -> None:
    class Plain(Child):
        from_pp_tensors = None

    with pytest.raises(ConformanceError) as caught:
        CompositeSamplingObserver({"good": Child(), "bad": Plain()})
    assert "the child 'bad' (test_composite." in str(caught.value)
    assert "has from_pp_tensors set to None" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [("stranger/sums", "'stranger/sums'"), ("sums", "'sums'"), ("a", "'a'"), ("a/", "'a/'")],
)
def test_what_belongs_to_no_child_is_an_error_and_nothing_is_lost(name: str, told: str) -> None:
    child = Child()
    wire = {PREFIX + name: torch.ones(1), PREFIX + "a/sums": torch.ones(1)}
    before = dict(wire)
    with pytest.raises(PayloadError) as caught:
        pop_auxiliary_output_from_pp_tensors(wire, CompositeSamplingObserver({"a": child}))
    assert f"got {told}, and has the children 'a'" in caught.value.found
    assert wire == before
    assert child.asked == []


def test_one_childs_exception_leaves_all_tensors_in_the_dict_and_names_the_child() -> None:
    class Raises(Child):
        def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
            raise LookupError("of its own")

    wire = sent_by(CompositeSamplingObserver({"good": Child(), "bad": Child()}))
    before = dict(wire)
    receiver = CompositeSamplingObserver({"good": Child(), "bad": Raises()})
    with pytest.raises(LookupError) as caught:
        pop_auxiliary_output_from_pp_tensors(wire, receiver)
    assert wire == before
    if sys.version_info >= (3, 11):  # which has notes
        assert any(note.endswith("the child 'bad'") for note in caught.value.__notes__)


async def later(self: Any, tensors: Any) -> None: ...


@pytest.mark.parametrize("result", [None, torch.ones(1), later], ids=["None", "tensor", "async"])
def test_a_child_that_rebuilds_nothing_usable_is_named(result: Any) -> None:
    class Empty(Child):
        def from_pp_tensors(self, tensors: Any) -> Any:
            return result(self, tensors) if result is later else result

    wire = {PREFIX + "a/x": torch.ones(1)}
    with pytest.raises(ReconstructionError, match=r"the child 'a' \(test_composite.*gave "):
        pop_auxiliary_output_from_pp_tensors(wire, CompositeSamplingObserver({"a": Empty()}))
    assert set(wire) == {PREFIX + "a/x"}


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (object(), UnsupportedOutputError),
        (Output({}), EmptyOutputError),
        (Output([1]), EmptyOutputError),
        (Output({"": torch.ones(1)}), TensorNameError),
        (Output({1: torch.ones(1)}), TensorNameError),
    ],
)
def test_an_output_that_cannot_be_sent_is_named_and_nothing_is_added(
    output: Any, error: type[Exception]
) -> None:
    wire = {"other": 1}
    composite = CompositeAuxiliaryOutput({"good": Output({"x": torch.ones(1)}), "bad": output})
    with pytest.raises(error, match="the child 'bad'"):
        add_auxiliary_output_to_pp_tensors(wire, composite)
    assert wire == {"other": 1}


class Consumes(Output):
    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        super().__init__({"x": torch.ones(1)})
        self.log, self.name, self.error = log, name, error

    def copy_to_host(self, copy_tensor: Any) -> Consumes:
        return self

    def consume(self, batch: Any, commits: Any) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def test_consume_reaches_every_child_and_raises_then() -> None:
    log: list[str] = []
    errors = [KeyError("first"), ValueError("third")]
    host = CompositeAuxiliaryOutput(
        {
            "first": Consumes(log, "first", errors[0]),
            "second": Consumes(log, "second"),
            "third": Consumes(log, "third", errors[1]),
        }
    ).copy_to_host(torch.clone)
    group = ExceptionGroup if sys.version_info >= (3, 11) else RuntimeError  # noqa: F821  # ruff looks at the lowest version
    with pytest.raises(group) as caught:
        host.consume(None, [])
    assert log == ["first", "second", "third"]
    if sys.version_info >= (3, 11):
        assert list(caught.value.exceptions) == errors
        assert "2 of 3 children raised" in str(caught.value)
        assert errors[1].__notes__ == [
            "raised by test_composite.Consumes.consume, the child 'third'"
        ]
    else:
        assert "'first': KeyError: 'first'; 'third': ValueError: third" in str(caught.value)
        assert caught.value.__cause__ is errors[0]


def test_an_exit_in_one_child_reaches_the_others_first() -> None:
    log: list[str] = []
    outputs = {
        "first": Consumes(log, "first", ValueError("first")),
        "second": Consumes(log, "second", SystemExit(3)),  # type: ignore[arg-type]  # no Exception
        "third": Consumes(log, "third"),
    }
    host = CompositeAuxiliaryOutput(outputs).copy_to_host(torch.clone)
    group = BaseExceptionGroup if sys.version_info >= (3, 11) else SystemExit  # noqa: F821  # ruff looks at the lowest version
    with pytest.raises(group):
        host.consume(None, [])
    assert log == ["first", "second", "third"]


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    number: int


def test_a_frozen_exception_of_a_child_comes_out_as_it_is() -> None:
    class Raises(Child):
        def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
            raise FrozenError(3)

    wire = {PREFIX + "a/x": torch.ones(1)}
    with pytest.raises(FrozenError):
        pop_auxiliary_output_from_pp_tensors(wire, CompositeSamplingObserver({"a": Raises()}))


def test_outputs_pickle_and_one_str_is_not_a_sequence_of_names() -> None:
    output = CompositeAuxiliaryOutput({"a": Output({"x": torch.ones(1)})})
    assert set(pickle.loads(pickle.dumps(output)).outputs) == {"a"}
    with pytest.raises(ValueError, match="one str"):
        CompositeAuxiliaryOutput.naming("ab", types.SimpleNamespace(outputs=(1, 2)))


def test_outputs_that_an_engine_has_combined_can_be_given_names_and_sent() -> None:
    combined = types.SimpleNamespace(
        outputs=(Output({"x": torch.ones(1)}), Output({"x": torch.zeros(1)}))
    )
    wire: dict[str, Any] = {}
    named = CompositeAuxiliaryOutput.naming(("one", "two"), combined)
    add_auxiliary_output_to_pp_tensors(wire, named)
    assert set(wire) == {PREFIX + "one/x", PREFIX + "two/x"}
    receiver = CompositeSamplingObserver({"two": Child(), "one": Child()})
    output = pop_auxiliary_output_from_pp_tensors(wire, receiver)
    assert output.outputs["two"].tensors["x"] == 0
    for names in (("one",), ("one", "one"), ("one", "two", "three")):
        with pytest.raises(ValueError, match="2 outputs cannot take the names"):
            CompositeAuxiliaryOutput.naming(names, combined)


def test_children_are_read_only() -> None:
    composite = CompositeSamplingObserver({"a": Child()})
    with pytest.raises(TypeError):
        composite.children["b"] = Child()  # type: ignore[index]  # that it raises is what is asked
