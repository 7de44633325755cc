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


@dataclass(frozen=True)
class TensorParallel:
    """One rank among those that hold the same stage, and how the engine shares the sending.

    SGLang 0.5.23 (`GroupCoordinator.send_tensor_dict`): a tensor whose element count divides by
    the number of ranks goes as one slice from each rank to its counterpart, and is gathered there;
    any other goes whole. That is right only if all ranks hold the same.
    """

    rank: int
    size: int
    group: Any
    """The process group of this stage's ranks."""

    def splits(self, count: int) -> bool:
        """Whether a tensor of so many elements is sent in slices."""
        return self.size > 1 and count % self.size == 0

    def slice_of(self, tensor: Tensor) -> Tensor:
        """What this rank sends."""
        if not self.splits(tensor.numel()):
            return tensor
        return tensor.reshape(self.size, -1)[self.rank]

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fill a tensor with what rank `src` and the counterparts of the others send."""
        if not self.splits(tensor.numel()):
            dist.recv(tensor, src)
            return
        parts = tensor.view(-1).view(torch.uint8).view(self.size, -1)  # all dtypes are gathered so
        mine = torch.empty_like(parts[self.rank])
        dist.recv(mine, src)
        dist.all_gather(list(parts.unbind()), mine, group=self.group)


ALONE = TensorParallel(0, 1, None)


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


def send_tensor_dict(tensors: Mapping[str, Any], dst: int, tp: TensorParallel = ALONE) -> Pending:
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
    slices = [tp.slice_of(tensor) for tensor in payload if tensor.numel()]
    return Pending([sizes, text, *slices], dst)


def recv_tensor_dict(src: int, tp: TensorParallel = ALONE) -> dict[str, Any]:
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
                tp.recv(value, src)
        received[key] = value
    return received
