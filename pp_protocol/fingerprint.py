"""Is what arrived, to the last byte, what was sent?

The sender adds one number over names, dtypes, shapes and bytes of all auxiliary tensors of the
dict, and the receiver computes it anew. It lies in a tensor without dimensions, which SGLang sends
whole (it slices what divides by the number of tensor-parallel ranks), and under a key of its own,
which a receiver that does not know of it leaves alone.

The number is that of tensor bytes as little words of 32 bits, folded by a bijection, in rows of
256: word c of row r, from 0 over all tensors in the order of their names, counts with the weight
C(c) * R(r) modulo 2**64. The weights are odd, so that no change of one word can cancel out. C(c) is
2c + 1 modulo 512 and R(r) is 1 + 512 times a permutation of r modulo 2**33, so that two weights
differ by no more than 32 powers of two, and the swap of two different words is always seen, in up
to 16 GiB. All other bits are mixed, so that nothing that is linear in the place or in the sign of
what changes cancels out by more than chance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .errors import FingerprintError, UnsupportedTensorError, type_name

FINGERPRINT = "__sampling_observer_fingerprint__"
"""The key under which it travels."""

VARIABLE = "PP_PROTOCOL_FINGERPRINT"
BY_DEFAULT = os.environ.get(VARIABLE, "").strip() == "1"
"""Whether a sender that does not say adds one; read once, when this is imported."""

_COLUMNS = 256
_ROWS_AT_ONCE = {"cpu": 256}
"""On the CPU so many rows stay in its cache; an accelerator takes more at a time."""


def of_sent(tensors: Mapping[str, Tensor]) -> Tensor:
    """The fingerprint, int64 without dimensions, on the tensors' device; no host synchronisation.

    Args:
        tensors: by their names, in the form in which they are sent.

    Raises:
        UnsupportedTensorError: the tensors lie on several devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items()}
    require_one_device(devices)
    return _sum(tensors).add_(_seed(tensors))


def require_one_device(devices: Mapping[str, torch.device]) -> None:
    """Refuse the first tensor that lies elsewhere than those before it.

    Raises:
        UnsupportedTensorError: with that tensor.
    """
    (first, expected), *others = devices.items()
    for name, device in others:
        if device != expected:
            raise UnsupportedTensorError.about(
                "it",
                f"is on {device} and {first!r} on {expected}, of which no one fingerprint is made",
                "Put all of them on one device, or send them without a fingerprint.",
                tensor=name,
            )


def check_received(tensors: Mapping[str, Tensor], found: Any, observer: object) -> None:
    """Hold what has arrived against the fingerprint that came with it; this waits for the device.

    Raises:
        FingerprintError: it does not match, or is no fingerprint, or cannot be made.
    """
    if type(found) is not Tensor or found.dtype != torch.int64 or found.dim() != 0 or found.is_meta:
        what = type_name(found)
        if type(found) is Tensor:
            what = f"a tensor {found.dtype} {list(found.shape)} on {found.device}"
        raise FingerprintError.about(
            f"what came under {FINGERPRINT!r}",
            f"is {what}, not an int64 tensor without dimensions",
            "Find what else writes under this key.",
        )
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's own code stays out of it
        if all(map(_is_dense, tensors.values())):
            by_device: dict[torch.device, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                by_device.setdefault(tensor.device, {})[name] = tensor
            sums = [int(_sum(tensors, only)) for only in by_device.values()]
            if (sum(sums) + _seed(tensors) - int(found)) % 2**64 == 0:
                return
        seen = ", ".join(
            f"{name!r} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
            if _is_dense(tensor)
            else f"{name!r} ({type_name(tensor)}, not dense)"
            for name, tensor in tensors.items()
        )
    raise FingerprintError.about(
        f"what arrived for {type_name(observer)}",
        f"is not what was sent, in at least one of {seen}",
        "Under tensor parallelism every rank has to send the same tensors: see"
        " pp-protocol check --tp. Otherwise something writes into them on the way.",
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether it has bytes of its own, as everything has that can be sent."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return plain and not (tensor.is_quantized or tensor.is_meta)


def without_tensors() -> FingerprintError:
    """The error for a fingerprint that came alone."""
    return FingerprintError.about(
        f"the received dict holds {FINGERPRINT!r}",
        "and not one tensor that it was made of",
        "Find what took them out; discard_auxiliary_output drops the fingerprint as well.",
    )


def _seed(tensors: Mapping[str, Tensor]) -> int:
    told = [(name, str(one.dtype), list(one.shape)) for name, one in sorted(tensors.items())]
    digest = blake2b(json.dumps(told).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _sum(tensors: Mapping[str, Tensor], only: Mapping[str, Tensor] | None = None) -> Tensor:
    """The weighted sum of all words, or of those of some tensors at the place they have in all."""
    taken = tensors if only is None else only
    device = next(iter(taken.values())).device
    columns, first_rows = _kept_weights(device)
    total, row = None, 0
    for name in sorted(tensors):
        count = -(-tensors[name].numel() * tensors[name].element_size() // (4 * _COLUMNS))
        if name in taken and count:
            kept = row + count <= len(first_rows)
            rows = first_rows[row : row + count] if kept else _row_weights(row, count, device)
            part = _row_sums(_words(tensors[name]), columns).mul_(rows).sum()
            total = part if total is None else total.add_(part)
        row += count
    return torch.zeros((), dtype=torch.int64, device=device) if total is None else total


_kept: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _kept_weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """The weights of the columns, and those of the first rows, 10 KiB for each device."""
    kept = _kept.get(device)
    if kept is None:
        with torch.inference_mode(False):
            columns = _weights(1, _COLUMNS, 9, 2, device).sub_(1)  # 2 (c + 1) - 1
            kept = columns, _row_weights(0, 1024, device)
        if type(columns) is Tensor:  # and not what a mode of the caller's makes of it
            _kept[device] = kept
    return kept


def _row_weights(start: int, count: int, device: torch.device) -> Tensor:
    """1 + 512 times a permutation of 24 bits of each row, with other mixed bits above."""
    rows = torch.arange(start, start + count, dtype=torch.int64, device=device)
    low = rows & 0xFFFFFF
    for factor, shift in ((0x9E3779, 11), (0x85EBCB, 13)):  # odd; each step can be undone
        low = (low * factor) & 0xFFFFFF
        low ^= low >> shift
    return _weights(start, count, 33, 0, device).add_(low, alpha=2 * _COLUMNS).add_(1)


def _weights(start: int, count: int, shift: int, step: int, device: torch.device) -> Tensor:
    """`step * i` for each i from `start`, with mixed bits above `shift`."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = index * 0x9E3779B1
    mixed ^= mixed >> 15
    mixed *= 0x85EBCA77
    mixed ^= mixed >> 13
    mixed <<= shift
    return mixed.add_(index, alpha=step)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, with zeros to fill up the last row, as int32 [rows, 256]."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    missing = -flat.numel() % (4 * _COLUMNS)
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32).view(-1, _COLUMNS)


def _row_sums(words: Tensor, columns: Tensor) -> Tensor:
    at_once = _ROWS_AT_ONCE.get(words.device.type, 1 << 14)
    size = (min(at_once, len(words)), _COLUMNS)
    mixed, shifted, wide = (
        torch.empty(size, dtype=dtype, device=words.device)
        for dtype in (torch.int32, torch.int32, torch.int64)
    )
    sums = []
    for first in range(0, len(words), at_once):
        some = words[first : first + at_once]
        place = slice(len(some))
        _fold(mixed[place].copy_(some), shifted[place])
        sums.append(wide[place].copy_(mixed[place]).mul_(columns).sum(1))
    return torch.cat(sums) if len(sums) > 1 else sums[0]


def _fold(words: Tensor, shifted: Tensor) -> None:
    """The upper half of each word onto its lower half, in place; this can be undone.

    A sign is the uppermost bit, of which few bits of the weights would be left modulo 2**64.
    """
    torch.bitwise_right_shift(words, 16, out=shifted)
    words ^= shifted.bitwise_and_(0xFFFF)  # the shift has copied the sign
