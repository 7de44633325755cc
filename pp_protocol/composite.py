"""How do several observers share the one slot that an engine has?

Each child's tensors travel under its name: `entropy/logsumexp`, in a composite of composites
`outer/entropy/logsumexp`. Names, not positions, decide what belongs to whom, so that the order of
the children may differ between ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .boundary import add_note, close_quietly
from .conformance import COPY_TO_HOST_JUDGE, TO_PP_TENSORS_JUDGE
from .contract import CommittedTokens, HostAuxiliaryOutput, PPCapableObserver
from .errors import (
    ConformanceError,
    EmptyOutputError,
    PayloadError,
    ReconstructionError,
    TensorNameError,
    UnsupportedOutputError,
    type_name,
)
from .reports import check_observer

if TYPE_CHECKING:
    from torch import Tensor

SEPARATOR = "/"
"""Between the name of a child and that of its tensor."""


class CompositeSamplingObserver:
    """One observer of several: every hook reaches those of them that are active.

    Args:
        children: the observers, by the names under which their tensors travel. The ranks need the
            same names, in any order; a child may be a composite itself.

    Raises:
        ValueError: there is no child, or a name is empty, is no str, or has a "/" in it.
        ConformanceError: a child lacks something that the contract asks for; the error names it
            and has its report.
    """

    def __init__(self, children: Mapping[str, PPCapableObserver[Any]]) -> None:
        self.children = MappingProxyType(_named(children, "observer"))
        """The observers by their names; read-only."""
        for name, child in self.children.items():
            report = check_observer(child)
            if not report.ok:
                raise ConformanceError.about(
                    f"the child {name!r} ({type_name(child)})",
                    f"cannot take part in a composite\n{report}\n",
                    "Mend what the report lists, or leave the child out.",
                )

    def __repr__(self) -> str:
        inner = ", ".join(f"{name!r}: {type_name(one)}" for name, one in self.children.items())
        return f"{type(self).__name__}({{{inner}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.children),)

    def is_active(self, sampling_info: Any, /) -> bool:
        """Whether any child is."""
        for name, child in self.children.items():
            with _Telling(name, child, "is_active"):
                if child.is_active(sampling_info):
                    return True
        return False

    def before_grammar(self, logits: Tensor, sampling_info: Any, /) -> dict[str, Any] | None:
        """Ask the active children; the state is that of each which gave one, None if none did.

        Each child is asked again whether it is active, with the same `sampling_info`.
        """
        states = {}
        for name, child in self.children.items():
            with _Telling(name, child, "before_grammar"):
                if child.is_active(sampling_info):
                    state = child.before_grammar(logits, sampling_info)
                    if state is not None:
                        states[name] = state
        return states or None

    def after_sample(
        self, state: dict[str, Any], token_ids: Tensor, /
    ) -> CompositeAuxiliaryOutput | None:
        """Ask the children that gave a state, each with its own; None if no output came of it."""
        outputs = {}
        for name, own in state.items():
            child = self.children[name]
            with _Telling(name, child, "after_sample"):
                output = child.after_sample(own, token_ids)
            if output is not None:
                outputs[name] = output
        return CompositeAuxiliaryOutput(outputs) if outputs else None

    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> CompositeAuxiliaryOutput:
        """Let each child of which something has arrived rebuild its output from its own tensors.

        Raises:
            PayloadError: a tensor is of no child that is installed here.
            ReconstructionError: what a child gave is no auxiliary output; the error names it.
            Exception: what a child raises comes out unchanged, with a note that names it.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, inner = key.partition(SEPARATOR)
            parts.setdefault(name, {})[inner] = tensor
        strangers = [
            key
            for key in tensors
            if key.partition(SEPARATOR)[0] not in self.children or not key.partition(SEPARATOR)[2]
        ]
        if strangers:
            raise PayloadError.about(
                type_name(self),
                f"got {', '.join(map(repr, strangers))}, and has the children"
                f" {', '.join(map(repr, self.children))}, whose tensors are named child/tensor",
                "Build the composite with the same children on every rank.",
            )
        outputs = {}
        for name, part in parts.items():
            child = self.children[name]
            with _Telling(name, child, "from_pp_tensors"):
                output = child.from_pp_tensors(part)
            finding = COPY_TO_HOST_JUDGE(output)
            if finding is not None:
                close_quietly(output)
                what = "None" if output is None else f"{type_name(output)}, which {finding.found}"
                raise ReconstructionError.about(
                    f"the child {name!r} ({type_name(child)})", f"gave {what}", finding.advice
                )
            outputs[name] = output
        return CompositeAuxiliaryOutput(outputs)


class CompositeAuxiliaryOutput:
    """The outputs of several children as one, which can be sent, copied and consumed.

    Args:
        outputs: by the names under which their tensors travel.

    Raises:
        ValueError: there is none, or a name is empty, is no str, or has a "/" in it.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.outputs = MappingProxyType(_named(outputs, "output"))
        """The outputs by their names; read-only."""

    @classmethod
    def naming(cls, names: Sequence[str], combined: Any) -> CompositeAuxiliaryOutput:
        """Names for the outputs that an engine has combined, so that they can be sent.

        Args:
            names: one for each, in the order of `combined.outputs`.
            combined: has a sequence `outputs`, as SGLang's `CompositeDeviceAuxiliaryOutput`.

        Raises:
            ValueError: there are more or fewer names than outputs, or one is there twice.
        """
        outputs = tuple(combined.outputs)
        if isinstance(names, str):
            raise ValueError("names is one str, not a sequence of them")
        if len(names) != len(outputs) or len(set(names)) != len(names):
            raise ValueError(f"{len(outputs)} outputs cannot take the names {list(names)}")
        return cls(dict(zip(names, outputs, strict=True)))

    def __repr__(self) -> str:
        inner = ", ".join(f"{name!r}: {type_name(one)}" for name, one in self.outputs.items())
        return f"{type(self).__name__}({{{inner}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.outputs),)

    def to_pp_tensors(self) -> dict[str, Tensor]:
        """Every child's tensors, each under `child/name`.

        Raises:
            UnsupportedOutputError, EmptyOutputError, TensorNameError: of what a child gives, as
                `add_auxiliary_output_to_pp_tensors` raises them; the error names the child.
        """
        named: dict[str, Tensor] = {}
        for name, output in self.outputs.items():
            for inner, tensor in _tensors_of(name, output).items():
                named[f"{name}{SEPARATOR}{inner}"] = tensor
        return named

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> CompositeHostOutput:
        """Copy every child's tensors."""
        hosts = {}
        for name, output in self.outputs.items():
            with _Telling(name, output, "copy_to_host"):
                hosts[name] = output.copy_to_host(copy_tensor)
        return CompositeHostOutput(hosts)


class CompositeHostOutput:
    """The host outputs of several children as one."""

    def __init__(self, outputs: Mapping[str, HostAuxiliaryOutput]) -> None:
        self.outputs = outputs

    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None], /) -> None:
        """Let every child consume, and raise only then what any of them has raised.

        Raises:
            ExceptionGroup: of the children's exceptions, each with a note that names its child (a
                BaseExceptionGroup if one is no Exception). Python 3.10 has none: there it is a
                RuntimeError that names them, from the first, or the first that is no Exception.
        """
        raised: dict[str, BaseException] = {}
        for name, output in self.outputs.items():
            try:
                with _Telling(name, output, "consume"):
                    output.consume(batch, commits)
            except BaseException as error:  # the others are owed their tokens
                raised[name] = error
        if not raised:
            return
        told = f"{len(raised)} of {len(self.outputs)} children raised"
        if sys.version_info >= (3, 11):  # which has groups
            raise BaseExceptionGroup(told, list(raised.values()))  # noqa: F821  # ruff looks at the lowest version
        for one in raised.values():
            if not isinstance(one, Exception):
                raise one
        each = "; ".join(f"{name!r}: {type_name(one)}: {one}" for name, one in raised.items())
        raise RuntimeError(f"{told}: {each}") from next(iter(raised.values()))


def _named(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    made = dict(given)
    if not made:
        raise ValueError(f"a composite has at least one {what}")
    for name in made:
        if type(name) is not str or not name or SEPARATOR in name:
            shown = repr(name) if type(name) is str else type_name(name)
            raise ValueError(f"the name of a child is a str without {SEPARATOR!r}, not {shown}")
    return made


class _Telling:
    """Adds to an exception whose it is; no generator, which would write into a frozen one."""

    def __init__(self, name: str, child: object, member: str) -> None:
        self.note = f"raised by {type_name(child)}.{member}, the child {name!r}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, Exception):
            add_note(error, self.note)


def _tensors_of(name: str, output: Any) -> Mapping[str, Tensor]:
    subject = f"the child {name!r} ({type_name(output)})"
    finding = TO_PP_TENSORS_JUDGE(output)
    if finding is not None:
        raise UnsupportedOutputError.about(subject, finding.found, finding.advice)
    with _Telling(name, output, "to_pp_tensors"):
        given: Any = output.to_pp_tensors()
    if not isinstance(given, Mapping) or not given:
        close_quietly(given)
        what = (
            "an empty mapping" if isinstance(given, Mapping) else f"{type_name(given)}, no mapping"
        )
        raise EmptyOutputError.about(
            subject, f"gave {what}", "Return None from after_sample where there is nothing to send."
        )
    for inner in given:
        if type(inner) is not str or not inner:
            what = "an empty name" if type(inner) is str else f"{type_name(inner)} as a name"
            raise TensorNameError.about(
                subject, f"gave {what}", "Use names that are exactly str and not empty."
            )
    return given
