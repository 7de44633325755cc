"""Promises of the wire: the released engine's own functions and ours understand each other."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import engine_path
from observers import Observer, Output
from test_transport import ADD_REFUSES, POP_REFUSES
from test_wire import AS_IT_IS, TRAVELS, expected

import pp_protocol
from pp_protocol import PREFIX, PPProtocolError, is_pp_observer, is_pp_output
from pp_protocol.codec import records


@pytest.fixture(scope="module")
def stock() -> Any:
    """`sglang.srt.sampling.sampling_observer_pp` of the released wheel, and its neighbours."""
    before = set(sys.modules)
    sys.path.insert(0, str(engine_path()))
    try:
        import sglang.srt.managers.auxiliary_output as outputs
        import sglang.srt.sampling.sampling_observer as observers
        import sglang.srt.sampling.sampling_observer_pp as pp

        yield types.SimpleNamespace(
            add=pp.add_auxiliary_output_to_pp_tensors,
            pop=pp.pop_auxiliary_output_from_pp_tensors,
            pp=pp,
            outputs=outputs,
            observers=observers,
        )
    finally:
        sys.path.remove(str(engine_path()))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "sglang":
                del sys.modules[name]


def ours() -> Any:
    return types.SimpleNamespace(
        add=pp_protocol.add_auxiliary_output_to_pp_tensors,
        pop=pp_protocol.pop_auxiliary_output_from_pp_tensors,
    )


def test_the_prefix_is_the_engine_s(stock: Any) -> None:
    assert stock.pp._OUTPUT_PREFIX == PREFIX


@pytest.mark.parametrize("label", TRAVELS)
def test_every_payload_goes_from_our_sender_to_the_stock_receiver(label: str, stock: Any) -> None:
    tensors: dict[str, Any] = {"next_token_ids": 1}
    ours().add(tensors, Output({"x": TRAVELS[label]()}))
    output = stock.pop(tensors, Observer())
    assert records(output.tensors) == [expected(TRAVELS[label])]
    assert tensors == {"next_token_ids": 1}


@pytest.mark.parametrize("label", TRAVELS)
def test_every_payload_goes_from_the_stock_sender_to_our_receiver(label: str, stock: Any) -> None:
    tensors: dict[str, Any] = {"next_token_ids": 1}
    tensor = TRAVELS[label]()
    stock.add(tensors, Output({"x": tensor}))
    output = ours().pop(tensors, Observer())
    assert output.tensors["x"] is tensor
    assert tensors == {"next_token_ids": 1}


@pytest.mark.parametrize("label", AS_IT_IS)
def test_what_needs_no_change_looks_the_same_on_the_wire(label: str, stock: Any) -> None:
    wires: list[dict[str, Any]] = [{}, {}]
    tensor = TRAVELS[label]()
    for side, wire in zip((ours(), stock), wires, strict=True):
        side.add(wire, Output({"x": tensor}))
    assert list(wires[0]) == list(wires[1])
    assert wires[0][PREFIX + "x"] is wires[1][PREFIX + "x"]


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """("", "") if it passes, or the class and the message of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock leaves coroutines that nobody awaits
        try:
            call()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""


NOT_REFUSED_BY_STOCK = {
    # what we refuse and stock does not, and why
    "the class": "its method would be called without an instance",
    "a bare mock": "it answers to every name and rebuilds nothing",
    "a property that cannot be called": "stock dies of a TypeError in place of it",
    "a coroutine": "it is truthy, has no items, and is never awaited",
    "a str Enum as name": "its text, and so its key, differs between Python versions",
    "a str subclass as name": "as an Enum member: its text may be anything",
    "an object without repr": "has no from_pp_tensors: refused by both",
    "a mock that claims to be a tensor": "isinstance believes it; no backend can send it",
    "a sparse tensor": "has no dense memory: p2p raises after the metadata has gone out",
    "a CSR tensor": "as above",
    "a jagged nested tensor": "as above",
    "a strided nested tensor": "as above",
    "a quantized tensor": "its scale and zero point would be lost",
    "a meta tensor": "it has no data",
    "an empty meta tensor": "its device does not exist on the receiver",
    "a fake tensor": "it has no data",
    "a wrapper subclass": "what it wraps would not travel",
    "freed memory": "p2p would read memory that is not there",
    "freed memory, further on": "as above",
    "an empty tensor inside vmap": "it belongs to a transform that is over",
    "a zero tensor": "it has no memory",
    "a tensor inside vmap": "as above",
    "a list of pairs": "stock dies of an AttributeError in place of it",
    "a tensor": "it is no mapping, and no output",
    "a mock": "it answers to every name and cannot be copied to the host",
    "the class of the output": "its method would be called without an instance",
    "an object without repr returned": "the engine calls copy_to_host, which it has not",
    "the bare prefix": "an empty name, which no sender can have meant",
    "a property that gives a coroutine function": "its result is never awaited",
}


@pytest.mark.parametrize("case", ADD_REFUSES)
def test_add_refuses_what_stock_refuses_with_the_same_beginning(case: str, stock: Any) -> None:
    make, _ = ADD_REFUSES[case]
    ours_says = outcome(lambda: ours().add({PREFIX + "already": 1}, make()))
    stock_says = outcome(lambda: stock.add({PREFIX + "already": 1}, make()))
    compare(case, ours_says, stock_says)


@pytest.mark.parametrize("case", POP_REFUSES)
def test_pop_refuses_what_stock_refuses_with_the_same_beginning(case: str, stock: Any) -> None:
    make, payload, _ = POP_REFUSES[case]
    tensors = {PREFIX + name: value for name, value in payload.items()}
    ours_says = outcome(lambda: ours().pop(dict(tensors), make()))
    stock_says = outcome(lambda: stock.pop(dict(tensors), make()))
    compare(case, ours_says, stock_says)


def compare(case: str, ours_says: tuple[str, str], stock_says: tuple[str, str]) -> None:
    assert issubclass(getattr(pp_protocol, ours_says[0]), PPProtocolError)
    if stock_says[0] == "RuntimeError" and "auxiliary" in stock_says[1] + "auxiliary":
        same = ours_says[1].startswith(stock_says[1])
        assert same or case in NOT_REFUSED_BY_STOCK, (ours_says, stock_says)
    else:
        assert case in NOT_REFUSED_BY_STOCK, (ours_says, stock_says)


def test_stock_outputs_pass_our_guards_as_the_contract_says(stock: Any) -> None:
    host = stock.outputs.CompositeHostAuxiliaryOutput(())
    device = stock.outputs.append_auxiliary_output(Output({}), Output({}))
    assert type(device) is stock.outputs.CompositeDeviceAuxiliaryOutput
    assert isinstance(host, pp_protocol.HostAuxiliaryOutput)
    assert isinstance(device, pp_protocol.DeviceAuxiliaryOutput)
    assert not is_pp_output(device)  # it cannot cross pipeline stages
    with pytest.raises(pp_protocol.UnsupportedOutputError):
        ours().add({}, device)
    assert outcome(lambda: stock.add({}, device))[0] == "RuntimeError"
    commits = [stock.outputs.CommittedTokens(0, (1,))]
    assert commits != [pp_protocol.CommittedTokens(0, (1,))]  # other classes, the same fields
    assert vars(commits[0]) == vars(pp_protocol.CommittedTokens(0, (1,)))


def test_stock_protocols_and_ours_take_each_other_s_objects(stock: Any) -> None:
    class Subclass(stock.pp.PipelineParallelSamplingObserver):
        def from_pp_tensors(self, tensors: Any) -> Any:
            return Output(tensors)

    class Forgetful(stock.pp.PipelineParallelSamplingObserver):
        pass

    class OfOurs(pp_protocol.PPCapableObserver):
        is_active = before_grammar = after_sample = from_pp_tensors = Observer.from_pp_tensors

    assert is_pp_observer(Subclass())
    assert not is_pp_observer(Forgetful())  # whose body says `...`, and stock calls it
    for observer in (Subclass(), OfOurs(), Observer()):
        assert isinstance(observer, stock.pp.PipelineParallelSamplingObserver)
        assert isinstance(observer, pp_protocol.PipelineParallelSamplingObserver)
    assert isinstance(Output({}), stock.pp.PipelineParallelAuxiliaryOutput)
    tensors = {PREFIX + "x": torch.ones(1)}
    assert stock.pop(dict(tensors), Subclass()).tensors.keys() == {"x"}
    assert ours().pop(dict(tensors), Subclass()).tensors.keys() == {"x"}


def test_a_composite_goes_both_ways_and_the_engine_s_combined_outputs_can_be_sent(
    stock: Any,
) -> None:
    observer = pp_protocol.CompositeSamplingObserver({"low": Observer(), "high": Observer()})
    one, two = Output({"x": torch.zeros(2)}), Output({"x": torch.ones(2), "y": torch.ones(1)})
    combined = stock.outputs.append_auxiliary_output(one, two)
    assert type(combined) is stock.outputs.CompositeDeviceAuxiliaryOutput
    assert not is_pp_output(combined)
    named = pp_protocol.CompositeAuxiliaryOutput.naming(("low", "high"), combined)
    for sender, receiver in ((ours(), stock), (stock, ours())):
        tensors: dict[str, Any] = {"next_token_ids": 1}
        sender.add(tensors, named)
        assert set(tensors) == {
            *("next_token_ids", PREFIX + "low/x", PREFIX + "high/x", PREFIX + "high/y"),
        }
        output = receiver.pop(tensors, observer)
        assert tensors == {"next_token_ids": 1}
        assert output.outputs["high"].tensors == two.tensors
        assert output.outputs["low"].tensors == one.tensors
