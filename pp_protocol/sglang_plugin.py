"""How does a stock SGLang get the checked boundary? By this plug-in, switched on by a variable.

Being installed changes no engine: the plug-in acts on PP_PROTOCOL_SGLANG=1, when SGLANG_PLUGINS
names it, or when another plug-in calls `install()`. Facts about the engine are those of SGLang
0.5.23 (`sglang.srt.plugins`, `sglang.srt.managers.scheduler_pp_mixin`).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import __version__
from .conformance import FROM_PP_TENSORS
from .contract import DeviceAuxiliaryOutput
from .errors import ConformanceError, HandshakeError, PPProtocolError
from .handshake import verify_pipeline
from .reports import check_observer
from .sglang_status import (
    HOOKS,
    FunctionStatus,
    Status,
    aliases,
    chain,
    engine_version,
    hooks_of,
    is_one_of,
    named,
    stock_of,
)
from .transport import (
    add_auxiliary_output_to_pp_tensors,
    discard_auxiliary_output,
    pop_auxiliary_output_from_pp_tensors,
)

NAME = "pp_protocol"
SWITCH, ON_ERROR, START_CHECK, VERIFY = (
    "PP_PROTOCOL_SGLANG",
    "PP_PROTOCOL_ON_ERROR",
    "PP_PROTOCOL_START_CHECK",
    "PP_PROTOCOL_VERIFY",
)
MODULE, MIXIN = (
    "sglang.srt.sampling.sampling_observer_pp",
    "sglang.srt.managers.scheduler_pp_mixin",
)
ADD, POP = "add_auxiliary_output_to_pp_tensors", "pop_auxiliary_output_from_pp_tensors"
LOOP = "SchedulerPPMixin.init_pp_loop_state"

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """What has happened in this process."""

    installed: bool = False
    why_not: str = "install() was not called"
    on_error: str = "raise"
    stock: dict[str, Any] = field(default_factory=dict)
    """The engine's own functions; in a dict, as the engine rewrites aliases in modules."""
    discarded: Counter[str] = field(default_factory=Counter)


_state = _State()
_CHECKED: dict[str, Any] = {
    "add": add_auxiliary_output_to_pp_tensors,
    "pop": pop_auxiliary_output_from_pp_tensors,
}
"""Ours, where the engine does not rewrite aliases: an engine may hold these very functions."""


def plugin() -> None:
    """The entry point: called by the engine in every process, whether it is wanted or not."""
    listed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if _switched(SWITCH, default=False) or NAME in listed:
        install()
    else:
        logger.debug("pp_protocol is installed but not switched on; %s=1 does that", SWITCH)


def install() -> bool:
    """Register the checked functions in place of the engine's own; idempotent.

    For a plug-in to call while the engine loads plug-ins: hooks take effect when all are loaded.

    Returns:
        Whether they are registered, in time. If not, the log says why; an engine that lacks what
        is replaced is left untouched.
    """
    if _state.installed:
        return not _state.why_not
    registry: Any = None
    try:
        registry = importlib.import_module(HOOKS).HookRegistry
        module, mixin = importlib.import_module(MODULE), importlib.import_module(MIXIN)
        stock = {name: stock_of(getattr(module, name)) for name in (ADD, POP)}
        stock[LOOP] = stock_of(mixin.SchedulerPPMixin.init_pp_loop_state)
        late = [target for target in _targets() if target in getattr(registry, "_patched", ())]
        on_error = _on_error()
        for target, (function, kind) in _targets(on_error).items():
            if function is not stock.get(target.rpartition(".")[2]):  # unless the engine has it
                registry.register(target, function, getattr(sys.modules[HOOKS].HookType, kind))
    except Exception as error:  # an engine must not die of a plug-in that does not fit
        _take_back(registry)
        _state.why_not = f"this engine does not have what it replaces: {error}"
        logger.warning(
            "pp_protocol %s does not fit SGLang %s, which is left as it is: %s",
            *(__version__, engine_version() or "(not installed)", error),
        )
        return False
    _state.installed, _state.stock, _state.on_error, _state.why_not = True, stock, on_error, ""
    if late:
        _state.why_not = f"install() came when the hooks of {', '.join(late)} were applied already"
        logger.error("pp_protocol IS SWITCHED ON AND NOT (FULLY) ACTIVE: %s", _state.why_not)
    return not late


def _targets(on_error: str = "raise") -> dict[str, tuple[Any, str]]:
    pop = _pop_or_discard if on_error == "discard" else _CHECKED["pop"]
    return {
        f"{MODULE}.{ADD}": (_CHECKED["add"], "REPLACE"),
        f"{MODULE}.{POP}": (pop, "REPLACE"),
        f"{MIXIN}.{LOOP}": (_before_the_loop, "BEFORE"),
    }


def _take_back(registry: Any) -> None:
    """Undo what was registered before something failed."""
    with suppress(Exception):  # a registry of another shape
        for target, (function, _) in [*_targets().items(), *_targets("discard").items()]:
            hooks = registry._hooks.get(target, [])
            hooks[:] = [one for one in hooks if one[1] is not function]


def status() -> Status:
    """What is active in this process, by looking at what the engine would call."""
    functions = (
        _function_status(ADD, (_CHECKED["add"],)),
        _function_status(POP, (_CHECKED["pop"], _pop_or_discard)),
    )
    return Status(
        *(engine_version(), __version__, _state.installed, functions, _loop_status()),
        *(_state.on_error, dict(_state.discarded)),
    )


def _function_status(name: str, checked: tuple[Any, ...]) -> FunctionStatus:
    stock = _state.stock.get(name)
    found = list(_bindings(name))
    if not found:
        loaded = f"has no {name}" if MODULE in sys.modules else "is not loaded"
        return FunctionStatus(name, False, _state.why_not or f"{MODULE} {loaded}")
    for where, current in found:
        called = chain(current)[-1]
        if is_one_of(called, checked):
            continue
        if not _state.installed:
            why = _state.why_not
        elif current is stock:
            why = "the hooks are not applied (yet); a hook that fails is only logged by the engine"
        else:
            why = f"what {where} calls is another plug-in's: {named(called)}"
        return FunctionStatus(name, False, why, tuple(aliases(stock)))
    return FunctionStatus(name, True, "active", tuple(aliases(stock)))


def _bindings(name: str) -> Iterator[tuple[str, Any]]:
    """Where the engine has the function: in its own module, and by name where it is called."""
    for module in (MODULE, MIXIN):
        value = getattr(sys.modules.get(module), name, None)
        if value is not None:
            yield module, value


def _loop_status() -> FunctionStatus:
    cls = getattr(sys.modules.get(MIXIN), "SchedulerPPMixin", None)
    hooks = hooks_of(getattr(cls, "init_pp_loop_state", None))
    active = any(is_one_of(one, (_before_the_loop,)) for one in hooks)
    why = "active" if active else _state.why_not or "the hooks are not applied (yet), or it failed"
    return FunctionStatus(f"before {LOOP}", active, why)


def _before_the_loop(*args: Any, **kwargs: Any) -> None:
    """Before a pipeline loop: say what is active, and refuse an observer that cannot do its part.

    Raises:
        ConformanceError: the observer of the first rank cannot rebuild, or that of the last rank
            has hooks that cannot be called; the report is in the message.
        HandshakeError: if PP_PROTOCOL_VERIFY is on, and in place of that, on every rank.
    """
    logger.disabled = False  # a logging configuration of the engine's may have switched it off
    try:
        found = status()
        if found.ok:
            logger.info("%s", found)
        else:
            logger.error("pp_protocol IS SWITCHED ON AND NOT (FULLY) ACTIVE\n%s", found)
    except Exception:  # an engine must not die of a look at it
        logger.exception("pp_protocol cannot say what is active")
    verify, check = _switched(VERIFY, default=False), _switched(START_CHECK, default=True)
    if not (verify or check) or not args:
        return
    try:
        refused = _not_verified(args[0]) if verify else _refused(args[0])
    except Exception as error:  # nor of another shape of the engine
        logger.warning("pp_protocol cannot check the observer of this engine: %r", error)
        return
    if refused is not None:
        raise refused


def _not_verified(scheduler: Any) -> HandshakeError | None:
    """The error that all ranks raise, if they cannot serve together.

    Over all ranks of the engine: the group of a pipeline holds one of each stage's TP ranks.
    """
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    group, stage = state.get_world_group().cpu_group, scheduler.pp_group.rank_in_group
    try:
        report = verify_pipeline(
            scheduler.tp_worker.model_runner.sampling_observer, group=group, stage=stage
        )
    except HandshakeError as error:
        return error
    logger.info("pp_protocol: all ranks agree\n%s", report)
    return None


def _refused(scheduler: Any) -> ConformanceError | None:
    """The error for an observer that cannot do what its rank asks of it."""
    observer = scheduler.tp_worker.model_runner.sampling_observer
    first, last = scheduler.pp_group.is_first_rank, scheduler.pp_group.is_last_rank
    if type(first) is not bool or type(last) is not bool:
        raise TypeError("is_first_rank and is_last_rank of pp_group are no bools")
    if observer is None:
        return None
    report = check_observer(observer)
    if not any(first if one.member == FROM_PP_TENSORS.name else last for one in report.errors):
        return None
    return ConformanceError.about(
        f"the sampling observer of the {'first' if first else 'last'} pipeline rank",
        f"cannot do its part\n{report}\n",
        f"Mend it, or set {START_CHECK}=0 to find out at the first token.",
    )


def _pop_or_discard(
    tensors: MutableMapping[str, Any], observer: Any
) -> DeviceAuxiliaryOutput | None:
    """As `pop_…`, but a fault of the observer drops its payload and not the scheduler."""
    try:
        output: DeviceAuxiliaryOutput | None = _CHECKED["pop"](tensors, observer)
        return output
    except Exception as error:
        names = discard_auxiliary_output(tensors)  # raises if it is the dict that is wrong
        code = error.code if isinstance(error, PPProtocolError) else "observer-raised"
        _state.discarded[code] += 1
        if _state.discarded[code] == 1:
            logger.exception(
                "pp_protocol dropped the auxiliary output %s (%s=discard); further ones with the"
                " code %s are only counted",
                *(list(names), ON_ERROR, code),
            )
        return None


def _switched(variable: str, *, default: bool) -> bool:
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        logger.warning("%s is %r, neither 0 nor 1: taken for %d", variable, value, default)
    return default if value not in ("0", "1") else value == "1"


def _on_error() -> str:
    value = os.environ.get(ON_ERROR, "").strip() or "raise"
    if value not in ("raise", "discard"):
        logger.warning("%s is %r, neither raise nor discard: taken for raise", ON_ERROR, value)
        return "raise"
    return value
