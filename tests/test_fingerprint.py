"""Promises of pp_protocol.fingerprint: whatever changes on the way is found, nothing else is."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from observers import Observer, Output
from test_wire import TRAVELS

from pp_protocol import (
    FINGERPRINT,
    PREFIX,
    FingerprintError,
    MissingObserverError,
    NonTensorError,
    UnsupportedTensorError,
    WireError,
    add_auxiliary_output_to_pp_tensors,
    discard_auxiliary_output,
    fingerprint,
    has_auxiliary_output,
    pop_auxiliary_output_from_pp_tensors,
)

CASES = 100_000


def sent(tensors: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    wire = dict(others)
    add_auxiliary_output_to_pp_tensors(wire, Output(tensors), fingerprint=True)
    return wire


def pop(wire: Any) -> Any:
    return pop_auxiliary_output_from_pp_tensors(wire, Observer())


def two() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(7.0), "y": torch.arange(12).reshape(3, 4)}


def test_it_is_one_number_without_dimensions_and_gone_after_the_pop() -> None:
    wire = sent(two(), next_token_ids=1)
    assert set(wire) == {"next_token_ids", PREFIX + "x", PREFIX + "y", FINGERPRINT}
    assert wire[FINGERPRINT].dtype == torch.int64
    assert wire[FINGERPRINT].shape == ()
    assert set(pop(wire).tensors) == {"x", "y"}
    assert wire == {"next_token_ids": 1}


@pytest.mark.parametrize("label", TRAVELS)
def test_whatever_can_travel_has_one_that_its_bytes_decide(label: str) -> None:
    wire = sent({"x": TRAVELS[label](), "y": torch.ones(3)})
    again = sent({"y": torch.ones(3), "x": TRAVELS[label]()})
    assert torch.equal(wire[FINGERPRINT], again[FINGERPRINT])  # in any order
    received = {key: value.clone() for key, value in wire.items()}
    assert pop(received) is not None
    other = dict(wire)
    other[PREFIX + "y"] = torch.ones(3) + 1
    with pytest.raises(FingerprintError):
        pop(other)


def test_the_number_is_the_same_on_every_machine_and_version() -> None:
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "half": torch.arange(5).half(),
        "int": torch.arange(1000).reshape(2, 500),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "complex": torch.view_as_complex(torch.arange(4.0).reshape(2, 2)).conj(),
    }
    assert int(sent(tensors)[FINGERPRINT]) == NUMBER


NUMBER = -1402071632254264403


CHANGES = {
    "a byte": lambda w: w[PREFIX + "x"].view(torch.uint8)[5].add_(1),
    "a name": lambda w: w.update({PREFIX + "z": w.pop(PREFIX + "x")}),
    "a dtype": lambda w: w.update({PREFIX + "x": w[PREFIX + "x"].view(torch.int32)}),
    "a shape": lambda w: w.update({PREFIX + "y": w[PREFIX + "y"].reshape(4, 3)}),
    "a tensor less": lambda w: w.pop(PREFIX + "x"),
    "a tensor more": lambda w: w.update({PREFIX + "z": torch.zeros(0)}),
    "names exchanged": lambda w: w.update(
        {PREFIX + "x": w[PREFIX + "y"], PREFIX + "y": w[PREFIX + "x"]}
    ),
    "a transposed tensor": lambda w: w.update({PREFIX + "y": w[PREFIX + "y"].T.reshape(3, 4)}),
    "its own last bit": lambda w: w[FINGERPRINT].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_an_error_and_nothing_is_lost(change: str) -> None:
    wire = {
        key: value.clone() if key != "other" else value
        for key, value in sent(two(), other=1).items()
    }
    CHANGES[change](wire)
    before = dict(wire)
    with pytest.raises(FingerprintError) as caught:
        pop(wire)
    assert wire == before
    text = str(caught.value)
    assert text.startswith("auxiliary PP tensors do not match their fingerprint")
    assert "observers.Observer is not what was sent" in text
    assert "'y' (int64 [" in text or "'x' (int64 [3, 4])" in text
    assert caught.value.code == "fingerprint"
    assert discard_auxiliary_output(wire)
    assert wire == {"other": 1}


@pytest.mark.parametrize(
    "found", [None, 3, torch.ones(1).long(), torch.tensor(1.0)], ids=["None", "int", "1-d", "float"]
)
def test_what_is_no_fingerprint_is_said_to_be_none(found: Any) -> None:
    wire = {**sent(two()), FINGERPRINT: found}
    with pytest.raises(FingerprintError, match="not an int64 tensor without dimensions"):
        pop(wire)
    assert len(wire) == 3


def test_one_without_its_tensors_is_an_error_and_can_be_discarded() -> None:
    wire = {FINGERPRINT: torch.tensor(1), "other": 1}
    assert has_auxiliary_output(wire)
    with pytest.raises(FingerprintError, match="not one tensor"):
        pop_auxiliary_output_from_pp_tensors(wire, None)
    assert len(wire) == 2
    assert discard_auxiliary_output(wire) == ()
    assert wire == {"other": 1}


def test_other_faults_come_first_and_the_observer_is_called_last() -> None:
    wire = sent(two())
    wire[PREFIX + "x"] = torch.zeros(7)
    with pytest.raises(MissingObserverError):
        pop_auxiliary_output_from_pp_tensors(wire, None)
    called = []

    class Seen(Observer):
        def from_pp_tensors(self, tensors: Any) -> Output:
            called.append(1)
            return Output(tensors)

    with pytest.raises(FingerprintError):
        pop_auxiliary_output_from_pp_tensors(wire, Seen())
    assert called == []


@pytest.mark.parametrize("second", [True, False, None])
def test_a_second_output_in_the_same_dict_is_covered_as_well(second: bool | None) -> None:
    wire = sent({"x": torch.ones(2)})
    add_auxiliary_output_to_pp_tensors(wire, Output({"y": torch.ones(3)}), fingerprint=second)
    assert torch.equal(
        wire[FINGERPRINT], sent({"x": torch.ones(2), "y": torch.ones(3)})[FINGERPRINT]
    )
    later: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(later, Output({"x": torch.ones(2)}))
    add_auxiliary_output_to_pp_tensors(later, Output({"y": torch.ones(3)}), fingerprint=True)
    assert torch.equal(later[FINGERPRINT], wire[FINGERPRINT])
    assert set(pop(later).tensors) == {"x", "y"}


class Half(collections.UserDict):  # type: ignore[type-arg]  # of anything
    """Takes one key and then no more."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == FINGERPRINT and len(self.data) > 3:
            raise OSError("full")
        super().__setitem__(key, value)


def test_a_failed_add_leaves_the_older_fingerprint_where_it_was() -> None:
    wire = Half(sent({"x": torch.ones(2)}))
    wire["other"] = 1
    before = dict(wire)
    with pytest.raises(WireError):
        add_auxiliary_output_to_pp_tensors(wire, Output({"y": torch.ones(3)}))
    assert dict(wire) == before


def test_without_it_nothing_is_added_and_an_output_of_none_adds_none() -> None:
    wire: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(wire, Output(two()))
    assert set(wire) == {PREFIX + "x", PREFIX + "y"}
    empty: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(empty, None, fingerprint=True)
    assert empty == {}


def test_tensors_on_several_devices_are_refused_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    fingerprint.require_one_device({"x": cuda, "y": cuda})
    with pytest.raises(UnsupportedTensorError, match="'z' cannot be transported: it is on cuda:1"):
        fingerprint.require_one_device({"x": cpu, "y": cpu, "z": cuda})


@pytest.mark.parametrize(("value", "added"), [("1", True), ("0", False), ("", False)])
def test_the_variable_is_read_once_at_import(value: str, added: bool) -> None:
    program = (
        "import os, torch, pp_protocol\n"
        "from observers import Output\n"
        "add = pp_protocol.add_auxiliary_output_to_pp_tensors\n"
        "os.environ['PP_PROTOCOL_FINGERPRINT'] = '1'\n"
        "wires = {}, {}, {}\n"
        "for wire, more in zip(wires, ({}, {'fingerprint': True}, {'fingerprint': False})):\n"
        "    add(wire, Output({'x': torch.ones(1)}), **more)\n"
        "print([pp_protocol.FINGERPRINT in wire for wire in wires])\n"
    )
    tests = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": f"{tests}:{tests.parent}",
            "PP_PROTOCOL_FINGERPRINT": value,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"[{added}, True, False]\n", done.stderr


def test_inference_mode_autograd_and_a_default_device_change_nothing() -> None:
    plain = sent(two())[FINGERPRINT]
    with torch.inference_mode():
        assert torch.equal(sent(two())[FINGERPRINT], plain)
    with torch.device("meta"):
        tensors = {"x": torch.arange(7.0, device="cpu"), "y": torch.arange(12, device="cpu")}
        tensors["y"] = tensors["y"].reshape(3, 4)
        assert torch.equal(sent(tensors)[FINGERPRINT], plain)
    grown = {"x": torch.arange(7.0, requires_grad=True), "y": two()["y"]}
    assert torch.equal(sent(grown)[FINGERPRINT], plain)


A = torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.1
B = torch.rand(256, generator=torch.Generator().manual_seed(2)) + 0.1
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
HADAMARD = torch.ones(1, 1)
for _ in range(8):
    HADAMARD = torch.cat([torch.cat([HADAMARD, HADAMARD]), torch.cat([HADAMARD, -HADAMARD])], 1)
Z = torch.complex(A[:128], B[:128])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.stack([A, -A, -A, A]), torch.stack([-A, A, A, -A])),
        (SIGNS[:, None] * SIGNS.repeat(64), -SIGNS[:, None] * SIGNS.repeat(64)),
        (torch.stack([A, B, B, A]), torch.stack([B, A, A, B])),
        (torch.stack([A, B, B, A]).round(), torch.stack([B, A, A, B]).round()),
        (torch.stack([Z, Z.conj(), Z.conj(), Z]), torch.stack([Z.conj(), Z, Z, Z.conj()])),
        (torch.stack([A, B, B, A]).bfloat16(), torch.stack([B, A, A, B]).bfloat16()),
        *((HADAMARD, torch.where(torch.arange(256) == c, -HADAMARD, HADAMARD)) for c in range(256)),
        (torch.eye(64), -torch.eye(64)),
        (torch.arange(4096.0), torch.arange(4096.0).roll(256)),
        (torch.arange(4096.0), torch.arange(4096.0).flip(0)),
    ],
)
def test_changes_of_signs_and_of_whole_rows_do_not_cancel_out(
    before: torch.Tensor, after: torch.Tensor
) -> None:
    assert not torch.equal(before, after)
    wires = sent({"x": before}), sent({"x": after})
    assert not torch.equal(wires[0][FINGERPRINT], wires[1][FINGERPRINT])


def test_signs_where_the_weights_alone_would_cancel_out_are_seen() -> None:
    """The weights of these rows sum up to 0 modulo 2**23, those of the columns modulo 2**20."""
    rows, columns = torch.zeros(495), torch.zeros(256)
    rows[torch.tensor([0, 494, 1, 62])] = SIGNS
    columns[torch.tensor([3, 61, 4, 62])] = SIGNS
    before = torch.outer(rows, columns)
    after = torch.where(before != 0, -before, before)
    marks = [sent({"x": x})[FINGERPRINT] for x in (before, after)]
    assert not torch.equal(*marks)


def test_a_difference_that_was_there_is_not_covered_up_by_a_second_output() -> None:
    wire = sent({"x": torch.ones(4)})
    wire[PREFIX + "x"] = torch.zeros(4)
    add_auxiliary_output_to_pp_tensors(wire, Output({"y": torch.ones(3)}))
    with pytest.raises(FingerprintError):
        pop(wire)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, and still there
def test_what_is_not_dense_is_named_and_a_prefixed_value_that_is_no_tensor_too() -> None:
    wire = sent({"x": torch.arange(4.0)})
    for odd in (
        torch.quantize_per_tensor(torch.arange(4.0), 1.0, 0, torch.qint8),
        torch.arange(4.0).to_sparse(),
        torch.empty(4, device="meta"),
    ):
        with pytest.raises(FingerprintError, match=r"'x' \(torch\.Tensor, not dense\)"):
            pop({**wire, PREFIX + "x": odd})
    with pytest.raises(FingerprintError, match="on meta, not an int64"):
        pop({**wire, FINGERPRINT: torch.empty((), dtype=torch.int64, device="meta")})
    with pytest.raises(NonTensorError, match="'z' is not a tensor"):
        add_auxiliary_output_to_pp_tensors({**wire, PREFIX + "z": "text"}, Output({"y": A}))


def test_every_change_of_100_000_is_found_and_none_where_there_is_none() -> None:
    dice = random.Random(7)
    torch.manual_seed(7)
    dtypes = [torch.uint8, torch.int16, torch.float32, torch.float64, torch.bool, torch.complex64]
    missed = false = seen = 0
    while seen < CASES:
        dtype = dice.choice(dtypes)
        sizes = dice.randint(1, 40), dice.choice([3, 70, 400])
        wide = torch.int64 if dtype is torch.bool else dtype
        tensors = {
            name: torch.randint(0, 2 if dtype is torch.bool else 100, (size,)).to(wide).to(dtype)
            for name, size in zip("ab", sizes, strict=True)
        }
        right = int(fingerprint.of_sent(tensors))
        false += int(fingerprint.of_sent({n: t.clone() for n, t in tensors.items()})) != right
        for _ in range(100):
            changed = {name: tensor.clone() for name, tensor in tensors.items()}
            if change(dice, changed):
                seen += 1
                missed += int(fingerprint.of_sent(changed)) == right
    assert (missed, false) == (0, 0)


def change(dice: random.Random, tensors: dict[str, torch.Tensor]) -> bool:
    """Change a byte, exchange two elements, or two slices between the tensors; False if equal."""
    kind = dice.choice(["byte", "elements", "slices"])
    a, b = tensors["a"], tensors["b"]
    if kind == "byte":
        target = dice.choice([a, b]).view(torch.uint8)
        place = dice.randrange(len(target))
        if dice.choice([True, False]) and a.dtype != torch.bool:
            target[place] ^= 1 << dice.randrange(8)
        else:
            target[place] ^= 1
        return True
    if kind == "elements":
        one, other = dice.choice([a, b]), dice.choice([a, b])
        i, j = dice.randrange(len(one)), dice.randrange(len(other))
        if bool(one[i] == other[j]):
            return False
        one[i], other[j] = other[j].clone(), one[i].clone()
        return True
    size = dice.randint(1, min(len(a), len(b)))
    i, j = dice.randint(0, len(a) - size), dice.randint(0, len(b) - size)
    first, second = a[i : i + size].clone(), b[j : j + size].clone()
    if torch.equal(first, second):
        return False
    a[i : i + size], b[j : j + size] = second, first
    return True
