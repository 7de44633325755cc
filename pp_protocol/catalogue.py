"""What does each code mean, and what is there to do about it?"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One code: when it happens, usual causes, how to fix it, how to prevent it."""

    when: str
    causes: tuple[str, ...]
    fix: str
    prevent: str


_CHECK = "Run pp-protocol check on the observer in CI."
_GUARD = "Call require_pp_observer(observer) when the engine starts, on every rank."

CATALOGUE: dict[str, Entry] = {
    "wire": Entry(
        "The `tensors` given to add, pop, has or discard is no mapping, or cannot be written to.",
        ("An engine's wrapper was passed, not the dict inside it.", "A read-only view was passed."),
        "Pass the dict itself: of SGLang's PPProxyTensors, its attribute .tensors.",
        "Annotate the variable as dict[str, Any] and let mypy look.",
    ),
    "unsupported-output": Entry(
        "add_auxiliary_output_to_pp_tensors got an output whose to_pp_tensors cannot be called.",
        (
            "after_sample returns an output that was written for an engine without PP.",
            "The output is a combined one, which has no to_pp_tensors in SGLang 0.5.23.",
        ),
        "Define to_pp_tensors() on the output; return its tensors by name.",
        _CHECK,
    ),
    "empty-output": Entry(
        "to_pp_tensors gave nothing, an empty mapping, or something that is no mapping.",
        ("There was nothing to send in this step.", "It returns a list of pairs, or is async."),
        "Return a dict with at least one tensor; to send nothing, return None from after_sample.",
        "Annotate to_pp_tensors as -> dict[str, Tensor].",
    ),
    "tensor-name": Entry(
        "A tensor's name is not exactly a str, or is empty.",
        ("A member of a (str, Enum) is the name: its text differs between Python versions.",),
        "Use plain strings; of an Enum member take its .value.",
        _CHECK,
    ),
    "non-tensor": Entry(
        "A value that is to be sent, or that arrived under an auxiliary key, is no tensor.",
        ("A Python number or list was left as it is.", "Another plug-in uses the same key prefix."),
        "Make it a tensor on the device of the others: torch.tensor(value, device=...).",
        "Annotate to_pp_tensors as -> dict[str, Tensor].",
    ),
    "unsupported-tensor": Entry(
        "A tensor has no dense memory of its own, or a dtype that the backend does not carry.",
        (
            "It is sparse, nested, quantized, on the meta device, or a DTensor.",
            "On CUDA: NCCL has no int16, uint16, uint32, uint64, float8_e8m0fnu or float4.",
        ),
        "Send a dense copy (to_dense(), full_tensor()), or convert it (to(torch.int32)).",
        _CHECK,
    ),
    "duplicate-tensor": Entry(
        "The dict holds an auxiliary tensor of that name already.",
        ("The same dict was filled twice.", "Two outputs with equal names went into one dict."),
        "Add one output to a dict once; put the tensors of both into one output.",
        "Make a new dict for each message.",
    ),
    "missing-observer": Entry(
        "Auxiliary tensors arrived on a stage where the observer is None.",
        ("The plug-in is installed, or switched on, on the last stage only.",),
        "Install the same observer on the first stage, or call discard_auxiliary_output there.",
        _GUARD,
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
    ),
    "unsupported-hook": Entry(
        "is_active, before_grammar or after_sample cannot be called as the engine calls it.",
        ("It is missing, misspelt or async, or takes other arguments.",),
        "Define it: is_active(sampling_info), before_grammar(logits, sampling_info),"
        " after_sample(state, token_ids).",
        "Derive the class from pp_protocol.PPCapableObserver.",
    ),
    "reconstruction": Entry(
        "from_pp_tensors returned None, or something without a copy_to_host that can be called.",
        ("It ends without a return.", "It is async.", "It returns the tensors themselves."),
        "Return an object with copy_to_host(copy_tensor).",
        _CHECK,
    ),
    "host-output": Entry(
        "copy_to_host returned something without a consume that can be called.",
        ("It ends without a return.", "It returns the copied tensors themselves."),
        "Return an object with consume(batch, commits).",
        _CHECK,
    ),
    "aliased-output": Entry(
        "An output tensor is a view of a buffer that the engine uses again.",
        ("The output holds a slice of the logits.", "It was detached or reshaped, not copied."),
        "Clone it in before_grammar, or keep what is computed from it.",
        _CHECK,
    ),
    "aliased-state": Entry(
        "What before_grammar returned is a view of the logits; the grammar mask is written there.",
        ("before_grammar returns the logits, to be used in after_sample.",),
        "Compute in before_grammar what is needed, or clone. If masked values are meant: ignore.",
        _CHECK,
    ),
    "altered-logits": Entry(
        "before_grammar wrote into the logits that it was given.",
        ("An in-place operation: mul_, div_, softmax with out=.",),
        "Work on a copy, or with operations that make new tensors: what is sampled changes else.",
        _CHECK,
    ),
    "rebuilt-otherwise": Entry(
        "What from_pp_tensors rebuilt names other tensors, or other values, than what arrived.",
        ("Two tensors were swapped, or an optional one was forgotten.", "It converts: on purpose."),
        "Rebuild each tensor under its own name. If the difference is meant: ignore.",
        _CHECK,
    ),
    "altered-in-transit": Entry(
        "A tensor arrived with another name, dtype, shape or content than it was sent with.",
        ("A hook wrote into a tensor after it was handed over.",),
        "Hand over tensors that nothing writes to any more.",
        _CHECK,
    ),
    "observer-raised": Entry(
        "A hook of the observer raised an exception of its own.",
        (
            "It reads what this pipeline's stand-ins for the engine's objects do not have.",
            "It reads values in copy_to_host: they are there in consume, not before.",
        ),
        "Look at the frames that are printed; supply the engine's objects with --inputs.",
        _CHECK,
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
    ),
    "stage-died": Entry(
        "The process of a stage ended without a word.",
        ("A crash in native code, os._exit, or the system ran out of memory.",),
        "Run with PYTHONFAULTHANDLER=1, and look at the hook that the report names.",
        _CHECK,
    ),
    "stalled": Entry(
        "No stage gave a sign of life for the time given with --timeout.",
        ("A hook waits for something that does not come.", "A hook is slow: compiling, for one."),
        "Look at the hook that the report names; raise --timeout if it is only slow.",
        _CHECK,
    ),
    "inputs": Entry(
        "What --inputs supplies raised, or has not the shape that it must have.",
        ("logits are not a float tensor [batch_size, vocabulary].",),
        "Return a dict with any of logits, sampling_info and batch (with reqs).",
        "Try the callable by itself: inputs(0, 3).",
    ),
    "stage": Entry(
        "A stage could not do its own part; this says nothing about the observer.",
        ("The loopback address cannot be used.", "torch has no gloo backend."),
        "Read the message; run the command with --reference to see whether it is the machine.",
        "Run pp-protocol check --reference where the tests run.",
    ),
    "static": Entry(
        "mypy finds that the observer does not satisfy PPCapableObserver, by its annotations.",
        (
            "A result that is Optional, a Tensor or a coroutine; a parameter of dict[str, Tensor].",
            "The output of after_sample has no to_pp_tensors.",
        ),
        "Change the member that mypy names so that it fits what it expected.",
        "Run mypy on the plug-in, with: observer: PPCapableObserver = MyObserver().",
    ),
    "static-unseen": Entry(
        "mypy did not look at the observer, or not at all of it.",
        ("Methods have no annotations.", "The package of the plug-in ships no py.typed."),
        "Annotate the four methods; put a py.typed into the package.",
        "Run pp-protocol check --require static in CI.",
    ),
    "static-not-run": Entry(
        "mypy could not be run.",
        ("It is not installed.", "Its configuration has an error."),
        "Install it: pip install 'pp-protocol[mypy]'.",
        "Run pp-protocol check --require static in CI.",
    ),
    "target": Entry(
        "The target could not be had: no such module or attribute, or it raised.",
        ("The module is not installed and not in the working directory.", "It needs arguments."),
        "Name module:attribute, where the attribute is an observer, its class, or a factory.",
        "Try it: python -c 'import module; module.attribute'.",
    ),
}
"""Every code that an error of this package or a finding of `pp-protocol check` has."""
