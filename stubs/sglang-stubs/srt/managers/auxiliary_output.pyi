# SGLang 0.5.23. Parameters of Protocols are positional-only: the engine passes them positionally.
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

# the same class for a type checker, or the two nominal types would conflict
from pp_protocol.contract import CommittedTokens as CommittedTokens

class DeviceAuxiliaryOutput(Protocol):
    @abstractmethod
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> HostAuxiliaryOutput: ...

class HostAuxiliaryOutput(Protocol):
    @abstractmethod
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None], /) -> None: ...

@dataclass(frozen=True)
class CompositeHostAuxiliaryOutput:
    outputs: tuple[HostAuxiliaryOutput, ...]
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None: ...

@dataclass(frozen=True)
class CompositeDeviceAuxiliaryOutput:
    outputs: tuple[DeviceAuxiliaryOutput, ...]
    def copy_to_host(
        self, copy_tensor: Callable[[Tensor], Tensor]
    ) -> CompositeHostAuxiliaryOutput: ...

def append_auxiliary_output(
    current: DeviceAuxiliaryOutput | None, output: DeviceAuxiliaryOutput | None
) -> DeviceAuxiliaryOutput | None: ...
