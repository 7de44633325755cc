from dataclasses import dataclass
from typing import Any

from .conformance import Member

CODES: dict[Member, str]
RESULTS: dict[Member, str]

@dataclass(frozen=True)
class Problem:
    member: str
    expected: str
    found: str
    code: str
    severity: str
    advice: str
    file: str = ""
    line: int = 0

@dataclass(frozen=True)
class ConformanceReport:
    subject: str
    problems: tuple[Problem, ...]
    @property
    def errors(self) -> tuple[Problem, ...]: ...
    @property
    def ok(self) -> bool: ...
    def to_json(self) -> str: ...
    def raise_if_failed(self) -> None: ...

def check_observer(obj: object, /) -> ConformanceReport: ...
def check_output(obj: object, /) -> ConformanceReport: ...
def declared_result(obj: object, member: Member) -> Any: ...
def where_defined(obj: Any, name: str) -> tuple[str, int]: ...
