"""How does an output of named tensors get its three methods from its fields alone?

A payload is one class for the device and, after `copy_to_host`, for the host. Its fields say what
travels, and what arrives is held against them.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
import typing_extensions
from torch import Tensor
from typing_extensions import Self, dataclass_transform

from .conformance import FROM_PP_TENSORS
from .errors import PayloadError, type_name
from .reports import declared_result

_Size = int | str
_Sizes = dict[str, tuple[int, str]]


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
    shape: tuple[_Size, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise TypeError(f"dtype is {type_name(self.dtype)}, not a torch.dtype")
        fits = isinstance(self.shape, tuple) and all(
            type(size) is str or (type(size) is int and size >= 0) for size in self.shape
        )
        if not (self.shape is None or fits):
            raise TypeError("shape is no tuple of sizes and names of dimensions")

    def _faults(self, name: str, tensor: Tensor, sizes: _Sizes) -> Iterator[str]:
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
class _Field:
    """One field of a payload, as its annotation says."""

    name: str
    optional: bool = False
    spec: TensorSpec | None = None
    payload: type[TensorPayload] | None = None
    local: bool = False


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class TensorPayload:
    """Base of auxiliary outputs that are named tensors; a subclass is a frozen dataclass.

    A field is a `Tensor`, a `Tensor | None` (absent on the wire when it is None), another payload
    (whose tensors travel as `field.name`) or such a payload or None (None where all of it is
    absent); with `Annotated[Tensor, TensorSpec(...)]` its dtype and shape are checked where it
    arrives, and `Annotated[..., Local()]` marks what does not travel. What the class itself has to
    define is `consume`, if it is used as an output and not only inside another payload.

    Raises:
        TypeError: when the class is defined: a field is none of these, or its annotation cannot be
            resolved.
    """

    _fields: ClassVar[tuple[_Field, ...]] = ()
    _names: ClassVar[tuple[str, ...]] = ()
    _named: ClassVar[frozenset[str]] = frozenset()
    _read: ClassVar[Callable[[Any], tuple[Tensor, ...]] | None] = None
    """Reads all fields that are sent, where each is a tensor that is always there."""
    _local: ClassVar[tuple[str, ...]] = ()
    _positional: ClassVar[bool] = True
    """Whether the fields in their order are what the class is called with."""
    _specs: ClassVar[tuple[tuple[str, torch.dtype | None, tuple[_Size, ...] | None], ...]] = ()

    _fixed: ClassVar[dict[_Size, int]] = {}
    """Each size that a spec gives as a number, so that all sizes are looked up in one way."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _require_free_names(cls)
        own_init = "__init__" in vars(cls)
        dataclass(frozen=True, eq=False)(cls)
        _require_plain_fields(cls)
        cls._fields = tuple(_fields_of(cls))
        sent = [one for one in cls._fields if not one.local]
        cls._names = tuple(one.name for one in sent)
        cls._named = frozenset(cls._names)
        keywords = any(one.kw_only for one in dataclasses.fields(typing.cast(Any, cls)))
        cls._positional = not (own_init or keywords)
        cls._local = tuple(one.name for one in cls._fields if one.local)
        plain = bool(sent) and not any(one.optional or one.payload for one in sent)
        cls._read = _reader(cls._names) if plain else None
        cls._specs = tuple(
            (one.name, one.spec.dtype, one.spec.shape) for one in cls._fields if one.spec
        )
        sizes = [size for *_, shape in cls._specs for size in shape or ()]
        cls._fixed = {size: size for size in sizes if type(size) is int}

    def to_pp_tensors(self) -> dict[str, Tensor]:
        """Name the tensors of the fields; those that are None are left out."""
        read = type(self)._read
        if read is not None:
            return dict(zip(self._names, read(self), strict=True))
        named: dict[str, Tensor] = {}
        for field in self._fields:
            value = getattr(self, field.name)
            if field.local or (value is None and field.optional):
                continue
            if field.payload is None:
                named[field.name] = value
            else:
                inner = value.to_pp_tensors().items()
                named.update({f"{field.name}.{name}": tensor for name, tensor in inner})
        return named

    @classmethod
    def from_pp_tensors(cls, tensors: Mapping[str, Tensor], /, **local: Any) -> Self:
        """Rebuild the payload from its tensors; fields that are `Local()` are given by keyword.

        Raises:
            PayloadError: a tensor is missing or unexpected, or is not what its field declares. It
                lists all that is wrong.
            TypeError: a local field is missing, or a keyword is none.
        """
        if (
            cls._read is not None
            and tensors.keys() == cls._named
            and (not cls._specs or cls._fits(tensors))
        ):
            return cls(**tensors, **local) if local else cls(**tensors)
        others = sorted(local.keys() - set(cls._local))
        if others:
            raise TypeError(f"{cls.__qualname__} has no Local() field {', '.join(others)}")
        faults: list[str] = []
        made = cls._rebuilt(tensors, "", {}, faults, local)
        if faults or made is None:
            raise PayloadError.about(
                type_name(cls).removeprefix("class "),
                f"cannot be rebuilt: {'; '.join(faults)}",
                "Install the same version of the payload on both ranks, and send what its fields"
                " declare.",
            )
        return made

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor], /) -> Self:
        """The same payload with each tensor copied, once each, in the order of the fields."""
        read = type(self)._read
        if read is not None:
            if type(self)._positional and not type(self)._local:
                return type(self)(*map(copy_tensor, read(self)))
            values = dict(zip(self._names, map(copy_tensor, read(self)), strict=True))
            return type(self)(**values, **{name: getattr(self, name) for name in self._local})
        copies: dict[str, Any] = {}
        for field in self._fields:
            value = getattr(self, field.name)
            travels = not field.local and not (value is None and field.optional)
            if travels and field.payload:
                value = value.copy_to_host(copy_tensor)
            elif travels:
                value = copy_tensor(value)
            copies[field.name] = value
        return type(self)(**copies)

    @classmethod
    def _fits(cls, tensors: Mapping[str, Tensor]) -> bool:
        """Whether every tensor is what its field declares; says no more, but says it quickly."""
        sizes = cls._fixed.copy()
        for name, dtype, shape in cls._specs:
            tensor = tensors[name]
            if not issubclass(type(tensor), Tensor):
                return False
            if dtype is not None and tensor.dtype is not dtype:
                return False
            if shape is not None:
                found = tensor.shape
                if len(found) != len(shape):
                    return False
                for expected, size in zip(shape, found, strict=True):
                    if sizes.setdefault(expected, size) != size:
                        return False
        return True

    @classmethod
    def _rebuilt(
        cls,
        tensors: Mapping[str, Tensor],
        prefix: str,
        sizes: _Sizes,
        faults: list[str],
        local: Mapping[str, Any],
    ) -> Self | None:
        """The payload of what is named with `prefix`; None, and why, if it cannot be rebuilt."""
        before, values, left = len(faults), dict(local), dict(tensors)
        for field in cls._fields:
            name = prefix + field.name
            if field.local:
                continue  # given by keyword, or by its default
            if field.payload is not None:
                inner = {key: left.pop(key) for key in [*left] if key.startswith(f"{name}.")}
                values[field.name] = None
                if inner or not field.optional:
                    values[field.name] = field.payload._rebuilt(
                        inner, f"{name}.", sizes, faults, {}
                    )
            elif name in left:
                tensor = values[field.name] = left.pop(name)
                if not issubclass(type(tensor), Tensor):
                    faults.append(f"{name!r} is {type_name(tensor)}, no tensor")
                elif field.spec is not None:
                    faults += field.spec._faults(name, tensor, sizes)
            elif field.optional:
                values[field.name] = None
            else:
                faults.append(f"{name!r} is missing")
        faults += [f"{name!r} is unexpected" for name in left]
        return cls(**values) if len(faults) == before else None


def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Tensor, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    (name,) = names
    return lambda payload: (getattr(payload, name),)


def _require_free_names(cls: type) -> None:
    """Refuse fields that would take the place of what every payload has."""
    names = typing_extensions.get_annotations(cls, format=typing_extensions.Format.FORWARDREF)
    taken = [name for name in names if name == "consume" or hasattr(TensorPayload, name)]
    if taken:
        raise TypeError(
            f"{cls.__qualname__}.{taken[0]} cannot be a field: payloads have it already"
        )


def _require_plain_fields(cls: Any) -> None:
    """Refuse what is not passed when the class is called, or is passed and not kept."""
    for name, one in cls.__dataclass_fields__.items():
        if not one.init or "InitVar" in str(one.type):
            raise TypeError(
                f"{cls.__qualname__}.{name} is not passed and kept as fields are: without"
                " init=False and InitVar a payload can be rebuilt from its tensors"
            )


def _fields_of(cls: type[TensorPayload]) -> Iterator[_Field]:
    known = {
        id(one): field
        for base in cls.__mro__[1:]
        if issubclass(base, TensorPayload) and base is not TensorPayload
        for one, field in zip(dataclasses.fields(typing.cast(Any, base)), base._fields, strict=True)
    }
    for one in dataclasses.fields(typing.cast(Any, cls)):  # made a dataclass just before
        yield known[id(one)] if id(one) in known else _field(cls, one.name, _hint(cls, one))


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


def _field(cls: type, name: str, hint: Any) -> _Field:
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
        return _Field(name, local=True)
    specs = [mark for mark in marks if isinstance(mark, TensorSpec)]
    spec = specs[0] if specs else None
    if hint is Tensor and len(specs) < 2:
        return _Field(name, optional, spec)
    if isinstance(hint, type) and issubclass(hint, TensorPayload) and not specs:
        if any(one.local for one in hint._fields):
            raise TypeError(
                f"{cls.__qualname__}.{name} is a payload with Local() fields, which nobody could"
                " pass; put those into the outermost payload"
            )
        if (
            hint.to_pp_tensors is not TensorPayload.to_pp_tensors
            or vars(hint).get("from_pp_tensors") is not None
        ):
            raise TypeError(
                f"{cls.__qualname__}.{name} is a payload with a to_pp_tensors or from_pp_tensors"
                " of its own, which are not called inside another payload"
            )
        return _Field(name, optional, payload=hint)
    raise TypeError(
        f"{cls.__qualname__}.{name} is neither a Tensor nor a payload, with at most one TensorSpec,"
        " nor one of them or None; mark what does not travel with Annotated[..., Local()]"
    )


def payload_schema(observer: Any) -> tuple[str, ...] | None:
    """A line for each tensor of the payload that an observer rebuilds; None if that is not known.

    It is known of a `from_pp_tensors` that is a payload's own, or is declared to return a payload,
    and of a composite of such observers.
    """
    children = getattr(observer, "children", None)
    if isinstance(children, Mapping):
        schemas = {name: payload_schema(child) for name, child in children.items()}
        lines = [
            f"{name}/{line}"
            for name, schema in schemas.items()
            for line in schema or ("(unknown)",)
        ]
        return tuple(sorted(lines))
    cls = getattr(getattr(observer, "from_pp_tensors", None), "__self__", None)
    if not (isinstance(cls, type) and issubclass(cls, TensorPayload)):
        cls = declared_result(observer, FROM_PP_TENSORS)
    if not (isinstance(cls, type) and issubclass(cls, TensorPayload)):
        return None
    return tuple(sorted(_lines(cls, "", False)))


def _lines(cls: type[TensorPayload], prefix: str, optional: bool) -> Iterator[str]:
    for field in cls._fields:
        absent = optional or field.optional
        if field.payload is not None:
            yield from _lines(field.payload, f"{prefix}{field.name}.", absent)
        elif not field.local:
            spec = field.spec or TensorSpec()
            dtype = "any dtype" if spec.dtype is None else str(spec.dtype).removeprefix("torch.")
            shape = "any shape" if spec.shape is None else f"[{', '.join(map(str, spec.shape))}]"
            yield f"{prefix}{field.name}: {dtype} {shape}{' or absent' if absent else ''}"
