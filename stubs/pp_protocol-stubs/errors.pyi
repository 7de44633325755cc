from typing import ClassVar

from typing_extensions import Self

def type_name(obj: object, /) -> str: ...

class PPProtocolError(RuntimeError):
    code: ClassVar[str]
    beginning: ClassVar[str]
    subject: str
    found: str
    advice: str
    tensor: str | None
    @classmethod
    def about(
        cls,
        subject: str,
        found: str,
        advice: str,
        *,
        tensor: str | None = None,
        beginning: str | None = None,
    ) -> Self: ...

class WireError(PPProtocolError): ...
class UnsupportedOutputError(PPProtocolError): ...
class EmptyOutputError(PPProtocolError): ...
class TensorNameError(PPProtocolError): ...

class NonTensorError(PPProtocolError):
    beginning_received: ClassVar[str]

class UnsupportedTensorError(PPProtocolError): ...
class DuplicateTensorError(PPProtocolError): ...
class MissingObserverError(PPProtocolError): ...
class UnsupportedObserverError(PPProtocolError): ...
class ReconstructionError(PPProtocolError): ...
