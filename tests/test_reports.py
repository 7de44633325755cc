"""Promises of pp_protocol.reports: all problems at once, in the words of the boundary."""

from __future__ import annotations

import json
import pathlib
import sys
import types
import typing
import weakref
from collections.abc import Awaitable, Mapping

import pytest
import torch
import typing_extensions
import usable_cases
from observers import Observer, Output
from usable_cases import Case, cases, instance, method

from pp_protocol import (
    PREFIX,
    PPProtocolError,
    add_auxiliary_output_to_pp_tensors,
    check_observer,
    check_output,
    pop_auxiliary_output_from_pp_tensors,
    reports,
)
from pp_protocol.conformance import CONSUME, COPY_TO_HOST, FROM_PP_TENSORS, TO_PP_TENSORS, Member
from pp_protocol.errors import ConformanceError

HOOKS = ("unsupported-hook", "unsupported-observer")
OBSERVER = [m for m in usable_cases.MEMBERS if reports.CODES[m] in HOOKS]
OUTPUT = [TO_PP_TENSORS, COPY_TO_HOST, CONSUME]


def report_of(member: Member, obj: object) -> reports.ConformanceReport:
    return check_output(obj) if member in OUTPUT else check_observer(obj)


def lines(member: Member, obj: object) -> list[reports.Problem]:
    return [one for one in report_of(member, obj).problems if one.member == member.name]


def named(member: Member, body: typing.Any) -> object:
    """An object that is right but for one member."""
    good = Output({}) if member in OUTPUT else Observer()
    return type("Wrong", (type(good),), {member.name: body, "__init__": lambda self: None})()


def lacking(member: Member, **body: typing.Any) -> object:
    """An object that has all members of its kind but one."""
    members = OUTPUT if member in OUTPUT else OBSERVER
    others = {m.name: method(len(m.arguments)) for m in members if m is not member}
    if COPY_TO_HOST.name in others:  # it is its own host output, so that consume is asked for
        others[COPY_TO_HOST.name].__annotations__["return"] = typing_extensions.Self
    return type("Wrong", (), {**others, **body})()


def misspelt(member: Member) -> object:
    return lacking(member, **{member.name[:-1]: method(len(member.arguments))})


def refuses_to_be_asked(self: object, name: str) -> typing.Any:
    raise AssertionError("it was asked")


def raising(self: object) -> typing.Any:
    raise OSError("not now")


WRONG: dict[str, tuple[typing.Callable[[Member], object], str]] = {
    "missing": (lacking, "has no {name}"),
    "misspelt": (misspelt, "has no {name}"),
    "None": (lambda m: named(m, None), "set to None"),
    "a string": (lambda m: named(m, "later"), "no method but str"),
    "too few": (lambda m: named(m, lambda: None), "takes too few arguments"),
    "too many": (lambda m: named(m, method(len(m.arguments) + 1)), "needs more arguments"),
    "keyword-only": (
        lambda m: named(m, method(len(m.arguments), keyword=", *, device")),
        "keyword-only argument 'device'",
    ),
    "async": (lambda m: named(m, method(len(m.arguments), prefix="async def")), "is async"),
    "generator": (lambda m: named(m, method(len(m.arguments), body="yield")), "is a generator"),
    "the class": (
        lambda m: type(named(m, method(len(m.arguments)))),
        "is a class where an instance is meant",
    ),
    "__getattr__ only": (
        lambda m: lacking(m, __getattr__=refuses_to_be_asked),
        "only through __getattr__",
    ),
    "a property that raises": (lambda m: named(m, property(raising)), "raised OSError when it was"),
}


@pytest.mark.parametrize("member", [*OBSERVER, *OUTPUT], ids=lambda member: member.name)
@pytest.mark.parametrize("wrong", WRONG)
def test_each_fault_in_each_member_has_its_own_line(wrong: str, member: Member) -> None:
    make, found = WRONG[wrong]
    (problem,) = lines(member, make(member))
    assert problem.severity == "error"
    assert problem.code == reports.CODES[member]
    assert problem.expected.startswith(str(member))
    assert found.format(name=member.name) in problem.found
    assert problem.advice.endswith(".")
    if wrong == "misspelt":
        assert f"It has {member.name[:-1]}: did you mean {member.name}?" in problem.advice
    if wrong in ("too many", "async", "generator", "keyword-only"):
        assert problem.line == 1  # made by exec
    text = str(report_of(member, make(member)))
    assert max(len(line) for line in text.splitlines() if "defined at" not in line) <= 100
    assert f"[{problem.code}] {member.name}: it {problem.found}"[:40] in text


DECLARED = {
    COPY_TO_HOST: [torch.Tensor, Awaitable[Output], None, dict[str, torch.Tensor]],
    TO_PP_TENSORS: [torch.Tensor, list[torch.Tensor], Awaitable[dict], None],
    FROM_PP_TENSORS: [torch.Tensor, Output | None, Awaitable[Output], None, "torch.Tensor"],
    reports.AFTER_SAMPLE: [torch.Tensor, Awaitable[Output], "torch.Tensor | None"],
    reports.IS_ACTIVE: [Awaitable[bool]],
    reports.BEFORE_GRAMMAR: [Awaitable[int]],
    CONSUME: [Awaitable[None]],
}
FITTING = {
    COPY_TO_HOST: [Output, "Unresolvable", typing.Any, object],
    TO_PP_TENSORS: [dict[str, torch.Tensor], Mapping[str, torch.Tensor], "dict[str, Absent]"],
    FROM_PP_TENSORS: [Output, typing.Any, "Absent", typing.Annotated[Output, 1]],
    reports.AFTER_SAMPLE: [Output, Output | None, None, "Output | None"],
    reports.IS_ACTIVE: [bool, "bool"],
    reports.BEFORE_GRAMMAR: [torch.Tensor, tuple[torch.Tensor, ...], None, typing.Any],
    CONSUME: [None, "None", typing.Any],
}


def declaring(member: Member, declared: object) -> object:
    function = method(len(member.arguments))
    function.__annotations__ = {"return": declared}
    function = types.FunctionType(
        *(function.__code__, {"torch": torch, "Output": Output}, member.name)
    )
    function.__annotations__ = {"return": declared}
    return named(member, function)


@pytest.mark.parametrize(
    ("member", "declared"), [(m, d) for m, all_ in DECLARED.items() for d in all_]
)
def test_a_contradicting_annotation_is_a_warning(member: Member, declared: object) -> None:
    report = report_of(member, declaring(member, declared))
    (problem,) = [one for one in report.problems if one.member == member.name]
    assert report.ok
    assert problem.severity == "warning"
    assert f"has a {member.name} that is declared to return" in problem.found.replace(" an ", " a ")
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("member", "declared"), [(m, d) for m, all_ in FITTING.items() for d in all_]
)
def test_a_fitting_or_unresolvable_annotation_is_none(member: Member, declared: object) -> None:
    assert lines(member, declaring(member, declared)) == []


ALL = [
    pytest.param(m, c, id=f"{m.name}-{c.label}")
    for m in (FROM_PP_TENSORS, TO_PP_TENSORS)
    for c in cases(m)
]


@pytest.mark.parametrize(("member", "case"), ALL)
def test_whatever_the_boundary_refuses_the_report_refuses(member: Member, case: Case) -> None:
    obj = case.make()
    if obj is None and member is TO_PP_TENSORS:
        return  # nothing is added, which is no fault
    reported = bool([one for one in lines(member, obj) if one.severity == "error"])
    try:
        if member is FROM_PP_TENSORS:
            pop_auxiliary_output_from_pp_tensors({PREFIX + "x": torch.ones(1)}, obj)
        else:
            add_auxiliary_output_to_pp_tensors({}, obj)
        code = ""
    except PPProtocolError as error:
        code = error.code
    except Exception:  # what the object itself raises
        code = "raised"
    refused = code in ("unsupported-observer", "unsupported-output", "missing-observer")
    assert reported == refused or (reported and code == "raised")


class EightFaults:
    is_active = None

    def before_grammar(self, logits, *, device, stream): ...

    async def after_sample(self, state) -> torch.Tensor: ...

    def from_pp_tensors(self, tensors, dtype) -> list[torch.Tensor]: ...


EIGHT = [
    ("is_active", "error", "set to None"),
    ("before_grammar", "error", "keyword-only argument 'device'"),
    ("before_grammar", "error", "keyword-only argument 'stream'"),
    ("before_grammar", "error", "takes too few arguments"),
    ("after_sample", "error", "is async"),
    ("after_sample", "error", "takes too few arguments"),
    ("after_sample", "warning", "declared to return torch.Tensor"),
    ("from_pp_tensors", "error", "needs more arguments"),
    ("from_pp_tensors", "warning", "declared to return list"),
]


def test_all_faults_are_listed_in_a_stable_order() -> None:
    report = check_observer(EightFaults())
    found = [(problem.member, problem.severity) for problem in report.problems]
    assert found == [(member, severity) for member, severity, _ in EIGHT]
    for problem, (*_, words) in zip(report.problems, EIGHT, strict=True):
        assert words in problem.found
    assert len(report.problems) == 9  # eight by themselves; and twice one that hides another
    assert str(report).count("to do:") == len(report.problems)
    assert check_observer(EightFaults()) == report


def test_a_payload_that_is_its_own_host_output_has_to_consume() -> None:
    class Payload:
        def to_pp_tensors(self): ...

        def copy_to_host(self, copy_tensor): ...

    Payload.copy_to_host.__annotations__["return"] = Payload
    (missing,) = check_output(Payload()).problems
    assert (missing.member, missing.code) == (CONSUME.name, "host-output")


def test_a_report_says_where_prints_raises_and_is_json() -> None:
    class Wrong(Observer):
        def from_pp_tensors(self): ...

    report = check_observer(Wrong())
    (problem,) = report.problems
    assert pathlib.Path(problem.file) == pathlib.Path(__file__)
    assert f"{problem.file}:{problem.line}" in str(report)
    assert json.loads(report.to_json())["problems"][0]["member"] == "from_pp_tensors"
    assert json.loads(report.to_json())["ok"] is False
    with pytest.raises(ConformanceError) as caught:
        report.raise_if_failed()
    assert caught.value.code == "conformance"
    assert str(report) in str(caught.value)
    assert str(caught.value).startswith("object does not conform to the pipeline-parallel contract")
    good = check_observer(Observer())
    assert good.ok
    assert str(good) == "observers.Observer conforms"
    good.raise_if_failed()
    assert check_output(Output({})).ok


class Odd:
    """Objects that do not let themselves be asked, or answer with something else."""

    class LyingClass(Observer):
        __class__ = property(raising)

    class Exits(Observer):
        from_pp_tensors = property(lambda self: sys.exit("from a property"))

    class Answers(Observer):
        def __getattribute__(self, name: str) -> typing.Any:
            return None if name == "from_pp_tensors" else object.__getattribute__(self, name)

    class RunsCode(Observer):
        def from_pp_tensors(self, tensors) -> LOG.append(1): ...

    class GivesAClass(Observer):
        def from_pp_tensors(self, tensors) -> type[Output]: ...


LOG: list[int] = []


def test_objects_that_are_odd_are_reported_and_run_nothing() -> None:
    assert check_observer(Odd.LyingClass()).ok
    assert "raised SystemExit" in check_observer(Odd.Exits()).problems[0].found
    assert "no method but NoneType" in check_observer(Odd.Answers()).problems[0].found
    assert check_observer(Odd.RunsCode()).ok
    assert LOG == []
    assert "declared to return type" in check_observer(Odd.GivesAClass()).problems[0].found
    dead = weakref.proxy(Observer())
    assert len(check_observer(dead).problems) == 4


def test_what_a_wrapper_hides_is_located_where_it_is_written() -> None:
    class Wrapped(Observer):
        @torch.no_grad()
        def from_pp_tensors(self, tensors) -> torch.Tensor: ...

    assert check_observer(Wrapped()).problems[0].file == __file__


def test_near_misses_are_methods_of_nearly_that_name() -> None:
    class Near(torch.nn.Module):
        consumed = True

        def is_inactive(self, sampling_info): ...
        def from_pp_tensor(self, tensors): ...

    advice = {problem.member: problem.advice for problem in check_observer(Near()).problems}
    assert "did you mean from_pp_tensors?" in advice["from_pp_tensors"]
    assert "did you mean" not in advice["is_active"]


def test_a_property_is_read_once_and_judged() -> None:
    read = []

    class Lazy(Observer):
        @property
        def from_pp_tensors(self):
            read.append(1)
            return lambda: None

    (problem,) = check_observer(Lazy()).problems
    assert "takes too few arguments" in problem.found
    assert read == [1]
    assert (
        check_observer(instance("from_pp_tensors", property(lambda self: Output)))
        .problems[-1]
        .member
        != "from_pp_tensors"
    )
