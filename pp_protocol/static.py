"""What does mypy say of this observer, against the stubs that ship with this package?"""

from __future__ import annotations

import importlib.util
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
reveal_type({expression})
observer: PPCapableObserver = {expression}
"""


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
    """Where mypy keeps what it has read: in the user's cache, not in the working directory."""
    home = pathlib.Path.home()
    if sys.platform == "darwin":
        default = home / "Library" / "Caches"
    else:
        default = home / ".cache"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or default) / "pp-protocol" / "mypy"


def ask_mypy(target: str, observer: Any) -> Said:
    """Assign the target to the Protocol that it must satisfy, and run mypy on that.

    The user's own mypy configuration applies, as found from the working directory.

    Raises:
        RuntimeError: mypy itself failed; the message is what it printed.
    """
    said = Said(unseen=_without_annotations(observer))
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "pp_protocol_probe.py"
        module, _, path = target.partition(":")
        called = "()" if called_for(load(target)) else ""
        expression = f"{module}.{path}{called}"
        probe.write_text(PROBE.format(module=module, expression=expression))
        for message in _run(probe):
            _sort(message, probe, observer, said)
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


def _sort(message: dict[str, Any], probe: pathlib.Path, observer: Any, said: Said) -> None:
    text = "\n".join(filter(None, [message["message"], message["hint"]]))
    if os.path.basename(message["file"]) != probe.name:
        if message["severity"] == "error":
            said.elsewhere.append(Message(message["file"], message["line"], text))
    elif message["severity"] == "error":
        member = next((m for m in MEMBERS if re.search(rf"\b{m.name}\b", text)), None)
        file, line = where_defined(observer, member.name if member else "")
        said.of_the_observer.append(Message(file, line, text))
    elif text.startswith("Revealed type is") and re.search(r'"(?:\w+\.)?Any"', text):
        said.unseen = "mypy takes it for Any: it is not annotated, or its package has no py.typed"


def _without_annotations(observer: Any) -> str:
    bare = []
    for member in MEMBERS:
        found = look_up(observer, member.name)
        function = getattr(found.raw, "__func__", found.raw) if found else None
        if type(function) is FunctionType and not function.__annotations__:
            bare.append(member.name)
    return f"no annotations on {', '.join(bare)}" if bare else ""
