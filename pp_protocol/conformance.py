"""Can this member of this object really be called the way the contract calls it?

`isinstance` with a runtime protocol looks only for a name. Here a member is looked up without
running the user's code, and judged: is it there, was it implemented, can it be called with the
contract's arguments, does it give a result rather than a coroutine. The verdict is the same on
every Python version.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from typing_extensions import TypeIs

from .contract import PipelineParallelAuxiliaryOutput, PipelineParallelSamplingObserver
from .errors import PPProtocolError, UnsupportedObserverError, UnsupportedOutputError, type_name

T = TypeVar("T")

_ABSENT: Any = object()
_DEFERRED_CODE = (  # code flags of functions whose call gives an object to be run later
    (inspect.CO_COROUTINE, "is async"),
    (inspect.CO_ASYNC_GENERATOR, "is an async generator"),
    (inspect.CO_ITERABLE_COROUTINE, "is a generator-based coroutine"),
    (inspect.CO_GENERATOR, "is a generator"),
)


class Member(NamedTuple):
    """A method of the contract, and the names of what the contract calls it with."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


FROM_PP_TENSORS = Member("from_pp_tensors", ("tensors",))
TO_PP_TENSORS = Member("to_pp_tensors", ())
COPY_TO_HOST = Member("copy_to_host", ("copy_tensor",))
CONSUME = Member("consume", ("batch", "commits"))
IS_ACTIVE = Member("is_active", ("sampling_info",))
BEFORE_GRAMMAR = Member("before_grammar", ("logits", "sampling_info"))
AFTER_SAMPLE = Member("after_sample", ("state", "token_ids"))


class Finding(NamedTuple):
    """Why a member is unusable, as a predicate ("has no …"), and what to do about it."""

    found: str
    advice: str


class Found(NamedTuple):
    """A member as it is stored, before any descriptor has run."""

    raw: Any
    owner: type | None
    """The class whose body holds it; None if the instance itself does."""


def _mro(cls: type) -> tuple[type, ...]:
    mro: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return mro


def _body(cls: type) -> types.MappingProxyType[str, Any]:
    body: types.MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return body


def _in_classes(classes: tuple[type, ...], name: str) -> Found | None:
    # not inspect.getattr_static: it keeps the classes alive before Python 3.12.4
    for cls in classes:
        raw = _body(cls).get(name, _ABSENT)
        if raw is not _ABSENT:
            return Found(raw, cls)
    return None


def _instance_dict(obj: object) -> dict[str, Any]:
    found = _in_classes(_mro(type(obj)), "__dict__")
    if found is not None and type(found.raw) in (
        types.GetSetDescriptorType,
        types.MemberDescriptorType,  # of SimpleNamespace and modules
    ):
        stored = found.raw.__get__(obj)
        if issubclass(type(stored), dict):
            return stored  # type: ignore[no-any-return]  # it is one
    return {}


def look_up(obj: object, name: str) -> Found | None:
    """The member `name` of `obj` as it is stored, found without running code of the user's."""
    if issubclass(type(obj), type):
        on_itself = _in_classes(_mro(obj), name)  # type: ignore[arg-type]  # a class, as just seen
        return on_itself or _in_classes(_mro(type(obj)), name)
    on_class = _in_classes(_mro(type(obj)), name)
    if on_class is not None and type(on_class.raw) is types.MemberDescriptorType:
        try:  # a slot: reading it runs no code of the user's
            return Found(on_class.raw.__get__(obj), None)
        except AttributeError:
            return None
    if on_class is None or not _is_data_descriptor(on_class.raw):
        raw = _instance_dict(obj).get(name, _ABSENT)
        if raw is not _ABSENT:
            return Found(raw, None)
    return on_class


def _type_has(raw: object, *names: str) -> bool:
    return any(_in_classes(_mro(type(raw)), name) is not None for name in names)


def _is_data_descriptor(raw: object) -> bool:
    return _type_has(raw, "__set__", "__delete__")


def unusable(obj: object, member: Member) -> Finding | None:
    """Why `obj.member(...)` cannot be called as the contract does; None if it can.

    Runs no code of the user's: a property is let pass, and judged when its value is read.
    """
    name = member.name
    define = f"Define {member} on it."
    found = look_up(obj, name)
    if found is None:
        if _type_has(obj, "__getattr__") or _overrides_getattribute(obj):
            return Finding(
                f"has {name} only through __getattr__, which answers to every name",
                f"Wrap it: with_pp_transport(...) gives it a real {member}.",
            )
        return Finding(f"has no {name}", define)
    raw, owner = found
    if owner is not None and _body(owner).get("_is_protocol") is True:
        return Finding(f"inherits {name} from the Protocol {owner.__name__}, unimplemented", define)
    if raw is None:
        return Finding(f"has {name} set to None", define)
    if owner is None:
        return unusable_callable(raw, member)
    if issubclass(type(raw), staticmethod):
        return unusable_callable(raw.__func__, member)
    if issubclass(type(raw), classmethod):
        return unusable_callable(raw.__func__, member, bound=1)
    if issubclass(type(obj), type) and owner in _mro(obj):  # type: ignore[arg-type]  # a class
        return Finding("is a class where an instance is meant", "Pass an instance of it.")
    if type(raw) is types.FunctionType:
        return unusable_callable(raw, member, bound=1)
    if type(raw) is not types.MethodType and _type_has(
        raw, "__get__"
    ):  # the boundary reads it once, and judges what it gets
        return None
    return unusable_callable(raw, member)


def _overrides_getattribute(obj: object) -> bool:
    found = _in_classes(_mro(type(obj)), "__getattribute__")
    return found is not None and type(found.raw) is types.FunctionType  # many C types have one


def unusable_callable(value: object, member: Member, *, bound: int = 0) -> Finding | None:
    """Why `value` cannot be called as `member`; `bound` arguments are put in front by Python."""
    name = member.name
    if not callable(value):
        kind = type_name(value)
        return Finding(f"has a {name} that is no method but {kind}", f"Define {member} on it.")
    function: object = value
    while type(function) is types.MethodType:
        function, bound = function.__func__, bound + 1
    code = _first_code(function)
    for flag, what in _DEFERRED_CODE:
        if code is not None and code.co_flags & flag:
            return Finding(
                f"has a {name} that {what}",
                f"Make {name} a plain function that returns its result.",
            )
    misfit = _misfit(function, bound + len(member.arguments))
    if misfit is None:
        return None
    return Finding(f"has a {name} that {misfit}", f"It is called as {member}, positionally.")


def _first_code(function: object) -> types.CodeType | None:
    """The Python code that a call of `function` runs first, as far as it can be seen."""
    while type(function) in (types.MethodType, functools.partial):
        function = function.__func__ if type(function) is types.MethodType else function.func  # type: ignore[attr-defined]  # of those two types
    if type(function) is not types.FunctionType and not issubclass(type(function), type):
        call = _in_classes(_mro(type(function)), "__call__")
        function = None if call is None else call.raw
    return function.__code__ if type(function) is types.FunctionType else None


def _own_signature(function: Any) -> inspect.Signature:
    """What the outermost callable takes: neither what it wraps nor what it declares instead."""
    if type(function) is types.FunctionType:
        bare = types.FunctionType(
            function.__code__, {}, "", function.__defaults__, function.__closure__
        )
        bare.__kwdefaults__ = function.__kwdefaults__
        function = bare
    return inspect.signature(function, follow_wrapped=False)


def _misfit(function: object, given: int) -> str | None:
    try:
        parameters = _own_signature(function).parameters.values()
    except Exception:  # a C function, or a reader that raises: nothing is known against it
        return None
    positional = required = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional = max(positional, given)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                return f"needs the keyword-only argument {parameter.name!r}"
        elif parameter.kind is not parameter.VAR_KEYWORD:
            positional += 1
            required += parameter.default is parameter.empty
    if required > given:
        return "needs more arguments than it gets"
    if positional < given:
        return "takes too few arguments"
    return None


def remembering(member: Member) -> Callable[[object], Finding | None]:
    """`unusable` for one member, that remembers for which types a plain method was usable.

    A type is believed only while it gives the same function and the object's bound method is made
    of it, so that a method deleted, replaced, shadowed on the instance or made static is judged
    anew. Types and functions are referred to weakly.
    """
    name = member.name
    usable: dict[int, tuple[weakref.ref[types.FunctionType], weakref.ref[type]]] = {}

    def judge(obj: object) -> Finding | None:
        cls = type(obj)
        remembered = usable.get(id(cls))
        if remembered is not None:
            function = remembered[0]()
            if getattr(cls, name, None) is function is not None:
                method = getattr(obj, name, None)
                if type(method) is types.MethodType and method.__func__ is function:
                    return None
        finding = unusable(obj, member)
        if finding is None:
            remember(obj, cls)
        return finding

    def remember(obj: object, cls: type) -> None:
        found = look_up(obj, name)
        if found is None or found.owner is None or type(found.raw) is not types.FunctionType:
            return
        key = id(cls)
        forget = weakref.ref(cls, lambda _: usable.pop(key, None))
        usable[key] = weakref.ref(found.raw), forget

    return judge


judge_from_pp_tensors = remembering(FROM_PP_TENSORS)
judge_to_pp_tensors = remembering(TO_PP_TENSORS)
judge_copy_to_host = remembering(COPY_TO_HOST)


def is_pp_observer(obj: object, /) -> TypeIs[PipelineParallelSamplingObserver]:
    """Whether `obj` has a `from_pp_tensors` that can be called with the tensors.

    Runs no code of the user's: a property counts as usable, and is judged when it is read.
    """
    return judge_from_pp_tensors(obj) is None


def is_pp_output(obj: object, /) -> TypeIs[PipelineParallelAuxiliaryOutput]:
    """Whether `obj` has a `to_pp_tensors` that can be called; as `is_pp_observer`."""
    return judge_to_pp_tensors(obj) is None


def require_pp_observer(obj: T, /) -> T:
    """Return `obj` if `is_pp_observer(obj)`.

    Raises:
        UnsupportedObserverError: it cannot rebuild what another stage sent; the message says why.
    """
    return _require(obj, judge_from_pp_tensors(obj), UnsupportedObserverError)


def require_pp_output(obj: T, /) -> T:
    """Return `obj` if `is_pp_output(obj)`.

    Raises:
        UnsupportedOutputError: it cannot be sent to another stage; the message says why.
    """
    return _require(obj, judge_to_pp_tensors(obj), UnsupportedOutputError)


def _require(obj: T, finding: Finding | None, error: type[PPProtocolError]) -> T:
    if finding is not None:
        raise error.about(type_name(obj), finding.found, finding.advice)
    return obj
