"""Which object does `module:attribute` mean?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

from .conformance import AFTER_SAMPLE, BEFORE_GRAMMAR, FROM_PP_TENSORS, IS_ACTIVE, look_up
from .errors import type_name

REFERENCE = "pp_protocol.reference:LogprobObserver"


class TargetError(Exception):
    """A target that could not be had, so that nothing can be said about it."""


def load(target: str) -> Any:
    """The object that `module:attribute` names; modules of the working directory are found.

    Raises:
        TargetError: it is not of that form, there is no such module or attribute, or importing
            the module raised.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise TargetError(f"{target!r} is not of the form module:attribute")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
    except BaseException as error:  # SystemExit too: a script without a guard
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TargetError(f"importing {module_name} raised {_described(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except Exception as error:
            raise TargetError(f"{target}: {_described(error)}") from error
    return found


def make_observer(target: str | Callable[[], Any]) -> Any:
    """The observer that a target gives: an instance as it is, a class or a factory called.

    Raises:
        TargetError: as `load`, or the class or factory raised.
    """
    found = load(target) if isinstance(target, str) else target
    if not _is_recipe(found):
        return found
    named = target if isinstance(target, str) else type_name(target)
    try:
        return found()
    except Exception as error:
        raise TargetError(
            f"{named}: calling it without arguments raised {_described(error)}"
        ) from error


def _is_recipe(found: Any) -> bool:
    """Whether it has to be called to get the observer: a class, or a factory of any kind."""
    if isinstance(found, (type, FunctionType, MethodType)):
        return True
    hooks = (FROM_PP_TENSORS, IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE)
    return callable(found) and not any(look_up(found, hook.name) for hook in hooks)


def _described(error: BaseException) -> str:
    return f"{type_name(error)}: {error}"
