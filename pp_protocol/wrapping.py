"""How does an observer that was written without pipeline parallelism get its two halves?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .conformance import (
    AFTER_SAMPLE,
    BEFORE_GRAMMAR,
    FROM_PP_TENSORS,
    IS_ACTIVE,
    Member,
    is_pp_output,
    only_by_getattr,
    unusable,
    unusable_callable,
)
from .contract import DeviceAuxiliaryOutput, HostAuxiliaryOutput, PPCapableObserver
from .errors import (
    ConformanceError,
    UnsupportedObserverError,
    UnsupportedOutputError,
    type_name,
)

if TYPE_CHECKING:
    from torch import Tensor

Rebuild = Callable[[Mapping[str, "Tensor"]], DeviceAuxiliaryOutput]
NameTensors = Callable[[Any], Mapping[str, "Tensor"]]


def with_pp_transport(
    observer: Any, from_pp_tensors: Rebuild, to_pp_tensors: NameTensors | None = None
) -> PPCapableObserver[Any]:
    """An observer with the hooks of `observer`, that can be used under pipeline parallelism.

    Everything else, `repr` included, is that of the wrapped observer; it may be a proxy or a remote
    handle that answers through `__getattr__`. To be picklable the functions have to be.

    Args:
        observer: has the three hooks.
        from_pp_tensors: rebuilds the output from the tensors; called on the first stage.
        to_pp_tensors: names the tensors of an output of `after_sample`, on the last stage. Used
            for outputs that have no `to_pp_tensors` of their own; without it those are refused by
            `add_auxiliary_output_to_pp_tensors`.

    Raises:
        UnsupportedObserverError: `from_pp_tensors` cannot be called with the tensors.
        UnsupportedOutputError: `to_pp_tensors` cannot be called with an output.
        ConformanceError: `observer` lacks a hook, or has one that cannot be called.
    """
    for hook in (IS_ACTIVE, BEFORE_GRAMMAR, AFTER_SAMPLE):
        finding = unusable(observer, hook)
        if finding is not None and not only_by_getattr(observer, hook):
            raise ConformanceError.about(
                f"with_pp_transport of {type_name(observer)}",
                f"gets an observer that {finding.found}",
                finding.advice,
            )
    finding = unusable_callable(from_pp_tensors, FROM_PP_TENSORS)
    if finding is not None:
        raise UnsupportedObserverError.about("with_pp_transport", finding.found, finding.advice)
    if to_pp_tensors is not None:
        finding = unusable_callable(to_pp_tensors, Member("to_pp_tensors", ("output",)))
        if finding is not None:
            raise UnsupportedOutputError.about("with_pp_transport", finding.found, finding.advice)
    return _ObserverWithTransport(observer, from_pp_tensors, to_pp_tensors)


class _Forwarding:
    """Whatever is not defined here is the wrapped object's."""

    def __init__(self, wrapped: Any, *functions: Any) -> None:
        self._wrapped, self._functions = wrapped, functions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_wrapped", "_functions"):
            # dunders are asked of the class; copy and pickle would take the wrapped object's
            raise AttributeError(f"{type_name(self)} has no {name}")
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("_wrapped", "_functions")
        object.__setattr__(self, name, value) if own else setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __repr__(self) -> str:
        return repr(self._wrapped)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapped, *self._functions)


class _ObserverWithTransport(_Forwarding):
    def is_active(self, sampling_info: Any, /) -> bool:
        active: bool = self._wrapped.is_active(sampling_info)
        return active

    def before_grammar(self, logits: Tensor, sampling_info: Any, /) -> Any:
        return self._wrapped.before_grammar(logits, sampling_info)

    def after_sample(self, state: Any, token_ids: Tensor, /) -> Any:
        output = self._wrapped.after_sample(state, token_ids)
        name_tensors = self._functions[1]
        if output is None or name_tensors is None or is_pp_output(output):
            return output
        return _OutputWithTransport(output, name_tensors)

    def from_pp_tensors(self, tensors: Mapping[str, Tensor], /) -> Any:
        return self._functions[0](tensors)


class _OutputWithTransport(_Forwarding):
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> HostAuxiliaryOutput:
        host: HostAuxiliaryOutput = self._wrapped.copy_to_host(copy_tensor)
        return host

    def to_pp_tensors(self) -> Mapping[str, Tensor]:
        named: Mapping[str, Tensor] = self._functions[0](self._wrapped)
        return named
