"""The pipeline-parallel sampling-observer contract, with run-time validation.

Everything public is here and is imported when it is first asked for, so that neither
`pp-protocol --help` nor a look at an error class imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .boundary import PREFIX as PREFIX
    from .boundary import pp_boundary as pp_boundary
    from .composite import CompositeAuxiliaryOutput as CompositeAuxiliaryOutput
    from .composite import CompositeSamplingObserver as CompositeSamplingObserver
    from .conformance import is_pp_observer as is_pp_observer
    from .conformance import is_pp_output as is_pp_output
    from .conformance import require_pp_observer as require_pp_observer
    from .conformance import require_pp_output as require_pp_output
    from .contract import CommittedTokens as CommittedTokens
    from .contract import DeviceAuxiliaryOutput as DeviceAuxiliaryOutput
    from .contract import HostAuxiliaryOutput as HostAuxiliaryOutput
    from .contract import PipelineParallelAuxiliaryOutput as PipelineParallelAuxiliaryOutput
    from .contract import PipelineParallelSamplingObserver as PipelineParallelSamplingObserver
    from .contract import PPCapableObserver as PPCapableObserver
    from .contract import PPCapableOutput as PPCapableOutput
    from .contract import SamplingObserver as SamplingObserver
    from .errors import ConformanceError as ConformanceError
    from .errors import ContractViolationError as ContractViolationError
    from .errors import DuplicateTensorError as DuplicateTensorError
    from .errors import EmptyOutputError as EmptyOutputError
    from .errors import FingerprintError as FingerprintError
    from .errors import HandshakeError as HandshakeError
    from .errors import MissingObserverError as MissingObserverError
    from .errors import NonTensorError as NonTensorError
    from .errors import PayloadError as PayloadError
    from .errors import PPProtocolError as PPProtocolError
    from .errors import ReconstructionError as ReconstructionError
    from .errors import TensorNameError as TensorNameError
    from .errors import UnsupportedObserverError as UnsupportedObserverError
    from .errors import UnsupportedOutputError as UnsupportedOutputError
    from .errors import UnsupportedTensorError as UnsupportedTensorError
    from .errors import WireError as WireError
    from .fingerprint import FINGERPRINT as FINGERPRINT
    from .handshake import PipelineReport as PipelineReport
    from .handshake import RankReport as RankReport
    from .handshake import verify_pipeline as verify_pipeline
    from .payload import Local as Local
    from .payload import TensorPayload as TensorPayload
    from .payload import TensorSpec as TensorSpec
    from .reports import ConformanceReport as ConformanceReport
    from .reports import Problem as Problem
    from .reports import check_observer as check_observer
    from .reports import check_output as check_output
    from .transport import add_auxiliary_output_to_pp_tensors as add_auxiliary_output_to_pp_tensors
    from .transport import discard_auxiliary_output as discard_auxiliary_output
    from .transport import has_auxiliary_output as has_auxiliary_output
    from .transport import (
        pop_auxiliary_output_from_pp_tensors as pop_auxiliary_output_from_pp_tensors,
    )
    from .wrapping import with_pp_transport as with_pp_transport

_HOME = {
    "boundary": ("PREFIX", "pp_boundary"),
    "composite": ("CompositeAuxiliaryOutput", "CompositeSamplingObserver"),
    "conformance": ("is_pp_observer", "is_pp_output", "require_pp_observer", "require_pp_output"),
    "contract": (
        "CommittedTokens",
        "DeviceAuxiliaryOutput",
        "HostAuxiliaryOutput",
        "PPCapableObserver",
        "PPCapableOutput",
        "PipelineParallelAuxiliaryOutput",
        "PipelineParallelSamplingObserver",
        "SamplingObserver",
    ),
    "errors": (
        "ConformanceError",
        "ContractViolationError",
        "DuplicateTensorError",
        "EmptyOutputError",
        "FingerprintError",
        "HandshakeError",
        "MissingObserverError",
        "NonTensorError",
        "PPProtocolError",
        "PayloadError",
        "ReconstructionError",
        "TensorNameError",
        "UnsupportedObserverError",
        "UnsupportedOutputError",
        "UnsupportedTensorError",
        "WireError",
    ),
    "fingerprint": ("FINGERPRINT",),
    "handshake": ("PipelineReport", "RankReport", "verify_pipeline"),
    "payload": ("Local", "TensorPayload", "TensorSpec"),
    "reports": ("ConformanceReport", "Problem", "check_observer", "check_output"),
    "transport": (
        "add_auxiliary_output_to_pp_tensors",
        "discard_auxiliary_output",
        "has_auxiliary_output",
        "pop_auxiliary_output_from_pp_tensors",
    ),
    "wrapping": ("with_pp_transport",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # made of the table above
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
