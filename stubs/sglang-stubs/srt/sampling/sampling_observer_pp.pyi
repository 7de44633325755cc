# SGLang 0.5.23, as strict as pp_protocol: what dies on the first token is an error here.
from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, overload, runtime_checkable

from sglang.srt.managers.auxiliary_output import DeviceAuxiliaryOutput as DeviceAuxiliaryOutput
from sglang.srt.sampling.sampling_observer import SamplingObserver as SamplingObserver
from torch import Tensor

from pp_protocol.transport import _OutputT, _PipelineParallelSamplingObserver, _Rebuilds

@runtime_checkable
class PipelineParallelAuxiliaryOutput(Protocol):
    @abstractmethod
    def to_pp_tensors(self) -> Mapping[str, Tensor]: ...

@runtime_checkable
class PipelineParallelSamplingObserver(Protocol):
    @abstractmethod
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> DeviceAuxiliaryOutput: ...

_OUTPUT_PREFIX: str

def add_auxiliary_output_to_pp_tensors(
    tensors: MutableMapping[str, Any], output: PipelineParallelAuxiliaryOutput | None
) -> None: ...

# As in pp_protocol.transport, where the overloads are explained.
@overload
def pop_auxiliary_output_from_pp_tensors(
    tensors: MutableMapping[str, Any], observer: _Rebuilds[_OutputT] | None
) -> _OutputT | None: ...
@overload
def pop_auxiliary_output_from_pp_tensors(  # type: ignore[overload-cannot-match]  # as said above
    tensors: MutableMapping[str, Any], observer: PipelineParallelSamplingObserver | None
) -> DeviceAuxiliaryOutput | None: ...
@overload
def pop_auxiliary_output_from_pp_tensors(  # type: ignore[overload-cannot-match]  # the same
    tensors: MutableMapping[str, Any],
    observer: _PipelineParallelSamplingObserver[
        Callable[[Mapping[str, Tensor]], DeviceAuxiliaryOutput]
    ]
    | None,
) -> DeviceAuxiliaryOutput | None: ...
