"""What would this process's SGLang call at the boundary: the checked functions, or others?

Found out by looking at what the engine's hooks have made (`sglang.srt.plugins.hook_registry` of
SGLang 0.5.23), without calling anything. `__wrapped__` does not tell: it shows the engine's own
function whoever has replaced it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import FunctionType, MethodType, ModuleType
from typing import Any

from .errors import type_name

HOOKS = "sglang.srt.plugins.hook_registry"


@dataclass(frozen=True)
class FunctionStatus:
    """One function of the engine: whether ours is what is called there, and if not, why."""

    name: str
    active: bool
    why: str
    stock_aliases: tuple[str, ...] = ()
    """Names in modules that still refer to the engine's own function."""


@dataclass(frozen=True)
class Status:
    """What this process has installed."""

    engine: str
    """Version of SGLang; empty if it is not installed."""
    package: str
    installed: bool
    functions: tuple[FunctionStatus, ...]
    """The add and the pop."""
    before_loop: FunctionStatus
    """The hook that says what is active, and checks the observer, before a pipeline loop."""
    on_error: str
    """"raise" or "discard"."""
    discarded: dict[str, int]
    """How many payloads were dropped in this process, by the code of the error."""

    @property
    def ok(self) -> bool:
        """Whether everything is active, everywhere."""
        parts = (*self.functions, self.before_loop)
        return self.installed and all(one.active and not one.stock_aliases for one in parts)

    def __str__(self) -> str:
        """A line for each function."""
        lines = [f"pp_protocol {self.package} in SGLang {self.engine or '(not installed)'}:"]
        for one in (*self.functions, self.before_loop):
            aliases = f"; still stock: {', '.join(one.stock_aliases)}" if one.stock_aliases else ""
            state = "checked" if one.active else "NOT checked"
            lines.append(f"  {one.name}: {state}, {one.why}{aliases}")
        dropped = ", ".join(f"{code}: {count}" for code, count in self.discarded.items())
        lines.append(f"  on error: {self.on_error}; dropped: {dropped or 'none'}")
        return "\n".join(lines)


def chain(function: Any) -> list[Any]:
    """The engine's wrappers around a function, from the outermost in, and what they end in."""
    found = [function]
    while (inner := _cells(found[-1])) and len(found) < 1000:
        found.append(inner.get("original_fn", inner.get("hook")))
    return found


def hooks_of(function: Any) -> list[Any]:
    """What the engine's wrappers call beside the function that they are around."""
    return [_cells(one).get("hook") for one in chain(function)[:-1]]


def stock_of(function: Any) -> Any:
    """The engine's own function, under whatever its hooks have put around it."""
    while _cells(function):
        function = function.__wrapped__
    return function


def _cells(function: Any) -> dict[str, Any]:
    """What one of the engine's wrappers holds; empty for any other function."""
    registry = sys.modules.get(HOOKS)
    if (
        type(function) is not FunctionType
        or registry is None
        or function.__globals__ is not vars(registry)
    ):
        return {}
    names = function.__code__.co_freevars
    return {
        name: cell.cell_contents
        for name, cell in zip(names, function.__closure__ or (), strict=True)
        if name in ("hook", "original_fn")
    }


def is_one_of(function: Any, ours: tuple[Any, ...]) -> bool:
    """Whether it is one of ours, by name, as a module may have been loaded anew."""
    return type(function) is FunctionType and named(function) in map(named, ours)


def named(function: Any) -> str:
    """`module.qualname` of a function; of another callable object what it is."""
    while type(function) is MethodType:
        function = function.__func__
    if type(function) is FunctionType:
        return f"{function.__module__}.{function.__qualname__}"
    return type_name(function)


def aliases(stock: Any) -> Iterator[str]:
    """Names in modules that refer to a function; runs no code of a module's."""
    for module_name, module in sys.modules.copy().items():
        try:
            names = ModuleType.__getattribute__(module, "__dict__").copy()
        except (TypeError, AttributeError):  # no module, or one that has nothing
            continue
        for name, value in names.items():
            if value is stock and stock is not None:
                yield f"{module_name}.{name}"


def engine_version() -> str:
    """The version of SGLang, by its metadata or by itself; empty if neither says."""
    try:
        found = metadata.version("sglang")
    except Exception:  # not installed, or metadata that cannot be read
        found = ""
    return str(found or getattr(sys.modules.get("sglang"), "__version__", ""))
