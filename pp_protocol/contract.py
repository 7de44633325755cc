"""What must an object have to take part in sampling under pipeline parallelism?

The names are those of SGLang 0.5.23 (`sglang.srt.sampling.sampling_observer`,
`sglang.srt.sampling.sampling_observer_pp`, `sglang.srt.managers.auxiliary_output`), so that an
object written for one side satisfies the other. Parameters are positional-only: engines call
these methods positionally, so an implementation may name them as it likes.

`isinstance` with one of these Protocols looks only for names; `pp_protocol.is_pp_observer` and
`pp_protocol.is_pp_output` say whether the member can really be called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# typing_extensions: since 3.12 `isinstance` looks members up statically; this does so on 3.10 too.
from typing_extensions import Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CommittedTokens:
    """The newly visible tokens of one request.

    `output_index` is the position of the first of them among the request's output tokens,
    counted from 0; `token_ids` are their ids in the vocabulary.
    """

    output_index: int
    token_ids: tuple[int, ...]


@runtime_checkable
class HostAuxiliaryOutput(Protocol):
    """An auxiliary output on the host, where the requests are."""

    @abstractmethod
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None], /) -> None:
        """Take what belongs to each request, after its tokens were committed.

        `commits` is aligned with `batch.reqs`, and so are the rows of the tensors; it holds None
        for a request that takes no token of this step, for instance because it was aborted.
        """
        raise NotImplementedError


@runtime_checkable
class DeviceAuxiliaryOutput(Protocol):
    """An auxiliary output on the device: tensors that became known while sampling.

    None of them may alias a buffer that the engine reuses, such as the logits: the engine
    overwrites it before the copy to the host has happened.
    """

    @abstractmethod
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> HostAuxiliaryOutput:
        """Copy every tensor with `copy_tensor`, once each.

        The copies may be asynchronous: their values are there when `consume` is called, and not
        before.
        """
        raise NotImplementedError


@runtime_checkable
class SamplingObserver(Protocol):
    """Hooks around the grammar mask and the sampler, on the last pipeline stage."""

    @abstractmethod
    def is_active(self, sampling_info: Any, /) -> bool:
        """Whether the other hooks are to be called for this batch."""
        raise NotImplementedError

    @abstractmethod
    def before_grammar(self, logits: Tensor, sampling_info: Any, /) -> Any:
        """Look at the logits, float [batch, vocabulary], before the grammar mask.

        The result is the `state` of `after_sample`; None skips that hook. The mask is written
        into this very tensor afterwards, so keep what is computed from it, not the tensor.
        """
        raise NotImplementedError

    @abstractmethod
    def after_sample(self, state: Any, token_ids: Tensor, /) -> DeviceAuxiliaryOutput | None:
        """Make the auxiliary output of this step; `token_ids` is int [batch]."""
        raise NotImplementedError


@runtime_checkable
class PipelineParallelAuxiliaryOutput(Protocol):
    """An auxiliary output that can be sent to another pipeline stage."""

    @abstractmethod
    def to_pp_tensors(self) -> Mapping[str, Tensor]:
        """Name the tensors to send: at least one, under non-empty names."""
        raise NotImplementedError


OutputT_co = TypeVar(
    "OutputT_co", bound=DeviceAuxiliaryOutput, covariant=True, default=DeviceAuxiliaryOutput
)


@runtime_checkable
class PipelineParallelSamplingObserver(Protocol[OutputT_co]):
    """An observer that can rebuild, on the first stage, what the last stage sent."""

    @abstractmethod
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> OutputT_co:
        """Rebuild the output from what its `to_pp_tensors` named on the last stage.

        The tensors are dense and contiguous, and the mapping is the observer's own. Nothing but
        them has travelled: this instance may never have seen a hook being called.
        """
        raise NotImplementedError


@runtime_checkable
class PPCapableOutput(DeviceAuxiliaryOutput, PipelineParallelAuxiliaryOutput, Protocol):
    """An auxiliary output that can be sent, and copied to the host where it arrives."""


@runtime_checkable
class PPCapableObserver(
    SamplingObserver, PipelineParallelSamplingObserver[OutputT_co], Protocol[OutputT_co]
):
    """An observer that does both halves: the hooks on the last stage, rebuilding on the first."""

    @abstractmethod
    def after_sample(self, state: Any, token_ids: Tensor, /) -> PPCapableOutput | None:
        """Make the auxiliary output of this step; it must be one that can be sent."""
        raise NotImplementedError
