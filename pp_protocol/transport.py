"""How does an auxiliary output get into the dict between two stages, and out of it again?"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from types import MethodType
from typing import Any

from torch import Tensor

from . import fingerprint as fingerprints
from .boundary import (
    PREFIX,
    Refused,
    add_note,
    close_quietly,
    is_tensor,
    not_rebuilt,
    rebuild,
)
from .conformance import TO_PP_TENSORS_JUDGE
from .contract import DeviceAuxiliaryOutput
from .errors import (
    DuplicateTensorError,
    EmptyOutputError,
    NonTensorError,
    TensorNameError,
    UnsupportedOutputError,
    WireError,
    type_name,
)
from .fingerprint import FINGERPRINT
from .wire import LOWEST_ADDRESS, PLAIN_DTYPES, wire_form

_FIRST = PREFIX[0]
_BY_DEFAULT = fingerprints.BY_DEFAULT
_senders = TO_PP_TENSORS_JUDGE.believed


def add_auxiliary_output_to_pp_tensors(
    tensors: MutableMapping[str, Any], output: Any, *, fingerprint: bool | None = None
) -> None:
    """Put the tensors of an auxiliary output into the dict that goes to the next stage.

    Takes the place of SGLang's function of that name. Each tensor goes under its own name behind
    `__sampling_observer_output__.`, in the form in which it can travel: dense, contiguous, without
    conj or neg bit, and detached. One that is so already travels as the same object.

    Args:
        tensors: the flat dict between the stages. All or nothing: on any error it is as it was.
        output: the auxiliary output, or None, which adds nothing.
        fingerprint: whether the receiver is to find out that a byte was changed on the way. None
            takes what PP_PROTOCOL_FINGERPRINT said when this was imported. A dict that holds a
            fingerprint keeps one: it is made anew, over what was there and what is added.

    Raises:
        WireError: `tensors` is no mapping, or cannot be written to.
        UnsupportedOutputError: `output` has no `to_pp_tensors` that can be called.
        EmptyOutputError: it gave no mapping, or an empty one.
        TensorNameError: a name is not exactly a `str`, or is empty.
        NonTensorError: a value is not a tensor.
        UnsupportedTensorError: a tensor that point-to-point communication cannot carry.
        DuplicateTensorError: a tensor of that name is in `tensors` already.
    """
    if type(tensors) is not dict:
        _require_mapping(tensors, writable=output is not None)
    if output is None:
        return
    payload = _payload(output)
    staged: dict[str, Any] = {}
    for name, tensor in payload.items():
        if type(name) is not str or not name:
            raise _bad_name(output, name, payload)
        try:  # one look for what most tensors are; `wire_form` looks again, and says what is wrong
            as_it_is = (
                type(tensor) is Tensor
                and tensor.dtype in PLAIN_DTYPES
                and not tensor.requires_grad
                and tensor.is_contiguous()
                and not tensor.is_nested
                and not tensor.is_neg()
                and tensor.data_ptr() >= LOWEST_ADDRESS  # 0 for meta tensors, and for empty ones
            )
        except RuntimeError:  # data_ptr() of a tensor that has none: sparse, or inside vmap
            as_it_is = False
        if not as_it_is:
            tensor = _wire_form(output, name, tensor)
        key = PREFIX + name
        if key in tensors:
            raise DuplicateTensorError.about(
                f"to_pp_tensors of {type_name(output)}",
                "gave a name that the dict holds already",
                "Add one output to one dict, once; rename one of two tensors of the same name.",
                tensor=name,
            )
        staged[key] = tensor
    if fingerprint or (fingerprint is None and _BY_DEFAULT) or FINGERPRINT in tensors:
        staged[FINGERPRINT] = _fingerprint(tensors, staged)
    if type(tensors) is dict:
        tensors.update(staged)
    else:
        _put(tensors, staged)


def _fingerprint(tensors: Mapping[str, Any], staged: Mapping[str, Tensor]) -> Tensor:
    """Of what is added and of what was added before; a difference that was there stays there."""
    before = {key[len(PREFIX) :]: tensors[key] for key in _auxiliary_keys(tensors)}
    for name, tensor in before.items():
        if not is_tensor(tensor):
            raise NonTensorError.about(
                "the dict", f"holds {type_name(tensor)} for it", "Add tensors only.", tensor=name
            )
    added = {key[len(PREFIX) :]: tensor for key, tensor in staged.items()}
    made = fingerprints.of_sent({**before, **added})
    if FINGERPRINT in tensors and before:
        made += tensors[FINGERPRINT] - fingerprints.of_sent(before)
    return made


def _wire_form(output: object, name: str, tensor: object) -> Tensor:
    if is_tensor(tensor):
        return wire_form(name, tensor)
    raise NonTensorError.about(
        f"to_pp_tensors of {type_name(output)}",
        f"gave {type_name(tensor)} for it",
        "Make it a tensor, torch.as_tensor(value) for instance, or leave it out.",
        tensor=name,
    )


def pop_auxiliary_output_from_pp_tensors(
    tensors: MutableMapping[str, Any], observer: Any
) -> DeviceAuxiliaryOutput | None:
    """Take the auxiliary tensors out of a received dict, and let the observer rebuild its output.

    Takes the place of SGLang's function of that name. Nothing is lost: on any error every key is
    still in `tensors`; on success exactly the auxiliary ones are gone.

    Args:
        tensors: the flat dict as it was received.
        observer: this stage's observer. It is not touched if there is nothing to pop.

    Returns:
        What `observer.from_pp_tensors` gave, or None if the dict holds no auxiliary tensor.

    Raises:
        WireError: `tensors` is no mapping, or there is something to remove and it is read-only.
        MissingObserverError: `observer` is None.
        UnsupportedObserverError: it has no `from_pp_tensors` that can be called.
        TensorNameError: a key is the bare prefix.
        NonTensorError: a value is not a tensor.
        FingerprintError: the sender added a fingerprint, and what arrived does not match it.
        ReconstructionError: the result is None, or has no `copy_to_host` that can be called.
        Exception: whatever `from_pp_tensors` raises comes out unchanged, with a note (Python
            3.11 and later) that names the observer and the tensors.
    """
    if type(tensors) is dict:
        try:  # most keys begin otherwise, and their first character says so
            keys = [key for key in tensors if key[0] == _FIRST and key.startswith(PREFIX)]
        except Exception:  # a key that is no str, or empty
            keys = _auxiliary_keys(tensors)
    else:
        keys = _auxiliary_keys(tensors)
        if keys:
            _require_mapping(tensors, writable=True)
    marked = FINGERPRINT in tensors
    if not keys:
        if marked:
            raise fingerprints.without_tensors()
        return None
    try:
        output = rebuild(observer, tensors, keys, marked)
    except Refused as refused:
        output, finding = refused.output, refused.finding
    else:
        if marked:
            keys.append(FINGERPRINT)
        if type(tensors) is dict:
            for key in keys:
                try:
                    del tensors[key]
                except KeyError:  # the observer has taken it out itself
                    continue
        else:
            _remove(tensors, keys)
        return output  # type: ignore[no-any-return]  # as `rebuild` has just checked
    raise not_rebuilt(observer, output, finding)


def has_auxiliary_output(tensors: Mapping[str, Any]) -> bool:
    """Whether there is anything to pop: a tensor, or a fingerprint that came without one.

    Raises:
        WireError: `tensors` is no mapping.
    """
    return bool(_auxiliary_keys(tensors)) or FINGERPRINT in tensors


def discard_auxiliary_output(tensors: MutableMapping[str, Any]) -> tuple[str, ...]:
    """Drop the auxiliary tensors and their fingerprint, on a stage that cannot consume them.

    Returns:
        The names of the tensors.

    Raises:
        WireError: `tensors` is no mapping, or there is something to remove and it is read-only.
    """
    keys = _auxiliary_keys(tensors)
    marked = [FINGERPRINT] if FINGERPRINT in tensors else []
    if (keys or marked) and type(tensors) is not dict:
        _require_mapping(tensors, writable=True)
    _remove(tensors, keys + marked)
    return tuple(str.removeprefix(key, PREFIX) for key in keys)


def _auxiliary_keys(tensors: Mapping[Any, Any]) -> list[str]:
    if type(tensors) is not dict:
        _require_mapping(tensors, writable=False)
    return [key for key in tensors if issubclass(type(key), str) and str.startswith(key, PREFIX)]


def _require_mapping(tensors: object, *, writable: bool) -> None:
    cls = type(tensors)
    if not issubclass(cls, Mapping):
        raise WireError.about(
            type_name(tensors),
            "is no mapping",
            "Pass the flat dict itself; of an engine's wrapper such as PPProxyTensors that is its"
            " attribute .tensors.",
        )
    if writable and not issubclass(cls, MutableMapping):
        raise WireError.about(
            type_name(tensors),
            "is read-only",
            "Pass the dict that is sent or was received, not a view of it; dict(tensors) copies.",
        )


def _payload(output: Any) -> Mapping[Any, Any]:
    known, method, finding, given = _senders.get(id(type(output))), None, None, None
    if known is not None:  # as `Judge.or_else` does, with the method kept
        method = getattr(output, "to_pp_tensors", None)
    if type(method) is not MethodType or id(method.__func__) != known:
        method, finding = None, TO_PP_TENSORS_JUDGE(output)
    if finding is None:
        try:
            if method is None:
                method = output.to_pp_tensors
                finding = TO_PP_TENSORS_JUDGE.of_read(output, method)
            if finding is None:
                given = method()
                if type(given) is dict and given:
                    return given
                if type(given) is not dict and issubclass(type(given), Mapping):
                    given = dict(given)
        except Exception as error:
            add_note(error, f"raised by {type_name(output)}.to_pp_tensors")
            raise
    if finding is not None:
        raise UnsupportedOutputError.about(type_name(output), finding.found, finding.advice)
    if type(given) is dict and given:
        return given
    close_quietly(given)
    raise EmptyOutputError.about(
        f"to_pp_tensors of {type_name(output)}",
        "gave an empty mapping" if type(given) is dict else f"gave {type_name(given)}, no mapping",
        "Return a dict of names and tensors; where there is nothing to send, return None from"
        " after_sample.",
    )


def _bad_name(output: object, name: object, payload: Mapping[Any, Any]) -> TensorNameError:
    position = next(place for place, other in enumerate(payload) if other is name)
    what = "an empty string" if type(name) is str else type_name(name)
    return TensorNameError.about(
        f"to_pp_tensors of {type_name(output)}",
        f"gave {what} as the name of item {position}",
        "Use names that are exactly str and not empty; of a (str, Enum) member take its .value.",
    )


def _put(tensors: MutableMapping[Any, Any], staged: Mapping[str, Any]) -> None:
    before = {key: tensors[key] for key in staged if key in tensors}  # an older fingerprint
    try:
        for key, tensor in staged.items():
            tensors[key] = tensor
    except BaseException as error:
        for key in staged:
            with suppress(Exception):
                tensors.pop(key, None)
        for key, tensor in before.items():
            with suppress(Exception):
                tensors[key] = tensor
        raise _not_written(tensors, error) from error


def _remove(tensors: MutableMapping[Any, Any], keys: list[str]) -> None:
    kept = {key: tensors[key] for key in keys}
    try:
        for key in keys:
            if key in tensors:  # the observer may have taken it out itself
                del tensors[key]
            if key in tensors:  # in another map of a ChainMap
                raise KeyError(key)
    except BaseException as error:
        for key, tensor in kept.items():
            with suppress(Exception):
                tensors[key] = tensor
        raise _not_written(tensors, error) from error


def _not_written(tensors: object, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    return WireError.about(
        type_name(tensors),
        f"raised {type_name(error)} when it was written to",
        "Pass the dict that is sent or was received; dict(tensors) makes one.",
    )
