"""What is wrong with this observer or output, all of it at once?"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typing_extensions

from .conformance import (
    AFTER_SAMPLE,
    BEFORE_GRAMMAR,
    CONSUME,
    COPY_TO_HOST,
    FROM_PP_TENSORS,
    IS_ACTIVE,
    TO_PP_TENSORS,
    Finding,
    Member,
    faults,
    faults_of_callable,
    has_to_be_read,
    is_protocol,
    look_up,
    overrides_getattribute,
    unusable_in_instances_of,
)
from .errors import ConformanceError, type_name

CODES = {
    IS_ACTIVE: "unsupported-hook",
    BEFORE_GRAMMAR: "unsupported-hook",
    AFTER_SAMPLE: "unsupported-hook",
    FROM_PP_TENSORS: "unsupported-observer",
    TO_PP_TENSORS: "unsupported-output",
    COPY_TO_HOST: "reconstruction",
    CONSUME: "host-output",
}
RESULTS = {
    IS_ACTIVE: "bool",
    BEFORE_GRAMMAR: "Any",
    AFTER_SAMPLE: "PPCapableOutput | None",
    FROM_PP_TENSORS: "DeviceAuxiliaryOutput",
    TO_PP_TENSORS: "Mapping[str, Tensor]",
    COPY_TO_HOST: "HostAuxiliaryOutput",
    CONSUME: "None",
}
_NEEDED_OF_RESULT = {
    AFTER_SAMPLE: (TO_PP_TENSORS, COPY_TO_HOST),
    FROM_PP_TENSORS: (COPY_TO_HOST,),
    COPY_TO_HOST: (CONSUME,),
}
_LATER = ("Awaitable", "Coroutine", "Generator", "AsyncGenerator", "AsyncIterator", "AsyncIterable")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one member."""

    member: str
    expected: str
    found: str
    """A predicate of the object: "has no from_pp_tensors"."""
    code: str
    severity: str
    """"error", or "warning" where the call itself would work."""
    advice: str
    file: str = ""
    line: int = 0
    """Where the member, or else the class, is defined; "" and 0 if that is not known."""


@dataclass(frozen=True)
class ConformanceReport:
    """All problems of one object, in the order of the contract's members."""

    subject: str
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that keep the object from being used."""
        return tuple(one for one in self.problems if one.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may be there."""
        return not self.errors

    def __str__(self) -> str:
        """At most 100 columns, but for paths."""
        if not self.problems:
            return f"{self.subject} conforms"
        how = "conforms, with warnings" if self.ok else "does not conform"
        lines = _wrapped(f"{self.subject} {how}:", "")
        for problem in self.problems:
            text = f"{problem.severity} [{problem.code}] {problem.member}: it {problem.found}"
            lines += _wrapped(text, "  ")
            lines += _wrapped(f"expected: {problem.expected}", "      ")
            if problem.file:
                lines.append(f"      defined at: {problem.file}:{problem.line}")
            lines += _wrapped(f"to do: {problem.advice}", "      ")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as one JSON object: subject, ok, problems."""
        problems = [dataclasses.asdict(problem) for problem in self.problems]
        return json.dumps({"subject": self.subject, "ok": self.ok, "problems": problems})

    def raise_if_failed(self) -> None:
        """Raise one error that lists all errors; do nothing if there is none.

        Raises:
            ConformanceError: the report is not `ok`; its text is in the message.
        """
        if not self.ok:
            found = f"has {len(self.errors)} errors\n{self}\n"
            raise ConformanceError.about(self.subject, found, "Mend what the report lists.")


def check_observer(obj: object, /) -> ConformanceReport:
    """Everything that is wrong with an observer: its three hooks and `from_pp_tensors`.

    Properties are read, once each; that is the only code of the user's that runs, and one that
    raises is reported. What an annotation says against the contract is a warning.
    """
    return _report(obj, (IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE, FROM_PP_TENSORS))


def check_output(obj: object, /) -> ConformanceReport:
    """Everything that is wrong with an auxiliary output: `copy_to_host` and `to_pp_tensors`.

    Of an object that is its own host output, by the annotation of `copy_to_host`, `consume` too.
    """
    members: tuple[Member, ...] = (COPY_TO_HOST, TO_PP_TENSORS)
    if _is_its_own(obj, declared_result(obj, COPY_TO_HOST)):
        members += (CONSUME,)
    return _report(obj, members)


def _report(obj: object, members: tuple[Member, ...]) -> ConformanceReport:
    problems = []
    for member in members:
        found = [(finding, "error") for finding in _judged(obj, member)]
        contradiction = _contradiction(obj, member)
        if contradiction is not None:
            found.append((contradiction, "warning"))
        expected = f"{member} -> {RESULTS[member]}"
        place = where_defined(obj, member.name)
        for finding, severity in found:
            problems.append(
                Problem(
                    *(member.name, expected, finding.found, CODES[member], severity),
                    *(finding.advice, *place),
                )
            )
    return ConformanceReport(type_name(obj), tuple(problems))


def _judged(obj: object, member: Member) -> list[Finding]:
    against = faults(obj, member)
    hidden = has_to_be_read(obj, member) or overrides_getattribute(type(obj))
    if against or not hidden:
        return against
    try:
        value = getattr(obj, member.name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the like are reported as well
        found = f"has a {member.name} that raised {type_name(error)} when it was read"
        return [Finding(found, "Make it readable at any time, or a method.")]
    return faults_of_callable(value, member)


def _contradiction(obj: object, member: Member) -> Finding | None:
    """What the declared result says against the contract, as far as it can be resolved."""
    declared = declared_result(obj, member)
    if declared is None or (member is COPY_TO_HOST and _is_its_own(obj, declared)):
        return None
    wrong = _wrong_result(declared, member)
    if wrong is None:
        return None
    return Finding(
        f"has a {member.name} that is declared to return {wrong}",
        f"Return {RESULTS[member]}, or mend the annotation.",
    )


def declared_result(obj: object, member: Member) -> Any:
    """The resolved annotation of the result; None if there is none, or it cannot be resolved."""
    found = look_up(obj, member.name)
    function = getattr(found.raw, "__func__", found.raw) if found else None
    if type(function) is not types.FunctionType or (found and is_protocol(found.owner)):
        return None
    annotation = function.__annotations__.get("return")
    if annotation is None:
        return type(None) if "return" in function.__annotations__ else None
    if isinstance(annotation, str):
        try:
            parts = ast.walk(ast.parse(annotation, mode="eval"))
            plain = all(isinstance(part, _PARTS_OF_ANNOTATIONS) for part in parts)
            names = dict(_unwrapped(function).__globals__)
            annotation = eval(annotation, names) if plain else None
        except Exception:  # a name that only exists while type checking, for one
            return None
    return annotation


_PARTS_OF_ANNOTATIONS = (  # no calls: a report runs no code of the user's
    *(ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BitOr, ast.Tuple),
    *(ast.List, ast.Constant, ast.expr_context),
)


def _is_its_own(obj: object, declared: Any) -> bool:
    """Whether a declared result is the object's own class."""
    if declared is typing_extensions.Self:
        return True
    cls: Any = obj if issubclass(type(obj), type) else type(obj)
    return isinstance(declared, type) and declared is not object and declared in type.mro(cls)


def _wrong_result(declared: Any, member: Member) -> str | None:
    origin = typing.get_origin(declared)
    if origin in (typing.Annotated, typing_extensions.Annotated):
        return _wrong_result(typing.get_args(declared)[0], member)
    if origin in (typing.Union, types.UnionType):
        for one in typing.get_args(declared):
            if one is not type(None) or member not in (AFTER_SAMPLE, CONSUME):
                wrong = _wrong_result(one, member)
                if wrong is not None:
                    return wrong
        return None
    cls = origin or declared
    if not isinstance(cls, type) or cls is object or cls is Any:  # a class since Python 3.11
        return None
    if cls.__name__ in _LATER and cls.__module__ in ("collections.abc", "typing"):
        return f"{cls.__name__}, which has to be run first"
    if cls is type(None):
        return "None" if member not in (AFTER_SAMPLE, CONSUME, BEFORE_GRAMMAR) else None
    if member is TO_PP_TENSORS and not issubclass(cls, Mapping):
        return f"{type_name(cls).removeprefix('class ')}, which is no mapping"
    for needed in _NEEDED_OF_RESULT.get(member, ()):
        finding = unusable_in_instances_of(cls, needed)
        if finding is not None:
            return f"{type_name(cls).removeprefix('class ')}, which {finding.found}"
    return None


def where_defined(obj: Any, name: str) -> tuple[str, int]:
    """File and line of a member's function, or else of the class; ("", 0) if neither is known."""
    found = look_up(obj, name) if name else None
    function = getattr(found.raw, "__func__", found.raw) if found else None
    function = _unwrapped(function)
    if type(function) is types.FunctionType:
        return function.__code__.co_filename, function.__code__.co_firstlineno
    try:
        cls = obj if issubclass(type(obj), type) else type(obj)
        return inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1]
    except Exception:  # no source, or a metaclass that does not let itself be asked
        return "", 0


def _unwrapped(function: Any) -> Any:
    try:
        return inspect.unwrap(function) if type(function) is types.FunctionType else function
    except ValueError:  # it wraps itself
        return function


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
