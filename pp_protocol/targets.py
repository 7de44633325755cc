"""Which object does `module:attribute` mean?"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

from .conformance import AFTER_SAMPLE, BEFORE_GRAMMAR, FROM_PP_TENSORS, IS_ACTIVE, look_up
from .errors import type_name

REFERENCE = "pp_protocol.reference:LogprobObserver"


class TargetError(Exception):
    """A target that could not be had, so that nothing can be said about it."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


class IncompleteError(Exception):
    """The target is a class with abstract methods, so that it cannot be made."""

    def __init__(self, target: type) -> None:
        super().__init__(type_name(target))
        self.missing = sorted(getattr(target, "__abstractmethods__", ()))


def load(target: str) -> Any:
    """The object that `module:attribute` names; modules of the working directory are found.

    Raises:
        TargetError: it is not of that form, there is no such module or attribute, or importing
            the module raised.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path) or "/" in module_name or module_name.startswith("."):
        raise TargetError(
            f"{target!r} is not of the form module:attribute",
            "Name the module as an import statement would: package.module:Observer.",
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        raise TargetError(
            f"importing {module_name} raised {_described(error)}",
            f"Install it, or run the command where it lies; this is {here}.",
        ) from error
    except BaseException as error:  # SystemExit too: a script without a guard
        raise _cannot(f"importing {module_name}", error) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            message = f"{target}: {_described(error)}"
            raise TargetError(message, "Look at the spelling of the attribute.") from error
        except BaseException as error:  # a module's __getattr__ can raise anything
            raise _cannot(f"reading {target}", error) from error
    return found


def make_observer(target: str | Callable[[], Any]) -> Any:
    """The observer that a target gives: an instance as it is, a class or a factory called.

    Raises:
        TargetError: as `load`; or the class or factory raised, or gave None or a class.
        IncompleteError: the class has abstract methods.
    """
    found = load(target) if isinstance(target, str) else target
    if not called_for(found):
        return found
    if isinstance(found, type) and getattr(found, "__abstractmethods__", None):
        raise IncompleteError(found)
    named = target if isinstance(target, str) else type_name(target)
    try:
        made = found()
    except BaseException as error:
        raise _cannot(f"{named}, called without arguments,", error) from error
    if made is None or isinstance(made, type):
        raise TargetError(
            f"{named}, called without arguments, gave {type_name(made)}",
            "Have the factory return the observer itself.",
        )
    return made


def called_for(found: Any) -> bool:
    """Whether it has to be called to get the observer: a class, or a factory of any kind."""
    if isinstance(found, (type, FunctionType, MethodType)):
        return True
    hooks = (FROM_PP_TENSORS, IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE)
    return callable(found) and not any(look_up(found, hook.name) for hook in hooks)


def _cannot(doing: str, error: BaseException) -> TargetError:
    if isinstance(error, KeyboardInterrupt):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    advice = "Mend what raises; of a class that needs arguments, name a function that makes one."
    return TargetError(f"{doing} raised {_described(error)}{place}", advice)


def _described(error: BaseException) -> str:
    try:
        return f"{type_name(error)}: {error}".removesuffix(": ")
    except Exception:  # it is the user's code that makes the text
        return type_name(error)
