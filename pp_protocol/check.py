"""Does this observer conform, and what is there to do if not?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .conformance import FROM_PP_TENSORS
from .errors import type_name
from .reports import check_observer, where_defined
from .targets import IncompleteError, TargetError, load, make_observer

OK, FAILS, CANNOT = "ok", "fails", "cannot"


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and where in the user's code if that is known."""

    code: str
    found: str
    advice: str
    file: str = ""
    line: int = 0


@dataclass
class Part:
    """One part of a check: its verdict, and how long it took."""

    name: str
    verdict: str = OK
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Options:
    """How the pipeline of a check is to be."""

    stages: int = 2
    steps: int = 12
    seed: int = 0
    timeout: float = 60.0
    inputs: str | None = None
    tp: int = 1
    require: tuple[str, ...] = ()
    """Parts that must run and find nothing unchecked."""


Tell = Callable[[str], None]


def check_target(target: str, options: Options, tell: Tell) -> list[Part]:
    """Check one target, part by part, and stop where the next part would say nothing new."""
    parts: list[Part] = []
    observer: Any = None
    for name in ("load", "static", "conformance", "pipeline"):
        part = Part(name)
        started = time.monotonic()
        if name == "load":
            observer = _load(target, options, part)
        elif name == "static":
            _static(target, observer, options, part, tell)
        elif name == "conformance":
            _conformance(observer, part)
            observer = None
        else:
            _pipeline(target, options, part, tell)
        part.seconds = time.monotonic() - started
        parts.append(part)
        tell(f"  {name:<12} {part.verdict:<7} {part.seconds:5.1f} s  {part.summary}")
        if part.verdict != OK and name != "static":
            break
    return parts


def _add(
    part: Part, code: str, found: str, advice: str | None = None, where: tuple[str, int] = ("", 0)
) -> None:
    from .catalogue import CATALOGUE

    part.findings.append(Finding(code, found, advice or CATALOGUE[code].fix, *where))


def _static(target: str, observer: Any, options: Options, part: Part, tell: Tell) -> None:
    from . import static
    from .catalogue import CATALOGUE

    required = "static" in options.require
    if not static.mypy_is_there():
        part.summary = "not run: mypy is not installed"
        if required:
            part.verdict = CANNOT
            _add(part, "static-not-run", "mypy is not installed, and --require static asks for it")
        return
    if not static.cache_directory().exists():
        tell("  static       mypy reads torch; this takes long the first time only")
    try:
        said = static.ask_mypy(target, observer)
    except RuntimeError as error:
        part.verdict, part.summary = (CANNOT if required else OK), "not run: mypy failed"
        put = part.findings if required else part.warnings
        put.append(Finding("static-not-run", str(error), CATALOGUE["static-not-run"].fix))
        return
    for message in said.of_the_observer:
        _add(part, "static", message.text, None, (message.file, message.line))
    elsewhere = "mypy says so of what the target imports; it does not decide the verdict."
    part.warnings += [
        Finding("static", message.text, elsewhere, message.file, message.line)
        for message in said.elsewhere
    ]
    if said.unseen:
        put = part.findings if required else part.warnings
        where = where_defined(observer, "")
        found = f"not checked: {said.unseen}"
        put.append(Finding("static-unseen", found, CATALOGUE["static-unseen"].fix, *where))
    part.verdict = FAILS if part.findings else OK
    wrong = len(said.of_the_observer)
    part.summary = f"mypy: {wrong} error{'s' * (wrong > 1)}" if wrong else "mypy: no error"
    if said.unseen:
        part.summary = f"not checked: {said.unseen}"


def _load(target: str, options: Options, part: Part) -> Any:
    code = "target"
    try:
        observer = make_observer(target)
        code = "inputs"
        if options.inputs is not None and not callable(load(options.inputs)):
            raise TargetError(f"{options.inputs} cannot be called", "Name a function.")
    except IncompleteError as error:
        part.verdict, part.summary = FAILS, "the class has abstract methods"
        for name in error.missing:
            code = "unsupported-observer" if name == FROM_PP_TENSORS.name else "unsupported-hook"
            _add(part, code, f"{error} does not define {name}")
        return None
    except TargetError as error:
        what = "the target" if code == "target" else "what --inputs names"
        part.verdict, part.summary = CANNOT, f"{what} cannot be had"
        _add(part, code, str(error), error.advice)
        return None
    part.summary = type_name(observer)
    return observer


def _conformance(observer: Any, part: Part) -> None:
    report = check_observer(observer)
    for problem in report.problems:
        found = f"{report.subject} {problem.found}; expected {problem.expected}"
        put = part.findings if problem.severity == "error" else part.warnings
        put.append(Finding(problem.code, found, problem.advice, problem.file, problem.line))
    wrong, members = len({problem.member for problem in report.errors}), 4
    part.verdict = OK if report.ok else FAILS
    part.summary = f"{members - wrong} of {members} members can be called"


def _pipeline(target: str, options: Options, part: Part, tell: Tell) -> None:
    from .catalogue import CATALOGUE
    from .pipeline import CANNOT_CHECK, run_pipeline

    told = 0

    def progress(finished: int) -> None:
        nonlocal told
        if finished * 4 // options.steps > told:
            told = finished * 4 // options.steps
            tell(f"  pipeline     step {finished} of {options.steps}")

    report = run_pipeline(
        target,
        stages=options.stages,
        steps=options.steps,
        seed=options.seed,
        inputs=options.inputs,
        timeout=options.timeout,
        tp=options.tp,
        progress=progress,
    )
    part.warnings += [
        Finding(code, found, CATALOGUE[code].fix) for code, found in report.warnings.items()
    ]
    for fault in report.faults:
        code = fault.code if fault.code in CATALOGUE else "observer-raised"
        where = (fault.where[-1].rpartition(" in ")[0] if fault.where else "").rpartition(":")
        place = (where[0], int(where[2])) if where[0] else ("", 0)
        _add(part, code, str(fault).removeprefix(f"[{fault.code}] "), fault.advice, place)
    names = f"{len(report.tensors)} {'name' if len(report.tensors) == 1 else 'names'}"
    stages = f"{report.stages} stages{f' of {report.tp} TP ranks' if report.tp > 1 else ''}"
    part.summary = (
        f"{stages}, {report.outputs} outputs (tensors of {names}) in"
        f" {report.asked} of {report.steps} steps, {report.tokens} tokens"
    )
    if report.faults:
        part.verdict = CANNOT if report.faults[0].code in CANNOT_CHECK else FAILS
        part.summary = f"{stages}: stage {report.faults[0].stage} failed"
    elif not report.outputs:
        part.verdict = CANNOT
        found = (
            f"nothing was transported: asked in {report.asked} of {report.steps} steps, it was"
            f" active in {report.active}, before_grammar gave a state in {report.with_state}, and"
            " after_sample gave an output in none"
        )
        _add(part, "no-output", found)
    else:
        part.summary += ", equal bit for bit"
