"""Small observers and outputs that the tests share; importable by processes that a test starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


class Output:
    """An output of whatever it is given, right or wrong."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def to_pp_tensors(self) -> Any:
        return self.tensors

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Output:
        return Output({name: copy_tensor(tensor) for name, tensor in self.tensors.items()})

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        pass


class Observer:
    """Rebuilds an `Output`."""

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return logits.float().logsumexp(-1)

    def after_sample(self, state: Any, token_ids: Tensor) -> Output | None:
        return Output({"logsumexp": state})

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output(tensors)


class Reprless:
    """Fails whoever calls repr, str or format on it."""

    def __repr__(self) -> str:
        raise AssertionError("repr of a user's object")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        raise AssertionError("format of a user's object")
