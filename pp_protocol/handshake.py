"""Do all ranks agree, before serving, on what is installed to send and to rebuild?

Each rank writes what it has into the store of the process group; the first that has read them all,
or whose time is over, writes the verdict, once, and all read that. No collective operation is used:
those name nobody when a rank is missing, and can leave the group unusable.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch.distributed as dist

from . import __version__
from .conformance import FROM_PP_TENSORS
from .errors import HandshakeError, type_name
from .payload import payload_schema
from .reports import check_observer
from .stage_process import shortened

POLL = 0.05
"""Seconds between two looks into the store."""


@dataclass(frozen=True)
class RankReport:
    """What one rank has installed."""

    rank: int
    stage: int | None
    """Its pipeline stage, if it was given."""
    observer: str = ""
    """Type of the observer, with its module; empty if there is none."""
    package: str = ""
    """The distribution that it comes from, and the version; empty if that is not known."""
    schema: tuple[str, ...] | None = None
    """A line for each tensor of its payload; None if it has no `TensorPayload`."""
    cannot_rebuild: tuple[str, ...] = ()
    """What a report lists against its `from_pp_tensors`."""
    cannot_sample: tuple[str, ...] = ()
    """What a report lists against its hooks."""
    failed: str = ""
    """What the check itself raised on this rank."""
    version: str = __version__
    """Of pp_protocol."""


@dataclass(frozen=True)
class PipelineReport:
    """What all ranks have, and what stands against serving with it; the same on every rank."""

    ranks: tuple[RankReport, ...]
    """In the order of the ranks, without those that never came."""
    missing: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing stands against serving; warnings may be there."""
        return not self.problems

    def __str__(self) -> str:
        """A line for each rank, problem and warning."""
        lines = []
        for one in self.ranks:
            stage = "" if one.stage is None else f", stage {one.stage}"
            package = f" of {one.package}" if one.package else ""
            lines.append(f"rank {one.rank}{stage}: {one.observer or 'no observer'}{package}")
        lines += [f"rank {rank}: did not come" for rank in self.missing]
        lines += [f"problem: {text}" for text in self.problems]
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PipelineReport:
        """The report that `to_json` wrote."""
        read = json.loads(text)
        ranks = tuple(_rank_report(one) for one in read["ranks"])
        rest = (tuple(read[name]) for name in ("missing", "problems", "warnings"))
        return cls(ranks, *rest)


def verify_pipeline(
    observer: Any, *, group: Any = None, stage: int | None = None, timeout: float = 300.0
) -> PipelineReport:
    """Agree with all ranks on the observers that are installed; to be called on every rank.

    Every rank returns the same report, or every rank raises the same error. No rank waits for one
    that has failed; one that does not come is named when the time of the first is over, and hears
    the same if it comes later. Nothing of another rank's is run: what travels is JSON.

    Args:
        observer: what this rank has installed, or None.
        group: the process group of all ranks that serve together; the default group if None. Any
            backend: only its store is used. Without a process group this rank is checked alone.
        stage: this rank's pipeline stage, 0 for the first. Give it on every rank or on none: if on
            none, each rank is a stage of its own, which with tensor parallelism is not so.
        timeout: seconds to wait for the other ranks. A store whose host is stopped without having
            ended can hold a call for as long as its own time-out.

    Returns:
        What all ranks have, with warnings where types or versions differ.

    Raises:
        HandshakeError: a rank of the first stage has no observer while the last stage has one; an
            observer cannot be transported, or that of the last stage has a hook that cannot be
            called; payload schemas differ; a check has raised; a rank did not come; the store
            cannot be reached. It lists all of it, with the ranks.
        ValueError: this rank is not in `group`, or `timeout` is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout has to be positive, not {timeout}")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return _required(judged([_own(observer, 0, stage)], 1))
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the group")
    own = _own(observer, rank, stage)
    if size == 1:
        return _required(judged([own], 1))
    try:
        report = _agreed(_store_of(group), own, size, timeout)
    except RuntimeError as error:  # what torch's stores raise when their host is gone
        raise HandshakeError.about(
            f"rank {rank}",
            f"cannot reach the store of the group ({type_name(error)}: {error})",
            "Look at the log of the rank that hosts it, mostly rank 0: it may have ended.",
        ) from error
    return _required(report)


def _store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):  # torch 2.9 and later
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _agreed(store: Any, own: RankReport, size: int, timeout: float) -> PipelineReport:
    """What the first rank to know it has found of all; the same for every rank."""
    until = time.monotonic() + timeout
    # counted in the store, which may outlive the group: no verdict is taken for another one
    call = store.add(f"pp_protocol/verify/calls/{own.rank}", 1)
    prefix = f"pp_protocol/verify/{call}"
    keys, verdict = [f"{prefix}/{rank}" for rank in range(size)], f"{prefix}/verdict"
    store.set(keys[own.rank], json.dumps(dataclasses.asdict(own)))
    while not store.check([verdict]):
        complete = store.check(keys)
        if complete or time.monotonic() > until:
            there = keys if complete else [key for key in keys if store.check([key])]
            ranks = [_rank_report(json.loads(store.get(key))) for key in there]
            report = judged(ranks, size, timeout)
            store.compare_set(verdict, "", report.to_json())  # only the first is kept
        else:
            time.sleep(POLL)  # a store tells nobody that a key has come
    return PipelineReport.from_json(store.get(verdict).decode())


def _required(report: PipelineReport) -> PipelineReport:
    if report.ok:
        return report
    listed = "\n".join(f"  * {text}" for text in report.problems)
    error = HandshakeError.about(
        f"{len(report.ranks) + len(report.missing)} ranks",
        f"have {len(report.problems)} problems:\n{listed}\n",
        "Mend each on the rank that it names, and start all ranks anew.",
    )
    error.report = report
    raise error


def _own(observer: Any, rank: int, stage: Any) -> RankReport:
    """What this rank has; whatever that raises is told to the others, and nobody waits for it."""
    name = ""
    try:
        stage = None if stage is None else operator.index(stage)
        if observer is None:
            return RankReport(rank, stage)
        name = shortened(type_name(observer))
        problems = check_observer(observer).errors
        texts = [(one.member, shortened(f"{one.found}; {one.advice}")) for one in problems]
        schema = payload_schema(observer)
        return RankReport(
            *(rank, stage, name, shortened(_package_of(observer))),
            None if schema is None else tuple(map(shortened, schema[:1000])),
            tuple(text for member, text in texts if member == FROM_PP_TENSORS.name),
            tuple(text for member, text in texts if member != FROM_PP_TENSORS.name),
        )
    except BaseException as error:
        try:
            text = str(error)
        except BaseException:  # it is the user's code that makes the text
            text = "(its message cannot be read)"
        raised = shortened(f"{type_name(error)}: {text}")
        return RankReport(rank, stage if type(stage) is int else None, name, failed=raised)


def judged(ranks: Sequence[RankReport], size: int, timeout: float = 0.0) -> PipelineReport:
    """What the reports of all ranks that came say together."""
    missing = sorted(set(range(size)) - {one.rank for one in ranks})
    problems = [
        f"rank {rank} did not call verify_pipeline within {timeout:g} s: look at its log, and"
        " whether all ranks call it"
        for rank in missing
    ]
    problems += _problems(ranks, size)
    return PipelineReport(
        *(tuple(ranks), tuple(missing), tuple(problems), tuple(_warnings(ranks, size)))
    )


def _stages(ranks: Sequence[RankReport], size: int) -> tuple[dict[int, int], int]:
    """The stage of each rank, and the last one; -1 if that may be of a rank that did not come."""
    given = [one.stage for one in ranks if one.stage is not None]
    if not given:
        return {one.rank: one.rank for one in ranks}, size - 1
    stages = {one.rank: one.stage for one in ranks if one.stage is not None}
    return stages, max(given) if len(ranks) == size else -1


def _problems(ranks: Sequence[RankReport], size: int) -> Iterator[str]:
    stages, last = _stages(ranks, size)
    if stages and len(ranks) == size and min(stages.values()) != 0:
        yield f"no rank gave stage 0, and one gave {min(stages.values())}: the first stage is 0"
    senders = [one for one in ranks if stages.get(one.rank) == last and one.observer]
    for one in ranks:
        stage = stages.get(one.rank)
        who = f"rank {one.rank} (stage {stage})"
        if stage is None:
            yield f"rank {one.rank} gave no stage, and other ranks did: pass stage= on every rank"
        if one.failed:
            yield f"{who}: checking {one.observer} raised {one.failed}"
        if stage == 0 and not one.observer and senders:
            yield (
                f"{who} has no observer, and rank {senders[0].rank} (stage {last}) has"
                f" {senders[0].observer}: install on the first stage what rebuilds its output"
            )
        yield from (f"{who}: {one.observer} {text}" for text in one.cannot_rebuild)
        if stage == last:
            yield from (f"{who}: {one.observer} {text}" for text in one.cannot_sample)
    with_schema = [one for one in ranks if one.schema is not None]
    for one in with_schema[1:]:
        first = with_schema[0]
        differs = _differing(first.schema or (), one.schema or ())
        if differs:
            yield (
                f"the payload of rank {one.rank} differs from that of rank {first.rank} in"
                f" {'; '.join(differs)}: install the same version on every rank"
            )


def _differing(one: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    """The lines that only one has, but for children of which one side says nothing."""
    unknown = tuple(
        line.removesuffix("(unknown)") for line in {*one, *other} if line.endswith("/(unknown)")
    )
    return sorted(
        line for line in set(one) ^ set(other) if not (unknown and line.startswith(unknown))
    )


def _warnings(ranks: Sequence[RankReport], size: int) -> Iterator[str]:
    stages, last = _stages(ranks, size)
    for what in ("observer", "package", "version"):
        found: dict[str, list[int]] = {}
        for one in ranks:
            if one.observer and getattr(one, what):
                found.setdefault(getattr(one, what), []).append(one.rank)
        if len(found) > 1:
            name = "pp_protocol" if what == "version" else what
            told = ", ".join(f"{value} on ranks {where}" for value, where in found.items())
            yield f"{name} differs between the ranks: {told}"
    on_last = [one for one in ranks if stages.get(one.rank) == last]
    if on_last and not any(one.observer for one in on_last) and any(one.observer for one in ranks):
        yield f"stage {last} has no observer: nothing will be sent"


def _rank_report(read: dict[str, Any]) -> RankReport:
    """What another rank wrote; what only its version of this package has is left out."""
    known = {one.name for one in dataclasses.fields(RankReport)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in read.items()
        if name in known
    }
    return RankReport(**values)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()  # reads the metadata of all that is installed


def _package_of(observer: object) -> str:
    """`distribution version` of what an object's class comes from, as far as that is known."""
    module = str(type(observer).__module__).partition(".")[0]
    try:
        # an editable install does not list its modules; most are named as their distribution is
        names = _distributions().get(module, [module.replace("_", "-")])
        return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))
    except Exception:  # no such distribution, or metadata that cannot be read
        version = getattr(sys.modules.get(module), "__version__", "")
        return f"{module} {version}" if version else ""
