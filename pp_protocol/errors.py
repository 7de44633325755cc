"""What can go wrong at the boundary, one class for each kind?

The first words of a message never change, and those that SGLang has too are SGLang's, so that a
log search finds both. The rest says which object, which tensor, what was found and what to do. It
is made of type names only: the `repr` of a user's object can raise, and that of a tensor copies
it from the GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import Self


def type_name(obj: object, /) -> str:
    """`module.Class` of an instance, `class module.Class` of a class; runs no user code."""
    kind = type(obj)
    if issubclass(kind, type):
        return f"class {_qualified(obj)}"
    return _qualified(kind)


def _qualified(cls: object) -> str:
    # type's own readers, so that a metaclass cannot interfere
    name = type.__dict__["__qualname__"].__get__(cls)
    try:
        module = type.__dict__["__module__"].__get__(cls)
    except AttributeError:  # made where no __name__ was, by exec for one
        module = None
    known = issubclass(type(module), str) and module != "builtins"
    return ".".join((module, name)) if known else str(name)  # no __format__ of a subclass of str


class PPProtocolError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as the engine's own are."""

    code: ClassVar[str] = "pp-protocol"
    """What tools and logs sort by; `pp_protocol.catalogue` explains each."""
    beginning: ClassVar[str] = "pipeline-parallel protocol error"

    subject: str = ""
    """Type name of the object that is at fault."""
    found: str = ""
    advice: str = ""
    tensor: str | None = None
    """Name of the tensor at fault, without the wire prefix, if it is one tensor."""

    @classmethod
    def about(
        cls,
        subject: str,
        found: str,
        advice: str,
        *,
        tensor: str | None = None,
        beginning: str | None = None,
    ) -> Self:
        """The error with its message put together from what it is about."""
        start = cls.beginning.format(name=tensor) if beginning is None else beginning
        error = cls(f"{start}: {subject} {found}. {advice} [pp-protocol explain {cls.code}]")
        error.subject, error.found, error.advice, error.tensor = subject, found, advice, tensor
        return error


class WireError(PPProtocolError):
    """`tensors` is not the flat dict that travels between the stages, or cannot be written to."""

    code = "wire"
    beginning = "cannot use this as the dict of a pipeline-parallel message"


class UnsupportedOutputError(PPProtocolError):
    """The auxiliary output has no `to_pp_tensors` that can be called."""

    code = "unsupported-output"
    beginning = "auxiliary output does not support pipeline-parallel transport"


class EmptyOutputError(PPProtocolError):
    """`to_pp_tensors` gave nothing, an empty mapping, or no mapping."""

    code = "empty-output"
    beginning = "auxiliary PP output must contain at least one tensor"


class TensorNameError(PPProtocolError):
    """A tensor's name is not exactly a `str`, or is empty."""

    code = "tensor-name"
    beginning = "auxiliary PP tensor names must be non-empty strings"


class NonTensorError(PPProtocolError):
    """A value to be sent, or one that arrived under an auxiliary key, is not a tensor."""

    code = "non-tensor"
    beginning = "auxiliary PP output {name!r} is not a tensor"
    beginning_received: ClassVar[str] = "received a non-tensor auxiliary PP output"


class UnsupportedTensorError(PPProtocolError):
    """A tensor that point-to-point communication cannot carry."""

    code = "unsupported-tensor"
    beginning = "auxiliary PP output {name!r} cannot be transported"


class DuplicateTensorError(PPProtocolError):
    """The dict holds a tensor of that name already."""

    code = "duplicate-tensor"
    beginning = "duplicate auxiliary PP tensor {name!r}"


class MissingObserverError(PPProtocolError):
    """An auxiliary output arrived where no observer is installed."""

    code = "missing-observer"
    beginning = "received auxiliary PP output without a sampling observer"


class UnsupportedObserverError(PPProtocolError):
    """The observer has no `from_pp_tensors` that can be called."""

    code = "unsupported-observer"
    beginning = "sampling observer does not support pipeline-parallel transport"


class ConformanceError(PPProtocolError):
    """A report lists what is wrong with an observer or an output."""

    code = "conformance"
    beginning = "object does not conform to the pipeline-parallel contract"


class ContractViolationError(PPProtocolError):
    """A parameter or a result of a `pp_boundary` function is not what its Protocol says."""

    code = "contract-violation"
    beginning = "argument or result does not satisfy its pipeline-parallel Protocol"


class PayloadError(PPProtocolError):
    """What arrived is not what the fields of a payload, or the children of a composite, declare."""

    code = "payload"
    beginning = "received tensors do not fit what is declared"


class FingerprintError(PPProtocolError):
    """What arrived is not, to the last byte, what was sent with its fingerprint."""

    code = "fingerprint"
    beginning = "auxiliary PP tensors do not match their fingerprint"


class HandshakeError(PPProtocolError):
    """The ranks cannot serve together with the observers that they have installed."""

    code = "handshake"
    beginning = "pipeline ranks do not agree on their sampling observers"
    report: Any = None
    """What all ranks have (a `PipelineReport`); None where the store could not be reached."""


class ReconstructionError(PPProtocolError):
    """`from_pp_tensors` gave None, or something that is no auxiliary output."""

    code = "reconstruction"
    beginning = "sampling observer did not reconstruct its PP output"
