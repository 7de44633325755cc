"""Promises of pp_protocol.transport: the rows of both tables, all or nothing, nothing lost."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
import types
import typing
import warnings
from collections.abc import Mapping
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from observers import Observer, Output, Reprless
from torch._subclasses.fake_tensor import FakeTensorMode

import pp_protocol
from pp_protocol import (
    PREFIX,
    PPProtocolError,
    add_auxiliary_output_to_pp_tensors,
    discard_auxiliary_output,
    errors,
    has_auxiliary_output,
    pop_auxiliary_output_from_pp_tensors,
)

add, pop = add_auxiliary_output_to_pp_tensors, pop_auxiliary_output_from_pp_tensors
T = torch.ones(2)


class Name(str, enum.Enum):
    SCORE = "score"


class StrSubclass(str):
    __slots__ = ()


class WrapperSubclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the subclass's own code ran")


async def a_coroutine() -> None: ...


def sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its support a beta
        return torch.eye(2).to_sparse_csr()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def strided_nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the API a prototype
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that it will go
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def wrapper_subclass() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(WrapperSubclass, (2,))


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_with_an_offset() -> torch.Tensor:
    whole = torch.arange(10.0)
    part = whole[2:]
    whole.untyped_storage().resize_(0)
    return part


def inside_vmap(size: int = 2) -> torch.Tensor:
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.ones(2, size))
    return kept[0]


class Row(typing.NamedTuple):
    error: type[PPProtocolError]
    code: str
    beginning: str
    parts: tuple[str, ...]


def row(error, code, beginning, *parts):
    return Row(error, code, beginning, parts)


NO_OUTPUT = "auxiliary output does not support pipeline-parallel transport"
EMPTY = "auxiliary PP output must contain at least one tensor"
NAMES = "auxiliary PP tensor names must be non-empty strings"
OUT = "observers.Output"


def unsupported(make, *parts):
    return (
        lambda: Output({"x": make()}),
        row(
            errors.UnsupportedTensorError,
            "unsupported-tensor",
            "auxiliary PP output 'x' cannot be transported",
            *parts,
        ),
    )


def bad_name(name, *parts):
    return (
        lambda: Output({"fine": T, name: T}),
        row(errors.TensorNameError, "tensor-name", NAMES, OUT, "item 1", *parts),
    )


def no_output(make, *parts):
    return make, row(errors.UnsupportedOutputError, "unsupported-output", NO_OUTPUT, *parts)


def empty(value, *parts):
    return lambda: Output(value()), row(errors.EmptyOutputError, "empty-output", EMPTY, OUT, *parts)


def non_tensor(value, *parts):
    return (
        lambda: Output({"fine": T, "x": value()}),
        row(
            errors.NonTensorError,
            "non-tensor",
            "auxiliary PP output 'x' is not a tensor",
            OUT,
            "torch.as_tensor",
            *parts,
        ),
    )


ADD_REFUSES = {
    "no to_pp_tensors": no_output(lambda: object(), "object has no to_pp_tensors", "Define to_pp_"),
    "the class": no_output(lambda: Output, "class observers.Output is a class", "Pass an instance"),
    "an int": no_output(lambda: 3, "int has no to_pp_tensors"),
    "a bare mock": no_output(Mock, "only through __getattr__", "with_pp_transport"),
    "a property that cannot be called": no_output(
        lambda: type("P", (), {"to_pp_tensors": property(lambda self: {"x": T})})(),
        "no method but dict",
    ),
    "None": empty(lambda: None, "NoneType, no mapping", "return None from after_sample"),
    "an empty dict": empty(dict, "an empty mapping"),
    "an empty mapping": empty(lambda: types.MappingProxyType({}), "an empty mapping"),
    "a list of pairs": empty(lambda: [("x", T)], "gave list, no mapping"),
    "a tensor": empty(lambda: T, "gave torch.Tensor, no mapping"),
    "a coroutine": empty(a_coroutine, "gave coroutine, no mapping"),
    "a number as name": bad_name(3, "gave int as the name", "Use names that are exactly str"),
    "bytes as name": bad_name(b"x", "gave bytes"),
    "None as name": bad_name(None, "gave NoneType"),
    "an empty name": bad_name("", "gave an empty string"),
    "a str Enum as name": bad_name(Name.SCORE, "test_transport.Name", ".value"),
    "a str subclass as name": bad_name(StrSubclass("x"), "test_transport.StrSubclass"),
    "a list": non_tensor(lambda: [1.0], "gave list for it"),
    "a number": non_tensor(lambda: 1.0, "gave float"),
    "nothing": non_tensor(lambda: None, "gave NoneType"),
    "an object without repr": non_tensor(Reprless, "observers.Reprless"),
    "a mock that claims to be a tensor": non_tensor(lambda: Mock(spec=torch.Tensor), "Mock"),
    "a sparse tensor": unsupported(sparse, "torch.sparse_coo", "dense copy"),
    "a CSR tensor": unsupported(sparse_csr, "torch.sparse_csr"),
    "a jagged nested tensor": unsupported(nested, "__torch_dispatch__"),
    "a strided nested tensor": unsupported(strided_nested, "is a nested tensor", "padded copy"),
    "a quantized tensor": unsupported(quantized, "torch.qint8", "int_repr()"),
    "a meta tensor": unsupported(lambda: torch.ones(2, device="meta"), "meta device"),
    "an empty meta tensor": unsupported(lambda: torch.ones(0, device="meta"), "meta device"),
    "a fake tensor": unsupported(fake, "FakeTensor", "__torch_dispatch__", "plain tensor"),
    "a wrapper subclass": unsupported(wrapper_subclass, "WrapperSubclass", "__torch_dispatch__"),
    "freed memory": unsupported(freed, "has no memory of its own"),
    "freed memory, further on": unsupported(freed_with_an_offset, "has no memory of its own"),
    "an empty tensor inside vmap": unsupported(lambda: inside_vmap(0), "no memory of its own"),
    "a zero tensor": unsupported(lambda: torch._efficientzerotensor(2), "no memory of its own"),
    "a tensor inside vmap": unsupported(inside_vmap, "no memory of its own"),
    "a duplicate": (
        lambda: Output({"x": T, "already": T}),
        row(
            errors.DuplicateTensorError,
            "duplicate-tensor",
            "duplicate auxiliary PP tensor 'already'",
            OUT,
            "rename",
        ),
    ),
}


def check(caught: PPProtocolError, expected: Row) -> None:
    assert type(caught) is expected.error or issubclass(type(caught), expected.error)
    assert caught.code == expected.code
    message = str(caught)
    assert message.startswith(expected.beginning + ": ")
    assert message.endswith(f"[pp-protocol explain {expected.code}]")
    for part in expected.parts:
        assert part in message
    assert caught.advice
    assert caught.advice in message
    assert isinstance(caught, RuntimeError)
    clone = pickle.loads(pickle.dumps(caught))
    assert (type(clone), str(clone), vars(clone)) == (type(caught), message, vars(caught))


def wire_dict() -> dict[typing.Any, typing.Any]:
    return {
        "next_token_ids": torch.arange(3),
        "__msg_type__": "output",
        "__mb_slot__": 1,
        PREFIX + "already": torch.zeros(1),
        7: "a key that is no str",
        (PREFIX, 1): None,
    }


def same(one: Mapping[object, object], other: Mapping[object, object]) -> bool:
    """Same keys in the same order, and the very same values."""
    return list(one) == list(other) and all(one[key] is other[key] for key in one)


@pytest.mark.parametrize(("make", "expected"), ADD_REFUSES.values(), ids=ADD_REFUSES)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
def test_add_refuses_each_row_and_leaves_the_dict_as_it_was(make, expected, kind) -> None:
    tensors = kind(wire_dict())
    before = dict(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PPProtocolError) as caught:
            add(tensors, make())
    check(caught.value, expected)
    assert same(tensors, before)


TWO_FAULTS = {
    "the first item's, though the second's stands higher in the table": (
        {"x": sparse, "": lambda: T},
        errors.UnsupportedTensorError,
    ),
    "the name before the value": ({3: lambda: "no tensor"}, errors.TensorNameError),
    "no tensor before the duplicate": ({"already": lambda: 3}, errors.NonTensorError),
    "what cannot travel before the duplicate": ({"already": sparse}, errors.UnsupportedTensorError),
    "the first item that is faulty": (
        {"x": lambda: T, "y": lambda: 3, "already": lambda: T},
        errors.NonTensorError,
    ),
}


@pytest.mark.parametrize(("payload", "error"), TWO_FAULTS.values(), ids=TWO_FAULTS)
def test_of_two_faults_add_names(payload, error) -> None:
    tensors = wire_dict()
    before = dict(tensors)
    with pytest.raises(error) as caught:
        add(tensors, Output({name: make() for name, make in payload.items()}))
    assert type(caught.value) is error
    assert same(tensors, before)


class ReadOnly(Mapping):
    def __init__(self, held=()):
        self.held = dict(held)

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class Stubborn(collections.UserDict):
    """Takes one change and refuses the next."""

    left = 10**6

    def __setitem__(self, key, value):
        self._change()
        super().__setitem__(key, value)

    def __delitem__(self, key):
        self._change()
        super().__delitem__(key)

    def _change(self):
        if self.left == 0:
            self.left = 10**6  # only once, so that a caller can put things right
            raise TypeError("frozen")
        self.left -= 1


class Wrapper:
    """Like an engine's PPProxyTensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __getitem__(self, key):
        return self.tensors[key]


NO_MAPPING = {"wrapper": Wrapper({}), "None": None, "list": [], "str": "tensors", "tensor": T}


def untouchable() -> typing.Any:
    class Untouchable:
        def __getattribute__(self, name):
            raise AssertionError(f"{name} of the user's object was read")

    return Untouchable()


@pytest.mark.parametrize("tensors", NO_MAPPING.values(), ids=NO_MAPPING)
def test_what_is_no_mapping_is_a_wire_error_before_anything_of_the_user_s_is_called(tensors):
    calls = [
        lambda: add(tensors, None),
        lambda: add(tensors, untouchable()),
        lambda: pop(tensors, None),
        lambda: pop(tensors, untouchable()),
        lambda: has_auxiliary_output(tensors),
        lambda: discard_auxiliary_output(tensors),
    ]
    for call in calls:
        with pytest.raises(errors.WireError) as caught:
            call()
        check(
            caught.value,
            row(
                errors.WireError,
                "wire",
                "cannot use this as the dict of a pipeline-parallel message",
                "is no mapping",
                ".tensors",
            ),
        )


@pytest.mark.parametrize("view", [types.MappingProxyType, ReadOnly])
def test_a_read_only_mapping_is_a_wire_error_where_something_has_to_change(view) -> None:
    foreign, auxiliary = view({"a": 1}), view({PREFIX + "x": T})
    assert add(foreign, None) is None
    assert pop(foreign, untouchable()) is None
    assert discard_auxiliary_output(foreign) == ()
    assert not has_auxiliary_output(foreign)
    assert has_auxiliary_output(auxiliary)
    for call in (
        lambda: add(foreign, untouchable()),
        lambda: pop(auxiliary, untouchable()),
        lambda: discard_auxiliary_output(auxiliary),
    ):
        with pytest.raises(errors.WireError, match="is read-only") as caught:
            call()
        assert "dict(tensors) copies" in caught.value.advice
    assert dict(auxiliary) == {PREFIX + "x": T}


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_mapping_that_refuses_a_change_half_way_is_put_right(left) -> None:
    tensors = Stubborn({"a": 1})
    tensors.left = left
    with pytest.raises(errors.WireError, match="raised TypeError when it was written to"):
        add(tensors, Output({"x": T, "y": T, "z": T}))
    assert dict(tensors) == {"a": 1}
    filled = Stubborn({"a": 1, PREFIX + "x": T, PREFIX + "y": T, PREFIX + "z": T})
    for change in (lambda: pop(filled, Observer()), lambda: discard_auxiliary_output(filled)):
        filled.left = left
        with pytest.raises(errors.WireError, match="raised TypeError when it was written to"):
            change()
        assert set(filled) == {"a", PREFIX + "x", PREFIX + "y", PREFIX + "z"}


NOT_REBUILT = "sampling observer did not reconstruct its PP output"
NOT_SUPPORTED = "sampling observer does not support pipeline-parallel transport"


def rebuilding(result):
    observer = Observer()
    observer.from_pp_tensors = lambda tensors: result()
    return observer


def no_observer(make, *parts):
    return (
        make,
        {"x": T},
        row(errors.UnsupportedObserverError, "unsupported-observer", NOT_SUPPORTED, *parts),
    )


def not_rebuilt(result, *parts):
    return (
        lambda: rebuilding(result),
        {"x": T},
        row(
            errors.ReconstructionError,
            "reconstruction",
            NOT_REBUILT,
            "observers.Observer returned",
            "copy_to_host(copy_tensor)",
            *parts,
        ),
    )


def not_received(payload, *parts):
    return (
        Observer,
        payload,
        row(
            errors.NonTensorError,
            "non-tensor",
            "received a non-tensor auxiliary PP output",
            *parts,
        ),
    )


POP_REFUSES = {
    "no observer": (
        lambda: None,
        {"x": T},
        row(
            errors.MissingObserverError,
            "missing-observer",
            "received auxiliary PP output without a sampling observer",
            "discard_auxiliary_output",
        ),
    ),
    "an observer without from_pp_tensors": no_observer(object, "object has no from_pp_tensors"),
    "the class": no_observer(lambda: Observer, "class observers.Observer is a class"),
    "a bare mock": no_observer(Mock, "only through __getattr__", "with_pp_transport"),
    "an object without repr": no_observer(Reprless, "observers.Reprless has no from_pp_tensors"),
    "a property that cannot be called": no_observer(
        lambda: type("P", (), {"from_pp_tensors": property(lambda self: 3)})(), "no method but int"
    ),
    "a property that gives a coroutine function": no_observer(
        lambda: type("P", (), {"from_pp_tensors": property(lambda self: a_coroutine)})(), "is async"
    ),
    "the bare prefix": (
        Observer,
        {"": T},
        row(errors.TensorNameError, "tensor-name", NAMES, "the received dict", repr(PREFIX)),
    ),
    "no tensor": not_received({"x": T, "y": 3}, "'y' is int", "adds tensors only"),
    "no tensor, without repr": not_received({"y": Reprless()}, "'y' is observers.Reprless"),
    "a mock that claims to be a tensor": not_received({"y": Mock(spec=torch.Tensor)}, "'y' is "),
    "None": not_rebuilt(lambda: None, "returned None from from_pp_tensors"),
    "a tensor": not_rebuilt(lambda: T, "returned torch.Tensor", "has no copy_to_host"),
    "a coroutine": not_rebuilt(a_coroutine, "returned coroutine"),
    "a mock": not_rebuilt(Mock, "only through __getattr__"),
    "the class of the output": not_rebuilt(lambda: Output, "class observers.Output"),
    "an object without repr returned": not_rebuilt(Reprless, "returned observers.Reprless"),
}


@pytest.mark.parametrize(("make", "payload", "expected"), POP_REFUSES.values(), ids=POP_REFUSES)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
def test_pop_refuses_each_row_and_loses_nothing(make, payload, expected, kind) -> None:
    tensors = kind({"a": 1, **{PREFIX + name: value for name, value in payload.items()}, 7: None})
    before = dict(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PPProtocolError) as caught:
            pop(tensors, make())
    check(caught.value, expected)
    assert same(tensors, before)


ARRIVED_WITH_TWO_FAULTS = {
    "no observer before a faulty item": ({"": 3}, None, errors.MissingObserverError),
    "a wrong observer before a faulty item": ({"": 3}, object(), errors.UnsupportedObserverError),
    "the name before the value": ({"": 3}, Observer(), errors.TensorNameError),
    "the first item that is faulty": ({"x": 3, "": T}, Observer(), errors.NonTensorError),
    "a faulty item before what comes of it": (
        {"x": 3},
        rebuilding(lambda: None),
        errors.NonTensorError,
    ),
}


@pytest.mark.parametrize(
    ("payload", "observer", "error"), ARRIVED_WITH_TWO_FAULTS.values(), ids=ARRIVED_WITH_TWO_FAULTS
)
def test_of_two_faults_pop_names(payload, observer, error) -> None:
    tensors = {PREFIX + name: value for name, value in payload.items()}
    before = dict(tensors)
    with pytest.raises(error) as caught:
        pop(tensors, observer)
    assert isinstance(caught.value, error)
    assert same(tensors, before)


def test_a_coroutine_that_will_not_be_awaited_is_closed() -> None:
    left = a_coroutine()
    with pytest.raises(errors.EmptyOutputError):
        add({}, Output(left))
    assert inspect.getcoroutinestate(left) == inspect.CORO_CLOSED
    left = a_coroutine()
    with pytest.raises(errors.ReconstructionError):
        pop({PREFIX + "x": T}, rebuilding(lambda: left))
    assert inspect.getcoroutinestate(left) == inspect.CORO_CLOSED


def test_nothing_to_pop_is_none_and_the_observer_is_not_touched() -> None:
    for tensors in ({}, {"a": 1}, {7: PREFIX, None: 1}, {"not " + PREFIX: 1}, {"a\n" + PREFIX: 1}):
        before = dict(tensors)
        assert pop(tensors, untouchable()) is None
        assert not has_auxiliary_output(tensors)
        assert discard_auxiliary_output(tensors) == ()
        assert same(tensors, before)


def test_a_round_trip_gives_the_same_tensors_and_leaves_the_rest() -> None:
    tensors = wire_dict()
    del tensors[PREFIX + "already"]
    before = dict(tensors)
    payload = {"x": torch.randn(3), "y.z/ä": torch.arange(3)}
    assert add(tensors, Output(payload)) is None
    assert has_auxiliary_output(tensors)
    assert list(tensors)[-2:] == [PREFIX + "x", PREFIX + "y.z/ä"]
    output = pop(tensors, Observer())
    assert isinstance(output, Output)
    assert same(output.tensors, payload)
    assert type(output.tensors) is dict
    assert same(tensors, before)
    assert pop(tensors, Observer()) is None


def test_discard_drops_exactly_the_auxiliary_keys_and_names_them() -> None:
    tensors = wire_dict()
    tensors[PREFIX] = 3
    assert discard_auxiliary_output(tensors) == ("already", "")
    assert list(tensors) == ["next_token_ids", "__msg_type__", "__mb_slot__", 7, (PREFIX, 1)]


def test_a_received_key_of_a_str_subclass_is_popped_under_its_plain_name() -> None:
    class Prefixed(str, enum.Enum):
        X = PREFIX + "x"

    tensors = {Prefixed.X: T, "a": 1}
    output = pop(tensors, Observer())
    assert [(type(name), name) for name in output.tensors] == [(str, "x")]
    assert tensors == {"a": 1}


class OwnError(Exception):
    pass


def raising(*_: object) -> typing.Any:
    raise OwnError("of the user's")


def _notes(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", []))


def test_an_exception_of_the_observer_comes_out_unchanged_with_a_note() -> None:
    observer = Observer()
    observer.from_pp_tensors = raising
    tensors = {PREFIX + "x": T, PREFIX + "y": T}
    with pytest.raises(OwnError, match="of the user's") as caught:
        pop(tensors, observer)
    assert str(caught.value) == "of the user's"
    if sys.version_info >= (3, 11):
        assert "observers.Observer.from_pp_tensors, given 'x', 'y'" in _notes(caught.value)
    assert list(tensors) == [PREFIX + "x", PREFIX + "y"]
    prop = type("P", (), {"from_pp_tensors": property(raising)})()
    with pytest.raises(OwnError):
        pop(tensors, prop)
    assert list(tensors) == [PREFIX + "x", PREFIX + "y"]


@pytest.mark.parametrize("member", [raising, property(raising)])
def test_an_exception_of_the_output_comes_out_unchanged_with_a_note(member) -> None:
    tensors = {"a": 1}
    with pytest.raises(OwnError) as caught:
        add(tensors, type("O", (), {"to_pp_tensors": member})())
    if sys.version_info >= (3, 11):
        assert "test_transport.O.to_pp_tensors" in _notes(caught.value)
    assert tensors == {"a": 1}


def test_an_exception_that_takes_no_note_comes_out_unchanged_all_the_same() -> None:
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        number: int

    class OddError(Exception):
        __notes__ = ()

    for error in (FrozenError(3), OddError()):
        member = property(lambda self, error=error: (_ for _ in ()).throw(error))
        both = type("B", (), {"from_pp_tensors": member, "to_pp_tensors": member})()
        with pytest.raises(type(error)) as caught:
            pop({PREFIX + "x": T}, both)
        assert caught.value is error
        with pytest.raises(type(error)) as caught:
            add({}, both)
        assert caught.value is error


def test_a_method_that_a_property_gives_is_judged_as_well() -> None:
    class Lazy:
        def no_argument(self): ...
        def two(self, a, b): ...
        async def later(self, tensors): ...

        from_pp_tensors = property(lambda self: getattr(self, self.which))
        to_pp_tensors = property(lambda self: getattr(self, self.which))

    for which, found in (
        ("no_argument", "takes too few"),
        ("two", "needs more"),
        ("later", "async"),
    ):
        observer = Lazy()
        observer.which = which
        with pytest.raises(errors.UnsupportedObserverError, match=found):
            pop({PREFIX + "x": T}, observer)
        if which != "no_argument":
            with pytest.raises(
                errors.UnsupportedOutputError, match=found if which == "two" else "m"
            ):
                add({}, observer)


def test_a_property_that_replaces_a_method_after_a_success_is_judged_too() -> None:
    class Changing(Observer):
        def from_pp_tensors(self, tensors):
            return Output(tensors)

    observer = Changing()
    assert pop({PREFIX + "x": T}, observer).tensors == {"x": T}
    Changing.from_pp_tensors = property(lambda self: 3)
    for _ in range(2):
        with pytest.raises(errors.UnsupportedObserverError, match="no method but int"):
            pop({PREFIX + "x": T}, observer)
    del Changing.from_pp_tensors
    assert pop({PREFIX + "x": T}, observer).tensors == {"x": T}


def test_a_name_whose_comparison_raises_is_a_name_error() -> None:
    class Incomparable(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise OwnError

    with pytest.raises(errors.TensorNameError):
        add({}, Output({Incomparable("x"): T}))


def test_a_mapping_that_keeps_its_keys_is_a_wire_error_and_nothing_is_lost() -> None:
    chain = collections.ChainMap({}, {PREFIX + "x": T})
    for change in (lambda: pop(chain, Observer()), lambda: discard_auxiliary_output(chain)):
        with pytest.raises(errors.WireError):
            change()
        assert has_auxiliary_output(chain)


def test_a_property_is_read_once_and_its_value_called() -> None:
    reads = []

    class Lazy:
        @property
        def from_pp_tensors(self):
            reads.append("from")
            return Output

        @property
        def to_pp_tensors(self):
            reads.append("to")
            return lambda: {"x": T}

    tensors = {}
    add(tensors, Lazy())
    assert pop(tensors, Lazy()).tensors["x"] is T
    assert reads == ["to", "from"]


def test_what_the_observer_does_to_its_dict_changes_nothing_else() -> None:
    class Greedy(Observer):
        def from_pp_tensors(self, tensors):
            output = Output(dict(tensors))
            tensors.clear()
            tensors["a"] = None
            return output

    tensors = {"a": 1, PREFIX + "x": T, PREFIX + "y": T}
    assert list(pop(tensors, Greedy()).tensors) == ["x", "y"]
    assert tensors == {"a": 1}


def test_an_observer_that_empties_the_dict_itself_is_no_fault() -> None:
    tensors = {"a": 1, PREFIX + "x": T}
    observer = Observer()

    def from_pp_tensors(given):
        del tensors[PREFIX + "x"]
        return Output(given)

    observer.from_pp_tensors = from_pp_tensors
    assert pop(tensors, observer).tensors == {"x": T}
    assert tensors == {"a": 1}


@pytest.mark.parametrize("payload", [types.MappingProxyType, ReadOnly, collections.UserDict])
def test_to_pp_tensors_may_give_any_mapping(payload) -> None:
    tensors = {}
    add(tensors, Output(payload({"x": T})))
    assert tensors == {PREFIX + "x": T}


def test_error_classes_have_codes_of_their_own() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    kinds = [c for c in classes if issubclass(c, PPProtocolError) and "code" in vars(c)]
    assert len(kinds) >= 11
    assert len({c.code for c in kinds}) == len(kinds)
    for kind in kinds:
        assert issubclass(kind, RuntimeError)
        assert hasattr(pp_protocol, kind.__name__) or kind is PPProtocolError


# Properties: whatever goes in, nothing half done comes out.

foreign_keys = st.one_of(
    st.text(max_size=5).filter(lambda key: not key.startswith(PREFIX)),
    st.integers(),
    st.none(),
    st.binary(max_size=3),
    st.tuples(st.text(max_size=2)),
)
foreign = st.dictionaries(foreign_keys, st.one_of(st.integers(), st.text(max_size=3), st.none()))
names = st.text(min_size=1, max_size=5)
tensor = st.builds(torch.full, st.tuples(st.integers(0, 3)), st.integers(0, 9))
fault_of_item = st.sampled_from(
    [(3, T), ("", T), (StrSubclass("s"), T), ("v", None), ("v", 1.5), ("v", "text")]
)


@given(foreign, st.dictionaries(names, tensor, max_size=4), fault_of_item, st.data())
def test_a_failed_add_leaves_any_dict_as_it_was(others, payload, fault, data) -> None:
    items = [item for item in payload.items() if item[0] != fault[0]]
    items.insert(data.draw(st.integers(0, len(items))), fault)
    before = dict(others)
    with pytest.raises((errors.TensorNameError, errors.NonTensorError)):
        add(others, Output(dict(items)))
    assert same(others, before)


@given(foreign, st.dictionaries(names, tensor, min_size=1, max_size=4), st.data())
def test_a_duplicate_at_any_place_leaves_any_dict_as_it_was(others, payload, data) -> None:
    others[PREFIX + data.draw(st.sampled_from(sorted(payload)))] = "there already"
    before = dict(others)
    with pytest.raises(errors.DuplicateTensorError):
        add(others, Output(payload))
    assert same(others, before)


@given(foreign, st.dictionaries(names, tensor, min_size=1, max_size=4))
def test_any_payload_survives_the_round_trip_beside_any_dict(others, payload) -> None:
    before = dict(others)
    add(others, Output(payload))
    assert set(others) - set(before) == {PREFIX + name for name in payload}
    assert same(pop(others, Observer()).tensors, payload)
    assert same(others, before)


results = st.sampled_from([None, 3, T, "text", Output, Mock(), {}, Reprless()])


@given(foreign, st.dictionaries(names, tensor, min_size=1, max_size=4), results, st.booleans())
def test_an_observer_that_mutates_and_returns_or_raises_anything_loses_nothing(
    others, payload, result, raises
) -> None:
    class Wild:
        def from_pp_tensors(self, tensors):
            tensors.popitem()
            tensors["more"] = self
            if raises:
                raise OwnError
            return result

    add(others, Output(payload))
    before = dict(others)
    with pytest.raises(OwnError if raises else errors.ReconstructionError):
        pop(others, Wild())
    assert same(others, before)


def test_first_calls_from_twelve_threads_at_once_all_succeed() -> None:
    program = """
import sys, threading
sys.path[:0] = sys.argv[1:]
sys.setswitchinterval(1e-6)
import torch
from observers import Observer, Output
import pp_protocol
barrier, done = threading.Barrier(12), []
def first_call():
    barrier.wait()
    tensors = {}
    pp_protocol.add_auxiliary_output_to_pp_tensors(tensors, Output({"x": torch.ones(2)}))
    done.append(pp_protocol.pop_auxiliary_output_from_pp_tensors(tensors, Observer()))
threads = [threading.Thread(target=first_call) for _ in range(12)]
[t.start() for t in threads]; [t.join() for t in threads]
if len(done) != 12: sys.exit(f"{len(done)} of 12")
"""
    here = os.path.dirname(__file__)
    flags = ["-O"] if not __debug__ else []
    command = [sys.executable, *flags, "-c", program, here, os.path.dirname(here)]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_pops_in_worker_threads_do_not_disturb_each_other() -> None:
    problems = []

    def work(number: int) -> None:
        for i in range(300):
            tensors = {}
            payload = {f"{number}.{i}": torch.tensor(i)}
            add(tensors, Output(payload))
            if not same(pop(tensors, Observer()).tensors, payload):
                problems.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_twenty_thousand_round_trips_keep_no_memory() -> None:
    payload = {"x": torch.ones(2), "y": torch.ones(2, 3).T}

    def trips(n: int) -> None:
        for _ in range(n):
            tensors = {"a": 1}
            add(tensors, Output(payload))
            pop(tensors, Observer())

    trips(100)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trips(20_000)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 20_000


def test_dicts_and_outputs_can_be_copied_between_add_and_pop() -> None:
    tensors = {}
    add(tensors, Output({"x": T}))
    assert pop(copy.copy(tensors), Observer()).tensors["x"] is T
    assert has_auxiliary_output(tensors)
