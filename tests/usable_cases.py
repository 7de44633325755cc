"""The design's table of what "usable" means, for any member; needs no torch and no pytest.

Run as a script it prints the verdicts as JSON, which is how other interpreters are asked.
"""

from __future__ import annotations

import enum
import functools
import json
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, Mock

import typing_extensions

from pp_protocol import conformance
from pp_protocol.conformance import Member


class Case(NamedTuple):
    label: str
    make: Callable[[], Any]
    found: str | None
    """What a refusal says; None where the member is usable."""


def method(arity: int, body: str = "return None", keyword: str = "", prefix: str = "def") -> Any:
    """A function of `self` and `arity` further positional parameters."""
    parameters = ", ".join(["self", *(f"a{i}" for i in range(arity))])
    namespace: dict[str, Any] = {}
    exec(f"{prefix} f({parameters}{keyword}):\n    {body}\n", namespace)
    return namespace["f"]


def function(arity: int, body: str = "return None", keyword: str = "", prefix: str = "def") -> Any:
    bound = functools.partial(method, arity - 1) if arity else None
    if bound is not None:
        return bound(body, keyword, prefix)
    namespace: dict[str, Any] = {}
    exec(f"{prefix} f({keyword.removeprefix(', ')}):\n    {body}\n", namespace)
    return namespace["f"]


def with_class_member(name: str, value: Any, *bases: type) -> type:
    return types.new_class("Observer", bases, {}, lambda body: body.update({name: value}))


def instance(name: str, value: Any, *bases: type) -> Any:
    return with_class_member(name, value, *bases)()


def wrapped(inner: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return wrapper


class Callables:
    """Callable objects of every kind, made for `arity` arguments."""

    def __init__(self, arity: int) -> None:
        self.good = instance("__call__", method(arity))
        self.async_call = instance("__call__", method(arity, prefix="async def"))


class Refusing:
    """A descriptor that fails the test when a guard reads it."""

    def __get__(self, obj: object, owner: type | None = None) -> Any:
        raise AssertionError("a guard read a descriptor")


def raising_signature(arity: int) -> Any:
    class Unreadable:
        @property
        def __signature__(self) -> Any:
            raise OSError("no signature to be had")

        def __call__(self, *args: Any) -> None: ...

    return Unreadable()


def protocol_with(protocol: Any, name: str, arity: int) -> type:
    return types.new_class(
        "EngineProtocol", (protocol,), {}, lambda body: body.update({name: method(arity)})
    )


def slotted(name: str, value: Any = None, *, filled: bool = True) -> Any:
    obj = types.new_class("Slotted", (), {}, lambda body: body.update(__slots__=(name,)))()
    if filled:
        setattr(obj, name, value)
    return obj


def via_getattribute(name: str) -> Any:
    class Proxy:
        def __getattribute__(self, wanted: str) -> Any:
            return (lambda *args: None) if wanted == name else object.__getattribute__(self, wanted)

    return Proxy()


def via_getattr(name: str) -> Any:
    class Handle:
        def __getattr__(self, wanted: str) -> Any:
            return lambda *args: None

    return Handle()


def cases(member: Member) -> Iterator[Case]:
    name, n = member.name, len(member.arguments)
    good = method(n)
    plain = function(n)

    def no_self(*args: Any) -> None: ...

    yield Case("a method on the class", lambda: instance(name, good), None)
    yield Case("an inherited method", lambda: type("Sub", (with_class_member(name, good),), {})(), None)
    yield Case("a function in a SimpleNamespace", lambda: types.SimpleNamespace(**{name: plain}), None)
    yield Case("a partial on the instance", lambda: types.SimpleNamespace(**{name: functools.partial(good, None)}), None)
    yield Case("a bound method of another object", lambda: types.SimpleNamespace(**{name: getattr(instance(name, good), name)}), None)
    yield Case("a callable object", lambda: types.SimpleNamespace(**{name: Callables(n).good}), None)
    yield Case("a callable object on the class", lambda: instance(name, Callables(n).good), None)
    yield Case("a mock that was put there", lambda: types.SimpleNamespace(**{name: Mock()}), None)
    yield Case("a slot that holds a function", lambda: slotted(name, plain), None)
    yield Case("a static method", lambda: instance(name, staticmethod(plain)), None)
    yield Case("a class method", lambda: instance(name, classmethod(good)), None)
    yield Case("a bound method on the class", lambda: instance(name, getattr(instance(name, good), name)), None)
    yield Case("optional further parameters", lambda: instance(name, method(n, keyword=", more=1, *, other=2")), None)
    yield Case("*args", lambda: instance(name, no_self), None)
    yield Case("a functools.wraps wrapper with *args", lambda: instance(name, wrapped(good)), None)
    yield Case("a wraps wrapper of what would not fit", lambda: instance(name, wrapped(method(n + 3))), None)
    yield Case("a static method of the class itself", lambda: with_class_member(name, staticmethod(plain)), None)
    yield Case("a class method of the class itself", lambda: with_class_member(name, classmethod(good)), None)
    yield Case("a method of the metaclass", lambda: with_class_member(name, good, type)("Cls", (), {}), None)
    yield Case("a module's function", lambda: _module(name, plain), None)
    yield Case("a property", lambda: instance(name, property(lambda self: 1 / 0)), None)
    yield Case("a cached property", lambda: instance(name, functools.cached_property(lambda self: 1 / 0)), None)
    yield Case("another descriptor", lambda: instance(name, Refusing()), None)
    yield Case("a partial method", lambda: instance(name, functools.partialmethod(good)), None)
    yield Case("a cached method", lambda: instance(name, functools.lru_cache(good)), None)
    yield Case("a C function of unknown signature", lambda: types.SimpleNamespace(**{name: max}), None)
    yield Case("a signature whose reader raises", lambda: types.SimpleNamespace(**{name: raising_signature(n)}), None)
    yield Case("a subclass of the Protocol that implements it", lambda: _constructed(with_class_member(name, good, _protocol_of(name))), None)

    yield Case("a callable object with a static __call__", lambda: types.SimpleNamespace(**{name: instance("__call__", staticmethod(plain))}), None)
    yield Case("a callable object with a __call__ of the class", lambda: types.SimpleNamespace(**{name: instance("__call__", classmethod(good))}), None)
    yield Case("a callable object whose __call__ is a partial", lambda: types.SimpleNamespace(**{name: instance("__call__", functools.partial(plain))}), None)
    yield Case("a class that is called", lambda: types.SimpleNamespace(**{name: with_class_member("__init__", good)}), None)
    yield Case("an Enum class that is called", lambda: instance(name, enum.Enum("E", "A B")), None)
    yield Case("a C callable", lambda: types.SimpleNamespace(**{name: operator.itemgetter(0)}), None)
    yield Case("a partial on the class", lambda: instance(name, functools.partial(good, None)), None)
    yield Case("a partial that gives the rest by keyword", lambda: types.SimpleNamespace(**{name: functools.partial(function(n + 1), **{f"a{n - 1}": 1}) if n else plain}), None)

    yield Case("a class that is called and needs more", lambda: types.SimpleNamespace(**{name: with_class_member("__init__", method(n + 1))}), "needs more arguments")
    yield Case("a partial on the class of an async function", lambda: instance(name, functools.partial(method(n, prefix="async def"), None)), "is async")
    yield Case("a partial on the class that needs more", lambda: instance(name, functools.partial(function(n + 2), None)), "needs more arguments")
    yield Case("a weak proxy", lambda: weakref.proxy(KEPT.setdefault(name, instance(name, good))), "only through __getattr__")
    yield Case("a slot of another class", lambda: instance(name, vars(type(slotted(name)))[name]), f"has no {name}")
    yield Case("nothing of that name", object, f"has no {name}")
    yield Case("None itself", lambda: None, f"has no {name}")
    yield Case("set to None on the class", lambda: instance(name, None), f"has {name} set to None")
    yield Case("set to None on the instance", lambda: _shadowed(name, good, None), f"has {name} set to None")
    yield Case("set to None in a subclass", lambda: type("Sub", (with_class_member(name, good),), {name: None})(), f"has {name} set to None")
    yield Case("a string", lambda: instance(name, "later"), "no method but str")
    yield Case("a string on the instance", lambda: _shadowed(name, good, "later"), "no method but str")
    yield Case("a static string", lambda: instance(name, staticmethod("later")), "no method but str")
    yield Case("an empty slot", lambda: slotted(name, filled=False), f"has no {name}")
    yield Case("a slot with None", lambda: slotted(name), f"has {name} set to None")
    for protocol in (typing.Protocol, typing_extensions.Protocol):
        yield Case(
            f"inherited from an engine's {protocol.__module__}.Protocol",
            lambda protocol=protocol: types.new_class("O", (protocol_with(protocol, name, n),))(),
            "from the Protocol EngineProtocol, unimplemented",
        )
    yield Case("inherited from our own Protocol", lambda: _unimplemented(name), "unimplemented")
    yield Case("the class for an instance", lambda: with_class_member(name, good), "is a class where an instance is meant")
    yield Case("too many required", lambda: instance(name, method(n + 1)), "needs more arguments")
    yield Case("takes one too few", lambda: instance(name, method(n - 1) if n else function(0)), "takes too few arguments")
    yield Case("without self", lambda: instance(name, function(n)), "takes too few arguments")
    yield Case("keyword-only", lambda: instance(name, method(n, keyword=", *, device")), "needs the keyword-only argument 'device'")
    yield Case("the class's own static method that does not fit", lambda: with_class_member(name, staticmethod(function(n + 1))), "needs more arguments")
    yield Case("a class method that needs more", lambda: instance(name, classmethod(method(n + 1))), "needs more arguments")
    yield Case("a static method that needs more", lambda: instance(name, staticmethod(function(n + 1))), "needs more arguments")
    yield Case("a partial that has bound too much", lambda: types.SimpleNamespace(**{name: functools.partial(function(n + 1), *range(2))}), "takes too few arguments")
    yield Case("a function that needs more, in a SimpleNamespace", lambda: types.SimpleNamespace(**{name: function(n + 1)}), "needs more arguments")
    yield Case("a bound method that needs more", lambda: types.SimpleNamespace(**{name: instance("m", method(n + 1)).m}), "needs more arguments")
    yield Case("an unfitting function that declares a fitting signature", lambda: instance(name, _declaring(method(n + 1), good)), "needs more arguments")
    yield Case("async", lambda: instance(name, method(n, prefix="async def")), "is async")
    yield Case("async on the instance", lambda: types.SimpleNamespace(**{name: function(n, prefix="async def")}), "is async")
    yield Case("an async static method", lambda: instance(name, staticmethod(function(n, prefix="async def"))), "is async")
    yield Case("an async class method", lambda: instance(name, classmethod(method(n, prefix="async def"))), "is async")
    yield Case("a partial of an async function", lambda: types.SimpleNamespace(**{name: functools.partial(method(n, prefix="async def"), None)}), "is async")
    yield Case("an async __call__", lambda: types.SimpleNamespace(**{name: Callables(n).async_call}), "is async")
    yield Case("a generator", lambda: instance(name, method(n, body="yield")), "is a generator")
    yield Case("an async generator", lambda: instance(name, method(n, body="yield", prefix="async def")), "is an async generator")
    yield Case("a generator-based coroutine", lambda: instance(name, types.coroutine(method(n, body="yield"))), "is a generator-based coroutine")
    yield Case("a bare mock", Mock, "only through __getattr__")
    yield Case("an async mock", AsyncMock, "only through __getattr__")
    yield Case("a mock of what conforms", lambda: Mock(spec=with_class_member(name, good)), "only through __getattr__")
    yield Case("a remote handle", lambda: via_getattr(name), "only through __getattr__")
    yield Case("a forwarding __getattribute__", lambda: via_getattribute(name), "only through __getattr__")


KEPT: dict[str, Any] = {}
"""What weak proxies refer to."""


def _module(name: str, value: Any) -> types.ModuleType:
    module = types.ModuleType("a_module")
    setattr(module, name, value)
    return module


def _shadowed(name: str, on_class: Any, on_instance: Any) -> Any:
    obj = instance(name, on_class)
    setattr(obj, name, on_instance)
    return obj


def _declaring(function: Any, shown: Any) -> Any:
    import inspect

    function.__signature__ = inspect.signature(shown)
    return function


def _protocol_of(name: str) -> type:
    from pp_protocol import contract

    for protocol in (
        contract.PipelineParallelSamplingObserver,
        contract.PipelineParallelAuxiliaryOutput,
        contract.DeviceAuxiliaryOutput,
        contract.HostAuxiliaryOutput,
        contract.SamplingObserver,
    ):
        if name in vars(protocol):
            return protocol
    raise LookupError(name)


def _unimplemented(name: str) -> Any:
    protocol = _protocol_of(name)
    return _constructed(types.new_class("Forgetful", (protocol,)))


def _constructed(cls: Any) -> Any:
    cls.__abstractmethods__ = frozenset()  # ours forbid an incomplete subclass; an engine's do not
    return cls()


MEMBERS = [
    conformance.FROM_PP_TENSORS,
    conformance.TO_PP_TENSORS,
    conformance.COPY_TO_HOST,
    conformance.CONSUME,
    conformance.IS_ACTIVE,
    conformance.BEFORE_GRAMMAR,
    conformance.AFTER_SAMPLE,
]


def verdicts() -> dict[str, str | None]:
    found = {}
    for member in MEMBERS:
        for case in cases(member):
            finding = conformance.unusable(case.make(), member)
            found[f"{member.name}: {case.label}"] = finding and finding.found
    return found


if __name__ == "__main__":
    assert "torch" not in sys.modules
    json.dump({"version": sys.version_info[:2], "verdicts": verdicts()}, sys.stdout)
