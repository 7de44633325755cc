"""Right code: every type checker accepts all of it, and knows the types that are asserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import sglang.srt.managers.auxiliary_output as engine_outputs
import sglang.srt.sampling.sampling_observer as engine_observers
import sglang.srt.sampling.sampling_observer_pp as engine
from pp_protocol import (
    FINGERPRINT,
    PREFIX,
    CommittedTokens,
    CompositeAuxiliaryOutput,
    CompositeSamplingObserver,
    ConformanceError,
    ConformanceReport,
    ContractViolationError,
    DeviceAuxiliaryOutput,
    DuplicateTensorError,
    EmptyOutputError,
    FingerprintError,
    HandshakeError,
    HostAuxiliaryOutput,
    Local,
    MissingObserverError,
    NonTensorError,
    PayloadError,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
    PPCapableObserver,
    PPCapableOutput,
    PipelineReport,
    PPProtocolError,
    Problem,
    RankReport,
    ReconstructionError,
    SamplingObserver,
    TensorNameError,
    TensorPayload,
    TensorSpec,
    UnsupportedObserverError,
    UnsupportedOutputError,
    UnsupportedTensorError,
    WireError,
    add_auxiliary_output_to_pp_tensors,
    check_observer,
    check_output,
    discard_auxiliary_output,
    has_auxiliary_output,
    is_pp_observer,
    is_pp_output,
    pop_auxiliary_output_from_pp_tensors,
    pp_boundary,
    require_pp_observer,
    require_pp_output,
    verify_pipeline,
    with_pp_transport,
)
from pp_protocol.catalogue import CATALOGUE, Entry
from pp_protocol.pipeline import RunReport, run_pipeline
from pp_protocol.reference import LogprobObserver, LogprobOutput
from torch import Tensor
from typing_extensions import assert_type


class HostOutput:
    def consume(self, batch: object, commits: Sequence[CommittedTokens | None]) -> None: ...


class Output:
    def __init__(self, entropy: Tensor) -> None:
        self.entropy = entropy

    def to_pp_tensors(self) -> dict[str, Tensor]:
        return {"entropy": self.entropy}

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostOutput:
        copy_tensor(self.entropy)
        return HostOutput()


class Observer:
    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> Output | None:
        return Output(state)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output(tensors["entropy"])


class Subclass(PPCapableObserver[Output]):
    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> Output | None:
        return Output(state)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        return Output(tensors["entropy"])


class OtherNames:
    """Parameters are positional-only in the contract, so that their names are free."""

    def from_pp_tensors(self, received: Mapping[str, Tensor], strict: bool = True) -> Output:
        return Output(received["entropy"])


class ClassMethod:
    @classmethod
    def from_pp_tensors(cls, tensors: Mapping[str, Tensor]) -> Output:
        return Output(tensors["entropy"])


class PlainObserver:
    """What an engine without pipeline parallelism asks for."""

    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> DeviceAuxiliaryOutput | None:
        return None


class Top(TensorPayload):
    ids: Annotated[Tensor, TensorSpec(torch.int64, ("batch", 5))]
    values: Tensor | None


class Scores(TensorPayload):
    entropy: Annotated[Tensor, TensorSpec(dtype=torch.float32, shape=("batch",))]
    top: Top | None
    on_token: Annotated[Callable[[int], None], Local()]

    def consume(self, batch: object, commits: Sequence[CommittedTokens | None]) -> None: ...


class PayloadObserver:
    def is_active(self, sampling_info: object) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: object) -> Tensor:
        return logits

    def after_sample(self, state: Tensor, token_ids: Tensor) -> Scores | None:
        return Scores(entropy=state, top=Top(token_ids, None), on_token=print)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Scores:
        return Scores.from_pp_tensors(tensors, on_token=print)


class ShortObserver:
    from_pp_tensors = staticmethod(Scores.from_pp_tensors)


wire: dict[str, Any] = {}
output = Output(Tensor())

# The observer decides what is popped.
assert_type(pop_auxiliary_output_from_pp_tensors(wire, Observer()), Output | None)
assert_type(pop_auxiliary_output_from_pp_tensors(wire, Subclass()), Output | None)
assert_type(pop_auxiliary_output_from_pp_tensors(wire, OtherNames()), Output | None)
assert_type(pop_auxiliary_output_from_pp_tensors(wire, ClassMethod()), Output | None)
assert_type(pop_auxiliary_output_from_pp_tensors(wire, LogprobObserver()), LogprobOutput | None)
assert_type(engine.pop_auxiliary_output_from_pp_tensors(wire, Observer()), Output | None)


def optional(
    known: Observer | None,
    protocol: PipelineParallelSamplingObserver | None,
    generic: PipelineParallelSamplingObserver[Output],
    of_the_engine: engine.PipelineParallelSamplingObserver | None,
) -> None:
    assert_type(pop_auxiliary_output_from_pp_tensors(wire, known), Output | None)
    assert_type(pop_auxiliary_output_from_pp_tensors(wire, protocol), DeviceAuxiliaryOutput | None)
    assert_type(pop_auxiliary_output_from_pp_tensors(wire, generic), Output | None)
    pop_auxiliary_output_from_pp_tensors(wire, of_the_engine)
    engine.pop_auxiliary_output_from_pp_tensors(wire, protocol)


# Instances, and what they are assigned to.
pp_observer: PipelineParallelSamplingObserver = Observer()
pp_observer_of_output: PipelineParallelSamplingObserver[Output] = Observer()
capable: PPCapableObserver = Observer()
capable_of_output: PPCapableObserver[Output] = Subclass()
renamed: PipelineParallelSamplingObserver = OtherNames()
static: PipelineParallelSamplingObserver = ClassMethod()
on_the_class: PipelineParallelSamplingObserver = ClassMethod
reference: PPCapableObserver = LogprobObserver()
plain: SamplingObserver = PlainObserver()
pp_output: PipelineParallelAuxiliaryOutput = Output(Tensor())
device_output: DeviceAuxiliaryOutput = Output(Tensor())
capable_output: PPCapableOutput = Output(Tensor())
host_output: HostAuxiliaryOutput = HostOutput()

# The engine's Protocols and ours take each other's objects.
engine_observer: engine_observers.SamplingObserver = Observer()
engine_pp_observer: engine.PipelineParallelSamplingObserver = Observer()
engine_pp_output: engine.PipelineParallelAuxiliaryOutput = Output(Tensor())
engine_device_output: engine_outputs.DeviceAuxiliaryOutput = Output(Tensor())
engine_host_output: engine_outputs.HostAuxiliaryOutput = HostOutput()
token: CommittedTokens = engine_outputs.CommittedTokens(0, (1,))
engine_token: engine_outputs.CommittedTokens = CommittedTokens(0, (1, 2))


def both_ways(
    theirs: engine_observers.SamplingObserver,
    ours: SamplingObserver,
    their_output: engine_outputs.DeviceAuxiliaryOutput,
    our_output: DeviceAuxiliaryOutput,
) -> None:
    one: SamplingObserver = theirs
    other: engine_observers.SamplingObserver = ours
    one_output: DeviceAuxiliaryOutput = their_output
    other_output: engine_outputs.DeviceAuxiliaryOutput = our_output
    composite = engine_outputs.append_auxiliary_output(our_output, their_output)
    assert_type(composite, engine_outputs.DeviceAuxiliaryOutput | None)
    both = engine_outputs.CompositeDeviceAuxiliaryOutput((our_output, their_output))
    host = both.copy_to_host(lambda tensor: tensor)
    assert_type(host, engine_outputs.CompositeHostAuxiliaryOutput)
    del one, other, one_output, other_output


add_auxiliary_output_to_pp_tensors(wire, output)
add_auxiliary_output_to_pp_tensors(wire, None)
add_auxiliary_output_to_pp_tensors(wire, output, fingerprint=True)
engine.add_auxiliary_output_to_pp_tensors(wire, output)
assert_type(has_auxiliary_output(wire), bool)
assert_type(discard_auxiliary_output(wire), tuple[str, ...])


def guards(
    anything: object, observer: SamplingObserver | None, device: DeviceAuxiliaryOutput
) -> None:
    if is_pp_observer(anything):
        assert_type(anything, PipelineParallelSamplingObserver)
        pop_auxiliary_output_from_pp_tensors(wire, anything)
    if observer is not None and is_pp_observer(observer):
        pop_auxiliary_output_from_pp_tensors(wire, observer)
        observer.is_active(None)
    if is_pp_output(device):
        add_auxiliary_output_to_pp_tensors(wire, device)
        device.copy_to_host(lambda tensor: tensor)
    assert_type(require_pp_observer(Observer()), Observer)
    assert_type(require_pp_output(output), Output)
    assert_type(require_pp_observer(anything), PipelineParallelSamplingObserver)
    if observer is not None:
        assert_type(require_pp_observer(observer), PPCapableObserver)
    assert_type(require_pp_output(device), PPCapableOutput)


def errors() -> None:
    try:
        pop_auxiliary_output_from_pp_tensors(wire, None)
    except (
        ConformanceError,
        ContractViolationError,
        DuplicateTensorError,
        EmptyOutputError,
        FingerprintError,
        HandshakeError,
        MissingObserverError,
        NonTensorError,
        PayloadError,
        ReconstructionError,
        TensorNameError,
        UnsupportedObserverError,
        UnsupportedOutputError,
        UnsupportedTensorError,
        WireError,
    ) as error:
        assert_type(error.code, str)
        assert_type(error.tensor, str | None)
        base: PPProtocolError = error
        assert_type(CATALOGUE[base.code], Entry)


@pp_boundary
def install(observer: PPCapableObserver | None, rank: int = 0) -> str:
    return str(rank)


class Engine:
    @pp_boundary()
    def install(self, observer: PPCapableObserver) -> int:
        return 1

    @staticmethod
    @pp_boundary
    async def later(observer: PPCapableObserver) -> bytes:
        return b""


async def decorated() -> None:
    assert_type(install(Observer(), rank=2), str)
    assert_type(Engine().install(Observer()), int)
    assert_type(await Engine.later(Observer()), bytes)


def rebuild(tensors: Mapping[str, Tensor]) -> Output:
    return Output(tensors["entropy"])


wrapped: PPCapableObserver[Output] = with_pp_transport(PlainObserver(), rebuild, lambda output: {})
assert_type(pop_auxiliary_output_from_pp_tensors(wire, wrapped), Output | None)
checked: ConformanceReport = check_observer(Observer())
problems: tuple[Problem, ...] = check_output(output).errors
checked.raise_if_failed()
key: str = PREFIX + "entropy"
other_key: str = FINGERPRINT
report: RunReport = run_pipeline("module:Observer", stages=2)
assert_type(report.ok, bool)


def payloads(
    scores: Scores, engine_combined: engine_outputs.CompositeDeviceAuxiliaryOutput
) -> None:
    assert_type(Scores.from_pp_tensors({}), Scores)
    assert_type(scores.copy_to_host(lambda tensor: tensor), Scores)
    assert_type(scores.to_pp_tensors(), dict[str, Tensor])
    assert_type(scores.entropy, Tensor)
    assert_type(scores.top, Top | None)
    capable: PPCapableOutput = scores
    observer: PPCapableObserver[Scores] = PayloadObserver()
    short: PipelineParallelSamplingObserver = ShortObserver()
    assert_type(pop_auxiliary_output_from_pp_tensors(wire, PayloadObserver()), Scores | None)
    both = CompositeSamplingObserver({"scores": PayloadObserver(), "plain": Observer()})
    as_one: PPCapableObserver[CompositeAuxiliaryOutput] = both
    nested = CompositeSamplingObserver({"both": both})
    assert_type(pop_auxiliary_output_from_pp_tensors(wire, nested), CompositeAuxiliaryOutput | None)
    outputs = CompositeAuxiliaryOutput({"scores": scores, "plain": output})
    named = CompositeAuxiliaryOutput.naming(("scores", "plain"), engine_combined)
    add_auxiliary_output_to_pp_tensors(wire, outputs)
    sent: PPCapableOutput = named
    agreed = verify_pipeline(observer, stage=1, timeout=30)
    assert_type(agreed, PipelineReport)
    assert_type(agreed.ranks, tuple[RankReport, ...])
    verify_pipeline(None)
    del capable, observer, short, as_one, sent
