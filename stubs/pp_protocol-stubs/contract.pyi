from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import Protocol, TypeVar, runtime_checkable

@dataclass(frozen=True)
class CommittedTokens:
    output_index: int
    token_ids: tuple[int, ...]

@runtime_checkable
class HostAuxiliaryOutput(Protocol):
    @abstractmethod
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None], /) -> None: ...

@runtime_checkable
class DeviceAuxiliaryOutput(Protocol):
    @abstractmethod
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> HostAuxiliaryOutput: ...

@runtime_checkable
class SamplingObserver(Protocol):
    @abstractmethod
    def is_active(self, sampling_info: Any, /) -> bool: ...
    @abstractmethod
    def before_grammar(self, logits: Tensor, sampling_info: Any, /) -> Any: ...
    @abstractmethod
    def after_sample(self, state: Any, token_ids: Tensor, /) -> DeviceAuxiliaryOutput | None: ...

@runtime_checkable
class PipelineParallelAuxiliaryOutput(Protocol):
    @abstractmethod
    def to_pp_tensors(self) -> Mapping[str, Tensor]: ...

OutputT_co = TypeVar(
    "OutputT_co", bound=DeviceAuxiliaryOutput, covariant=True, default=DeviceAuxiliaryOutput
)

@runtime_checkable
class PipelineParallelSamplingObserver(Protocol[OutputT_co]):
    @abstractmethod
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> OutputT_co: ...

@runtime_checkable
class PPCapableOutput(DeviceAuxiliaryOutput, PipelineParallelAuxiliaryOutput, Protocol): ...

@runtime_checkable
class PPCapableObserver(
    SamplingObserver, PipelineParallelSamplingObserver[OutputT_co], Protocol[OutputT_co]
):
    @abstractmethod
    def after_sample(self, state: Any, token_ids: Tensor, /) -> PPCapableOutput | None: ...
