# What plug-in authors get wrong most often. tests/typing/mistakes.mypy.txt is what they read.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pp_protocol import CommittedTokens, PipelineParallelSamplingObserver
from pp_protocol import add_auxiliary_output_to_pp_tensors as add
from pp_protocol import pop_auxiliary_output_from_pp_tensors as pop
from torch import Tensor


class Entropy:
    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {}

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Entropy:
        return self

    def consume(self, batch: object, commits: Sequence[CommittedTokens | None]) -> None: ...


class GivesTheTensor:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["entropy"]


class MayGiveNone:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Entropy | None:
        return None


class IsAsync:
    async def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Entropy:
        return Entropy()


class TakesADict:
    def from_pp_tensors(self, tensors: dict[str, Tensor]) -> Entropy:
        return Entropy()


class IsMisspelt:
    def from_pp_tensor(self, tensors: Mapping[str, Tensor]) -> Entropy:
        return Entropy()


class GivesNumbers:
    def to_pp_tensors(self) -> dict[str, float]:
        return {}


pop({}, GivesTheTensor())
pop({}, MayGiveNone())
pop({}, IsAsync())
pop({}, TakesADict())
pop({}, IsMisspelt())
add({}, GivesNumbers())
one: PipelineParallelSamplingObserver = GivesTheTensor()
two: PipelineParallelSamplingObserver = TakesADict()
three: PipelineParallelSamplingObserver = IsMisspelt()
