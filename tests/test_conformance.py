"""Promises of pp_protocol.conformance: what counts as usable, and what is remembered."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import subprocess
import types
import typing
import warnings
import weakref

import pytest
import typing_extensions
import usable_cases
from usable_cases import MEMBERS, Case, cases, instance, method, with_class_member

from pp_protocol import conformance, is_pp_observer, require_pp_observer, require_pp_output
from pp_protocol.conformance import FROM_PP_TENSORS, Judge, remembering, unusable
from pp_protocol.errors import UnsupportedObserverError, UnsupportedOutputError

ROOT = pathlib.Path(__file__).parent.parent
ALL = [pytest.param(m, c, id=f"{m.name}-{c.label}") for m in MEMBERS for c in cases(m)]


@pytest.mark.parametrize(("member", "case"), ALL)
def test_each_row_of_the_table_has_its_verdict(member: conformance.Member, case: Case) -> None:
    obj = case.make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = unusable(obj, member)
        remembered = remembering(member)
        again = [remembered(obj) for _ in range(2)]
    assert again == [finding, finding]
    if case.found is None:
        assert finding is None
    else:
        assert finding is not None
        assert case.found in finding.found
        assert finding.advice.endswith(".")
        assert ("with_pp_transport" in finding.advice) == ("__getattr__" in finding.found)


def _interpreters() -> list[str]:
    candidates = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    candidates += [str(p) for p in sorted(pyenv.glob("versions/3.1[0-9]*/bin/python"))]
    versions = {}
    for path in filter(None, candidates):
        out = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if out.returncode == 0:
            versions.setdefault(out.stdout.strip(), path)
    return sorted(versions.values())


@pytest.mark.processes
def test_every_interpreter_at_hand_gives_the_same_verdicts_without_torch(
    tmp_path: pathlib.Path,
) -> None:
    # typing_extensions is one file, so it can be lent to interpreters that have nothing installed
    shutil.copy(typing_extensions.__file__, tmp_path)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    here = usable_cases.verdicts()
    seen = set()
    for interpreter in _interpreters():
        for flags in ([], ["-O"]):
            out = subprocess.run(
                [interpreter, *flags, "-W", "error", usable_cases.__file__],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert out.returncode == 0, (interpreter, out.stderr)
            answer = json.loads(out.stdout)
            assert answer["verdicts"] == here, interpreter
            seen.add(tuple(answer["version"]))
    if not seen:
        pytest.skip("no other Python interpreter on this machine")
    assert seen


def test_a_guard_never_reads_a_property() -> None:
    read = []
    observer = instance("from_pp_tensors", property(lambda self: read.append(1)))
    assert is_pp_observer(observer)
    assert require_pp_observer(observer) is observer
    assert not read


class Interfering(type):
    """A metaclass that lets nobody read from its classes."""

    def __getattribute__(cls, name: str) -> object:
        raise AssertionError(f"{name} of the user's class was read")


def test_a_class_that_interferes_with_look_ups_is_judged_without_them() -> None:
    class Own:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} of the user's object was read")

        def from_pp_tensors(self, tensors): ...

    observers = [Own(), Interfering("O", (), {"from_pp_tensors": method(1)})()]
    for observer in observers:
        for _ in range(3):
            assert is_pp_observer(observer)
            assert not conformance.is_pp_output(observer)


def test_messages_can_be_made_of_any_class() -> None:
    class Meta(type):
        __module__ = property(lambda cls: 1 / 0)

    nameless = eval("type('Nameless', (), {})", {"type": type})
    for obj, name in ((Meta("Odd", (), {})(), "Odd"), (nameless(), "Nameless")):
        with pytest.raises(UnsupportedObserverError, match=f"{name} has no from_pp_tensors"):
            require_pp_observer(obj)
    with pytest.raises(UnsupportedObserverError, match="it is None"):
        require_pp_observer(None)


def test_instances_of_one_type_are_judged_apart() -> None:
    judge = remembering(FROM_PP_TENSORS)
    good = types.SimpleNamespace(from_pp_tensors=lambda tensors: None)
    assert judge(good) is None
    assert judge(types.SimpleNamespace()) is not None
    observer, shadowed = (instance("from_pp_tensors", method(1)) for _ in range(2))
    shadowed = type(observer)()
    assert judge(observer) is None
    shadowed.from_pp_tensors = None
    assert judge(shadowed) is not None
    assert judge(observer) is None


CHANGES = {
    "deleted": lambda cls: delattr(cls, "from_pp_tensors"),
    "replaced by one that does not fit": lambda cls: setattr(cls, "from_pp_tensors", method(2)),
    "set to None": lambda cls: setattr(cls, "from_pp_tensors", None),
    "made static": lambda cls: setattr(
        cls, "from_pp_tensors", staticmethod(cls.__dict__["from_pp_tensors"])
    ),
    "replaced by a coroutine function": lambda cls: setattr(
        cls, "from_pp_tensors", method(1, prefix="async def")
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("inherited", [False, True])
def test_a_change_of_the_class_after_a_success_is_seen(
    change: typing.Callable[[type], None], inherited: bool
) -> None:
    judge = remembering(FROM_PP_TENSORS)
    observer = instance("from_pp_tensors", method(1))
    base = type(observer)
    if inherited:
        observer = type("Sub", (base,), {})()
    for _ in range(3):
        assert judge(observer) is None
    change(base)
    for _ in range(3):
        assert judge(observer) is not None


def test_a_function_remembered_for_one_class_is_judged_anew_in_another() -> None:
    judge = remembering(FROM_PP_TENSORS)
    shared = method(1)
    assert judge(instance("from_pp_tensors", shared)) is None
    assert judge(instance("from_pp_tensors", staticmethod(shared))) is not None


def test_nothing_that_is_remembered_keeps_classes_or_observers_alive() -> None:
    judge = Judge(FROM_PP_TENSORS)

    def remember_one() -> tuple[weakref.ref[object], ...]:
        observer = instance("from_pp_tensors", method(1))
        assert judge(observer) is None
        assert is_pp_observer(observer)
        return (
            weakref.ref(observer),
            weakref.ref(type(observer)),
            weakref.ref(type(observer).from_pp_tensors),
        )

    dead = [ref for _ in range(50) for ref in remember_one()]
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert judge.believed == {}


def test_require_returns_its_argument_or_says_what_is_wrong() -> None:
    class Observer:
        def from_pp_tensor(self, tensors): ...

    good = instance("to_pp_tensors", method(0))
    assert require_pp_output(good) is good
    with pytest.raises(UnsupportedObserverError) as caught:
        require_pp_observer(Observer())
    assert str(caught.value).startswith(
        "sampling observer does not support pipeline-parallel transport: "
    )
    assert f"{__name__}.{Observer.__qualname__} has no from_pp_tensors" in str(caught.value)
    assert "Define from_pp_tensors(tensors)" in str(caught.value)
    with pytest.raises(UnsupportedOutputError, match="has no to_pp_tensors"):
        require_pp_output(Observer())


def test_python_s_own_isinstance_takes_more_than_the_guards_do() -> None:
    """Why the guards exist: a name is all that a runtime protocol looks for."""
    from pp_protocol import PipelineParallelSamplingObserver

    observer = instance("from_pp_tensors", method(5))
    assert isinstance(observer, PipelineParallelSamplingObserver)
    assert not is_pp_observer(observer)


def test_what_another_thread_puts_there_is_not_believed_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cls = with_class_member("from_pp_tensors", method(1))
    judge = Judge(FROM_PP_TENSORS)
    real = conformance.unusable

    def while_another_thread_works(obj: object, member: conformance.Member) -> object:
        found = real(obj, member)
        cls.from_pp_tensors = method(1, prefix="async def")
        return found

    monkeypatch.setattr(conformance, "unusable", while_another_thread_works)
    assert judge(cls()) is None  # as it was judged
    monkeypatch.undo()
    assert judge(cls()) is not None
    assert judge.believed == {}


def test_a_class_that_is_judged_says_nothing_of_other_classes() -> None:
    def shared(tensors: object) -> None: ...

    static = with_class_member("from_pp_tensors", staticmethod(shared))
    plain = with_class_member("from_pp_tensors", shared)
    assert not is_pp_observer(plain)
    assert is_pp_observer(static)
    assert not is_pp_observer(plain)


def test_a_property_that_takes_the_place_and_raises_does_not_come_out_of_a_guard() -> None:
    def raises(self: object) -> None:
        raise OSError("not now")

    for was in (method(1), staticmethod(lambda tensors: None)):
        observer = instance("from_pp_tensors", was)
        assert is_pp_observer(observer)
        type(observer).from_pp_tensors = property(raises)
        assert is_pp_observer(observer)  # as any property: the boundary reads it
