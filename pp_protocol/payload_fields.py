"""What do the annotations of a payload's fields say?"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import typing_extensions
from torch import Tensor

from .errors import type_name

Size = int | str
Sizes = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class TensorSpec:
    """What a field's tensor is, in its annotation: `Annotated[Tensor, TensorSpec(...)]`.

    Args:
        dtype: for instance torch.float32; None leaves it open.
        shape: the size of each dimension, as a number, or as a name ("batch") that stands for the
            same size wherever it occurs in the payload and in those nested in it. () is a tensor
            without dimensions; None leaves the shape open.

    Raises:
        TypeError: something else was given; of a list, pass tuple(shape).
    """

    dtype: torch.dtype | None = None
    shape: tuple[Size, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise TypeError(f"dtype is {type_name(self.dtype)}, not a torch.dtype")
        fits = isinstance(self.shape, tuple) and all(
            type(size) is str or (type(size) is int and size >= 0) for size in self.shape
        )
        if not (self.shape is None or fits):
            raise TypeError("shape is no tuple of sizes and names of dimensions")

    def _faults(self, name: str, tensor: Tensor, sizes: Sizes) -> Iterator[str]:
        """What of a tensor is otherwise; `sizes` gathers the size of each named dimension."""
        if self.dtype is not None and tensor.dtype != self.dtype:
            yield f"{name!r} is {tensor.dtype}, not {self.dtype}"
        if self.shape is None:
            return
        found = tuple(tensor.shape)
        if len(found) != len(self.shape):
            yield f"{name!r} has the shape {list(found)}, not [{', '.join(map(str, self.shape))}]"
            return
        for place, (size, expected) in enumerate(zip(found, self.shape, strict=True)):
            if type(expected) is int:
                if size != expected:
                    yield f"{name!r} has the size {size} in dimension {place}, not {expected}"
                continue
            known, where = sizes.setdefault(str(expected), (size, name))
            if size != known:
                yield (
                    f"{name!r} has the size {size} in dimension {place}, {expected!r}, which is"
                    f" {known} in {where!r}"
                )


@dataclass(frozen=True)
class Local:
    """Marks a field that does not travel: `Annotated[Callback, Local()]`.

    Whoever rebuilds the payload passes it by keyword: `from_pp_tensors(tensors, callback=...)`.
    """


@dataclass(frozen=True)
class Field:
    """One field of a payload, as its annotation says."""

    name: str
    optional: bool = False
    spec: TensorSpec | None = None
    payload: Any = None
    """The class, if it is a payload."""
    local: bool = False


def require_free_names(cls: type, base: type) -> None:
    """Refuse fields that would take the place of what every payload has."""
    names = typing_extensions.get_annotations(cls, format=typing_extensions.Format.FORWARDREF)
    taken = [name for name in names if name == "consume" or hasattr(base, name)]
    if taken:
        raise TypeError(
            f"{cls.__qualname__}.{taken[0]} cannot be a field: payloads have it already"
        )


def require_plain_fields(cls: Any) -> None:
    """Refuse what is not passed when the class is called, or is passed and not kept."""
    for name, one in cls.__dataclass_fields__.items():
        if not one.init or "InitVar" in str(one.type):
            raise TypeError(
                f"{cls.__qualname__}.{name} is not passed and kept as fields are: without"
                " init=False and InitVar a payload can be rebuilt from its tensors"
            )


def fields_of(cls: Any, base: Any) -> Iterator[Field]:
    """The fields of a payload; `base` is what all payloads derive from."""
    known = {
        id(one): field
        for parent in cls.__mro__[1:]
        if issubclass(parent, base) and parent is not base
        for one, field in zip(dataclasses.fields(parent), parent._fields, strict=True)
    }
    for one in dataclasses.fields(cls):  # made a dataclass just before
        yield known[id(one)] if id(one) in known else _field(cls, one.name, _hint(cls, one), base)


def _hint(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The resolved annotation of a field."""
    return _resolved(cls, field.name, field.type)


def _resolved(cls: type, name: str, hint: Any) -> Any:
    """What an annotation says; names that are local where the class stands are known as well."""
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if not isinstance(hint, str):
        return hint
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    local = {**(frame.f_locals if frame else {}), **vars(cls)}
    try:
        names = frame.f_globals if frame else vars(sys.modules[cls.__module__])
        return _resolved(cls, name, eval(hint, names, local))
    except TypeError as error:
        if str(error).startswith(f"{cls.__qualname__}."):  # of what was inside
            raise
        raise _unresolved(cls, name, hint, error) from error
    except Exception as error:
        raise _unresolved(cls, name, hint, error) from error


def _unresolved(cls: type, name: str, hint: str, error: Exception) -> TypeError:
    return TypeError(
        f"{cls.__qualname__}.{name}: the annotation {hint!r} cannot be resolved ({error}); import"
        " what it names outside of TYPE_CHECKING, and define a nested payload before the one that"
        " holds it"
    )


def _field(cls: type, name: str, hint: Any, base: Any) -> Field:
    spec, optional = None, False
    marks: list[Any] = []
    while True:  # Annotated and None around the type, in any order
        hint = _resolved(cls, name, hint)
        origin, given = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Annotated, typing_extensions.Annotated):
            hint, marks = given[0], [*marks, *given[1:]]
        elif origin in (typing.Union, types.UnionType) and type(None) in given and len(given) == 2:
            (hint,) = (one for one in given if one is not type(None))
            optional = True
        else:
            break
    if any(isinstance(mark, Local) for mark in marks):
        return Field(name, local=True)
    specs = [mark for mark in marks if isinstance(mark, TensorSpec)]
    spec = specs[0] if specs else None
    if hint is Tensor and len(specs) < 2:
        return Field(name, optional, spec)
    if isinstance(hint, type) and issubclass(hint, base) and not specs:
        payload: Any = hint
        if any(one.local for one in payload._fields):
            raise TypeError(
                f"{cls.__qualname__}.{name} is a payload with Local() fields, which nobody could"
                " pass; put those into the outermost payload"
            )
        if (
            payload.to_pp_tensors is not base.to_pp_tensors
            or vars(payload).get("from_pp_tensors") is not None
        ):
            raise TypeError(
                f"{cls.__qualname__}.{name} is a payload with a to_pp_tensors or from_pp_tensors"
                " of its own, which are not called inside another payload"
            )
        return Field(name, optional, payload=hint)
    raise TypeError(
        f"{cls.__qualname__}.{name} is neither a Tensor nor a payload, with at most one TensorSpec,"
        " nor one of them or None; mark what does not travel with Annotated[..., Local()]"
    )
