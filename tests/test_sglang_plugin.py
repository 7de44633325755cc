"""Promises of the SGLang plug-in, through the released engine's own HookRegistry."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from engine import ENGINE_VERSION, engine_path

pytestmark = pytest.mark.processes
TESTS = pathlib.Path(__file__).parent

# A scheduler's module: it imports the two functions by name, before anything is replaced.
MIXIN = """
from sglang.srt.sampling.sampling_observer_pp import (
    add_auxiliary_output_to_pp_tensors, pop_auxiliary_output_from_pp_tensors)
class SchedulerPPMixin:
    def init_pp_loop_state(self): self.started = True
"""
PRELUDE = """
import logging, sys, types
import torch
import sglang; sglang.__version__ = "{version}"
from observers import Observer, Output
from sglang.srt.managers import scheduler_pp_mixin as mixin
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling import sampling_observer_pp as stock_module
import pp_protocol
from pp_protocol import sglang_plugin
from pp_protocol.sglang_plugin import install, plugin, status
STOCK = {{name: getattr(mixin, name) for name in (sglang_plugin.ADD, sglang_plugin.POP)}}
POP = "sglang.srt.sampling.sampling_observer_pp.pop_auxiliary_output_from_pp_tensors"
LOOP = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin.init_pp_loop_state"
def scheduler(observer, first=True, last=None):
    made = mixin.SchedulerPPMixin()
    made.tp_worker = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(sampling_observer=observer))
    last = not first if last is None else last
    made.pp_group = types.SimpleNamespace(is_first_rank=first, is_last_rank=last)
    return made
def received(value=1.0):
    return {{pp_protocol.PREFIX + "x": torch.tensor(value), "other": 1}}
logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s")
"""


@pytest.fixture
def engine(tmp_path: pathlib.Path) -> pathlib.Path:
    """The engine's real modules, and beside them a scheduler module that can be imported here."""
    import shutil

    shutil.copytree(engine_path(), tmp_path / "engine")
    (tmp_path / "engine/sglang/srt/managers/scheduler_pp_mixin.py").write_text(MIXIN)
    return tmp_path / "engine"


def run(program: str, engine: pathlib.Path, *flags: str, **environment: str) -> str:
    path = os.pathsep.join([str(engine), str(TESTS.parent), str(TESTS)])
    code = PRELUDE.format(version=ENGINE_VERSION) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, *flags, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_installed_and_not_switched_on_it_changes_nothing(engine: pathlib.Path) -> None:
    out = run(
        """
        plugin(); HookRegistry.apply_hooks()
        assert all(getattr(mixin, n) is f for n, f in STOCK.items())
        assert not status().installed and not status().ok
        assert "install() was not called" in str(status())
        """,
        engine,
    )
    assert out.count("DEBUG pp_protocol is installed but not switched on") == 1


@pytest.mark.parametrize(
    "switch",
    [{"PP_PROTOCOL_SGLANG": "1"}, {"SGLANG_PLUGINS": "other, pp_protocol"}, {}],
    ids=["by its own variable", "by the engine's list", "by another plug-in"],
)
@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "-O"])
def test_switched_on_it_replaces_both_functions_and_every_alias(
    switch: dict[str, str], flags: tuple[str, ...], engine: pathlib.Path
) -> None:
    out = run(
        f"""
        installed = {"plugin()" if switch else "install()"}
        assert install() and install()  # idempotent
        HookRegistry.apply_hooks()
        found = status()
        assert found.installed and found.ok, str(found)
        assert [f.why for f in found.functions] == ["active", "active"]
        assert found.engine == "{ENGINE_VERSION}"
        assert all(
            getattr(mixin, n) is getattr(stock_module, n) is not f for n, f in STOCK.items())
        tensors = {{"other": 1}}
        mixin.add_auxiliary_output_to_pp_tensors(tensors, Output({{"x": torch.ones(2, 3).T}}))
        assert tensors[pp_protocol.PREFIX + "x"].is_contiguous()  # which stock does not care for
        output = mixin.pop_auxiliary_output_from_pp_tensors(tensors, Observer())
        assert list(output.tensors) == ["x"] and tensors == {{"other": 1}}
        try: mixin.pop_auxiliary_output_from_pp_tensors(received(), object())
        except pp_protocol.UnsupportedObserverError: pass
        else: raise SystemExit("not refused")
        one = scheduler(Observer()); one.init_pp_loop_state(); assert one.started
        """,
        engine,
        *flags,
        **switch,
    )
    assert "INFO pp_protocol" in out
    assert "add_auxiliary_output_to_pp_tensors: checked, active" in out
    assert "NOT" not in out


def test_the_entry_point_is_what_the_engine_looks_for(engine: pathlib.Path) -> None:
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "pp_protocol"]
    assert entry.value == "pp_protocol.sglang_plugin:plugin"


def test_an_observer_that_cannot_do_its_part_is_refused_before_the_loop(
    engine: pathlib.Path,
) -> None:
    program = """
        install(); HookRegistry.apply_hooks()
        class CannotRebuild(Observer): from_pp_tensors = None
        class NoHook(Observer): is_active = None
        def starts(observer, first):
            made = scheduler(observer, first)
            try: made.init_pp_loop_state()
            except pp_protocol.ConformanceError as error:
                assert "pp-protocol explain conformance" in str(error)
                assert "has from_pp_tensors set to None" in str(error) or "is_active" in str(error)
                return False
            return made.started
        print([starts(CannotRebuild(), True), starts(CannotRebuild(), False),
               starts(NoHook(), True), starts(NoHook(), False),
               starts(None, True), starts(Observer(), True)])
        class Neither: "on a rank in the middle nothing is asked of it"
        middle = scheduler(Neither(), first=False, last=False)
        middle.init_pp_loop_state(); assert middle.started
        """
    assert "[False, True, True, False, True, True]" in run(program, engine)
    out = run(program, engine, PP_PROTOCOL_START_CHECK="0")
    assert "[True, True, True, True, True, True]" in out
    out = run(program, engine, PP_PROTOCOL_START_CHECK="false")
    assert "PP_PROTOCOL_START_CHECK is 'false', neither 0 nor 1: taken for 1" in out
    assert "[False, True, True, False, True, True]" in out


ODD_SCHEDULERS = """
class Raises:
    def __getattr__(self, name): raise RuntimeError("not built")
class Looped(Observer):
    def from_pp_tensors(self, tensors): ...
Looped.from_pp_tensors.__wrapped__ = Looped.from_pp_tensors
"""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("mixin.SchedulerPPMixin()", "has no attribute 'tp_worker'"),
        ("scheduler(Observer()); one.tp_worker = Raises()", "not built"),
        ("scheduler(Observer(), first=lambda: True)", "are no bools"),
        ("scheduler(Looped())", ""),
    ],
)
def test_a_scheduler_of_another_shape_starts_all_the_same(
    made: str, told: str, engine: pathlib.Path
) -> None:
    program = f"""
install(); HookRegistry.apply_hooks()
{ODD_SCHEDULERS}
one = {made}
one.init_pp_loop_state(); print(one.started)
"""
    out = run(program, engine)
    assert "True" in out
    warned = "WARNING pp_protocol cannot check the observer of this engine"
    assert (warned in out and told in out) if told else warned not in out


def test_an_installation_that_did_not_take_cannot_be_missed(engine: pathlib.Path) -> None:
    out = run(
        """
        def theirs(tensors, observer): return "theirs"
        HookRegistry.register(POP, theirs, HookType.REPLACE)
        HookRegistry.apply_hooks()  # from now on a second REPLACE of it has no effect
        install(); HookRegistry.apply_hooks()
        add, pop = status().functions
        assert add.active and not pop.active, str(status())
        assert pop.why.endswith("calls is another plug-in's: __main__.theirs"), pop.why
        assert install() is False
        assert not status().ok
        scheduler(None).init_pp_loop_state()
        """,
        engine,
    )
    assert out.count("ERROR pp_protocol IS SWITCHED ON AND NOT (FULLY) ACTIVE") == 2


NOT_OURS = {  # what another plug-in does, and what the status says of the pop
    "a replacement that keeps ours in its closure": (
        """
        def factory(ours):
            def theirs(tensors, observer): return ours and "theirs"
            return theirs
        install()
        HookRegistry.register(POP, factory(pp_protocol.pop_auxiliary_output_from_pp_tensors),
                              HookType.REPLACE)
        """,
        "theirs",
    ),
    "a hook that keeps ours, and a replacement": (
        """
        def factory(ours):
            def look(tensors, observer): assert ours
            return look
        HookRegistry.register(POP, factory(pp_protocol.pop_auxiliary_output_from_pp_tensors),
                              HookType.BEFORE)
        install()
        def theirs(tensors, observer): return "theirs"
        HookRegistry.register(POP, theirs, HookType.REPLACE)
        """,
        "__main__.theirs",
    ),
    "a binding of the scheduler's module": (
        """
        def theirs(tensors, observer): return "theirs"
        mixin.pop_auxiliary_output_from_pp_tensors = theirs
        install()
        """,
        "scheduler_pp_mixin calls is another plug-in's: __main__.theirs",
    ),
    "an object": (
        """
        class Theirs:
            def __call__(self, tensors, observer): return "theirs"
        install()
        HookRegistry.register(POP, lambda f, *a: f(*a), HookType.AROUND)
        HookRegistry.register(POP, Theirs(), HookType.REPLACE)
        """,
        "calls is another plug-in's: __main__.Theirs",
    ),
}


@pytest.mark.parametrize("how", NOT_OURS)
def test_whatever_else_is_called_is_named(how: str, engine: pathlib.Path) -> None:
    program, why = NOT_OURS[how]
    judged = f"""
HookRegistry.apply_hooks()
add, pop = status().functions
assert add.active and not pop.active and not status().ok, str(status())
assert {why!r} in pop.why, pop.why
assert mixin.pop_auxiliary_output_from_pp_tensors({{}}, None) == "theirs"
"""
    run(textwrap.dedent(program) + judged, engine)


def test_a_hook_with_an_empty_cell_and_modules_that_are_odd_do_not_disturb_the_status(
    engine: pathlib.Path,
) -> None:
    run(
        """
        def make():
            def theirs(tensors, observer): return helper(tensors)
            if False: helper = None
            return theirs
        install()
        HookRegistry.register(POP, make(), HookType.BEFORE)
        HookRegistry.apply_hooks()
        class Lazy(types.ModuleType):
            def __getattribute__(self, name): raise OSError("it was loaded")
        sys.modules["lazy"] = Lazy("lazy"); sys.modules["no_module"] = object()
        assert status().ok, str(status())
        """,
        engine,
    )


@pytest.mark.parametrize("on_error", ["raise", "discard"])
def test_an_engine_that_holds_our_functions_already_works(
    on_error: str, engine: pathlib.Path
) -> None:
    run(
        """
        for n in (sglang_plugin.ADD, sglang_plugin.POP):
            setattr(stock_module, n, getattr(pp_protocol, n))
            setattr(mixin, n, getattr(pp_protocol, n))
        assert not status().ok
        install(); HookRegistry.apply_hooks()
        assert status().functions[0].active and status().functions[1].active, str(status())
        output = mixin.pop_auxiliary_output_from_pp_tensors(received(), Observer())
        assert list(output.tensors) == ["x"] and status().discarded == {}
        """,
        engine,
        PP_PROTOCOL_ON_ERROR=on_error,
    )


def test_a_hook_before_the_loop_that_is_not_there_is_told(engine: pathlib.Path) -> None:
    run(
        """
        HookRegistry.register(LOOP, lambda *a: None, HookType.BEFORE)
        HookRegistry.apply_hooks()
        install(); HookRegistry.apply_hooks()
        found = status()
        assert all(one.active for one in found.functions) and not found.before_loop.active
        assert not found.ok and "came when the hooks of" in str(found), str(found)
        """,
        engine,
    )


def test_a_registry_that_fails_half_way_is_left_as_it_was(engine: pathlib.Path) -> None:
    out = run(
        """
        import enum
        import sglang.srt.plugins.hook_registry as registry
        registry.HookType = enum.Enum("HookType", ["REPLACE"])  # and no BEFORE
        assert install() is False and not status().installed
        assert not any(HookRegistry._hooks.values()), HookRegistry._hooks
        """,
        engine,
    )
    assert f"does not fit SGLang {ENGINE_VERSION}, which is left as it is" in out


def test_a_later_replacement_that_wins_is_seen_though_wrapped_shows_the_stock_one(
    engine: pathlib.Path,
) -> None:
    run(
        """
        install()
        def theirs(tensors, observer): return "theirs"
        HookRegistry.register(POP, theirs, HookType.REPLACE)
        HookRegistry.apply_hooks()
        add, pop = status().functions
        assert add.active and not pop.active, str(status())
        assert mixin.pop_auxiliary_output_from_pp_tensors({}, None) == "theirs"
        """,
        engine,
    )


def test_hooks_around_the_checked_function_leave_it_active(engine: pathlib.Path) -> None:
    run(
        """
        install()
        HookRegistry.register(POP, lambda f, *a, **k: f(*a, **k), HookType.AROUND)
        HookRegistry.register(POP, lambda *a, **k: None, HookType.BEFORE)
        HookRegistry.apply_hooks()
        assert status().ok, str(status())
        """,
        engine,
    )


def test_before_the_hooks_are_applied_and_with_stale_aliases_the_status_says_so(
    engine: pathlib.Path,
) -> None:
    run(
        """
        install()
        assert "the hooks are not applied (yet)" in str(status())
        HookRegistry.apply_hooks()
        late = types.ModuleType("late"); late.stale = STOCK[sglang_plugin.POP]
        sys.modules["late"] = late
        found = status()
        assert found.functions[1].active and not found.ok
        assert found.functions[1].stock_aliases == ("late.stale",)
        """,
        engine,
    )


def test_discard_drops_the_payload_logs_once_per_code_and_counts(engine: pathlib.Path) -> None:
    out = run(
        """
        install(); HookRegistry.apply_hooks()
        class Raises(Observer):
            def from_pp_tensors(self, tensors): raise LookupError("the observer's own")
        pop = mixin.pop_auxiliary_output_from_pp_tensors
        for observer in (object(), object(), Raises(), None):
            tensors = received()
            assert pop(tensors, observer) is None
            assert tensors == {"other": 1}
        assert pop(received(), Observer()).tensors["x"] == 1
        expected = {"unsupported-observer": 2, "observer-raised": 1, "missing-observer": 1}
        assert status().discarded == expected, status().discarded
        import os; os.environ["PP_PROTOCOL_ON_ERROR"] = "raise"  # too late to change anything
        assert status().on_error == "discard" and status().ok
        assert "unsupported-observer: 2" in str(status())
        try: pop([], None)
        except pp_protocol.WireError: pass
        else: raise SystemExit("a wrong dict is the engine's fault")
        class AddsToNoDict(Observer):
            def from_pp_tensors(self, tensors):
                pp_protocol.add_auxiliary_output_to_pp_tensors([], Output({}))
        assert pop(received(), AddsToNoDict()) is None
        assert status().discarded["wire"] == 1
        """,
        engine,
        PP_PROTOCOL_ON_ERROR="discard",
    )
    assert out.count("ERROR pp_protocol dropped the auxiliary output ['x']") == 4
    assert "the observer's own" in out


def test_an_unknown_choice_is_taken_for_raise_with_a_warning(engine: pathlib.Path) -> None:
    out = run(
        """
        install(); HookRegistry.apply_hooks()
        try: mixin.pop_auxiliary_output_from_pp_tensors(received(), None)
        except pp_protocol.MissingObserverError: pass
        else: raise SystemExit("not raised")
        """,
        engine,
        PP_PROTOCOL_ON_ERROR="ignore",
    )
    assert out.count("WARNING PP_PROTOCOL_ON_ERROR is 'ignore', neither raise nor discard") == 1


def test_a_switch_that_is_neither_0_nor_1_is_warned_of(engine: pathlib.Path) -> None:
    out = run(
        """
        import os
        for value in ("true", "yes", "2"):
            os.environ["PP_PROTOCOL_SGLANG"] = value
            plugin()
            assert not status().installed
        os.environ["PP_PROTOCOL_SGLANG"] = " 1 "
        plugin()
        assert status().installed
        """,
        engine,
    )
    for value in ("true", "yes", "2"):
        assert f"WARNING PP_PROTOCOL_SGLANG is '{value}', neither 0 nor 1: taken for 0" in out
    assert out.count("WARNING") == 3


@pytest.mark.parametrize(
    "lacking", ["sampling_observer_pp.py", "function", "loop", "hook_registry.py"]
)
def test_an_engine_that_lacks_the_target_is_left_alone_with_a_clear_warning(
    lacking: str, engine: pathlib.Path
) -> None:
    sampling = engine / "sglang/srt/sampling/sampling_observer_pp.py"
    if lacking == "hook_registry.py":
        (engine / "sglang/srt/plugins/hook_registry.py").unlink()
    elif lacking == "loop":
        mixin = engine / "sglang/srt/managers/scheduler_pp_mixin.py"
        mixin.write_text(mixin.read_text().replace("def init_pp", "def other_pp"))
    elif lacking == "function":
        text = sampling.read_text()
        sampling.write_text(text.replace("def pop_auxiliary", "def other_auxiliary"))
    else:
        sampling.unlink()
    program = """
import logging, sys
import sglang; sglang.__version__ = "0.0.1"
logging.basicConfig()
from pp_protocol.sglang_plugin import install, status
before = dict(vars(sys.modules.get("sglang.srt.sampling.sampling_observer_pp", sys)))
assert install() is False
assert not status().installed and not status().ok
assert "does not have what it replaces" in str(status())
"""
    path = os.pathsep.join([str(engine), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "does not fit SGLang 0.0.1, which is left as it is" in done.stderr


WORLD = """
import torch.distributed as dist
class _World: cpu_group = None
def get_world_group(): return _World
"""
RANK = """
import os
import torch.distributed as dist
import sglang.srt.distributed.parallel_state as state
rank, store = int(os.environ["RANK"]), os.environ["STORE"]
from pp_protocol.stage_process import _loopback
os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
state._World.cpu_group = dist.new_group([0, 1], backend="gloo")
class CannotRebuild(Observer): from_pp_tensors = None
install(); HookRegistry.apply_hooks()
one = scheduler({observer} if rank == 0 else Observer(), first=rank == 0)
one.pp_group.rank_in_group = rank
try:
    one.init_pp_loop_state()
    print("STARTED")
except pp_protocol.HandshakeError as error:
    print("REFUSED", str(error).replace(chr(10), " "))
dist.barrier()
"""


@pytest.mark.parametrize(
    ("observer", "started"), [("Observer()", True), ("CannotRebuild()", False), ("None", False)]
)
def test_switched_on_all_ranks_agree_before_the_loop(
    observer: str, started: bool, engine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    place = engine / "sglang/srt/distributed"
    place.mkdir()
    (place / "__init__.py").touch()
    (place / "parallel_state.py").write_text(WORLD)
    variables = {"PP_PROTOCOL_VERIFY": "1", "STORE": str(tmp_path / "store")}

    def one(rank: int) -> str:
        return run(RANK.format(observer=observer), engine, RANK=str(rank), **variables)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(one, range(2)))
    if started:
        assert all("STARTED" in out and "all ranks agree" in out for out in outs)
        return
    told = [line for out in outs for line in out.splitlines() if line.startswith("REFUSED")]
    assert len(told) == 2
    assert len(set(told)) == 1
    assert "rank 0 (stage 0)" in told[0]
