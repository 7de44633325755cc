"""Observers written with what makes them short, for a real pipeline of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from observers import Observer
from torch import Tensor

from pp_protocol import (
    CommittedTokens,
    CompositeAuxiliaryOutput,
    CompositeSamplingObserver,
    PPCapableObserver,
    TensorPayload,
    TensorSpec,
    with_pp_transport,
)
from pp_protocol.reference import LogprobObserver


class Top(TensorPayload):
    ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", 2))]
    logits: Annotated[Tensor, TensorSpec(torch.float32, ("batch", 2))]


class Scores(TensorPayload):
    """Everything at once: declared, optional and nested."""

    entropy: Annotated[Tensor, TensorSpec(torch.float32, ("batch",))]
    token: Tensor
    mean: Annotated[Tensor, TensorSpec(torch.float32, ())] | None
    top: Top | None

    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None:
        if not len(self.entropy) == len(batch.reqs) == len(commits):
            raise ValueError("rows and requests differ")


class PayloadObserver:
    """Every second batch size leaves out what is optional."""

    from_pp_tensors = staticmethod(Scores.from_pp_tensors)

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Tensor:
        return logits.float().clone()

    def after_sample(self, state: Tensor, token_ids: Tensor) -> Scores:
        log_p = state.log_softmax(-1)
        more = len(state) % 2
        top = state.topk(2, -1)
        return Scores(
            entropy=-(log_p.exp() * log_p).sum(-1),
            token=token_ids.clone(),
            mean=log_p.mean() if more else None,
            top=Top(top.indices, top.values) if more else None,
        )


class EvenOnly(Observer):
    """Gives an output for batches of an even size only."""

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return None if len(logits) % 2 else super().before_grammar(logits, sampling_info)


def composite() -> CompositeSamplingObserver:
    inner = CompositeSamplingObserver({"even": EvenOnly(), "payload": PayloadObserver()})
    return CompositeSamplingObserver({"inner": inner, "logprobs": LogprobObserver()})


class Combined:
    """What an engine without names for the parts gives."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs


class Combining:
    """Sends a combined output under names, and takes it apart with a composite."""

    def __init__(self) -> None:
        self.parts = CompositeSamplingObserver({"one": Observer(), "two": LogprobObserver()})

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return [part.before_grammar(logits, sampling_info) for part in self.parts.children.values()]

    def after_sample(self, state: Any, token_ids: Tensor) -> CompositeAuxiliaryOutput:
        outputs = (
            part.after_sample(own, token_ids)
            for part, own in zip(self.parts.children.values(), state, strict=True)
        )
        return CompositeAuxiliaryOutput.naming(("one", "two"), Combined(*outputs))

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> CompositeAuxiliaryOutput:
        return self.parts.from_pp_tensors(tensors)


class PlainSums:
    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def copy_to_host(self, copy_tensor: Any) -> PlainSums:
        return PlainSums(copy_tensor(self.sums))

    def consume(self, batch: Any, commits: Any) -> None:
        if len(self.sums) != len(batch.reqs):
            raise ValueError("rows and requests differ")


class Plain:
    """An observer that was written without pipeline parallelism."""

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Tensor:
        return logits.sum(-1)

    def after_sample(self, state: Tensor, token_ids: Tensor) -> PlainSums:
        return PlainSums(state)


def wrapped() -> PPCapableObserver[Any]:
    return with_pp_transport(
        Plain(), lambda tensors: PlainSums(tensors["sums"]), lambda output: {"sums": output.sums}
    )
