"""Promises of pp_boundary: the Protocols in a signature are enforced, and nothing else changes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Optional
from unittest import mock

import pytest
import torch
import typing_extensions
from observers import Observer, Output, Reprless

from pp_protocol import (
    DeviceAuxiliaryOutput,
    HostAuxiliaryOutput,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
    PPCapableObserver,
    PPCapableOutput,
    SamplingObserver,
    errors,
    pp_boundary,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

GOOD, OUTPUT = Observer(), Output({})


@pp_boundary
def plain(observer: PPCapableObserver, scale: int = 2) -> int:
    """Documented."""
    return scale


@pp_boundary()
def with_parentheses(observer: PipelineParallelSamplingObserver | None = None) -> str:
    return "ran"


@pp_boundary
def optional(observer: Optional[PipelineParallelSamplingObserver[Output]]) -> str:  # noqa: UP045
    return "ran"


@pp_boundary
def annotated(observer: Annotated[PPCapableObserver[Output], "metadata"]) -> str:
    return "ran"


@pp_boundary
def keyword_only(*, observer: PipelineParallelSamplingObserver) -> str:
    return "ran"


@pp_boundary
def variadic(*observers: PipelineParallelSamplingObserver) -> str:
    return "ran"


@pp_boundary
def by_name(**observers: PipelineParallelSamplingObserver) -> str:
    return "ran"


@pp_boundary
def beside_unknown(batch: ScheduleBatch | None, observer: PipelineParallelSamplingObserver) -> str:
    return "ran"


@pp_boundary
@torch.no_grad()
def under_no_grad(observer: PipelineParallelSamplingObserver, scale: int = 1) -> str:
    return "ran"


def passing_on(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


class Engine:
    @pp_boundary
    def method(self, observer: PipelineParallelSamplingObserver) -> str:
        return "ran"

    @staticmethod
    @pp_boundary
    def static(observer: PipelineParallelSamplingObserver) -> str:
        return "ran"

    @pp_boundary
    @staticmethod
    def over_static(observer: PipelineParallelSamplingObserver) -> str:
        return "ran"

    @classmethod
    @pp_boundary
    def of_class(cls, observer: PipelineParallelSamplingObserver) -> str:
        return "ran"

    @pp_boundary
    @classmethod
    def over_class(cls, observer: PipelineParallelSamplingObserver) -> str:
        return "ran"

    @pp_boundary
    @passing_on
    def wrapped(self, observer: PipelineParallelSamplingObserver) -> str:
        return "ran"


CALLS = {
    "plain": lambda x: plain(x),
    "by keyword": lambda x: plain(observer=x),
    "with parentheses": lambda x: with_parentheses(x),
    "Optional": lambda x: optional(x),
    "Annotated": lambda x: annotated(x),
    "keyword-only": lambda x: keyword_only(observer=x),
    "*args": lambda x: variadic(GOOD, x),
    "**kwargs": lambda x: by_name(a=GOOD, b=x),
    "beside a name that only exists while type checking": lambda x: beside_unknown(None, x),
    "and before a value of it": lambda x: beside_unknown(object(), x),
    "under torch.no_grad()": lambda x: under_no_grad(x),
    "under torch.no_grad(), by keyword": lambda x: under_no_grad(scale=3, observer=x),
    "a method": lambda x: Engine().method(x),
    "a static method": lambda x: Engine.static(x),
    "over a static method": lambda x: Engine().over_static(x),
    "a class method": lambda x: Engine.of_class(x),
    "over a class method": lambda x: Engine().over_class(x),
    "a method behind a wrapper": lambda x: Engine().wrapped(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wrong_observer_is_refused_and_a_right_one_passes(call) -> None:
    assert call(GOOD) in ("ran", 2)
    for wrong in (object(), Observer, Reprless(), 3):
        with pytest.raises((errors.UnsupportedObserverError, errors.ContractViolationError)) as e:
            call(wrong)
        assert "'observer" in str(e.value) or "'observers'" in str(e.value)
        assert "test_boundary." in str(e.value)
        assert "pp-protocol explain" in str(e.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_none_is_named_as_such_where_it_is_not_allowed(call) -> None:
    if call in (CALLS["with parentheses"], CALLS["Optional"]):
        assert call(None) == "ran"
        return
    with pytest.raises(errors.MissingObserverError, match=r"which has no \w+: it is None"):
        call(None)


KINDS = {
    HostAuxiliaryOutput: (OUTPUT, errors.ContractViolationError, "consume"),
    DeviceAuxiliaryOutput: (OUTPUT, errors.ContractViolationError, "copy_to_host"),
    SamplingObserver: (GOOD, errors.ContractViolationError, "is_active"),
    PipelineParallelAuxiliaryOutput: (OUTPUT, errors.UnsupportedOutputError, "to_pp_tensors"),
    PipelineParallelSamplingObserver: (GOOD, errors.UnsupportedObserverError, "from_pp_tensors"),
    PPCapableOutput: (OUTPUT, errors.ContractViolationError, "copy_to_host"),
    PPCapableObserver: (GOOD, errors.ContractViolationError, "is_active"),
}


@pytest.mark.parametrize("protocol", KINDS)
def test_each_protocol_is_enforced_going_in_and_coming_out(protocol) -> None:
    good, error, member = KINDS[protocol]

    def takes(x): ...

    def gives(x):
        return x

    takes.__annotations__ = {"x": protocol}
    gives.__annotations__ = {"return": protocol}
    takes, gives = pp_boundary(takes), pp_boundary(gives)
    takes(good)
    assert gives(good) is good
    with pytest.raises(error, match=f"parameter 'x' of .*takes, a {protocol.__name__}.*{member}"):
        takes(object())
    expected = errors.ReconstructionError if protocol is DeviceAuxiliaryOutput else error
    with pytest.raises(expected, match=f"the result of .*gives, a {protocol.__name__}"):
        gives(object())


def test_what_is_awaited_or_iterated_stays_so() -> None:
    @pp_boundary
    async def coroutine(observer: PipelineParallelSamplingObserver) -> DeviceAuxiliaryOutput:
        await asyncio.sleep(0)  # so that it is suspended once
        return observer.from_pp_tensors({})

    @pp_boundary
    async def later(
        observer: PipelineParallelSamplingObserver,
    ) -> typing.AsyncIterator[DeviceAuxiliaryOutput]:
        yield observer.from_pp_tensors({})

    @pp_boundary
    def generator(observer: PipelineParallelSamplingObserver) -> typing.Iterator[int]:
        yield 1

    async def run(observer):
        assert isinstance(await coroutine(observer), Output)
        return [output async for output in later(observer)]

    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert len(asyncio.run(run(GOOD))) == 1
    assert list(generator(GOOD)) == [1]
    for call in (coroutine, run):
        with pytest.raises(errors.UnsupportedObserverError):
            asyncio.run(call(object()))
    with pytest.raises(errors.UnsupportedObserverError):
        list(generator(object()))
    bad = types.SimpleNamespace(from_pp_tensors=lambda tensors: 3)
    with pytest.raises(errors.ReconstructionError):
        asyncio.run(coroutine(bad))


def test_a_wrapper_s_wrong_call_is_python_s_own_error() -> None:
    for call in (lambda: under_no_grad(), lambda: plain(), lambda: plain(GOOD, 1, 2)):
        with pytest.raises(TypeError):
            call()


def test_signature_name_and_docstring_are_kept() -> None:
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Documented."
    assert plain.__module__ == __name__
    assert (
        str(inspect.signature(plain))
        == "(observer: 'PPCapableObserver', scale: 'int' = 2) -> 'int'"
    )
    assert plain.__wrapped__.__name__ == "plain"
    assert typing_extensions.get_type_hints(plain)["scale"] is int


class Base:
    def method(self, observer: object) -> str:
        return "ran"


class WithSuper(Base):
    @pp_boundary
    def method(self, observer: PPCapableObserver) -> str:
        return super().method(observer)


def test_methods_that_use_super_and_names_that_are_bound_later() -> None:
    @pp_boundary
    def recursive(observer: PPCapableObserver, depth: int = 2) -> int:
        return recursive(observer, depth - 1) if depth else helper()

    def helper() -> int:
        return 7

    assert WithSuper().method(GOOD) == "ran"
    assert recursive(GOOD) == 7


NewObserver = typing.NewType("NewObserver", PPCapableObserver)
BoundT = typing.TypeVar("BoundT", bound=PPCapableObserver)
Alias = typing_extensions.TypeAliasType("Alias", "PPCapableObserver | None")
NESTED = {
    "a string inside": Optional["PPCapableObserver"],
    "a string inside Annotated": Annotated["PPCapableObserver", 1],
    "a string of a string": "'PPCapableObserver'",
    "a NewType": NewObserver,
    "a bound TypeVar": BoundT,
    "an alias": Alias,
}


@pytest.mark.parametrize("annotation", NESTED.values(), ids=NESTED)
def test_an_annotation_is_looked_through_to_the_protocol(annotation) -> None:
    def function(first: PPCapableObserver, second) -> None: ...

    function.__annotations__["second"] = annotation
    checked = pp_boundary(function)
    checked(GOOD, GOOD)
    with pytest.raises(errors.PPProtocolError, match="'second'"):
        checked(GOOD, object())


def test_a_wrapper_that_takes_other_parameters_is_refused() -> None:
    def inner(observer: PPCapableObserver, scale: int = 1) -> None: ...

    @functools.wraps(inner)
    def adds(timeout, *args, **kwargs): ...

    @functools.wraps(inner)
    def renames(obs, scale=1): ...

    @functools.wraps(inner)
    def swaps(scale, observer): ...

    for wrapper in (adds, renames, swaps):
        with pytest.raises(TypeError, match="takes other parameters than"):
            pp_boundary(wrapper)

    def undeclared(*args, **kwargs): ...

    undeclared.__signature__ = inspect.signature(inner)
    with pytest.raises(TypeError, match="nothing to check"):
        pp_boundary(undeclared)
    with pytest.raises(TypeError, match="decorates functions"):
        pp_boundary(functools.wraps(functools.partial(inner))(lambda *args, **kwargs: None))


def test_a_wrapper_may_add_arguments_itself() -> None:
    @pp_boundary
    @mock.patch("os.getcwd")
    def patched(observer: PPCapableObserver, getcwd) -> str:
        return "ran"

    assert patched(GOOD) == "ran"
    with pytest.raises(errors.PPProtocolError):
        patched(object())


def test_a_default_has_to_be_what_the_annotation_says() -> None:
    def function(observer: PPCapableObserver = None) -> None: ...  # the fault

    with pytest.raises(TypeError, match=r"the default of 'observer' of .* it is None"):
        pp_boundary(function)


def test_a_coroutine_under_a_plain_wrapper_is_checked_when_it_is_awaited() -> None:
    @pp_boundary
    @torch.no_grad()
    async def coroutine(observer: PipelineParallelSamplingObserver) -> DeviceAuxiliaryOutput:
        return observer.from_pp_tensors({})

    assert isinstance(asyncio.run(coroutine(GOOD)), Output)
    bad = types.SimpleNamespace(from_pp_tensors=lambda tensors: 3)
    with pytest.raises(errors.ReconstructionError):
        asyncio.run(coroutine(bad))


def nothing_to_check(x: int) -> int:
    return x


def allows_others(x: PPCapableObserver | int) -> None: ...


def unresolvable(x: PPCapableObserver | ScheduleBatch) -> None: ...


def in_a_list(x: list[PPCapableObserver]) -> None: ...


REFUSED = {
    "nothing to check": (nothing_to_check, "nothing to check in"),
    "other types too": (allows_others, "allows other types"),
    "a Protocol in an unresolvable annotation": (unresolvable, "cannot resolve"),
    "only inside a container": (in_a_list, "nothing to check in"),
    "no function": (functools.partial(plain), "decorates functions, not functools.partial"),
    "a class": (Observer, "decorates functions, not class observers.Observer"),
}


@pytest.mark.parametrize(("function", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_checked_is_refused_when_decorated(function, why) -> None:
    with pytest.raises(TypeError, match=why):
        pp_boundary(function)


def test_a_protocol_of_ones_own_module_under_type_checking_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "engine", "pp_boundary": pp_boundary}
    program = "from __future__ import annotations\ndef f(x: PPCapableObserver) -> None: ...\n"
    exec(program, namespace)
    with pytest.raises(TypeError, match="Import the Protocol where"):
        pp_boundary(namespace["f"])


def test_any_of_several_protocols_will_do() -> None:
    @pp_boundary
    def either(x: HostAuxiliaryOutput | PipelineParallelSamplingObserver) -> str:
        return "ran"

    assert either(GOOD) == either(OUTPUT) == "ran"
    with pytest.raises(errors.PPProtocolError):
        either(object())


def test_defaults_and_closures_work_as_before() -> None:
    count = 0

    @pp_boundary
    def counting(observer: PPCapableObserver = GOOD, *, step: int = 1) -> int:
        nonlocal count
        count += step
        return count

    assert [counting(), counting(step=2), counting(GOOD)] == [1, 3, 4]
    assert sys.getrefcount(counting) > 0
