"""Promises of pp_protocol.payload: fields say what travels, and what arrives is held to it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pp_protocol import (
    Local,
    PayloadError,
    TensorPayload,
    TensorSpec,
    add_auxiliary_output_to_pp_tensors,
    check_output,
    is_pp_observer,
    pop_auxiliary_output_from_pp_tensors,
)

TESTS = pathlib.Path(__file__).parent


class Inner(TensorPayload):
    low: Tensor
    high: Tensor | None


class Scores(TensorPayload):
    logprobs: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", 2))]

    def consume(self, batch: Any, commits: Sequence[Any]) -> None: ...


class Everything(Scores):
    plain: Tensor
    maybe: Optional[Annotated[Tensor, TensorSpec(shape=("batch", "k"))]]  # noqa: UP045  # the old spelling is read as well
    inner: Inner
    rest: Inner | None
    callback: Annotated[Callable[[int], None] | None, Local()] = None
    count: typing.ClassVar[int] = 0


class Packed(TensorPayload):
    x: Tensor

    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {"packed": self.x}


def scores(batch: int = 3) -> dict[str, Tensor]:
    return {"logprobs": torch.rand(batch), "ids": torch.arange(2 * batch).reshape(batch, 2)}


def everything(**given: Any) -> Everything:
    made: dict[str, Any] = {
        **scores(),
        "plain": torch.rand(4),
        "maybe": None,
        "inner": Inner(torch.rand(1), None),
        "rest": None,
        "callback": print,
    }
    return Everything(**{**made, **given})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, TensorPayload):
        names = [field.name for field in dataclasses.fields(one)]  # type: ignore[arg-type]  # it is a dataclass
        return type(one) is type(other) and all(
            equal(getattr(one, name), getattr(other, name)) for name in names
        )
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one, other)
    return one is other


def test_fields_travel_under_their_names_and_those_that_are_none_do_not() -> None:
    assert set(Scores(**scores()).to_pp_tensors()) == {"logprobs", "ids"}
    sent = everything().to_pp_tensors()
    assert set(sent) == {"logprobs", "ids", "plain", "inner.low"}
    sent = everything(maybe=torch.ones(3, 1), rest=Inner(torch.ones(1), torch.ones(2)))
    assert set(sent.to_pp_tensors()) == {
        *("logprobs", "ids", "plain", "inner.low", "maybe", "rest.low", "rest.high"),
    }
    assert sent.to_pp_tensors()["plain"] is sent.plain


@pytest.mark.parametrize(
    "more",
    [{}, {"maybe": torch.ones(3, 1)}, {"rest": Inner(torch.ones(1), torch.ones(2))}],
    ids=["all absent", "an optional tensor", "an optional payload"],
)
def test_what_is_sent_arrives_as_an_equal_payload_of_the_same_class(more: dict[str, Any]) -> None:
    sent = everything(**more)
    back = Everything.from_pp_tensors(sent.to_pp_tensors(), callback=print)
    assert equal(sent, back)
    assert not equal(sent, Everything.from_pp_tensors(sent.to_pp_tensors()))  # no callback


def test_an_optional_payload_of_which_all_is_none_arrives_as_none() -> None:
    class AllOptional(TensorPayload):
        only: Tensor | None

    class Outer(TensorPayload):
        x: Tensor
        inner: AllOptional | None

    sent = Outer(torch.ones(1), AllOptional(None))
    assert Outer.from_pp_tensors(sent.to_pp_tensors()).inner is None


def test_copy_to_host_copies_each_tensor_exactly_once_and_keeps_the_rest() -> None:
    for sent in (everything(rest=Inner(torch.ones(1), torch.ones(2))), Scores(**scores())):
        copied: list[Tensor] = []

        def copy_tensor(tensor: Tensor, copied: list[Tensor] = copied) -> Tensor:
            copied.append(tensor)
            return tensor.clone()

        host = sent.copy_to_host(copy_tensor)
        assert [id(one) for one in copied] == [id(one) for one in sent.to_pp_tensors().values()]
        assert equal(host, sent)
        assert host is not sent
        assert host.logprobs is not sent.logprobs


WRONG = {  # what arrives of Everything, beside what is right, and all that is said of it
    "missing": ({"plain": None}, ["'plain' is missing"]),
    "unexpected": ({"more": torch.ones(1)}, ["'more' is unexpected"]),
    "dtype": (
        {"logprobs": torch.ones(3).half()},
        ["'logprobs' is torch.float16, not torch.float32"],
    ),
    "rank": ({"ids": torch.ones(3).long()}, ["'ids' has the shape [3], not [batch, 2]"]),
    "size": (
        {"ids": torch.ones(3, 4).long()},
        ["'ids' has the size 4 in dimension 1, not 2"],
    ),
    "named": (
        {"ids": torch.ones(5, 2).long()},
        ["'ids' has the size 5 in dimension 0, 'batch', which is 3 in 'logprobs'"],
    ),
    "optional": (
        {"maybe": torch.ones(2, 1)},
        ["'maybe' has the size 2 in dimension 0, 'batch', which is 3 in 'logprobs'"],
    ),
    "nested": (
        {"inner.low": None, "rest.high": torch.ones(1), "inner.more": torch.ones(1)},
        ["'inner.low' is missing", "'inner.more' is unexpected", "'rest.low' is missing"],
    ),
    "several": (
        {"plain": None, "logprobs": torch.ones(2, 1).int(), "x": torch.ones(1)},
        [
            "'logprobs' is torch.int32, not torch.float32",
            "'logprobs' has the shape [2, 1], not [batch]",
            "'plain' is missing",
            "'x' is unexpected",
        ],
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_whatever_arrives_otherwise_is_one_error_that_lists_all(kind: str) -> None:
    changes, told = WRONG[kind]
    arrived: dict[str, Any] = {**everything().to_pp_tensors(), **changes}
    arrived = {name: tensor for name, tensor in arrived.items() if tensor is not None}
    with pytest.raises(PayloadError) as caught:
        Everything.from_pp_tensors(arrived)
    text = str(caught.value)
    assert text.startswith("received tensors do not fit what is declared: test_payload.Everything")
    assert text.endswith("[pp-protocol explain payload]")
    assert caught.value.code == "payload"
    assert caught.value.found == f"cannot be rebuilt: {'; '.join(told)}"


@pytest.mark.parametrize("kind", ["missing", "unexpected", "dtype", "rank", "size", "named"])
def test_the_short_way_for_plain_payloads_sees_the_same(kind: str) -> None:
    changes, told = WRONG[kind]
    arrived = {**scores(), **changes}
    if kind == "missing":
        del arrived["plain"], arrived["ids"]
        told = ["'ids' is missing"]
    with pytest.raises(PayloadError) as caught:
        Scores.from_pp_tensors(arrived)
    assert caught.value.found == f"cannot be rebuilt: {'; '.join(told)}"


REFUSED = {
    "count: int": "C.count is neither a Tensor nor a payload",
    "maybe: int | None": "C.maybe is neither a Tensor nor a payload",
    "either: Tensor | Inner": "C.either is neither",
    "absent: Absent": "C.absent: the annotation 'Absent' cannot be resolved",
    "itself: C | None": "C.itself: the annotation 'C | None' cannot be resolved",
    "twice: Annotated[Tensor, TensorSpec(), TensorSpec()]": "C.twice is neither",
    "inner: Annotated[Inner, TensorSpec()]": "C.inner is neither",
    "inner: Everything": "C.inner is a payload with Local() fields",
    "x: Annotated[Tensor, TensorSpec(shape=['batch'])]": "cannot be resolved (shape is no tuple",
    "x: Annotated[Tensor, TensorSpec('float32')]": "cannot be resolved (dtype is str",
    "_names: Tensor": "C._names cannot be a field",
    "consume: Tensor": "C.consume cannot be a field",
    "to_pp_tensors: Tensor": "C.to_pp_tensors cannot be a field",
    "b: Tensor = dataclasses.field(init=False)": "C.b is not passed and kept",
    "b: dataclasses.InitVar[int]": "C.b is not passed and kept",
    "own: Packed": "C.own is a payload with a to_pp_tensors or from_pp_tensors of its own",
    "x: Annotated[Tensor, TensorSpec(None, (-1,))]": "cannot be resolved (shape is no tuple",
}


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.parametrize("postponed", [True, False])
def test_a_field_that_is_no_tensor_is_an_error_when_the_class_is_defined(
    field: str, postponed: bool
) -> None:
    future = "from __future__ import annotations\n" if postponed else ""
    program = compile(
        f"{future}class C(TensorPayload):\n    {field}", "program", "exec", dont_inherit=True
    )
    with pytest.raises((TypeError, NameError)) as caught:
        exec(program, dict(globals()))
    if postponed:
        assert caught.type is TypeError
        assert REFUSED[field] in str(caught.value)
    elif "cannot be resolved" not in REFUSED[field]:
        assert REFUSED[field] in str(caught.value)


def test_annotations_may_be_postponed_local_and_inherited() -> None:
    class Part(TensorPayload):
        x: Tensor

    class Whole(Part):
        part: Part
        parts: typing.ClassVar[list[Absent]] = []  # type: ignore[name-defined]  # noqa: F821  # no field

    sent = Whole(torch.ones(1), Part(torch.ones(2)))
    assert equal(Whole.from_pp_tensors(sent.to_pp_tensors()), sent)
    assert [field.name for field in dataclasses.fields(Whole)] == ["x", "part"]  # type: ignore[arg-type]  # it is one


def test_a_payload_is_frozen_and_compares_by_identity() -> None:
    one = Scores(**scores())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.ids = torch.ones(1)  # type: ignore[misc]  # that it raises is what is asked
    assert one == one  # equality of tensors would raise
    assert one != Scores(**scores())
    assert len({one, one}) == 1


def test_local_fields_are_passed_by_keyword_and_nothing_else_is() -> None:
    class Output(TensorPayload):
        x: Tensor
        callback: Annotated[Callable[[], None], Local()]

    tensors = {"x": torch.ones(1)}
    assert Output.from_pp_tensors(tensors, callback=print).callback is print
    assert Output(tensors["x"], len).copy_to_host(torch.clone).callback is len  # type: ignore[arg-type]  # any callable will do
    with pytest.raises(TypeError, match="callback"):
        Output.from_pp_tensors(tensors)
    with pytest.raises(TypeError, match="other"):
        Output.from_pp_tensors(tensors, callback=print, other=1)
    with pytest.raises(PayloadError, match="'callback' is unexpected"):
        Output.from_pp_tensors({**tensors, "callback": torch.ones(1)}, callback=print)


def test_a_keyword_that_is_no_local_field_is_refused_in_either_way() -> None:
    class Some(TensorPayload):
        a: Tensor
        b: Tensor | None

    with pytest.raises(TypeError, match=r"has no Local\(\) field b"):
        Some.from_pp_tensors({"a": torch.ones(1)}, b=torch.ones(1))


def test_what_is_no_tensor_is_named_where_it_is_declared() -> None:
    with pytest.raises(PayloadError, match="'ids' is int, no tensor"):
        Scores.from_pp_tensors({**scores(), "ids": 3})  # type: ignore[dict-item]  # on purpose


def test_keywords_and_an_init_of_its_own_are_kept_to() -> None:
    class Keywords(TensorPayload):
        a: Tensor
        b: Tensor = dataclasses.field(kw_only=True)

    class Swapped(TensorPayload):
        a: Tensor
        b: Tensor

        def __init__(self, b: Tensor, a: Tensor) -> None:
            object.__setattr__(self, "a", a)
            object.__setattr__(self, "b", b)

    one, two = torch.ones(1), torch.zeros(1)
    for cls in (Keywords, Swapped):
        copied = cls(a=one, b=two).copy_to_host(torch.clone)
        assert (copied.a, copied.b) == (one, two)
        assert equal(cls.from_pp_tensors({"a": one, "b": two}), copied)


def test_quoted_names_inside_an_annotation_are_resolved() -> None:
    class Quoted(TensorPayload):
        a: Optional["Tensor"]  # noqa: UP037, UP045  # as older code has it
        b: "Annotated['Tensor', TensorSpec(torch.int64)]"  # noqa: UP037  # the same
        c: Optional["Inner"]  # noqa: UP037, UP045  # the same

    sent = Quoted(None, torch.arange(2), Inner(torch.ones(1), None))
    assert equal(Quoted.from_pp_tensors(sent.to_pp_tensors()), sent)


class ByStaticMethod:
    from_pp_tensors = staticmethod(Scores.from_pp_tensors)


class ByClassMethod:
    @classmethod
    def from_pp_tensors(cls, tensors: Any) -> Scores:
        return Scores.from_pp_tensors(tensors)


@pytest.mark.parametrize("kind", [ByStaticMethod, ByClassMethod])
def test_it_goes_over_the_wire_whichever_way_the_observer_names_it(kind: type) -> None:
    observer = kind()
    for _ in range(3):
        sent, wire = Scores(**scores()), {"other": 1}
        add_auxiliary_output_to_pp_tensors(wire, sent)
        back = pop_auxiliary_output_from_pp_tensors(wire, observer)
        assert equal(back, sent)
        assert wire == {"other": 1}
    del kind.from_pp_tensors
    try:
        assert not is_pp_observer(observer)
    finally:
        kind.from_pp_tensors = staticmethod(Scores.from_pp_tensors)
    assert is_pp_observer(observer)


def test_one_that_forgets_consume_is_reported() -> None:
    (problem,) = check_output(Inner(torch.ones(1), None)).problems
    assert (problem.member, problem.code) == ("consume", "host-output")
    assert check_output(Scores(**scores())).ok


def test_it_works_under_beartype_claw_and_without_asserts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from __future__ import annotations\n"
        "from typing import Annotated\n"
        "import torch\n"
        "from torch import Tensor\n"
        "from pp_protocol import TensorPayload, TensorSpec\n"
        "def make():\n"
        "    class Part(TensorPayload):\n"
        "        x: Annotated[Tensor, TensorSpec(torch.int64, ('n',))]\n"
        "    class Whole(TensorPayload):\n"
        "        part: Part | None\n"
        "    return Whole, Part\n"
    )
    program = (
        "from beartype.claw import beartype_packages\n"
        "beartype_packages(('plugin', 'pp_protocol'))\n"
        "import torch, plugin\n"
        "Whole, Part = plugin.make()\n"
        "sent = Whole(Part(torch.arange(3))).to_pp_tensors()\n"
        "print(Whole.from_pp_tensors(sent).part.x.tolist())\n"
    )
    for flags in ([], ["-O"]):
        done = subprocess.run(
            [sys.executable, *flags, "-W", "ignore", "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{TESTS.parent}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == "[0, 1, 2]\n", done.stderr


# Properties: random classes, random tensors.

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
DIMENSIONS = ["batch", "k", 2]
names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True)


@st.composite
def specs(draw: Any) -> TensorSpec | None:
    if draw(st.booleans()):
        return None
    shape = draw(st.none() | st.lists(st.sampled_from(DIMENSIONS), max_size=3).map(tuple))
    return TensorSpec(draw(st.none() | st.sampled_from(DTYPES)), shape)


@st.composite
def classes(draw: Any, depth: int = 2) -> type[TensorPayload]:
    fields: dict[str, Any] = {}
    for name in draw(names):
        hint: Any = Tensor
        spec = draw(specs())
        if depth and draw(st.integers(0, 3)) == 0:
            hint = draw(classes(depth - 1))
        elif spec is not None:
            hint = Annotated[Tensor, spec]
        fields[name] = hint | None if draw(st.booleans()) else hint
    return type("Random", (TensorPayload,), {"__annotations__": fields, "__module__": __name__})


def filled(draw: Any, cls: type[TensorPayload], sizes: dict[Any, int]) -> Any:
    values: dict[str, Any] = {}
    for field in cls._fields:
        if field.optional and draw(st.booleans()):
            values[field.name] = None
        elif field.payload:
            values[field.name] = filled(draw, field.payload, sizes)
        else:
            spec = field.spec or TensorSpec()
            shape = spec.shape
            if shape is None:
                shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
            size = [sizes.get(one, one) for one in shape]
            dtype = spec.dtype or draw(st.sampled_from(DTYPES))
            values[field.name] = torch.randint(0, 2, size).to(dtype)
    return cls(**values)


def without_empty(payload: Any) -> Any:
    """With None for the optional payloads of which nothing travels."""
    values = {}
    for field in payload._fields:
        value = getattr(payload, field.name)
        if field.payload and value is not None:
            empty = field.optional and not value.to_pp_tensors()
            value = None if empty else without_empty(value)
        values[field.name] = value
    return type(payload)(**values)


@settings(deadline=None)
@given(st.data())
def test_random_payloads_are_equal_after_the_trip(data: st.DataObject) -> None:
    cls = data.draw(classes())
    sizes = {"batch": data.draw(st.integers(0, 3)), "k": data.draw(st.integers(0, 3))}
    sent = filled(data.draw, cls, sizes)
    if not sent.to_pp_tensors():
        return  # nothing travels, so nothing arrives
    wire: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(wire, sent)
    observer = type("Observer", (), {"from_pp_tensors": staticmethod(cls.from_pp_tensors)})()
    back = pop_auxiliary_output_from_pp_tensors(wire, observer)
    assert equal(back, without_empty(sent))
    assert wire == {}


@settings(deadline=None)
@given(st.data())
def test_whatever_is_changed_on_the_way_is_named_or_harmless(data: st.DataObject) -> None:
    cls = data.draw(classes())
    sizes = {"batch": data.draw(st.integers(1, 3)), "k": data.draw(st.integers(1, 3))}
    sent = filled(data.draw, cls, sizes).to_pp_tensors()
    name = data.draw(st.sampled_from([*sent, "unknown"]))
    how = data.draw(st.sampled_from(["gone", "dtype", "rank", "size"]))
    changed = dict(sent)
    tensor = changed.pop(name, torch.ones(1))
    if name == "unknown":
        changed[name] = tensor
    elif how == "dtype":
        changed[name] = tensor.real.to(torch.int16)
    elif how == "rank":
        changed[name] = tensor.unsqueeze(0)
    elif how == "size":
        changed[name] = torch.cat([tensor, tensor], -1) if tensor.dim() else tensor
    try:
        back = cls.from_pp_tensors(changed)
    except PayloadError as error:
        inner = name.rpartition(".")[0]
        told = re.findall(r"'([\w.]+)'", error.found)
        assert name in told or any(one.startswith(inner) for one in told)
    else:
        arrived = back.to_pp_tensors()
        assert set(arrived) == set(changed)
        assert all(arrived[one] is changed[one] for one in changed)
