from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, dataclass_transform

@dataclass(frozen=True)
class TensorSpec:
    dtype: torch.dtype | None = None
    shape: tuple[int | str, ...] | None = None
    def __post_init__(self) -> None: ...

@dataclass(frozen=True)
class Local: ...

def payload_schema(observer: Any) -> tuple[str, ...] | None: ...

@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class TensorPayload:
    def __init_subclass__(cls, **options: Any) -> None: ...
    def to_pp_tensors(self) -> dict[str, Tensor]: ...
    @classmethod
    def from_pp_tensors(cls, tensors: Mapping[str, Tensor], /, **local: Any) -> Self: ...
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> Self: ...
