"""How does an output of named tensors get its three methods from its fields alone?

A payload is one class for the device and, after `copy_to_host`, for the host. Its fields say what
travels, and what arrives is held against them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, dataclass_transform

from .conformance import FROM_PP_TENSORS, look_up
from .errors import PayloadError, type_name
from .payload_fields import Field as Field
from .payload_fields import Local as Local
from .payload_fields import Size, Sizes, fields_of, require_free_names, require_plain_fields
from .payload_fields import TensorSpec as TensorSpec
from .reports import declared_result


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

    _fields: ClassVar[tuple[Field, ...]] = ()
    _names: ClassVar[tuple[str, ...]] = ()
    _named: ClassVar[frozenset[str]] = frozenset()
    _read: ClassVar[Callable[[Any], tuple[Tensor, ...]] | None] = None
    """Reads all fields that are sent, where each is a tensor that is always there."""
    _local: ClassVar[tuple[str, ...]] = ()
    _positional: ClassVar[bool] = True
    """Whether the fields in their order are what the class is called with."""
    _specs: ClassVar[tuple[tuple[str, torch.dtype | None, tuple[Size, ...] | None], ...]] = ()

    _fixed: ClassVar[dict[Size, int]] = {}
    """Each size that a spec gives as a number, so that all sizes are looked up in one way."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        require_free_names(cls, TensorPayload)
        own_init = "__init__" in vars(cls)
        dataclass(frozen=True, eq=False)(cls)
        require_plain_fields(cls)
        cls._fields = tuple(fields_of(cls, TensorPayload))
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
            if type(tensor) is not Tensor and not issubclass(type(tensor), Tensor):
                return False
            if dtype is not None and tensor.dtype is not dtype:
                return False
            if shape is not None:
                found = tensor.shape
                if len(found) != len(shape):
                    return False
                if found != tuple(map(sizes.setdefault, shape, found)):
                    return False
        return True

    @classmethod
    def _rebuilt(
        cls,
        tensors: Mapping[str, Tensor],
        prefix: str,
        sizes: Sizes,
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


def payload_schema(observer: Any) -> tuple[str, ...] | None:
    """A line for each tensor of the payload that an observer rebuilds; None if that is not known.

    It is known of a `from_pp_tensors` that is a payload's own, or is declared to return a payload,
    and of a composite of such observers.
    """
    from .composite import CompositeSamplingObserver  # which stands above this module

    if issubclass(type(observer), CompositeSamplingObserver):
        schemas = {name: payload_schema(child) for name, child in observer.children.items()}
        lines = [
            f"{name}/{line}"
            for name, schema in schemas.items()
            for line in schema or ("(unknown)",)
        ]
        return tuple(sorted(lines))
    found = look_up(observer, "from_pp_tensors")  # as it is stored: a property is not read
    cls = getattr(getattr(found.raw, "__func__", None), "__self__", None) if found else None
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
