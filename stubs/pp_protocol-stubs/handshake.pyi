from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from .contract import PipelineParallelSamplingObserver

POLL: float

@dataclass(frozen=True)
class RankReport:
    rank: int
    stage: int | None
    observer: str = ""
    package: str = ""
    schema: tuple[str, ...] | None = None
    cannot_rebuild: tuple[str, ...] = ()
    cannot_sample: tuple[str, ...] = ()
    failed: str = ""
    version: str = ...

@dataclass(frozen=True)
class PipelineReport:
    ranks: tuple[RankReport, ...]
    missing: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    @property
    def ok(self) -> bool: ...
    def to_json(self) -> str: ...
    @classmethod
    def from_json(cls, text: str) -> PipelineReport: ...

def verify_pipeline(
    observer: PipelineParallelSamplingObserver | None,
    *,
    group: ProcessGroup | None = None,
    stage: int | None = None,
    timeout: float = 300.0,
) -> PipelineReport: ...
def judged(ranks: Sequence[RankReport], size: int, timeout: float = 0.0) -> PipelineReport: ...
