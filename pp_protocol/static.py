"""What does mypy say of this observer, against the stubs that ship with this package?"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from .conformance import AFTER_SAMPLE, BEFORE_GRAMMAR, FROM_PP_TENSORS, IS_ACTIVE, look_up
from .reports import where_defined
from .targets import called_for, load

MEMBERS = (IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE, FROM_PP_TENSORS)
PROBE = """\
from typing_extensions import reveal_type
from pp_protocol import PPCapableObserver
import {module}
target = {expression}
reveal_type(target.is_active)
reveal_type(target.after_sample)
reveal_type(target.from_pp_tensors)
reveal_type(target)
observer: PPCapableObserver = target
"""
_ASSIGNMENT_LINE = PROBE.count("\n")
_ANY = re.compile(r'"(?:\w+\.)?Any"$|-> (?:\w+\.)?Any"$')


@dataclass(frozen=True)
class Message:
    """One thing that mypy said, with its notes."""

    file: str
    line: int
    text: str


@dataclass
class Said:
    """What mypy said of the observer, and of the modules that it imports; what it did not see."""

    of_the_observer: list[Message] = field(default_factory=list)
    elsewhere: list[Message] = field(default_factory=list)
    unseen: str = ""
    """Why nothing, or not all, was checked."""


def mypy_is_there() -> bool:
    """Whether mypy is installed beside this package."""
    return importlib.util.find_spec("mypy") is not None


def cache_directory() -> pathlib.Path:
    """Where mypy keeps what it has read here: in the user's cache, one for each directory.

    A cache shared by two checkouts would name the files of the other.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        library = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
        default = pathlib.Path.home().joinpath(*library)
    except RuntimeError:  # a container's user may have no home
        default = pathlib.Path(tempfile.gettempdir())
    place = pathlib.Path(given) if os.path.isabs(given) else default
    here = hashlib.sha256(os.getcwd().encode()).hexdigest()[:16]
    return place / "pp-protocol" / "mypy" / here


def ask_mypy(target: str, observer: Any) -> Said:
    """Assign the target to the Protocol that it must satisfy, and run mypy on that.

    The user's own mypy configuration applies, as found from the working directory.

    Raises:
        RuntimeError: mypy itself failed; the message is what it printed.
    """
    said = Said(unseen=_without_annotations(observer))
    found = load(target)
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "pp_protocol_probe.py"
        module, _, path = target.partition(":")
        called = "()" if called_for(found) else ""
        probe.write_text(PROBE.format(module=module, expression=f"{module}.{path}{called}"))
        messages = _run(probe)
    revealed = False
    for message in messages:
        text = "\n".join(filter(None, [message["message"], message["hint"]]))
        of_probe = os.path.basename(message["file"]) == probe.name
        if text.startswith("Revealed type is"):
            revealed = True
            if _ANY.search(text):
                said.unseen = said.unseen or "mypy takes it, or a result, for Any"
        elif message["severity"] == "error" and of_probe:
            if message["code"] == "assignment" and message["line"] == _ASSIGNMENT_LINE:
                said.of_the_observer.append(Message(*_place(text, observer, found), text))
            elif message["code"] in ("import-untyped", "import-not-found"):
                said.unseen = f"mypy does not follow its module: {message['message']}"
        elif message["severity"] == "error":
            one = Message(message["file"], message["line"], text)
            own = _is_in_a_member(observer, one)
            (said.of_the_observer if own else said.elsewhere).append(one)
    if not revealed:
        said.unseen = said.unseen or "your configuration of mypy silences what it says"
    return said


def _run(probe: pathlib.Path) -> list[dict[str, Any]]:
    path = [os.getcwd(), *filter(None, [os.environ.get("MYPYPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--output=json", "--no-error-summary"),
            *(f"--cache-dir={cache_directory()}", "--show-absolute-path", str(probe)),
        ],
        env={**os.environ, "MYPYPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode not in (0, 1) or (done.returncode and not lines):
        raise RuntimeError((done.stdout + done.stderr).strip())
    return [json.loads(line) for line in lines]


def _place(text: str, observer: Any, found: Any) -> tuple[str, int]:
    """Where the error of the assignment belongs: a member, the class, or the factory."""
    if f'expression has type "{type(observer).__name__}' in text and " | None" not in text[:200]:
        member = next((m.name for m in MEMBERS if re.search(rf"\b{m.name}\b", text)), "")
        return where_defined(observer, member)
    if type(found) is FunctionType:
        return found.__code__.co_filename, found.__code__.co_firstlineno
    return "", 0


def _is_in_a_member(observer: Any, message: Message) -> bool:
    """Whether an error lies in one of the four members, of the class or of one of its bases."""
    for cls in type.mro(type(observer)):
        for member in MEMBERS:
            raw = vars(cls).get(member.name)
            function = inspect.unwrap(getattr(raw, "__func__", raw)) if raw else None
            if type(function) is FunctionType:
                lines = [line for _, _, line in function.__code__.co_lines() if line is not None]
                same = os.path.realpath(function.__code__.co_filename) == os.path.realpath(
                    message.file
                )
                if same and function.__code__.co_firstlineno <= message.line <= max(lines):
                    return True
    return False


def _without_annotations(observer: Any) -> str:
    """Which members have no, or not all, annotations."""
    bare = []
    for member in MEMBERS:
        found = look_up(observer, member.name)
        function = getattr(found.raw, "__func__", found.raw) if found else None
        if type(function) is FunctionType:
            function = inspect.unwrap(function)
            code = function.__code__
            named = code.co_varnames[: code.co_argcount]
            bound = 0 if found is not None and type(found.raw) is staticmethod else 1
            if not {*named[bound:], "return"} <= set(function.__annotations__):
                bare.append(member.name)
    return f"not all is annotated of {', '.join(bare)}" if bare else ""
