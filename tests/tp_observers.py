"""Observers that are, and that are not, the same on all tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from observers import Observer, Output
from torch import Tensor

TP = 2


def tp_rank() -> int:
    return dist.get_rank() % TP


class AddsItsRank(Observer):
    """Adds its TP rank to one of its two tensors."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        return Output({"right": state.clone(), "ranked": state + tp_rank()})


class AddsItsRankToAScalar(Observer):
    """The count does not divide: it goes whole."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        return Output({"scalar": torch.tensor(float(tp_rank()))})


class OnOneRankOnly(Observer):
    """Has a tensor more on one rank."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        more = {"more": state.clone()} if tp_rank() else {}
        return Output({"right": state.clone(), **more})


class AllKinds(Observer):
    """Tensors of every size and dtype that gloo has to slice or not, the same on all ranks."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        rows = len(state)
        return Output(
            {
                "even": torch.arange(rows * 2).reshape(rows, 2),
                "odd": torch.arange(rows * 2 + 1).to(torch.int16),
                "scalar": torch.tensor(3.5, dtype=torch.float64),
                "empty": torch.empty(rows, 0),
                "bool": torch.ones(rows, 2, dtype=torch.bool),
                "bfloat16": state.repeat(2).bfloat16(),
                "complex": torch.complex(state, state).repeat(2),
                "float8": torch.ones(4).to(torch.float8_e4m3fn),
            }
        )


class InAnotherOrder(Observer):
    """As from a set of names, whose order differs between processes."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        names = ["a", "b"] if tp_rank() else ["b", "a"]
        return Output({name: state.clone() for name in names})


class RaisesOnOneRank(Observer):
    def after_sample(self, state: Any, token_ids: Tensor) -> Output:
        if tp_rank():
            raise ValueError("only here")
        return Output({"right": state.clone()})
