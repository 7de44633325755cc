"""What does each code mean, and what is there to do about it?"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One code: when it happens, usual causes, how to fix it, how to prevent it."""

    when: str
    causes: tuple[str, ...]
    fix: str
    prevent: str
    example: str
    """A few lines of Python that are right; they run as they are, beside this package and torch."""


_CHECK = "Run pp-protocol check on the observer in CI."
_GUARD = "Call require_pp_observer(observer) when the engine starts, on every rank."

CATALOGUE: dict[str, Entry] = {
    "wire": Entry(
        "The `tensors` given to add, pop, has or discard is no mapping, or cannot be written to.",
        ("An engine's wrapper was passed, not the dict inside it.", "A read-only view was passed."),
        "Pass the dict itself: of SGLang's PPProxyTensors, its attribute .tensors.",
        "Annotate the variable as dict[str, Any] and let mypy look.",
        """from pp_protocol import has_auxiliary_output
class PPProxyTensors:  # an engine's wrapper
    def __init__(self, tensors): self.tensors = tensors
received = PPProxyTensors({"next_token_ids": None})
has_auxiliary_output(received.tensors)  # not: received""",
    ),
    "unsupported-output": Entry(
        "add_auxiliary_output_to_pp_tensors got an output whose to_pp_tensors cannot be called.",
        (
            "after_sample returns an output that was written for an engine without PP.",
            "The output is a combined one, which has no to_pp_tensors in SGLang 0.5.23.",
        ),
        "Define to_pp_tensors() on the output; return its tensors by name.",
        _CHECK,
        """class EntropyOutput:
    def __init__(self, entropy): self.entropy = entropy
    def to_pp_tensors(self): return {"entropy": self.entropy}""",
    ),
    "empty-output": Entry(
        "to_pp_tensors gave nothing, an empty mapping, or something that is no mapping.",
        ("There was nothing to send in this step.", "It returns a list of pairs, or is async."),
        "Return a dict with at least one tensor; to send nothing, return None from after_sample.",
        "Annotate to_pp_tensors as -> dict[str, Tensor].",
        """class Observer:
    def after_sample(self, state, token_ids):
        if state["entropy"] is None:
            return None  # nothing to send in this step
        return EntropyOutput(state["entropy"])""",
    ),
    "tensor-name": Entry(
        "A tensor's name is not exactly a str, or is empty.",
        ("A member of a (str, Enum) is the name: its text differs between Python versions.",),
        "Use plain strings; of an Enum member take its .value.",
        _CHECK,
        """import enum
class Name(str, enum.Enum):
    ENTROPY = "entropy"
def to_pp_tensors(self):
    return {Name.ENTROPY.value: self.entropy}""",
    ),
    "non-tensor": Entry(
        "A value that is to be sent, or that arrived under an auxiliary key, is no tensor.",
        ("A Python number or list was left as it is.", "Another plug-in uses the same key prefix."),
        "Make it a tensor on the device of the others: torch.tensor(value, device=...).",
        "Annotate to_pp_tensors as -> dict[str, Tensor].",
        """import torch
def to_pp_tensors(self):
    return {"entropy": self.entropy, "steps": torch.tensor(self.steps)}""",
    ),
    "unsupported-tensor": Entry(
        "A tensor has no dense memory of its own, or a dtype that the backend does not carry.",
        (
            "It is sparse, nested, quantized, on the meta device, or a DTensor.",
            "On CUDA: NCCL has no int16, uint16, uint32, uint64, float8_e8m0fnu or float4.",
        ),
        "Send a dense copy (to_dense(), full_tensor()), or convert it (to(torch.int32)).",
        _CHECK,
        """import torch
scores = torch.eye(3).to_sparse()
counts = torch.ones(2, dtype=torch.int16)
to_send = {"scores": scores.to_dense(), "counts": counts.to(torch.int32)}""",
    ),
    "duplicate-tensor": Entry(
        "The dict holds an auxiliary tensor of that name already.",
        ("The same dict was filled twice.", "Two outputs with equal names went into one dict."),
        "Add one output to a dict once; put the tensors of both into one output.",
        "Make a new dict for each message.",
        """def to_pp_tensors(self):
    return {"first.score": self.first, "second.score": self.second}""",
    ),
    "missing-observer": Entry(
        "Auxiliary tensors arrived where the observer is None, or a pp_boundary function got None.",
        ("The plug-in is installed, or switched on, on the last stage only.",),
        "Install the same observer on the first stage, or call discard_auxiliary_output there.",
        _GUARD,
        """from pp_protocol import discard_auxiliary_output
tensors = {"next_token_ids": None}
dropped = discard_auxiliary_output(tensors)  # on a stage that has no observer""",
    ),
    "unsupported-observer": Entry(
        "The observer has no from_pp_tensors that can be called with the tensors.",
        (
            "It was written for an engine without pipeline parallelism.",
            "The method is misspelt, async, needs more arguments, or was never implemented.",
            "It is a mock, a remote handle or a proxy that answers through __getattr__.",
        ),
        "Define from_pp_tensors(self, tensors) and return the output rebuilt from them.",
        f"{_GUARD} {_CHECK}",
        """class EntropyObserver:
    def from_pp_tensors(self, tensors):
        return EntropyOutput(tensors["entropy"])""",
    ),
    "unsupported-hook": Entry(
        "is_active, before_grammar or after_sample cannot be called as the engine calls it.",
        ("It is missing, misspelt or async, or takes other arguments.",),
        "Define it: is_active(sampling_info), before_grammar(logits, sampling_info),"
        " after_sample(state, token_ids).",
        "Derive the class from pp_protocol.PPCapableObserver.",
        """class EntropyObserver:
    def is_active(self, sampling_info): return True
    def before_grammar(self, logits, sampling_info): return logits.float().logsumexp(-1)
    def after_sample(self, state, token_ids): return EntropyOutput(state)""",
    ),
    "reconstruction": Entry(
        "from_pp_tensors returned None, or something without a copy_to_host that can be called.",
        ("It ends without a return.", "It is async.", "It returns the tensors themselves."),
        "Return an object with copy_to_host(copy_tensor).",
        _CHECK,
        """class EntropyOutput:
    def __init__(self, entropy): self.entropy = entropy
    def copy_to_host(self, copy_tensor): return EntropyOutput(copy_tensor(self.entropy))
    def consume(self, batch, commits): ...
def from_pp_tensors(self, tensors):
    return EntropyOutput(tensors["entropy"])""",
    ),
    "host-output": Entry(
        "copy_to_host returned something without a consume that can be called.",
        ("It ends without a return.", "It returns the copied tensors themselves."),
        "Return an object with consume(batch, commits).",
        _CHECK,
        """class HostEntropy:
    def __init__(self, entropy): self.entropy = entropy
    def consume(self, batch, commits):
        for request, commit, entropy in zip(batch.reqs, commits, self.entropy.tolist()):
            if commit is not None: request.entropies.append(entropy)""",
    ),
    "payload": Entry(
        "What arrived is not what the fields of a TensorPayload, or the children of a composite,"
        " declare.",
        (
            "The ranks have different versions of the plug-in, or composites of other children.",
            "The sender made a tensor of another dtype or shape than its field declares.",
        ),
        "The message lists all that differs: send what is declared, or declare what is sent.",
        f"{_CHECK} Start the same environment on every rank.",
        """import torch
from typing import Annotated
from pp_protocol import TensorPayload, TensorSpec
class EntropyOutput(TensorPayload):
    entropy: Annotated[torch.Tensor, TensorSpec(torch.float32, ("batch",))]
    def consume(self, batch, commits): ...
EntropyOutput.from_pp_tensors({"entropy": torch.zeros(4)})  # float64 or [4, 1] would raise""",
    ),
    "fingerprint": Entry(
        "The sender added a fingerprint, and what arrived is not, to the last byte, what it sent.",
        (
            "Under tensor parallelism the ranks sent different tensors, which the engine mixes.",
            "Something wrote into a tensor after it was added, or into the received one.",
        ),
        "Make the output the same on all TP ranks: compute it from gathered logits, or broadcast.",
        "Run pp-protocol check --tp 2 in CI.",
        """import torch
from pp_protocol import add_auxiliary_output_to_pp_tensors, pop_auxiliary_output_from_pp_tensors
from pp_protocol.reference import LogprobObserver
observer, message = LogprobObserver(), {}
output = observer.after_sample(observer.before_grammar(torch.randn(1, 9), None), torch.ones(1))
add_auxiliary_output_to_pp_tensors(message, output, fingerprint=True)
pop_auxiliary_output_from_pp_tensors(message, observer)  # would raise if a byte had changed""",
    ),
    "handshake": Entry(
        "verify_pipeline found, before serving, that the ranks cannot serve together.",
        (
            "The observer is installed on the last stage only, or in different versions.",
            "An observer cannot be transported, a check raised, or a rank did not come.",
        ),
        "Mend each problem on the rank that it names; the error is the same on all ranks.",
        "Start the same environment on every rank, and call verify_pipeline on every rank.",
        """from pp_protocol import verify_pipeline
from pp_protocol.reference import LogprobObserver
report = verify_pipeline(LogprobObserver())  # with a process group: on every rank, stage=...
print(report)""",
    ),
    "conformance": Entry(
        "A report of check_observer or check_output lists errors, and raise_if_failed was called.",
        ("See what the report lists: each line has a code of its own.",),
        "Mend each line; it says what was expected, what was found, and where it is defined.",
        f"{_CHECK} Call check_observer(observer).raise_if_failed() at start-up.",
        """from pp_protocol import check_observer
from pp_protocol.reference import LogprobObserver
check_observer(LogprobObserver()).raise_if_failed()""",
    ),
    "contract-violation": Entry(
        "A parameter or a result of a function under pp_boundary does not satisfy its Protocol.",
        ("Something else was passed.", "The Protocol asks for more than what is used."),
        "Pass what satisfies the Protocol; the message names function, parameter and member.",
        "Let mypy check the callers of the function.",
        """from pp_protocol import PPCapableObserver, pp_boundary
from pp_protocol.reference import LogprobObserver
@pp_boundary
def install(observer: PPCapableObserver | None) -> None: ...
install(LogprobObserver())
install(None)""",
    ),
    "aliased-output": Entry(
        "An output tensor is a view of a buffer that the engine uses again.",
        ("The output holds a slice of the logits.", "It was detached or reshaped, not copied."),
        "Clone it in before_grammar, or keep what is computed from it.",
        _CHECK,
        """def before_grammar(self, logits, sampling_info):
    return logits[:, :4].clone()  # or what is computed from them: logits.amax(-1)""",
    ),
    "aliased-state": Entry(
        "What before_grammar returned is a view of the logits; the grammar mask is written there.",
        ("before_grammar returns the logits, to be used in after_sample.",),
        "Compute in before_grammar what is needed, or clone. If masked values are meant: ignore.",
        _CHECK,
        """def before_grammar(self, logits, sampling_info):
    return logits.float().log_softmax(-1)  # a new tensor, before the mask""",
    ),
    "altered-logits": Entry(
        "before_grammar wrote into the logits that it was given.",
        ("An in-place operation: mul_, div_, softmax with out=.",),
        "Work on a copy, or with operations that make new tensors: what is sampled changes else.",
        _CHECK,
        """def before_grammar(self, logits, sampling_info):
    return (logits / sampling_info.temperatures).logsumexp(-1)  # not: logits.div_(…)""",
    ),
    "rebuilt-otherwise": Entry(
        "What from_pp_tensors rebuilt names other tensors, or other values, than what arrived.",
        ("Two tensors were swapped, or an optional one was forgotten.", "It converts: on purpose."),
        "Rebuild each tensor under its own name. If the difference is meant: ignore.",
        _CHECK,
        """class Output:
    def __init__(self, low, high): self.low, self.high = low, high
    def to_pp_tensors(self): return {"low": self.low, "high": self.high}
def from_pp_tensors(self, tensors):
    return Output(low=tensors["low"], high=tensors["high"])""",
    ),
    "altered-in-transit": Entry(
        "A tensor arrived with another name, dtype, shape or content than it was sent with.",
        ("A hook wrote into a tensor after it was handed over.",),
        "Hand over tensors that nothing writes to any more.",
        _CHECK,
        """def after_sample(self, state, token_ids):
    self.running_sum += state
    return EntropyOutput(self.running_sum.clone())  # the sum goes on, the output stays""",
    ),
    "not-replicated": Entry(
        "An output is not the same on all tensor-parallel (TP) ranks of the last stage.",
        (
            "It was computed from this rank's own part of the vocabulary, or of the weights.",
            "It depends on the rank, on a clock, or on random numbers of one process.",
        ),
        "Compute it from gathered logits, or have one rank broadcast it: the engine sends a slice"
        " from each rank and gathers them, so that a mixture arrives, without an error.",
        "Run pp-protocol check --tp 2 in CI; PP_PROTOCOL_FINGERPRINT=1 finds it while serving.",
        """import torch, torch.distributed as dist
def the_same_on_all_ranks(entropy: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.broadcast(entropy, src=0)  # with the TP group of the engine: group=...
    return entropy""",
    ),
    "observer-raised": Entry(
        "A hook of the observer raised an exception of its own.",
        (
            "It reads what this pipeline's stand-ins for the engine's objects do not have.",
            "It reads values in copy_to_host: they are there in consume, not before.",
        ),
        "Look at the frames that are printed; supply the engine's objects with --inputs.",
        _CHECK,
        """# pp-protocol check my_plugin:Observer --inputs my_tests:inputs
def inputs(step, batch_size):
    import types
    return {"sampling_info": types.SimpleNamespace(temperatures=None, watermark_keys=None)}""",
    ),
    "no-output": Entry(
        "The observer gave no output in any step, so that nothing could be checked.",
        (
            "is_active is false for the sampling_info that it is shown.",
            "A hook ends without a return: a state of None skips after_sample.",
        ),
        "Look at the counts: is_active false, a state of None, or an output of None. Supply a"
        " sampling_info for which it is active with --inputs, or raise --steps.",
        "Keep the command in CI: it exits with 2 as long as nothing is checked.",
        """def is_active(self, sampling_info):
    return bool(getattr(sampling_info, "watermark_keys", None))
def inputs(step, batch_size):
    import types
    return {"sampling_info": types.SimpleNamespace(watermark_keys=[7] * batch_size)}""",
    ),
    "stage-died": Entry(
        "The process of a stage ended without a word.",
        ("A crash in native code, os._exit, or the system ran out of memory.",),
        "Run with PYTHONFAULTHANDLER=1, and look at the hook that the report names.",
        _CHECK,
        """import faulthandler
faulthandler.enable()  # prints the stack when the process crashes""",
    ),
    "stalled": Entry(
        "No stage gave a sign of life for the time given with --timeout.",
        ("A hook waits for something that does not come.", "A hook is slow: compiling, for one."),
        "Look at the hook that the report names; raise --timeout if it is only slow.",
        _CHECK,
        """import queue
scores = queue.Queue()
scores.put(0.5)
scores.get(timeout=5)  # wait for ever for nothing""",
    ),
    "inputs": Entry(
        "What --inputs supplies raised, or has not the shape that it must have.",
        ("logits are not a float tensor [batch_size, vocabulary].",),
        "Return a dict with any of logits, sampling_info and batch (with reqs).",
        "Try the callable by itself: inputs(0, 3).",
        """import torch
def inputs(step, batch_size):
    return {"logits": torch.randn(batch_size, 1000, dtype=torch.bfloat16)}
inputs(0, 3)""",
    ),
    "stage": Entry(
        "A stage could not do its own part; this says nothing about the observer.",
        ("The loopback address cannot be used.", "torch has no gloo backend."),
        "Read the message; run the command with --reference to see whether it is the machine.",
        "Run pp-protocol check --reference where the tests run.",
        """import torch.distributed
assert torch.distributed.is_gloo_available()""",
    ),
    "static": Entry(
        "mypy finds that the observer does not satisfy PPCapableObserver, by its annotations.",
        (
            "A result that is Optional, a Tensor or a coroutine; a parameter of dict[str, Tensor].",
            "The output of after_sample has no to_pp_tensors.",
        ),
        "Change the member that mypy names so that it fits what it expected.",
        "Run mypy on the plug-in, with: observer: PPCapableObserver = MyObserver().",
        """from pp_protocol import PPCapableObserver
from pp_protocol.reference import LogprobObserver
observer: PPCapableObserver = LogprobObserver()  # mypy looks at this line""",
    ),
    "static-unseen": Entry(
        "mypy did not look at the observer, or not at all of it.",
        (
            "A method has not all of its annotations, or a decorator that has none.",
            "The package of the plug-in ships no py.typed, or mypy is told to ignore errors in it.",
        ),
        "Annotate the four methods; put a py.typed into the package.",
        "Run pp-protocol check --require static in CI.",
        """from collections.abc import Mapping
from torch import Tensor
class EntropyObserver:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> "EntropyOutput": ...""",
    ),
    "static-not-run": Entry(
        "mypy could not be run.",
        ("It is not installed.", "Its configuration has an error."),
        "Install it: pip install 'pp-protocol[mypy]'.",
        "Run pp-protocol check --require static in CI.",
        """import importlib.util
installed = importlib.util.find_spec("mypy") is not None
# if not: pip install 'pp-protocol[mypy]'""",
    ),
    "target": Entry(
        "The target could not be had: no such module or attribute, or it raised.",
        ("The module is not installed and not in the working directory.", "It needs arguments."),
        "Name module:attribute, where the attribute is an observer, its class, or a factory.",
        "Try it: python -c 'import module; module.attribute'.",
        """from pp_protocol.reference import LogprobObserver
def make_observer():  # pp-protocol check my_plugin:make_observer
    return LogprobObserver(top_k=20)""",
    ),
}
"""Every code that an error of this package or a finding of `pp-protocol check` has."""


def listed() -> str:
    """Every code with the beginning of what it means, a line each, in at most 100 columns."""
    width = max(map(len, CATALOGUE))
    return "\n".join(
        f"{code:<{width}}  {textwrap.shorten(entry.when, 98 - width, placeholder=' …')}"
        for code, entry in CATALOGUE.items()
    )


def explained(code: str) -> str:
    """All of one entry, in at most 100 columns."""
    entry = CATALOGUE[code]
    lines = [code, "", *textwrap.wrap(entry.when, 100), "", "usual causes:"]
    for cause in entry.causes:
        lines += textwrap.wrap(cause, 100, initial_indent="  * ", subsequent_indent="    ")
    lines += ["", *textwrap.wrap(f"fix: {entry.fix}", 100), ""]
    lines += [f"    {line}" for line in entry.example.splitlines()]
    lines += ["", *textwrap.wrap(f"prevent, and check before: {entry.prevent}", 100)]
    return "\n".join(lines)
