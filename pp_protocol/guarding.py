"""How does a function come to check the Protocols in its own signature?"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typing_extensions
from beartype import beartype
from beartype.vale import Is

from . import contract
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
    remembering,
)
from .errors import (
    ContractViolationError,
    MissingObserverError,
    PPProtocolError,
    ReconstructionError,
    UnsupportedObserverError,
    UnsupportedOutputError,
    type_name,
)

_HOOKS = (IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE)
_MEMBERS: dict[Any, tuple[Member, ...]] = {
    contract.HostAuxiliaryOutput: (CONSUME,),
    contract.DeviceAuxiliaryOutput: (COPY_TO_HOST,),
    contract.SamplingObserver: _HOOKS,
    contract.PipelineParallelAuxiliaryOutput: (TO_PP_TENSORS,),
    contract.PipelineParallelSamplingObserver: (FROM_PP_TENSORS,),
    contract.PPCapableOutput: (COPY_TO_HOST, TO_PP_TENSORS),
    contract.PPCapableObserver: (*_HOOKS, FROM_PP_TENSORS),
}
_NAMES = re.compile(rf"\b({'|'.join(protocol.__name__ for protocol in _MEMBERS)})\b")
_ERRORS = {FROM_PP_TENSORS: UnsupportedObserverError, TO_PP_TENSORS: UnsupportedOutputError}
_GENERATORS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
RESULT = "return"


@dataclass(frozen=True)
class Asked:
    """Which Protocols an annotation asks for; any of them will do."""

    protocols: tuple[Any, ...]
    none_too: bool


Check = Callable[[object], bool]


def guarded(function: Any) -> Any:
    """The function with its checks; see `pp_boundary`."""
    if type(function) is not types.FunctionType:
        raise TypeError(f"pp_boundary decorates functions, not {type_name(function)}")
    signature = inspect.signature(function)  # of what is wrapped, if functools.wraps says so
    where = f"{function.__module__}.{function.__qualname__}"
    checks = {}
    for name, annotation in _annotations(function, signature).items():
        asked = _asked_for(annotation, f"{name!r} of {where}")
        if asked is not None and not (name == RESULT and any(is_(function) for is_ in _GENERATORS)):
            checks[name] = _check(asked, name, where)
    if not checks:
        raise TypeError(
            f"pp_boundary has nothing to check in {where}: annotate a parameter or the result with"
            " a Protocol of pp_protocol"
        )
    own = inspect.signature(function, follow_wrapped=False)
    if beartype_is_off() or list(own.parameters) != list(signature.parameters):
        return _checking_by_hand(function, signature, checks)
    return _checked_by_beartype(function, checks)


def _checked_by_beartype(function: types.FunctionType, checks: dict[str, Check]) -> Any:
    """A twin of the function whose only hints are the checks, decorated with beartype."""
    twin = types.FunctionType(
        *(function.__code__, function.__globals__, function.__name__),
        *(function.__defaults__, function.__closure__),
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    twin.__annotations__ = {name: Annotated[Any, Is[check]] for name, check in checks.items()}
    return functools.update_wrapper(beartype(twin), function)


def _checking_by_hand(function: Any, signature: inspect.Signature, checks: dict[str, Check]) -> Any:
    """Where beartype is off, or would not see the parameters behind `*args`."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    check_result: Check = checks.get(RESULT, lambda result: True)

    def check_arguments(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        for name, check in checks.items():
            if name not in bound:
                continue
            if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
                values: Any = bound[name]
            elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
                values = bound[name].values()
            else:
                values = (bound[name],)
            for value in values:
                check(value)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            check_arguments(*args, **kwargs)
            result = await function(*args, **kwargs)
            check_result(result)
            return result

        return later

    @functools.wraps(function)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        check_arguments(*args, **kwargs)
        result = function(*args, **kwargs)
        check_result(result)
        return result

    return at_once


def beartype_is_off() -> bool:
    """Whether beartype decorates nothing: under `-O`, or by the variable PYTHONOPTIMIZE."""

    def probe(x: int) -> int:
        return x

    return beartype(probe) is probe


def _annotations(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    """What is annotated, each resolved by itself where it names one of the Protocols."""
    found = {name: one.annotation for name, one in signature.parameters.items()}
    found[RESULT] = signature.return_annotation
    real = inspect.unwrap(function)
    names = {**real.__globals__, **inspect.getclosurevars(real).nonlocals}
    resolved = {}
    for name, annotation in found.items():
        if annotation is inspect.Parameter.empty:
            continue
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, names)
            except Exception as error:
                if _NAMES.search(annotation):
                    what = f"{annotation!r}, of {name!r} of {real.__module__}.{real.__qualname__}"
                    raise TypeError(
                        f"pp_boundary cannot resolve {what}: {error}. Import the Protocol where the"
                        " function is defined, not only under TYPE_CHECKING"
                    ) from error
                continue
        resolved[name] = annotation
    return resolved


def _asked_for(annotation: Any, what: str) -> Asked | None:
    origin = typing.get_origin(annotation)
    if origin in (typing.Annotated, typing_extensions.Annotated):
        return _asked_for(typing.get_args(annotation)[0], what)
    if origin in (typing.Union, types.UnionType):
        alternatives = typing.get_args(annotation)
        parts = [_asked_for(one, what) for one in alternatives if one is not type(None)]
        asked = [one for one in parts if one is not None]
        if not asked:
            return None
        if len(asked) < len(parts):
            raise TypeError(
                f"pp_boundary cannot check {what}: it allows other types than Protocols of"
                " pp_protocol, and everything would pass"
            )
        protocols = tuple(protocol for one in asked for protocol in one.protocols)
        return Asked(protocols, type(None) in alternatives or any(one.none_too for one in asked))
    protocol = origin or annotation
    try:
        return Asked((protocol,), False) if protocol in _MEMBERS else None
    except TypeError:  # an annotation that cannot be hashed is none of ours
        return None


_JUDGES = {member: remembering(member) for members in _MEMBERS.values() for member in members}


def _check(asked: Asked, name: str, where: str) -> Check:
    """The predicate of one annotation, which raises the finished error itself."""
    judges = [[(one, _JUDGES[one]) for one in _MEMBERS[protocol]] for protocol in asked.protocols]
    none_too = asked.none_too

    def conforms(value: object) -> bool:
        if value is None and none_too:
            return True
        for members in judges:
            for _, judge in members:
                if judge(value) is not None:
                    break
            else:
                return True
        member, finding = next((m, f) for m, judge in judges[0] if (f := judge(value)) is not None)
        raise _violation(asked.protocols[0], member, finding, value, name, where)

    return conforms


def _violation(
    protocol: Any, member: Member, finding: Finding, value: object, name: str, where: str
) -> PPProtocolError:
    kind: type[PPProtocolError] = _ERRORS.get(member, ContractViolationError)
    if value is None and FROM_PP_TENSORS in _MEMBERS[protocol]:
        kind = MissingObserverError
    elif name == RESULT and protocol is contract.DeviceAuxiliaryOutput:
        kind = ReconstructionError
    what = f"the result of {where}" if name == RESULT else f"parameter {name!r} of {where}"
    subject = f"{what}, a {protocol.__name__}, got {type_name(value)}, which"
    return kind.about(subject, finding.found, finding.advice)
