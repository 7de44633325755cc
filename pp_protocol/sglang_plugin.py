"""How does a stock SGLang get the checked boundary? By this plug-in, switched on by a variable.

Being installed changes no engine: the plug-in acts on PP_PROTOCOL_SGLANG=1, when SGLANG_PLUGINS
names it, or when another plug-in calls `install()`. Facts about the engine are those of SGLang
0.5.23 (`sglang.srt.plugins`, `sglang.srt.managers.scheduler_pp_mixin`).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

from . import __version__
from .boundary import PREFIX
from .conformance import FROM_PP_TENSORS
from .contract import DeviceAuxiliaryOutput
from .errors import ConformanceError, PPProtocolError, WireError, type_name
from .reports import check_observer
from .transport import (
    add_auxiliary_output_to_pp_tensors,
    discard_auxiliary_output,
    pop_auxiliary_output_from_pp_tensors,
)

NAME = "pp_protocol"
SWITCH, ON_ERROR, START_CHECK = (
    "PP_PROTOCOL_SGLANG",
    "PP_PROTOCOL_ON_ERROR",
    "PP_PROTOCOL_START_CHECK",
)
MODULE = "sglang.srt.sampling.sampling_observer_pp"
ADD, POP = "add_auxiliary_output_to_pp_tensors", "pop_auxiliary_output_from_pp_tensors"
LOOP = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin.init_pp_loop_state"

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """What has happened in this process."""

    installed: bool = False
    why_not: str = "install() was not called"
    stock: dict[str, Any] = field(default_factory=dict)
    """The engine's own functions; in a dict, as the engine rewrites aliases in modules."""
    discarded: Counter[str] = field(default_factory=Counter)


_state = _State()


@dataclass(frozen=True)
class FunctionStatus:
    """One of the two functions: whether the checked one is active, and if not, why."""

    name: str
    active: bool
    why: str
    stock_aliases: tuple[str, ...]
    """Names in modules that still refer to the engine's own function."""


@dataclass(frozen=True)
class Status:
    """What this process has installed."""

    engine: str
    """Version of SGLang; empty if it is not installed."""
    package: str
    installed: bool
    functions: tuple[FunctionStatus, ...]
    on_error: str
    """"raise" or "discard"."""
    discarded: dict[str, int]
    """How many payloads were dropped, by the code of the error."""

    @property
    def ok(self) -> bool:
        """Whether both functions are the checked ones, everywhere."""
        return all(one.active and not one.stock_aliases for one in self.functions)

    def __str__(self) -> str:
        """A line for each function."""
        lines = [f"pp_protocol {self.package} in SGLang {self.engine or '(not installed)'}:"]
        for one in self.functions:
            aliases = f"; still stock: {', '.join(one.stock_aliases)}" if one.stock_aliases else ""
            state = "checked" if one.active else "NOT checked"
            lines.append(f"  {one.name}: {state}, {one.why}{aliases}")
        dropped = ", ".join(f"{code}: {count}" for code, count in self.discarded.items())
        lines.append(f"  on error: {self.on_error}; dropped: {dropped or 'none'}")
        return "\n".join(lines)


def plugin() -> None:
    """The entry point: called by the engine in every process, whether it is wanted or not."""
    named = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if os.environ.get(SWITCH) == "1" or NAME in named:
        install()
    else:
        logger.debug("pp_protocol is installed but not switched on; %s=1 does that", SWITCH)


def install() -> bool:
    """Register the checked functions in place of the engine's own; idempotent.

    For a plug-in to call while the engine loads plug-ins: hooks take effect when all are loaded.

    Returns:
        Whether they are registered. If not, the engine is untouched and a warning says why.
    """
    if _state.installed:
        return True
    try:
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        module = importlib.import_module(MODULE)
        stock = {name: inspect.unwrap(getattr(module, name)) for name in (ADD, POP)}
        register, kinds = registry.HookRegistry.register, registry.HookType
    except (ImportError, AttributeError) as error:
        _state.why_not = f"this engine does not have what it replaces: {error}"
        logger.warning(
            "pp_protocol %s does not fit SGLang %s, which is left as it is: %s",
            *(__version__, _engine_version() or "(not installed)", error),
        )
        return False
    if _on_error() == "discard":
        checked_pop: Callable[..., Any] = _pop_or_discard
    else:
        checked_pop = pop_auxiliary_output_from_pp_tensors
    _state.stock = stock
    register(f"{MODULE}.{ADD}", add_auxiliary_output_to_pp_tensors, kinds.REPLACE)
    register(f"{MODULE}.{POP}", checked_pop, kinds.REPLACE)
    register(LOOP, _before_the_loop, kinds.BEFORE)
    _state.installed, _state.why_not = True, ""
    return True


def status() -> Status:
    """What is active in this process, by looking at what the engine would call."""
    ours = {
        ADD: (add_auxiliary_output_to_pp_tensors,),
        POP: (pop_auxiliary_output_from_pp_tensors, _pop_or_discard),
    }
    functions = tuple(_function_status(name, checked) for name, checked in ours.items())
    return Status(
        *(_engine_version(), __version__, _state.installed, functions, _on_error()),
        dict(_state.discarded),
    )


def _function_status(name: str, checked: tuple[Callable[..., Any], ...]) -> FunctionStatus:
    current = getattr(sys.modules.get(MODULE), name, None)
    stock = _state.stock.get(name)
    if current is None:
        why = _state.why_not or f"{MODULE} is not loaded"
        return FunctionStatus(name, False, why, ())
    # not by __wrapped__, which shows the engine's function whoever has replaced it
    active = any(function in checked for function in _called_by(current))
    if active:
        why = "active"
    elif not _state.installed:
        why = _state.why_not
    elif current is stock:
        why = "the hooks are not applied (yet); a hook that fails is only logged by the engine"
    else:
        winner = ", ".join(sorted({_named(one) for one in _called_by(current)} - {_named(stock)}))
        why = f"another plug-in's hook has won: {winner}"
    return FunctionStatus(name, active, why, tuple(_aliases(stock)) if active else ())


def _called_by(function: Any) -> list[Any]:
    """The functions that the engine's wrappers call, from the outermost in."""
    found: list[Any] = []
    left = [function]
    while left:
        one = left.pop()
        if type(one) is FunctionType and one not in found:
            found.append(one)
            if one.__module__ and one.__closure__:
                left += [cell.cell_contents for cell in one.__closure__]
    return found[1:] if len(found) > 1 else found


def _named(function: Any) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', type_name(function))}"


def _aliases(stock: Any) -> Iterator[str]:
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is stock and stock is not None:
                    yield f"{module_name}.{name}"


def _before_the_loop(*args: Any, **kwargs: Any) -> None:
    """Before a pipeline loop: say what is active, and refuse an observer that cannot do its part.

    Raises:
        ConformanceError: the observer of the first rank cannot rebuild, or that of another rank
            has hooks that cannot be called; the report is in the message.
    """
    found = status()
    if found.ok:
        logger.info("%s", found)
    else:
        logger.error("pp_protocol IS SWITCHED ON AND NOT (FULLY) ACTIVE\n%s", found)
    if os.environ.get(START_CHECK) == "0" or not args:
        return
    try:
        observer = args[0].tp_worker.model_runner.sampling_observer
        first = args[0].pp_group.is_first_rank
    except AttributeError as error:  # another version of the engine must not die of a check
        logger.warning("pp_protocol cannot check the observer of this engine: %s", error)
        return
    if observer is None:
        return
    report = check_observer(observer)
    mine = [one for one in report.errors if (one.member == FROM_PP_TENSORS.name) == first]
    if mine:
        rank = "the first" if first else "a later"
        raise ConformanceError.about(
            f"the sampling observer of {rank} pipeline rank",
            f"cannot do its part\n{report}\n",
            f"Mend it, or set {START_CHECK}=0 to find out at the first token.",
        )


def _pop_or_discard(
    tensors: MutableMapping[str, Any], observer: Any
) -> DeviceAuxiliaryOutput | None:
    """As `pop_…`, but a fault of the observer drops its payload and not the scheduler."""
    try:
        return pop_auxiliary_output_from_pp_tensors(tensors, observer)
    except WireError:  # the engine's own fault, and there is nothing that could be dropped
        raise
    except Exception as error:
        code = error.code if isinstance(error, PPProtocolError) else "observer-raised"
        names = discard_auxiliary_output(tensors)
        _state.discarded[code] += 1
        if _state.discarded[code] == 1:
            logger.exception(
                "pp_protocol dropped the auxiliary output %s (%s=discard); further ones with the"
                " code %s are only counted",
                *([name.removeprefix(PREFIX) for name in names], ON_ERROR, code),
            )
        return None


def _on_error() -> str:
    value = os.environ.get(ON_ERROR, "raise")
    if value not in ("raise", "discard"):
        logger.warning("%s is %r, neither raise nor discard: taken for raise", ON_ERROR, value)
        return "raise"
    return value


def _engine_version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("sglang"), "__version__", ""))
