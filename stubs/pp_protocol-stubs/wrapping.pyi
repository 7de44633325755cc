from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import TypeVar

from .contract import DeviceAuxiliaryOutput, PPCapableObserver, SamplingObserver

_OutputT = TypeVar("_OutputT", bound=DeviceAuxiliaryOutput)

Rebuild = Callable[[Mapping[str, Tensor]], DeviceAuxiliaryOutput]
NameTensors = Callable[[Any], Mapping[str, Tensor]]

def with_pp_transport(
    observer: SamplingObserver,
    from_pp_tensors: Callable[[Mapping[str, Tensor]], _OutputT],
    to_pp_tensors: NameTensors | None = None,
) -> PPCapableObserver[_OutputT]: ...
