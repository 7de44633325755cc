from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from typing_extensions import TypeIs, TypeVar

from .contract import (
    DeviceAuxiliaryOutput,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
    PPCapableObserver,
    PPCapableOutput,
    SamplingObserver,
)

_T = TypeVar("_T")
_ObserverT = TypeVar("_ObserverT", bound=PipelineParallelSamplingObserver)
_OutputT = TypeVar("_OutputT", bound=PipelineParallelAuxiliaryOutput)

@dataclass(frozen=True)
class Member:
    name: str
    arguments: tuple[str, ...]

@dataclass(frozen=True)
class Finding:
    found: str
    advice: str

@dataclass(frozen=True)
class Found:
    raw: Any
    owner: type | None

FROM_PP_TENSORS: Member
TO_PP_TENSORS: Member
COPY_TO_HOST: Member
CONSUME: Member
IS_ACTIVE: Member
BEFORE_GRAMMAR: Member
AFTER_SAMPLE: Member

def stored_in(obj: object) -> list[Any]: ...
def look_up(obj: object, name: str) -> Found | None: ...
def unusable(obj: object, member: Member) -> Finding | None: ...
def faults(obj: object, member: Member) -> list[Finding]: ...
def is_protocol(cls: type | None) -> bool: ...
def overrides_getattribute(cls: type) -> bool: ...
def has_to_be_read(obj: object, member: Member) -> bool: ...
def unusable_in_instances_of(cls: type, member: Member) -> Finding | None: ...
def unusable_callable(value: object, member: Member) -> Finding | None: ...
def faults_of_callable(value: object, member: Member, *, bound: int = 0) -> list[Finding]: ...

class Judge:
    member: Member
    believed: dict[int, int]
    def __init__(self, member: Member) -> None: ...
    def __call__(self, obj: object) -> Finding | None: ...
    def of_read(self, obj: object, value: object) -> Finding | None: ...
    def or_else(self, otherwise: Callable[[object], _T], yes: _T) -> Callable[[object], _T]: ...

def remembering(member: Member) -> Callable[[object], Finding | None]: ...

FROM_PP_TENSORS_JUDGE: Judge
TO_PP_TENSORS_JUDGE: Judge
COPY_TO_HOST_JUDGE: Judge

def judge_from_pp_tensors(obj: object) -> Finding | None: ...
def judge_to_pp_tensors(obj: object) -> Finding | None: ...
def is_pp_observer(obj: object, /) -> TypeIs[PipelineParallelSamplingObserver]: ...
def is_pp_output(obj: object, /) -> TypeIs[PipelineParallelAuxiliaryOutput]: ...

# What is known of the argument stays known; a plain observer is known to be capable afterwards.
@overload
def require_pp_observer(obj: _ObserverT, /) -> _ObserverT: ...
@overload
def require_pp_observer(obj: SamplingObserver, /) -> PPCapableObserver: ...
@overload
def require_pp_observer(obj: object, /) -> PipelineParallelSamplingObserver: ...
@overload
def require_pp_output(obj: _OutputT, /) -> _OutputT: ...
@overload
def require_pp_output(obj: DeviceAuxiliaryOutput, /) -> PPCapableOutput: ...
@overload
def require_pp_output(obj: object, /) -> PipelineParallelAuxiliaryOutput: ...
