"""How does a flat dict of tensors and plain values cross from one process to another?

Metadata first, as JSON and not as pickle, then the bytes of each tensor: what SGLang does with its
tensor dicts, without running anything of the sender's at the receiver.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorRecord:
    """What one tensor is, down to its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorRecord:
        """The record of a dense tensor; equal records mean equal bytes."""
        digest = blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements in row-major order, as they lie in memory; needs no numpy."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def records(tensors: Mapping[str, Tensor]) -> list[TensorRecord]:
    """The records of several tensors, in order of their names."""
    return [TensorRecord.of(name, tensors[name]) for name in sorted(tensors)]


class Pending:
    """A message on its way; keeps its tensors alive until `wait` returns."""

    def __init__(self, tensors: list[Tensor], dst: int) -> None:
        self._tensors = tensors
        self._works = [dist.isend(tensor, dst) for tensor in tensors]

    def wait(self) -> None:
        """Wait until everything is sent; raises what the backend raises when the peer is gone."""
        for work in self._works:
            if work is not None:
                work.wait()


def send_tensor_dict(tensors: Mapping[str, Any], dst: int) -> Pending:
    """Start sending a dict of tensors and of values that JSON has to rank `dst`.

    Raises:
        TypeError: a key is no str, or a value is neither a tensor nor something that JSON has.
    """
    metadata: list[tuple[str, bool, Any]] = []
    payload = []
    for key, value in tensors.items():
        if type(key) is not str:
            raise TypeError(f"a key of {type(key).__name__} cannot be sent, only str can")
        if isinstance(value, Tensor):
            metadata.append((key, True, (dtype_name(value.dtype), tuple(value.shape))))
            payload.append(value)
        else:
            metadata.append((key, False, value))
    text = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
    sizes = torch.tensor([len(text)], dtype=torch.int64)
    return Pending([sizes, text, *(tensor for tensor in payload if tensor.numel())], dst)


def recv_tensor_dict(src: int) -> dict[str, Any]:
    """Receive a dict that `send_tensor_dict` of rank `src` sent."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(text, src)
    received = {}
    for key, is_tensor, value in json.loads(tensor_bytes(text)):
        if is_tensor:
            name, shape = value
            value = torch.empty(shape, dtype=getattr(torch, name))
            if value.numel():
                dist.recv(value, src)
        received[key] = value
    return received
