"""In what form does a tensor travel, and which ones cannot?

Point-to-point communication moves the memory of a dense, contiguous tensor. It knows nothing of
strides, of the conj and neg bits, or of autograd: gloo refuses a non-contiguous tensor after the
metadata has gone out, NCCL only warns and the receiver gets other numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UnsupportedTensorError, type_name

_NCCL_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("int8", "uint8", "int32", "int64", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
"""What torch's NCCL backend maps (`torch/csrc/distributed/c10d/NCCLUtils.hpp` of torch 2.13;
complex numbers travel as pairs of real ones)."""

PLAIN_DTYPES = frozenset(dtype for dtype in _NCCL_DTYPES if not dtype.is_complex)
"""Dtypes that every backend carries, and that can be neither conjugated nor quantized."""


LOWEST_ADDRESS = 1 << 32
"""Below it an address may be an offset into memory that was freed: then look more closely."""


def wire_form(name: str, tensor: Tensor) -> Tensor:
    """What to send for `tensor`: itself where that is right, otherwise its dense equal.

    Raises:
        UnsupportedTensorError: point-to-point communication cannot carry it.
    """
    obstacle: tuple[str, str] | None = (
        "is a subclass with a __torch_dispatch__ of its own",
        "Send a plain tensor: for a DTensor its full_tensor() or to_local().",
    )
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass's own code stays out of it
            plain = tensor if type(tensor) is Tensor else Tensor.as_subclass(tensor, Tensor)
            obstacle = _obstacle(plain)
            if obstacle is None:
                plain = plain.detach() if plain.requires_grad else plain
                plain = plain.resolve_conj().resolve_neg().contiguous()
                obstacle = _without_memory(plain)
    if obstacle is not None:
        found, advice = obstacle
        raise UnsupportedTensorError.about(type_name(tensor), found, advice, tensor=name)
    return plain


def _obstacle(tensor: Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        return "is a nested tensor", "Send its values and its offsets, or a padded copy."
    if tensor.layout is not torch.strided:
        return (
            f"is not dense but has the layout {tensor.layout}",
            "Send a dense copy of it, or the dense tensors that it is made of.",
        )
    if tensor.is_quantized:
        advice = "Send its int_repr(), and its scale and zero point as tensors of their own."
        return f"is quantized ({tensor.dtype})", advice
    if tensor.is_meta:
        return "is on the meta device and has no data", "Send a tensor that holds data."
    if tensor.is_cuda and tensor.dtype not in _NCCL_DTYPES:
        advice = "Convert it before sending, for instance to int32 or int64, or view its bytes."
        return f"has a dtype that NCCL does not carry ({tensor.dtype})", advice
    return _without_memory(tensor)


def _without_memory(tensor: Tensor) -> tuple[str, str] | None:
    try:
        address, count = tensor.data_ptr(), tensor.numel()
        if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            return None  # a copy will be made of it, and that is looked at
        needed = (tensor.storage_offset() + count) * tensor.element_size()
        if count == 0 or (address != 0 and tensor.untyped_storage().nbytes() >= needed):
            return None
        advice = "Send it before its memory is freed, or send a clone."
    except RuntimeError:  # inside vmap, grad and the like
        advice = "Send it from outside of torch.func, after it was computed."
    return "has no memory of its own", advice
