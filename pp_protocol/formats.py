"""How is the result of a check written down: for people, for programs, for a workflow?"""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Callable

from .check import CANNOT, FAILS, OK, Finding, Part

Results = dict[str, list[Part]]


def verdict_of(parts: list[Part]) -> str:
    """The worst of the parts."""
    verdicts = {part.verdict for part in parts}
    return next((one for one in (FAILS, CANNOT) if one in verdicts), OK)


def as_text(results: Results, status: int) -> str:
    """A short table: what was checked, what was found, what to do."""
    lines = []
    for target, parts in results.items():
        verdict = verdict_of(parts)
        telling = next(part for part in reversed(parts) if part.verdict == verdict)
        lines.append(f"{verdict:<7} {target}: {telling.summary}")
        for part in parts:
            for kind, findings in (("", part.findings), ("warning: ", part.warnings)):
                for finding in findings:
                    lines += _wrapped(f"[{finding.code}] ", kind + finding.found)
                    if finding.file:
                        lines.append(f"          {_relative(finding.file)}:{finding.line}")
                    lines += _wrapped("to do: ", finding.advice)
    return "\n".join(lines)


def as_json(results: Results, status: int) -> str:
    """One object, as `pp-protocol check --help` describes it."""
    targets = [
        {
            "target": target,
            "verdict": verdict_of(parts),
            "parts": [dataclasses.asdict(part) for part in parts],
        }
        for target, parts in results.items()
    ]
    return json.dumps({"version": 1, "status": status, "targets": targets}, indent=2)


def as_annotations(results: Results, status: int) -> str:
    """Workflow commands of GitHub Actions, on the file and line of the user's code."""
    lines = []
    for target, parts in results.items():
        for part in parts:
            lines += [_annotation("error", target, finding) for finding in part.findings]
            lines += [_annotation("warning", target, finding) for finding in part.warnings]
        if verdict_of(parts) == OK:
            lines.append(f"::notice title=pp-protocol::{_escaped(target)} conforms")
    return "\n".join(lines)


FORMATS: dict[str, Callable[[Results, int], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_annotations,
}


def _annotation(level: str, target: str, finding: Finding) -> str:
    place = ""
    if finding.file:
        root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
        file = _escaped(_relative(finding.file, root)).replace(":", "%3A").replace(",", "%2C")
        place = f"file={file},line={finding.line},"
    text = _escaped(f"{target}: {finding.found}\nto do: {finding.advice}")
    return f"::{level} {place}title=pp-protocol {finding.code}::{text}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _relative(file: str, root: str = os.curdir) -> str:
    inside = os.path.relpath(file, root)
    return file if inside.startswith(os.pardir) else inside


def _wrapped(label: str, text: str) -> list[str]:
    first, *rest = text.split("\n")
    indent = " " * 8
    return [
        *textwrap.wrap(label + first, 100, initial_indent=indent, subsequent_indent=indent + "  "),
        *(f"{indent}  {line.rstrip()}" for line in rest),
    ]
