"""Wrong code: every type checker finds an error on exactly the lines that say why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sglang.srt.managers.auxiliary_output as engine_outputs
import sglang.srt.sampling.sampling_observer as engine_observers
import sglang.srt.sampling.sampling_observer_pp as engine
from pp_protocol import (
    CommittedTokens,
    CompositeAuxiliaryOutput,
    CompositeSamplingObserver,
    DeviceAuxiliaryOutput,
    HostAuxiliaryOutput,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
    PPCapableObserver,
    PPCapableOutput,
    SamplingObserver,
    TensorPayload,
    add_auxiliary_output_to_pp_tensors as add,
    pop_auxiliary_output_from_pp_tensors as pop,
    pp_boundary,
    verify_pipeline,
    with_pp_transport,
)
from torch import Tensor


class HostOutput:
    def consume(self, batch: object, commits: Sequence[CommittedTokens | None]) -> None: ...


class Output:
    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {}

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostOutput:
        return HostOutput()


class TransportOnly:
    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {}


class DeviceOnly:
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostOutput:
        return HostOutput()


class Good:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output()


class Missing:
    def is_active(self, sampling_info: object) -> bool:
        return True


class Misspelt:
    def from_pp_tensor(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output()


class Narrow:
    def from_pp_tensors(self, tensors: dict[str, Tensor]) -> Output:
        return Output()


class ReturnsOptional:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output | None:
        return None


class ReturnsTensor:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["x"]


class ReturnsNothing:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class ReturnsTransportOnly:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> TransportOnly:
        return TransportOnly()


class Asynchronous:
    async def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output()


class NeedsMore:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], device: str) -> Output:
        return Output()


class NeedsKeyword:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor], *, device: str) -> Output:
        return Output()


class TakesNothing:
    def from_pp_tensors(self) -> Output:
        return Output()


class SendsWhatCannotTravel:
    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> DeviceOnly | None:
        return None

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output()


class NamesNoTensors:
    def to_pp_tensors(self) -> dict[str, float]:
        return {}


class ListsTensors:
    def to_pp_tensors(self) -> list[Tensor]:
        return []


class NoConsume:
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> object:
        return object()


wire: dict[str, Any] = {}

# At the call.
pop(wire, Good)  # reject: a class where an instance is meant
pop(wire, Missing())  # reject: no from_pp_tensors
pop(wire, Misspelt())  # reject: misspelt
pop(wire, Narrow())  # reject: takes a dict only
pop(wire, ReturnsOptional())  # reject: may give None
pop(wire, ReturnsTensor())  # reject: gives a tensor
pop(wire, ReturnsNothing())  # reject: gives None
pop(wire, ReturnsTransportOnly())  # reject: gives what cannot be copied to the host
pop(wire, Asynchronous())  # reject: gives a coroutine
pop(wire, NeedsMore())  # reject: an extra required parameter
pop(wire, NeedsKeyword())  # reject: a keyword-only parameter
pop(wire, TakesNothing())  # reject: no parameter for the tensors
pop([], Good())  # reject: a list is no dict
engine.pop_auxiliary_output_from_pp_tensors(wire, Missing())  # reject: as ours
engine.pop_auxiliary_output_from_pp_tensors(wire, ReturnsOptional())  # reject: as ours
engine.pop_auxiliary_output_from_pp_tensors(wire, Good)  # reject: as ours
add(wire, Output)  # reject: a class where an instance is meant
add(wire, DeviceOnly())  # reject: no to_pp_tensors
add(wire, NamesNoTensors())  # reject: values that are no tensors
add(wire, ListsTensors())  # reject: no mapping
engine.add_auxiliary_output_to_pp_tensors(wire, DeviceOnly())  # reject: as ours


def not_narrowed(
    observer: SamplingObserver | None,
    theirs: engine_observers.SamplingObserver | None,
    output: DeviceAuxiliaryOutput | None,
    anything: object,
) -> None:
    pop(wire, observer)  # reject: an engine's observer need not be able to
    engine.pop_auxiliary_output_from_pp_tensors(wire, theirs)  # reject: as ours
    pop(wire, anything)  # reject: nothing is known of it
    add(wire, output)  # reject: an engine's output need not be able to


@pp_boundary
def install(observer: PPCapableObserver, rank: int = 0) -> str:
    return str(rank)


install(Good())  # reject: the decorated signature is still there
install(Good, rank="0")  # reject: all of it
number: int = install  # reject: and it is a function

with_pp_transport(Good(), Good().from_pp_tensors)  # reject: no hooks
with_pp_transport(SendsWhatCannotTravel(), ReturnsTensor().from_pp_tensors)  # reject: a tensor

# At the assignment.
a: PipelineParallelSamplingObserver = Good  # reject: a class where an instance is meant
b: PipelineParallelSamplingObserver = Missing()  # reject: no from_pp_tensors
c: PipelineParallelSamplingObserver = Misspelt()  # reject: misspelt
d: PipelineParallelSamplingObserver = Narrow()  # reject: takes a dict only
e: PipelineParallelSamplingObserver = ReturnsOptional()  # reject: may give None
f: PipelineParallelSamplingObserver = ReturnsTensor()  # reject: gives a tensor
g: PipelineParallelSamplingObserver = ReturnsTransportOnly()  # reject: cannot be copied
h: PipelineParallelSamplingObserver = Asynchronous()  # reject: gives a coroutine
i: PipelineParallelSamplingObserver = NeedsMore()  # reject: an extra required parameter
j: PipelineParallelSamplingObserver = NeedsKeyword()  # reject: a keyword-only parameter
k: PipelineParallelSamplingObserver[Output] = ReturnsNothing()  # reject: gives None
m: PPCapableObserver = SendsWhatCannotTravel()  # reject: its output dies in add
n: PPCapableObserver = Good()  # reject: no hooks
o: SamplingObserver = Good()  # reject: no hooks
p: PPCapableOutput = DeviceOnly()  # reject: cannot be sent
q: PPCapableOutput = TransportOnly()  # reject: cannot be copied to the host
r: DeviceAuxiliaryOutput = NoConsume()  # reject: gives what cannot be consumed
s: HostAuxiliaryOutput = Output()  # reject: no consume
t: PipelineParallelAuxiliaryOutput = NamesNoTensors()  # reject: values that are no tensors
u: engine.PipelineParallelSamplingObserver = ReturnsTensor()  # reject: as ours
v: engine_outputs.DeviceAuxiliaryOutput = NoConsume()  # reject: as ours
w: engine_observers.SamplingObserver = Good()  # reject: as ours


class Forgetful(PPCapableObserver[Output]):
    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> Output | None:
        return None


class ForgetfulOutput(PPCapableOutput):
    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {}


class ForgetfulHost(HostAuxiliaryOutput): ...


Forgetful()  # reject: from_pp_tensors is abstract
ForgetfulOutput()  # reject: copy_to_host is abstract
ForgetfulHost()  # reject: consume is abstract


class ForgetfulPayload(TensorPayload):
    entropy: Tensor


class ConsumingPayload(ForgetfulPayload):
    def consume(self, batch: object, commits: Sequence[CommittedTokens | None]) -> None: ...


def payloads(tensor: Tensor, forgetful: ForgetfulPayload, consuming: ConsumingPayload) -> None:
    device: DeviceAuxiliaryOutput = forgetful  # reject: consume is not defined
    host: HostAuxiliaryOutput = forgetful  # reject: as above
    ConsumingPayload()  # reject: a field is missing
    ConsumingPayload(entropy=1.5)  # reject: a field that is no tensor
    ConsumingPayload(entropy=tensor, more=tensor)  # reject: there is no such field
    consuming.entropy = tensor  # reject: payloads are frozen
    ConsumingPayload.from_pp_tensors([tensor])  # reject: no mapping
    CompositeSamplingObserver([Good()])  # reject: without names
    CompositeSamplingObserver({"good": Good()})  # reject: a child without hooks
    CompositeAuxiliaryOutput({"device": DeviceOnly()})  # reject: a child that cannot be sent
    CompositeAuxiliaryOutput.naming(("one",), consuming)  # reject: it has no outputs
    verify_pipeline(tensor)  # reject: no observer
    del device, host
