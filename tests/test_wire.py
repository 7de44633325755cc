"""Promises of pp_protocol.wire: what travels arrives equal, over real gloo between processes."""

from __future__ import annotations

import multiprocessing
import os
import time
import types
import warnings
from collections.abc import Callable

import pytest
import torch
from observers import Observer, Output
from torch import Tensor, nn

from pp_protocol import (
    PPProtocolError,
    UnsupportedTensorError,
    add_auxiliary_output_to_pp_tensors,
    has_auxiliary_output,
    pop_auxiliary_output_from_pp_tensors,
    wire,
)
from pp_protocol.codec import TensorRecord, records, recv_tensor_dict, send_tensor_dict
from pp_protocol.wire import wire_form


class Tagged(Tensor):
    """A subclass without a __torch_dispatch__ of its own; its own code fails the test."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the subclass's own code ran")


def float8() -> Tensor:
    return torch.tensor([0.5, -448.0, 0.0]).to(torch.float8_e4m3fn)


TRAVELS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "sliced": lambda: torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "strided": lambda: torch.arange(9)[::2],
    "a contiguous slice of a larger buffer": lambda: torch.arange(12.0).reshape(3, 4)[1:2],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "channels last": lambda: (
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugated and transposed": lambda: torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).mH,
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "part of a graph": lambda: torch.ones(2, requires_grad=True) * 3,
    "Parameter": lambda: nn.Parameter(torch.ones(2)),
    "a subclass with a __torch_function__": lambda: torch.ones(2).as_subclass(Tagged),
    "empty": lambda: torch.ones(0),
    "empty with a shape": lambda: torch.ones(2, 0, 3),
    "0-d": lambda: torch.tensor(3.5),
    "bool": lambda: torch.tensor([True, False, True]),
    "float16": lambda: torch.tensor([1.5, -2.25]).half(),
    "bfloat16": lambda: torch.tensor([1.5, -2.25]).bfloat16(),
    "float8": float8,
    "float8_e5m2": lambda: torch.tensor([0.5, 4.0]).to(torch.float8_e5m2),
    "float64": lambda: torch.tensor([1e-300]).double(),
    "int8": lambda: torch.tensor([-1], dtype=torch.int8),
    "int16": lambda: torch.tensor([-1, 2], dtype=torch.int16),
    "uint16": lambda: torch.tensor([65535], dtype=torch.uint16),
    "uint64": lambda: torch.tensor([2**63], dtype=torch.uint64),
    "complex64": lambda: torch.tensor([1 + 2j]),
    "complex128": lambda: torch.tensor([1 + 2j], dtype=torch.complex128),
    "NaN and infinities": lambda: torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]),
    "made in inference mode": lambda: torch.inference_mode()(torch.ones)(2),
}


def expected(make: Callable[[], Tensor]) -> TensorRecord:
    """What has to arrive, by a way of its own: through Python numbers, not through wire_form."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = make().detach().as_subclass(Tensor)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        plain = torch.tensor(tensor.float().tolist()).to(tensor.dtype)
    else:
        plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    return TensorRecord.of("x", plain)


def _peer(rank: int, port: int, work: Callable[[int], None]) -> None:
    import torch.distributed as dist

    from pp_protocol.stage_process import _loopback

    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    work(rank)
    dist.destroy_process_group()


def between_two_processes(work: Callable[[int], None]) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    peers = [context.Process(target=_peer, args=(rank, store.port, work)) for rank in (0, 1)]
    try:
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join(60)
        assert [peer.exitcode for peer in peers] == [0, 0]
    finally:
        for peer in peers:
            peer.kill()
            peer.join()


def send_every_kind(rank: int) -> None:
    if rank == 0:
        for make in TRAVELS.values():
            message = {"next_token_ids": torch.arange(3), "__mb_slot__": 1, "__msg_type__": "o"}
            add_auxiliary_output_to_pp_tensors(message, Output({"x": make()}))
            send_tensor_dict(message, 1).wait()
        return
    for label, make in TRAVELS.items():
        message = recv_tensor_dict(0)
        output = pop_auxiliary_output_from_pp_tensors(message, Observer())
        assert isinstance(output, Output)
        assert records(output.tensors) == [expected(make)], label
        assert records({"t": message.pop("next_token_ids")}) == records({"t": torch.arange(3)})
        assert message == {"__mb_slot__": 1, "__msg_type__": "o"}


@pytest.mark.processes
def test_every_kind_of_tensor_arrives_equal_over_gloo() -> None:
    between_two_processes(send_every_kind)


def refuse_before_sending(rank: int) -> None:
    import test_transport

    makers = (
        test_transport.sparse,
        test_transport.quantized,
        test_transport.nested,
        test_transport.strided_nested,
        lambda: torch.ones(2, device="meta"),
        test_transport.fake,
    )
    for make in makers:
        if rank == 0:
            message = {"__msg_type__": "o"}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what torch thinks of its own prototypes
                wrong = Output({"fine": torch.ones(1), "x": make()})
            try:
                add_auxiliary_output_to_pp_tensors(message, wrong)
            except UnsupportedTensorError:
                pass
            else:
                raise AssertionError(f"{make} was accepted")
            send_tensor_dict(message, 1).wait()  # the engine goes on without it
        else:
            before = time.monotonic()
            message = recv_tensor_dict(0)
            assert not has_auxiliary_output(message)
            assert message == {"__msg_type__": "o"}
            assert time.monotonic() - before < 30


@pytest.mark.processes
def test_what_cannot_travel_is_refused_before_anything_is_sent_and_nobody_hangs() -> None:
    between_two_processes(refuse_before_sending)


@pytest.mark.parametrize("label", TRAVELS)
def test_the_wire_form_is_dense_contiguous_and_detached(label: str) -> None:
    tensor = TRAVELS[label]()
    form = wire_form("x", tensor)
    assert type(form) is Tensor
    assert form.is_contiguous()
    assert not form.is_conj()
    assert not form.is_neg()
    assert not form.requires_grad
    assert TensorRecord.of("x", form) == expected(TRAVELS[label])


AS_IT_IS = ("0-d", "bool", "float16", "bfloat16", "float8", "float64", "int8", "empty", "complex64")


@pytest.mark.parametrize("label", [*AS_IT_IS, "a contiguous slice of a larger buffer", "int16"])
def test_what_can_travel_already_travels_as_the_same_object(label: str) -> None:
    tensor = TRAVELS[label]()
    message: dict[str, Tensor] = {}
    add_auxiliary_output_to_pp_tensors(message, Output({"x": tensor}))
    (sent,) = message.values()
    assert sent is tensor
    assert sent.data_ptr() == tensor.data_ptr()


ACCESS = {
    *("data_ptr", "numel", "is_conj", "is_neg", "is_contiguous", "storage_offset"),
    *("element_size", "untyped_storage"),
}
CUDA = {
    **dict.fromkeys(("int16", "uint16", "uint32", "uint64", "float8_e8m0fnu"), True),
    **dict.fromkeys(("float4_e2m1fn_x2",), True),
    **dict.fromkeys(("int8", "uint8", "int32", "int64", "bool", "float16", "bfloat16"), False),
    **dict.fromkeys(("float32", "float64", "complex64", "complex128", "float8_e4m3fn"), False),
}


@pytest.mark.parametrize(("dtype", "refused"), CUDA.items())
def test_on_cuda_a_dtype_that_nccl_does_not_carry_is_refused(dtype: str, refused: bool) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"torch {torch.__version__} has no {dtype}")
    data = torch.zeros(2, dtype=getattr(torch, dtype))
    assert wire_form("x", data) is data
    assert (data.dtype in wire.PLAIN_DTYPES) <= (not refused)  # so that `wire_form` decides
    on_cuda = types.SimpleNamespace(  # there is none where the tests run
        **dict.fromkeys(("is_nested", "is_quantized", "is_meta"), False),
        layout=torch.strided,
        is_cuda=True,
        dtype=data.dtype,
        **{name: getattr(data, name) for name in dir(data) if name in ACCESS},
    )
    obstacle = wire._obstacle(on_cuda)
    assert (obstacle is not None) is refused
    if obstacle is not None:
        assert f"NCCL does not carry (torch.{dtype})" in obstacle[0]


def test_a_dtensor_is_refused_with_a_way_out() -> None:
    class DTensorLike(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("the subclass's own code ran")

    tensor = Tensor._make_wrapper_subclass(DTensorLike, (2,))
    with pytest.raises(PPProtocolError, match=r"full_tensor\(\)"):
        wire_form("x", tensor)


def test_the_codec_refuses_what_json_cannot_carry() -> None:
    for message in ({7: 1}, {"a": object()}):
        with pytest.raises(TypeError):
            send_tensor_dict(message, 1)


def test_records_tell_apart_what_differs_in_one_bit() -> None:
    zero = torch.zeros(2)
    assert TensorRecord.of("x", zero) == TensorRecord.of("x", torch.zeros(2))
    for other in (-zero, torch.zeros(2, 1), torch.zeros(2).int()):
        assert TensorRecord.of("x", zero) != TensorRecord.of("x", other)
    assert TensorRecord.of("x", zero) != TensorRecord.of("y", zero)
