"""How does a function come to check the Protocols in its own signature?"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
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
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
RESULT = "return"


@dataclass(frozen=True)
class Asked:
    """Which Protocols an annotation asks for; any of them will do."""

    protocols: tuple[Any, ...]
    none_too: bool


Check = Callable[[object], bool]


def guarded(function: Any) -> Any:
    """The function with its checks; see `pp_boundary`."""
    real = inspect.unwrap(function)  # what a functools.wraps wrapper passes its arguments on to
    if type(function) is not types.FunctionType or type(real) is not types.FunctionType:
        raise TypeError(f"pp_boundary decorates functions, not {type_name(real)}")
    where = f"{function.__module__}.{function.__qualname__}"
    own, signature = _by_code(function), _by_code(real)
    passes_on = list(own.parameters) != list(signature.parameters)
    if passes_on and not _passes_all_on(own, signature):
        raise TypeError(
            f"pp_boundary cannot check {where}: its wrapper takes other parameters than"
            f" {real.__qualname__}; decorate the inner function"
        )
    checks = {}
    for name, annotation in _annotations(real, signature).items():
        asked = _asked_for(annotation, f"{name!r} of {where}", _names_of(real))
        if asked is not None and not (name == RESULT and any(is_(real) for is_ in _GENERATORS)):
            checks[name] = _check(asked, name, where)
    if not checks:
        raise TypeError(
            f"pp_boundary has nothing to check in {where}: annotate a parameter or the result with"
            " a Protocol of pp_protocol"
        )
    _check_defaults(signature, checks, where)
    if beartype_is_off() or function is not real:
        return _checking_by_hand(function, real, signature, checks)
    return _checked_by_beartype(function, checks)


def _by_code(function: types.FunctionType) -> inspect.Signature:
    """The signature of the code itself, whatever `__signature__` or `__wrapped__` say."""
    bare = types.FunctionType(
        *(function.__code__, {}, "", function.__defaults__, function.__closure__)
    )
    bare.__kwdefaults__, bare.__annotations__ = function.__kwdefaults__, function.__annotations__
    return inspect.signature(bare)


def _passes_all_on(own: inspect.Signature, signature: inspect.Signature) -> bool:
    kinds = [parameter.kind for parameter in own.parameters.values()]
    named = [name for name, one in own.parameters.items() if one.kind in _NAMED]
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    same_beginning = list(signature.parameters)[: len(named)] == named
    return same_beginning and tuple(kinds[len(named) :]) == variadic


def _check_defaults(signature: inspect.Signature, checks: dict[str, Check], where: str) -> None:
    for name, parameter in signature.parameters.items():
        if name in checks and parameter.default is not parameter.empty:
            try:
                checks[name](parameter.default)
            except PPProtocolError as error:
                raise TypeError(
                    f"pp_boundary: the default of {name!r} of {where} is not what its annotation"
                    f" says: it {error.found}"
                ) from error


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


def _checking_by_hand(
    function: Callable[..., Any],
    real: types.FunctionType,
    signature: inspect.Signature,
    checks: dict[str, Check],
) -> Any:
    """Where beartype is off, or would not see the parameters behind `*args`."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    check_result: Check = checks.get(RESULT, lambda result: True)

    def check_arguments(*args: Any, **kwargs: Any) -> None:
        # partial: a wrapper such as mock.patch may add arguments of its own
        bound = signature.bind_partial(*args, **kwargs).arguments
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

    async def awaited(result: Any) -> Any:
        result = await result
        check_result(result)
        return result

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            check_arguments(*args, **kwargs)
            return await awaited(function(*args, **kwargs))

        return later

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def iterated(*args: Any, **kwargs: Any) -> Any:
            check_arguments(*args, **kwargs)
            return (yield from function(*args, **kwargs))

        return iterated

    @functools.wraps(function)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        check_arguments(*args, **kwargs)
        result = function(*args, **kwargs)
        if inspect.iscoroutinefunction(real):  # under a plain wrapper, such as torch.no_grad()
            return awaited(result)
        check_result(result)
        return result

    return at_once


def beartype_is_off() -> bool:
    """Whether beartype decorates nothing: under `-O`, or by the variable PYTHONOPTIMIZE."""

    def probe(x: int) -> int:
        return x

    return beartype(probe) is probe


def _names_of(function: types.FunctionType) -> dict[str, Any]:
    """What the function's annotations can refer to; a name of a closure may not be bound yet."""
    names = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            names[name] = cell.cell_contents
    return names


def _annotations(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    found = {name: one.annotation for name, one in signature.parameters.items()}
    found[RESULT] = signature.return_annotation
    empty = inspect.Parameter.empty
    return {name: annotation for name, annotation in found.items() if annotation is not empty}


def _asked_for(annotation: Any, what: str, names: dict[str, Any]) -> Asked | None:
    """What an annotation asks for; each part that is a string is resolved by itself."""
    text = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(text, str):
        try:
            resolved = eval(text, names)
        except Exception as error:
            if _NAMES.search(text):
                raise TypeError(
                    f"pp_boundary cannot resolve {text!r}, of {what}: {error}. Import the Protocol"
                    " where the function is defined, not only under TYPE_CHECKING"
                ) from error
            return None
        return _asked_for(resolved, what, names)
    for attribute in ("__value__", "__supertype__", "__bound__"):  # type X = …, NewType, TypeVar
        meant = getattr(annotation, attribute, None)
        if meant is not None and not isinstance(annotation, type):
            return _asked_for(meant, what, names)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, typing_extensions.Annotated):
        return _asked_for(arguments[0], what, names)
    if getattr(annotation, "__unpacked__", False) and _NAMES.search(str(annotation)):
        raise TypeError(f"pp_boundary cannot check {what}: annotate *args with the Protocol itself")
    if origin in (typing.Union, types.UnionType):
        parts = [_asked_for(one, what, names) for one in arguments if one is not type(None)]
        asked = [one for one in parts if one is not None]
        if not asked:
            return None
        if len(asked) < len(parts):
            raise TypeError(
                f"pp_boundary cannot check {what}: it allows other types than Protocols of"
                " pp_protocol, and everything would pass"
            )
        protocols = tuple(protocol for one in asked for protocol in one.protocols)
        return Asked(protocols, type(None) in arguments or any(one.none_too for one in asked))
    protocol = origin or annotation
    try:
        return Asked((protocol,), False) if protocol in _MEMBERS else None
    except Exception:  # what cannot be hashed or compared is none of ours
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
