"""Observers with one fault each, and their like, for the stages of a pipeline to make."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from typing import Any

import torch
from observers import Observer, Output
from torch import Tensor

from pp_protocol import PPCapableObserver, stage

CLAIMED_INFO = types.SimpleNamespace(kind="the test's own")


class Good(Observer):
    pass


class AliasedOutput(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return logits

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"fine": state.sum(-1), "all_logits": state})


class AliasedState(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return {"kept": [logits[:, :2]]}

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": state["kept"][0] + 1})


class StridedAlias(AliasedOutput):
    """add_… would make a copy of it; without pipeline parallelism nobody does."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": state[:, ::2]})


class HiddenAlias(AliasedOutput):
    """Only what it sends shows that it is a view."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        output = Output({})
        output.to_pp_tensors = (lambda hidden: lambda: {"hidden": hidden[0]})(state)
        return output


class WritesLogits(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return logits.mul_(2).sum(-1)


class AliasedAttribute(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        self.kept = logits
        return True

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": self.kept.sum(-1)})


class AliasedNamespace(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return types.SimpleNamespace(logits=logits)

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": state.logits.sum(-1)})


class Slotted:
    __slots__ = ("absent", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class SlottedState(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return Slotted(logits.sum(-1))

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": state.kept})


class CyclicState(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        state: list[Any] = [logits.sum(-1)]
        state.append(state)
        return state

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"x": state[0]})


class NoState(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        pass


class Swaps(Observer):
    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"one": state, "two": state + 1})

    def from_pp_tensors(self, tensors: Any) -> Any:
        return Output({"one": tensors["two"], "two": tensors["one"]})


class Forgets(Swaps):
    def from_pp_tensors(self, tensors: Any) -> Any:
        return Output({"one": tensors["one"]})


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError


class RaisesUnreadable(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        error = UnreadableError()
        error.__notes__ = None
        raise error


class RealTimeSignal(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        os.kill(os.getpid(), 40)


class DiesAndLeavesAChild(Observer):
    """The child holds everything open that its parent has."""

    def is_active(self, sampling_info: Any) -> bool:
        if os.fork() == 0:
            time.sleep(20)  # longer than the run
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


class CopiesMeta(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        output = Output(tensors)
        host = Output({})
        output.copy_to_host = lambda copy: copy(torch.ones(2, device="meta")) is None or host
        return output


class ExitsWhenMade(Observer):
    def __init__(self) -> None:
        sys.exit(0)


class Abstract(PPCapableObserver):
    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_gramar(self, logits: Tensor, sampling_info: Any) -> Any:
        return logits

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return None


class Unsupported(Observer):
    from_pp_tensors = None


class NotRebuilt(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        return None


class NoHostOutput(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        output = Output(tensors)
        output.copy_to_host = lambda copy_tensor: None
        return output


class Sparse(Observer):
    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"fine": state, "scores": torch.eye(2).to_sparse()})


class RaisesBeforeGrammar(Observer):
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        raise KeyError("temperature")


class RaisesInFrom(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        raise LookupError("no such request")


class RaisesInConsume(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        output = Output(tensors)
        host = Output(tensors)
        host.consume = lambda batch, commits: 1 / 0
        output.copy_to_host = lambda copy_tensor: host
        return output


class Exits(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        sys.exit("from a hook")


class DiesSilently(Observer):
    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        os._exit(7)


class Killed(Observer):
    def from_pp_tensors(self, tensors: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Stubborn(Observer):
    """Waits for ever, and does not listen to SIGTERM."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)  # for ever, as far as a test can tell


class FailsWhileAPeerIsStubborn(Observer):
    """The last stage raises while the first is in a hook that does not end."""

    steps = 0

    def is_active(self, sampling_info: Any) -> bool:
        self.steps += 1
        if self.steps == 2:
            time.sleep(1)  # the others wait by then
            raise ValueError("enough")
        return True

    def from_pp_tensors(self, tensors: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)  # for ever, as far as a test can tell


class Slow(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        time.sleep(1)  # a step that takes long
        return True


class Inactive(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        return False


class Tampering(Observer):
    """Damages what is sent, as a broken transport would."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        send = stage.send_tensor_dict

        def send_other_bytes(message: dict[str, Any], dst: int, *more: Any) -> Any:
            damaged = {
                key: value + 1 if key.endswith(".victim") else value
                for key, value in message.items()
            }
            return send(damaged, dst, *more)

        stage.send_tensor_dict = send_other_bytes
        return Output({"fine": state, "victim": state})


class LooksTooEarly(Observer):
    """Fails unless the copies are empty in copy_to_host and filled in consume."""

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        return Output({"ones": torch.ones(3)})

    def from_pp_tensors(self, tensors: Any) -> Any:
        return LooksTooEarlyOutput(tensors)


class LooksTooEarlyOutput(Output):
    def copy_to_host(self, copy_tensor: Any) -> Any:
        copy = copy_tensor(self.tensors["ones"])
        assert copy.tolist() == [0, 0, 0]
        return LooksTooEarlyOutput({"ones": copy})

    def consume(self, batch: Any, commits: Any) -> None:
        assert self.tensors["ones"].tolist() == [1, 1, 1]


class NeedsInputs(Observer):
    def is_active(self, sampling_info: Any) -> bool:
        return sampling_info.kind == "the test's own"

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        assert logits.dtype is torch.bfloat16
        assert logits.shape[1] == 7
        return logits.clone()

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        assert int(token_ids.max()) < 7
        return Output({"logits": state})

    def from_pp_tensors(self, tensors: Any) -> Any:
        return NeedsInputsOutput(tensors)


class NeedsInputsOutput(Output):
    def copy_to_host(self, copy_tensor: Any) -> Any:
        return NeedsInputsOutput({k: copy_tensor(v) for k, v in self.tensors.items()})

    def consume(self, batch: Any, commits: Any) -> None:
        assert batch.name == "the test's own"
        assert len(batch.reqs) == len(commits) == len(self.tensors["logits"])


def inputs(step: int, batch_size: int) -> dict[str, Any]:
    return {
        "logits": torch.randn(batch_size, 7).to(torch.bfloat16),
        "sampling_info": CLAIMED_INFO,
        "batch": types.SimpleNamespace(name="the test's own", reqs=[object()] * batch_size),
    }


def raising_inputs(step: int, batch_size: int) -> dict[str, Any]:
    raise OSError("no recording to be found")


def wrong_inputs(step: int, batch_size: int) -> dict[str, Any]:
    return {"logits": torch.ones(batch_size + 1, 7)}


class NeedsArguments(Observer):
    def __init__(self, vocabulary: int) -> None:
        pass


class Recorder(Observer):
    """Writes what it consumes to the file that the environment names."""

    def from_pp_tensors(self, tensors: Any) -> Any:
        return RecorderOutput(tensors)


class RecorderOutput(Output):
    def copy_to_host(self, copy_tensor: Any) -> Any:
        return RecorderOutput({k: copy_tensor(v) for k, v in self.tensors.items()})

    def consume(self, batch: Any, commits: Any) -> None:
        rows = len(self.tensors["logsumexp"])
        aligned = rows == len(batch.reqs) == len(commits)
        for request, commit in zip(batch.reqs, commits, strict=True):
            if commit is not None:
                at = commit.output_index
                aligned &= tuple(request.output_ids[at : at + 1]) == commit.token_ids
                aligned &= at + 1 == len(request.output_ids)
        with open(os.environ["RECORD"], "a") as file:
            missing = sum(commit is None for commit in commits)
            file.write(f"{rows} {missing} {int(aligned)}\n")


instance = Good()


def factory() -> Observer:
    return Good()
