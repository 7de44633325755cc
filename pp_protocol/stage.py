"""What does one stage of the pipeline do, in a process of its own?

A small seeded model, split over the stages, stands in for the LLM; everything around it is done
in the order in which the engine does it (SGLang 0.5.23: `ModelRunner.sample`,
`SchedulerPPMixin._pp_prep_batch_result`). Stage 0 owns the requests, the last stage samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .boundary import PREFIX, is_tensor
from .codec import (
    Pending,
    TensorParallel,
    TensorRecord,
    records,
    recv_tensor_dict,
    send_tensor_dict,
)
from .conformance import CONSUME, TO_PP_TENSORS, stored_in, unusable
from .contract import CommittedTokens
from .errors import type_name
from .stage_process import Fault, PeerLost, Place, Plan
from .stand_ins import Batch, Inputs, Request, SamplingInfo
from .targets import make_observer
from .transport import add_auxiliary_output_to_pp_tensors, pop_auxiliary_output_from_pp_tensors

HIDDEN, VOCABULARY = 32, 97
MICROBATCHES = 2
BATCH_SIZES = (3, 1, 4, 2, 5, 1)


class Stage:
    """What all stages have: weights of their own, and neighbours."""

    def __init__(
        self, stage: int, plan: Plan, place: Place, store: Any, tp: TensorParallel
    ) -> None:
        self.stage, self.plan, self.place, self.store, self.tp = stage, plan, place, store, tp
        self.random = torch.Generator().manual_seed(plan.seed * 1000 + stage)
        self._sent: deque[Pending] = deque()

    def weights(self, *shape: int) -> Tensor:
        """A seeded matrix that keeps the scale of what it is multiplied with."""
        scale: float = shape[0] ** -0.5
        return torch.randn(*shape, generator=self.random) * scale

    def send(self, message: dict[str, Any], dst: int) -> None:
        """Send without waiting for the receiver; only so many messages stay under way."""
        with self._peer("send", dst):
            counterpart = dst * self.tp.size + self.tp.rank
            self._sent.append(send_tensor_dict(message, counterpart, self.tp))
            while len(self._sent) > 2 * MICROBATCHES:
                self._sent.popleft().wait()

    def recv(self, src: int) -> dict[str, Any]:
        """Wait for the next message."""
        with self._peer("recv", src):
            return recv_tensor_dict(src * self.tp.size + self.tp.rank, self.tp)

    def drain(self) -> None:
        """Wait until everything is sent."""
        with self._peer("send", -1):
            while self._sent:
                self._sent.popleft().wait()

    @contextlib.contextmanager
    def _peer(self, what: str, other: int) -> Iterator[None]:
        self.place.at(what)
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"{what} with stage {other}: {error}") from error

    def sent(self, step: int, tp_rank: int) -> list[TensorRecord]:
        """The records of what a rank of the last stage made in a step, when it has said so."""
        with self._peer("store", self.plan.stages - 1):
            told = json.loads(self.store.get(f"sent/{step}/{tp_rank}"))
        return [
            TensorRecord(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in told
        ]

    def run(self) -> dict[str, Any]:
        """Work until the end of the run; what is returned goes into the report."""
        layer = self.weights(HIDDEN, HIDDEN)
        while True:
            message = self.recv(self.stage - 1)
            if message["__msg_type__"] != "stop":
                self.place.at("layer", message["step"], message["requests"])
                message["hidden_states"] = torch.tanh(message["hidden_states"] @ layer)
            self.send(message, self.stage + 1)
            if message["__msg_type__"] == "stop":
                self.drain()
                return {}


class FirstStage(Stage):
    """Owns the requests, sends each microbatch on its way, and consumes what comes back."""

    def run(self) -> dict[str, Any]:
        self.place.at("observer")
        self.observer = make_observer(self.plan.target)
        self.inputs = Inputs(self.plan.inputs)
        self.embedding = self.weights(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.dice = random.Random(self.plan.seed)
        self.requests = 0
        self.tokens = 0
        self.consumed = 0
        self.tensors: dict[str, dict[str, Any]] = {}
        self.warned: dict[str, str] = {}
        slots: list[list[Request]] = [[] for _ in range(MICROBATCHES)]
        under_way: deque[tuple[int, Batch]] = deque()
        for step in range(self.plan.steps):
            batch = self.schedule(slots[step % MICROBATCHES], step)
            self.begin(step, batch)
            under_way.append((step, batch))
            if len(under_way) == MICROBATCHES:
                self.finish(*under_way.popleft())
        while under_way:
            self.finish(*under_way.popleft())
        self.send({"__msg_type__": "stop"}, 1)
        self.drain()
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "consumed": self.consumed,
            "tensors": self.tensors,
            "warned": self.warned,
        }

    def schedule(self, running: list[Request], step: int) -> Batch:
        """Keep what is unfinished, up to the batch size of this step, and fill up with new ones."""
        running[:] = [request for request in running if not request.finished]
        while len(running) < BATCH_SIZES[step % len(BATCH_SIZES)]:
            running.append(Request(f"r{self.requests}", self.dice.randint(1, 4)))
            self.requests += 1
        del running[BATCH_SIZES[step % len(BATCH_SIZES)] :]
        return Batch(list(running))

    def begin(self, step: int, batch: Batch) -> None:
        """Send the microbatch to the next stage."""
        self.place.at("schedule", step, [request.rid for request in batch.reqs])
        last = [request.output_ids[-1] if request.output_ids else 0 for request in batch.reqs]
        message = {
            "hidden_states": self.embedding[torch.tensor(last) % VOCABULARY],
            "__msg_type__": "proxy",
            "__mb_slot__": step % MICROBATCHES,
            "step": step,
            "requests": [request.rid for request in batch.reqs],
        }
        self.send(message, 1)

    def finish(self, step: int, batch: Batch) -> None:
        """Take the result of a microbatch: commit its tokens, consume its auxiliary output."""
        self.place.at("recv", step, [request.rid for request in batch.reqs])
        message = self.recv(self.plan.stages - 1)
        if message["step"] != step:
            raise Fault("stage", f"the result of step {message['step']} came for step {step}")
        self.compare(step, message)
        self.place.at("from_pp_tensors")
        arrived = _auxiliary(message)
        output = pop_auxiliary_output_from_pp_tensors(message, self.observer)
        if output is not None:
            self.compare_rebuilt(output, arrived)
        copies: list[tuple[Tensor, Tensor]] = []
        host = None
        if output is not None:
            self.place.at("copy_to_host")
            host = output.copy_to_host(lambda tensor: _later(tensor, copies))
            finding = unusable(host, CONSUME)
            if finding is not None:
                what = f"copy_to_host gave {type_name(host)}, which {finding.found}"
                raise Fault("host-output", what, finding.advice)
        self.place.at("inputs")
        seen = self.inputs.of(step, len(batch.reqs)).get("batch", batch)
        self.place.at("commit")
        commits = self.commit(step, batch, message["next_token_ids"].tolist())
        if host is not None:
            self.place.at("copy_to_host")
            for copy, tensor in copies:
                copy.copy_(tensor)
            self.place.at("consume")
            host.consume(seen, commits)
            self.consumed += 1

    def compare(self, step: int, message: dict[str, Any]) -> None:
        """Hold what has arrived against what the last stage says it sent, bit for bit."""
        arrived = records(_auxiliary(message))
        sent = self.sent(step, 0)
        self.place.at("compare")
        for one in sent:
            seen = self.tensors.setdefault(one.name, {"dtypes": [], "shapes": []})
            for kind, value in (("dtypes", one.dtype), ("shapes", list(one.shape))):
                if value not in seen[kind]:
                    seen[kind].append(value)
        if arrived != sent:
            changed = sorted({record.name for record in set(arrived) ^ set(sent)})
            raise Fault(
                "altered-in-transit",
                f"what arrived is not what was sent: {', '.join(map(repr, changed))}",
            )

    def compare_rebuilt(self, output: Any, arrived: dict[str, Tensor]) -> None:
        """Hold what was rebuilt against what arrived, where the output can name its tensors."""
        if unusable(output, TO_PP_TENSORS) is not None:
            return  # a receiver need not be able to send
        self.place.at("to_pp_tensors")
        again: dict[str, Tensor] = {}
        add_auxiliary_output_to_pp_tensors(again, output)
        changed = set(records(_auxiliary(again))) ^ set(records(arrived))
        if changed:
            names = ", ".join(sorted({repr(record.name) for record in changed}))
            self.warned["rebuilt-otherwise"] = (
                f"from_pp_tensors gave {type_name(output)}, whose to_pp_tensors differs from what"
                f" arrived in {names}"
            )

    def commit(self, step: int, batch: Batch, token_ids: list[int]) -> list[CommittedTokens | None]:
        """Append the tokens; a request that was aborted on the way commits none."""
        if step % 3 == 2 and len(batch.reqs) > 1:
            batch.reqs[self.dice.randrange(len(batch.reqs))].aborted = True
        commits: list[CommittedTokens | None] = []
        for request, token_id in zip(batch.reqs, token_ids, strict=True):
            if request.finished:
                commits.append(None)
                continue
            commits.append(CommittedTokens(len(request.output_ids), (token_id,)))
            request.output_ids.append(token_id)
            self.tokens += 1
        return commits


class LastStage(Stage):
    """Samples, with the observer's hooks around it, into buffers that it uses again."""

    def run(self) -> dict[str, Any]:
        self.place.at("observer")
        self.observer = make_observer(self.plan.target)
        self.inputs = Inputs(self.plan.inputs)
        head = self.weights(HIDDEN, VOCABULARY) * 4
        self.buffer = torch.empty(0)
        self.asked = self.active = self.with_state = self.outputs = 0
        self.warned: dict[str, str] = {}
        while True:
            message = self.recv(self.stage - 1)
            if message["__msg_type__"] == "stop":
                self.drain()
                counts = ("asked", "active", "with_state", "outputs", "warned")
                return {name: getattr(self, name) for name in counts}
            step, requests = message["step"], message["requests"]
            self.place.at("inputs", step, requests)
            given = self.inputs.of(step, len(requests))
            logits = given.get("logits")
            if logits is None:
                logits = message["hidden_states"] @ head
            info = given.get("sampling_info")
            if info is None:
                info = SamplingInfo.neutral(*logits.shape)
            self.send(self.sample(step, message["__mb_slot__"], logits, info), 0)

    def sample(self, step: int, slot: int, source: Tensor, info: Any) -> dict[str, Any]:
        """One step of the sampler; gives the message to stage 0."""
        logits = self.reused_buffer(source)
        dice = torch.Generator().manual_seed(self.plan.seed * 10_000 + step)
        mask = torch.rand(logits.shape, generator=dice) < 0.5
        mask.scatter_(-1, logits.argmax(-1, keepdim=True), False)  # something stays allowed
        state = None
        if step % 5 != 3:  # an engine skips the observer now and then, for a batch of its own
            state = self.before_the_mask(logits, info)
        self.place.at("sampler")
        logits.masked_fill_(mask, -torch.inf)
        probabilities = torch.softmax(logits.float(), -1).nan_to_num(1.0)
        token_ids = torch.multinomial(probabilities, 1, generator=dice).squeeze(-1)
        output = None
        if state is not None:
            self.place.at("after_sample")
            output = self.observer.after_sample(state, token_ids)
        message = {
            "next_token_ids": token_ids,
            "__msg_type__": "output",
            "__mb_slot__": slot,
            "step": step,
        }
        if any(_shares_memory(tensor, self.buffer) for tensor in _tensors_in(output)):
            raise _aliased(f"a tensor of {type_name(output)}")
        self.place.at("to_pp_tensors")
        add_auxiliary_output_to_pp_tensors(message, output)
        self.outputs += output is not None
        self.place.at("compare")
        auxiliary = _auxiliary(message)
        sent = records(auxiliary)
        self.buffer.fill_(torch.nan)
        aliased = [
            old.name for old, new in zip(sent, records(auxiliary), strict=True) if old != new
        ]
        if aliased:
            raise _aliased(", ".join(map(repr, aliased)))
        with self._peer("store", 0):
            told = json.dumps([dataclasses.astuple(record) for record in sent])
            self.store.set(f"sent/{step}/{self.tp.rank}", told)
            self.store.set(f"order/{step}/{self.tp.rank}", json.dumps(list(auxiliary)))
        self.require_replicated(step)
        return message

    def require_replicated(self, step: int) -> None:
        """Before it is sent: every tensor-parallel rank has to have made the same."""
        by_rank = [
            {record.name: record for record in self.sent(step, rank)}
            for rank in range(self.tp.size)
        ]
        self.place.at("compare")
        names = sorted({name for records in by_rank for name in records})
        told = [_differs(name, [made.get(name) for made in by_rank], self.tp) for name in names]
        differs = [text for text in told if text] or self.differing_orders(step)
        if differs and self.tp.rank == 0:
            raise Fault("not-replicated", "; ".join(differs))
        if differs:
            raise PeerLost("this stage's first rank tells what differs between its ranks")

    def differing_orders(self, step: int) -> list[str]:
        """What is to be said of tensors that are the same, and named in another order."""
        with self._peer("store", self.stage):
            orders = [
                json.loads(self.store.get(f"order/{step}/{rank}")) for rank in range(self.tp.size)
            ]
        told = [
            f"the order of the names on TP rank {rank} is {', '.join(order)}, on TP rank 0"
            f" {', '.join(orders[0])}: the engine sends tensors in that order, and gathers slices"
            " of different ones"
            for rank, order in enumerate(orders)
            if order != orders[0]
        ]
        self.place.at("compare")
        return told

    def before_the_mask(self, logits: Tensor, info: Any) -> Any:
        """Ask the observer, as the engine does; None if it wants nothing of this step."""
        self.asked += 1
        self.place.at("is_active")
        if not self.observer.is_active(info):
            return None
        self.active += 1
        self.place.at("before_grammar")
        kept = TensorRecord.of("logits", logits)
        state = self.observer.before_grammar(logits, info)
        if TensorRecord.of("logits", logits) != kept:
            raise Fault("altered-logits", "before_grammar wrote into the logits")
        self.with_state += state is not None
        held = [*_tensors_in(state), *_tensors_in(self.observer)]
        if any(_shares_memory(tensor, self.buffer) for tensor in held):
            self.warned["aliased-state"] = (
                "what before_grammar returned or kept is a view of the logits: after_sample sees"
                " them with the grammar mask written into them"
            )
        return state

    def reused_buffer(self, source: Tensor) -> Tensor:
        """The rows of the one logits buffer, filled; its memory is used again in the next step."""
        rows, vocabulary = source.shape
        old = self.buffer
        fits = old.dim() == 2 and old.shape[1] == vocabulary and len(old) >= rows
        if not fits or old.dtype != source.dtype:
            self.buffer = torch.empty(max(rows, *BATCH_SIZES), vocabulary, dtype=source.dtype)
        return self.buffer[:rows].copy_(source)


def _auxiliary(message: dict[str, Any]) -> dict[str, Tensor]:
    return {
        key.removeprefix(PREFIX): value for key, value in message.items() if key.startswith(PREFIX)
    }


def _differs(name: str, made: list[TensorRecord | None], tp: TensorParallel) -> str:
    """What is to be said of a tensor that is not the same on all tensor-parallel ranks."""
    alike: dict[TensorRecord | None, list[int]] = {}
    for rank, record in enumerate(made):
        alike.setdefault(record, []).append(rank)
    if len(alike) < 2:
        return ""
    groups = " and of ".join(
        f"TP rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in alike.values()
    )
    kinds = {(record.dtype, record.shape) if record else None for record in alike}
    if len(kinds) > 1:
        kinds_of = ", ".join(
            f"{record.dtype} {list(record.shape)} on TP rank {ranks[0]}"
            if record
            else f"absent on TP rank {ranks[0]}"
            for record, ranks in alike.items()
        )
        return f"{name!r} is {kinds_of}: the engine's receivers would wait for ever or fail"
    count = math.prod(made[0].shape) if made[0] else 0
    what = (
        f"would send one slice of its {count} elements from each rank and gather a mixture"
        if tp.splits(count)
        else f"would send its {count} elements whole, other ones to each rank of the first stage"
    )
    return f"{name!r} of {groups} differ: the engine {what}"


def _later(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A copy whose values come later, as those of the engine's asynchronous copies do."""
    copy = torch.zeros_like(tensor, device="cpu")
    copies.append((copy, tensor))
    return copy


def _aliased(what: str) -> Fault:
    return Fault("aliased-output", f"{what} is a view of the logits, which the engine overwrites")


def _tensors_in(held: Any) -> list[Tensor]:
    """The tensors that an object holds, as far as can be seen without running its code."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [held]
    while left and len(seen) < 1000:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_tensor(one):
            found.append(one)
        elif type(one) in (tuple, list, set, frozenset, deque):
            left += one
        elif type(one) is dict:
            left += one.values()
        else:
            left += stored_in(one)
    return found


def _shares_memory(tensor: Tensor, buffer: Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # no storage of its own
        return False
