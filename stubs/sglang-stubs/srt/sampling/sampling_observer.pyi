# SGLang 0.5.23. Parameters of Protocols are positional-only: the engine passes them positionally.
from abc import abstractmethod
from typing import Any, Protocol

from sglang.srt.managers.auxiliary_output import DeviceAuxiliaryOutput as DeviceAuxiliaryOutput
from torch import Tensor

class SamplingObserver(Protocol):
    @abstractmethod
    def is_active(self, sampling_info: Any, /) -> bool: ...
    @abstractmethod
    def before_grammar(self, logits: Tensor, sampling_info: Any, /) -> Any: ...
    @abstractmethod
    def after_sample(self, state: Any, token_ids: Tensor, /) -> DeviceAuxiliaryOutput | None: ...
