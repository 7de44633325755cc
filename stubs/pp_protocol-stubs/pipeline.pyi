from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GRACE: float
CANNOT_CHECK: frozenset[str]

@dataclass(frozen=True)
class StageFault:
    code: str
    stage: int
    phase: str
    step: int
    requests: tuple[str, ...]
    error: str
    message: str
    advice: str = ""
    notes: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    tp_rank: int | None = None

@dataclass
class RunReport:
    stages: int
    steps: int
    seconds: float = 0.0
    faults: list[StageFault] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    outputs: int = 0
    asked: int = 0
    active: int = 0
    with_state: int = 0
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    tp: int = 1
    @property
    def ok(self) -> bool: ...

def run_pipeline(
    target: str | Callable[[], Any],
    *,
    stages: int = 2,
    steps: int = 12,
    seed: int = 0,
    inputs: str | None = None,
    timeout: float = 60.0,
    tp: int = 1,
    progress: Callable[[int], None] | None = None,
) -> RunReport: ...
