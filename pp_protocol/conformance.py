"""Can this member of this object really be called the way the contract calls it?

`isinstance` with a runtime protocol looks only for a name. Here a member is looked up without
running the user's code, and judged: is it there, was it implemented, can it be called with the
contract's arguments, does it give a result rather than a coroutine. The verdict is the same on
every Python version.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

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


@dataclass(frozen=True)
class Member:
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
_CONTRACT_NAMES = frozenset(
    member.name
    for member in (
        *(FROM_PP_TENSORS, TO_PP_TENSORS, COPY_TO_HOST, CONSUME),
        *(IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE),
    )
)


@dataclass(frozen=True)
class Finding:
    """Why a member is unusable, as a predicate ("has no …"), and what to do about it."""

    found: str
    advice: str


@dataclass(frozen=True)
class Found:
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
    for cls in _mro(type(obj)):
        reader = _body(cls).get("__dict__")
        if type(reader) in (
            types.GetSetDescriptorType,
            types.MemberDescriptorType,  # of SimpleNamespace and modules
        ):
            stored = reader.__get__(obj)  # type: ignore[union-attr]  # one of the two types
            return stored if issubclass(type(stored), dict) else {}
    return {}


def stored_in(obj: object) -> list[Any]:
    """The values of an object's attributes, its slots among them; runs no code of the user's."""
    slots = [
        name
        for cls in _mro(type(obj))
        for name, raw in _body(cls).items()
        if type(raw) is types.MemberDescriptorType and cls is not types.FunctionType
    ]
    found = [look_up(obj, name) for name in slots]
    return [*_instance_dict(obj).values(), *(one.raw for one in found if one and not one.owner)]


def look_up(obj: object, name: str) -> Found | None:
    """The member `name` of `obj` as it is stored, found without running code of the user's."""
    if issubclass(type(obj), type):
        on_itself = _in_classes(_mro(obj), name)  # type: ignore[arg-type]  # a class, as just seen
        return on_itself or _in_classes(_mro(type(obj)), name)
    on_class = _in_classes(_mro(type(obj)), name)
    if on_class is not None and type(on_class.raw) is types.MemberDescriptorType:
        try:  # a slot: reading it runs no code of the user's
            return Found(on_class.raw.__get__(obj), None)
        except (AttributeError, TypeError):  # empty, or a slot of another class
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
    return next(iter(faults(obj, member)), None)


def faults(obj: object, member: Member) -> list[Finding]:
    """All that stands against the member, of which `unusable` gives the first."""
    name = member.name
    define = f"Define {member} on it."
    found = look_up(obj, name)
    if found is None:
        if obj is None:
            return [Finding(f"has no {name}: it is None", "Pass an object that has it.")]
        near = _near_miss(obj, name)
        if near is not None:
            return [Finding(f"has no {name}", f"It has {near}: did you mean {name}? {define}")]
        if only_by_getattr(obj, member):
            return [
                Finding(
                    f"has {name} only through __getattr__, which answers to every name",
                    f"Wrap it: with_pp_transport(...) gives it a real {member}.",
                )
            ]
        return [Finding(f"has no {name}", define)]
    raw, owner = found.raw, found.owner
    if owner is not None and is_protocol(owner):
        unwritten = f"inherits {name} from the Protocol {owner.__name__}, unimplemented"
        return [Finding(unwritten, define)]
    if raw is None:
        return [Finding(f"has {name} set to None", define)]
    if owner is None:
        return faults_of_callable(raw, member)
    if issubclass(type(raw), staticmethod):
        return faults_of_callable(raw.__func__, member)
    if issubclass(type(raw), classmethod):
        return faults_of_callable(raw.__func__, member, bound=1)
    if issubclass(type(obj), type) and owner in _mro(obj):  # type: ignore[arg-type]  # a class
        return [Finding("is a class where an instance is meant", "Pass an instance of it.")]
    if type(raw) is types.FunctionType:
        return faults_of_callable(raw, member, bound=1)
    if type(raw) is functools.partial:  # binds like a method since Python 3.14
        return faults_of_callable(raw, member, bound=int(sys.version_info >= (3, 14)))
    if has_to_be_read(obj, member):
        return []  # the boundary reads it once, and judges what it gets
    return faults_of_callable(raw, member)


def only_by_getattr(obj: object, member: Member) -> bool:
    """Whether the member can only come from a `__getattr__`, which may have it or not."""
    if look_up(obj, member.name) is not None or _near_miss(obj, member.name) is not None:
        return False
    return _type_has(obj, "__getattr__") or overrides_getattribute(type(obj)) or _is_proxy(obj)


def is_protocol(cls: type | None) -> bool:
    """Whether what its body holds was never implemented."""
    return cls is not None and _body(cls).get("_is_protocol") is True


_JUDGED_AS_STORED = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    staticmethod,
    classmethod,
)


def has_to_be_read(obj: object, member: Member) -> bool:
    """Whether only reading it, which runs the user's code, shows what the member is: a property."""
    found = look_up(obj, member.name)
    return (
        found is not None
        and found.owner is not None
        and not issubclass(type(found.raw), _JUDGED_AS_STORED)
        and _type_has(found.raw, "__get__")
    )


def unusable_in_instances_of(cls: type, member: Member) -> Finding | None:
    """Why instances of `cls` will not have the member, by what the class says.

    None where it cannot be known: a Protocol promises its members, a `__getattr__` may have any.
    """
    found = _in_classes(_mro(cls), member.name)
    if found is None:
        open_ended = _in_classes(_mro(cls), "__getattr__") or "__slots__" in _body(cls)
        declared = (_body(one).get("__annotations__") for one in _mro(cls))
        annotated = any(member.name in names for names in declared if type(names) is dict)
        return None if open_ended or annotated else Finding(f"has no {member.name}", "")
    if type(found.raw) is types.FunctionType:
        return next(iter(faults_of_callable(found.raw, member, bound=1)), None)
    return None


def _near_miss(obj: object, name: str) -> str | None:
    cls = obj if issubclass(type(obj), type) else type(obj)
    methods = [
        one
        for body in (_instance_dict(obj), *(_body(base) for base in _mro(cls)))  # type: ignore[arg-type]  # a class
        for one, raw in body.items()
        if type(raw) in (types.FunctionType, staticmethod, classmethod, property)
    ]
    names = [one for one in methods if type(one) is str and one not in _CONTRACT_NAMES]
    return next(iter(difflib.get_close_matches(name, names, 1, 0.91)), None)


def _is_proxy(obj: object) -> bool:
    return type(obj) in weakref.ProxyTypes


def overrides_getattribute(cls: type) -> bool:
    found = _in_classes(_mro(cls), "__getattribute__")
    return found is not None and type(found.raw) is types.FunctionType  # many C types have one


def unusable_callable(value: object, member: Member) -> Finding | None:
    """Why `value` cannot be called as `member`; None if it can."""
    return next(iter(faults_of_callable(value, member)), None)


def faults_of_callable(value: object, member: Member, *, bound: int = 0) -> list[Finding]:
    """All that stands against `value`; `bound` arguments are put in front by Python."""
    has = f"has {'an' if member.name[0] in 'aeiou' else 'a'} {member.name}"
    if not callable(value):
        found = f"{has} that is no method but {type_name(value)}"
        return [Finding(found, f"Define {member} on it.")]
    call = _python_call(value, bound)
    if call is None:  # a C function, for one: nothing is known against it
        return []
    plain = f"Make {member.name} a plain function that returns its result."
    deferred = [what for flag, what in _DEFERRED_CODE if call.function.__code__.co_flags & flag]
    called = f"It is called as {member}, positionally."
    return [Finding(f"{has} that {what}", plain) for what in deferred[:1]] + [
        Finding(f"{has} that {misfit}", called) for misfit in _misfits(call, len(member.arguments))
    ]


@dataclass(frozen=True)
class _Call:
    """The Python function that a call reaches first, and what it is given beside the arguments."""

    function: types.FunctionType
    bound: int
    keywords: frozenset[str]


def _python_call(value: Any, bound: int) -> _Call | None:
    """What a call of `value` runs, by its own code: neither `__wrapped__` nor `__signature__`.

    inspect.signature would believe those, and sees callable objects, C functions and metaclasses
    differently from one Python version to the next; what it would have to guess is None here.
    """
    keywords: frozenset[str] = frozenset()
    for _ in range(20):  # a chain that is longer, or runs in a circle, is nobody's
        if type(value) is types.FunctionType:
            return _Call(value, bound, keywords)
        if type(value) is types.MethodType:
            value, bound = value.__func__, bound + 1
        elif type(value) is functools.partial:
            bound, keywords = bound + len(value.args), keywords | set(value.keywords)
            value = value.func
        else:
            value, more = _call_member(value)
            bound += more
    return None


def _call_member(value: object) -> tuple[object, int]:
    """What is called when `value`, a class or a callable object, is; and with how much more."""
    if type(value) is type:
        made = (_in_classes(_mro(value), name) for name in ("__new__", "__init__"))
        raws = (getattr(one.raw, "__func__", one.raw) for one in made if one is not None)
        return next((raw for raw in raws if type(raw) is types.FunctionType), None), 1
    call = None if issubclass(type(value), type) else _in_classes(_mro(type(value)), "__call__")
    if call is None:
        return None, 0
    if issubclass(type(call.raw), staticmethod):
        return call.raw.__func__, 0
    if issubclass(type(call.raw), classmethod):
        return call.raw.__func__, 1
    return (call.raw, 1) if type(call.raw) is types.FunctionType else (None, 0)


def _misfits(call: _Call, arguments: int) -> Iterator[str]:
    code, given = call.function.__code__, call.bound + arguments
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    required = code.co_argcount - len(call.function.__defaults__ or ())
    optional: dict[str, Any] = call.function.__kwdefaults__ or {}
    for name in names[code.co_argcount :]:
        if name not in optional and name not in call.keywords:
            yield f"needs the keyword-only argument {name!r}"
    if set(names[given:required]) - call.keywords:
        yield "needs more arguments than it gets"
    if given > code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
        yield "takes too few arguments"


class Judge:
    """`unusable` for one member, that remembers for which types it was usable.

    `believed` holds the id of a type and that of its function. A type is believed only while an
    object's bound method is made of that very function, so that a method deleted, replaced,
    shadowed on the instance or made static is judged anew; and only while both are alive, to which
    it refers weakly. Of a static method it is what the method gives, itself, that has to be there.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.believed: dict[int, int] = {}
        self._static: dict[int, int] = {}
        self._alive: dict[int, tuple[weakref.ref[Any], ...]] = {}
        self._lock = threading.RLock()  # a reference may die, and call, at any time

    def __call__(self, obj: object) -> Finding | None:
        static = self._static.get(id(type(obj)))
        with suppress(Exception):  # of what has taken its place, and is judged then
            if static is not None and id(getattr(obj, self.member.name, None)) == static:
                return None
        finding = unusable(obj, self.member)
        if finding is None:
            self._remember(obj)
        return finding

    def of_read(self, obj: object, value: object) -> Finding | None:
        """Why what was read from a judged object cannot be called, if it was only then to be seen.

        So it is with a property; what is remembered needs no second look.
        """
        cls = id(type(obj))
        if cls in self.believed or self._static.get(cls) == id(value):
            return None
        return unusable_callable(value, self.member)

    def _remember(self, obj: object) -> None:
        cls = type(obj)
        key = id(cls)

        def forget(_: object) -> None:
            with self._lock:
                self.believed.pop(key, None)
                self._static.pop(key, None)
                self._alive.pop(key, None)

        forget(None)  # what the class had before
        if overrides_getattribute(cls) or overrides_getattribute(type(cls)):
            return  # looking again would run it
        found = look_up(obj, self.member.name)
        if found is None or found.owner is None or issubclass(cls, type):
            return
        raw = found.raw
        function = raw.__func__ if type(raw) in (staticmethod, classmethod) else raw
        if type(function) is not types.FunctionType and type(raw) is not staticmethod:
            return
        # what is there now may be another than what was judged: another thread has replaced it
        bound = int(type(raw) is not staticmethod)
        if is_protocol(found.owner) or faults_of_callable(function, self.member, bound=bound):
            return
        remembered = self._static if type(raw) is staticmethod else self.believed
        with self._lock:
            try:
                self._alive[key] = weakref.ref(cls, forget), weakref.ref(function, forget)
            except TypeError:  # a callable that cannot be referred to weakly
                return
            remembered[key] = id(function)

    def or_else(self, otherwise: Callable[[object], T], yes: T) -> Callable[[object], T]:
        """A function that gives `yes` by the shortest way to what is remembered, for most objects.

        For the others it gives what `otherwise` makes of them.
        """
        believed, name = self.believed, self.member.name

        def judged(obj: object) -> T:
            known = believed.get(id(type(obj)))
            if known is not None:
                try:
                    method = getattr(obj, name, None)
                except Exception:  # of what has taken its place, and is judged then
                    return otherwise(obj)
                if type(method) is types.MethodType and id(method.__func__) == known:
                    return yes
            return otherwise(obj)

        return judged


def remembering(member: Member) -> Callable[[object], Finding | None]:
    """`unusable` for one member, that remembers."""
    judge = Judge(member)
    return judge.or_else(judge, None)


FROM_PP_TENSORS_JUDGE = Judge(FROM_PP_TENSORS)
TO_PP_TENSORS_JUDGE = Judge(TO_PP_TENSORS)
COPY_TO_HOST_JUDGE = Judge(COPY_TO_HOST)
judge_from_pp_tensors = FROM_PP_TENSORS_JUDGE.or_else(FROM_PP_TENSORS_JUDGE, None)
judge_to_pp_tensors = TO_PP_TENSORS_JUDGE.or_else(TO_PP_TENSORS_JUDGE, None)


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
