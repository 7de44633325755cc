"""Where does beartype hold the contract?

A hint of this module is a predicate of `conformance` that raises the finished error itself, so
that beartype's own violation, which calls `repr` on the user's object, is never built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import CoroutineType
from typing import Annotated, Any, TypeVar, overload

from beartype import beartype
from beartype.vale import Is
from torch import Tensor
from typing_extensions import TypeIs

from .conformance import (
    COPY_TO_HOST_JUDGE,
    FROM_PP_TENSORS_JUDGE,
    Finding,
)
from .errors import (
    MissingObserverError,
    NonTensorError,
    ReconstructionError,
    TensorNameError,
    UnsupportedObserverError,
    type_name,
)
from .fingerprint import FINGERPRINT, check_received
from .guarding import beartype_is_off, guarded

PREFIX = "__sampling_observer_output__."
"""What the keys of auxiliary tensors begin with in the dict between stages: SGLang's wire."""
_PREFIX_LENGTH = len(PREFIX)
_rebuilders = FROM_PP_TENSORS_JUDGE.believed


class Refused(Exception):  # noqa: N818  # no error of the package: `pop_…` makes one of it
    """A result that is no auxiliary output; caught by who knows the observer that gave it."""

    def __init__(self, output: object, finding: Finding) -> None:
        super().__init__()
        self.output, self.finding = output, finding


def _can_rebuild_after_a_look(observer: object) -> bool:
    finding = FROM_PP_TENSORS_JUDGE(observer)
    if finding is None:
        return True
    if observer is None:
        raise MissingObserverError.about(
            "this stage's observer",
            "is None",
            "Install on the first stage the observer that the last stage has, or call"
            " discard_auxiliary_output(tensors) where its output is not wanted.",
        )
    raise UnsupportedObserverError.about(type_name(observer), finding.found, finding.advice)


def _is_output_after_a_look(output: object) -> bool:
    finding = COPY_TO_HOST_JUDGE(output)
    if finding is None:
        return True
    raise Refused(output, finding)


_can_rebuild = FROM_PP_TENSORS_JUDGE.or_else(_can_rebuild_after_a_look, True)
_is_output = COPY_TO_HOST_JUDGE.or_else(_is_output_after_a_look, True)


@beartype
def rebuild(
    observer: Annotated[Any, Is[_can_rebuild]], tensors: Any, keys: Any, marked: Any
) -> Annotated[Any, Is[_is_output]]:
    """Call `observer.from_pp_tensors` with what the dict `tensors` holds under `keys`.

    `marked` says whether it holds a fingerprint, to which that is held first.
    """
    payload = {}
    for key in keys:
        tensor = tensors[key]
        name = key[_PREFIX_LENGTH:]
        if type(tensor) is not Tensor or not name:
            _check_received(name, tensor)
        payload[name] = tensor
    if marked:
        check_received(payload, tensors[FINGERPRINT], observer)
    finding = None
    try:
        method = observer.from_pp_tensors
        if id(type(observer)) not in _rebuilders:  # read from a property, for instance
            finding = FROM_PP_TENSORS_JUDGE.of_read(observer, method)
        if finding is None:
            return method(payload)
    except Exception as error:
        names = ", ".join(repr(str.removeprefix(key, PREFIX)) for key in keys)
        add_note(error, f"raised by {type_name(observer)}.from_pp_tensors, given {names}")
        raise
    raise UnsupportedObserverError.about(type_name(observer), finding.found, finding.advice)


if beartype_is_off():
    _unchecked = rebuild

    def rebuild(observer: Any, tensors: Any, keys: Any, marked: Any) -> Any:
        """Call `observer.from_pp_tensors`, with beartype's two checks made by hand."""
        _can_rebuild(observer)
        output = _unchecked(observer, tensors, keys, marked)
        _is_output(output)
        return output


def _check_received(name: str, tensor: object) -> None:
    if not name:
        raise TensorNameError.about(
            "the received dict",
            f"holds a tensor under the bare prefix {PREFIX!r}",
            "Name every tensor: a sender that uses add_auxiliary_output_to_pp_tensors does.",
            tensor=name,
        )
    if not is_tensor(tensor):
        raise NonTensorError.about(
            f"{name!r}",
            f"is {type_name(tensor)}",
            "Find what put it into the dict: add_auxiliary_output_to_pp_tensors adds tensors only.",
            tensor=name,
            beginning=NonTensorError.beginning_received,
        )


def is_tensor(value: object) -> TypeIs[Tensor]:
    """Whether it is one, and does not only claim so, as a mock with a spec does."""
    return issubclass(type(value), Tensor)


def add_note(error: Exception, note: str) -> None:
    """`error.add_note(note)`, where Python has it and the exception, which may be frozen, can."""
    if sys.version_info >= (3, 11):
        with suppress(Exception):
            error.add_note(note)


def not_rebuilt(observer: object, output: object, finding: Finding) -> ReconstructionError:
    """The error for an observer whose `from_pp_tensors` gave something that is no output."""
    close_quietly(output)
    if output is None:
        what = "returned None from from_pp_tensors"
    else:
        what = f"returned {type_name(output)} from from_pp_tensors, which {finding.found}"
    return ReconstructionError.about(
        type_name(observer),
        what,
        "Return an object with copy_to_host(copy_tensor) from it.",
    )


def close_quietly(result: object) -> None:
    """End a coroutine that will not be awaited, so that Python does not warn of it."""
    if type(result) is CoroutineType:
        result.close()


_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def pp_boundary(function: _F, /) -> _F: ...
@overload
def pp_boundary(function: None = None, /) -> Callable[[_F], _F]: ...
def pp_boundary(function: Any = None, /) -> Any:
    """Enforce the Protocols of this package in the signature of an engine's own function.

    Every parameter, and the result, that is annotated with one of them (also in `Optional`, in
    `| None`, in `Annotated`, subscripted, on `*args` or `**kwargs`) is checked when the function is
    called; every other annotation is left alone and need not even be resolvable. What is awaited
    or iterated stays so; the result of a generator is not checked.

    Raises:
        TypeError: when decorated: there is nothing to check; an annotation that names one of the
            Protocols cannot be resolved, or allows other types too; it is no function.
        MissingObserverError, UnsupportedObserverError, UnsupportedOutputError,
            ReconstructionError: when called: the error that speaks of the Protocol.
        ContractViolationError: when called, where none does.
    """
    if function is None:
        return pp_boundary
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(pp_boundary(function.__func__))
    return guarded(function)
