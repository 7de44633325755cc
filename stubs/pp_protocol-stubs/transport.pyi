from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, overload

from torch import Tensor
from typing_extensions import TypeVar

from .contract import (
    DeviceAuxiliaryOutput,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
)

_OutputT = TypeVar("_OutputT")
_OutputT_co = TypeVar("_OutputT_co", covariant=True)
_MethodT_co = TypeVar("_MethodT_co", covariant=True)

# Gives the exact type of what is rebuilt, and only for what is an auxiliary output: a function has
# to satisfy both overloads. A bound on the type variable would do the same, but mypy then says
# `Value of type variable cannot be "Tensor"`, and names neither the observer nor the Protocol.
class _Rebuilds(Protocol[_OutputT_co]):
    @overload
    @abstractmethod
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> _OutputT_co: ...
    @overload
    @abstractmethod
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> DeviceAuxiliaryOutput: ...  # type: ignore[overload-cannot-match]  # as said above

# Only for what mypy says: it has to have the member, whatever that is, to be spoken of.
class _PipelineParallelSamplingObserver(Protocol[_MethodT_co]):
    @property
    def from_pp_tensors(self) -> _MethodT_co: ...

def add_auxiliary_output_to_pp_tensors(
    tensors: MutableMapping[str, Any],
    output: PipelineParallelAuxiliaryOutput | None,
    *,
    fingerprint: bool | None = None,
) -> None: ...

# Whatever matches one matches the first. The others are what mypy speaks of where none does: of a
# wrong result, and of parameters that do not fit; it then says what was expected and what it got.
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
def has_auxiliary_output(tensors: Mapping[str, Any]) -> bool: ...
def discard_auxiliary_output(tensors: MutableMapping[str, Any]) -> tuple[str, ...]: ...
