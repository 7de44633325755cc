# What is public; complete by name. Stricter than the code where that finds faults: see transport.
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

__version__: str
__all__ = [
    "FINGERPRINT",
    "PREFIX",
    "CommittedTokens",
    "CompositeAuxiliaryOutput",
    "CompositeSamplingObserver",
    "ConformanceError",
    "ConformanceReport",
    "ContractViolationError",
    "DeviceAuxiliaryOutput",
    "DuplicateTensorError",
    "EmptyOutputError",
    "FingerprintError",
    "HandshakeError",
    "HostAuxiliaryOutput",
    "Local",
    "MissingObserverError",
    "NonTensorError",
    "PPCapableObserver",
    "PPCapableOutput",
    "PPProtocolError",
    "PayloadError",
    "PipelineParallelAuxiliaryOutput",
    "PipelineParallelSamplingObserver",
    "PipelineReport",
    "Problem",
    "RankReport",
    "ReconstructionError",
    "SamplingObserver",
    "TensorNameError",
    "TensorPayload",
    "TensorSpec",
    "UnsupportedObserverError",
    "UnsupportedOutputError",
    "UnsupportedTensorError",
    "WireError",
    "add_auxiliary_output_to_pp_tensors",
    "check_observer",
    "check_output",
    "discard_auxiliary_output",
    "has_auxiliary_output",
    "is_pp_observer",
    "is_pp_output",
    "pop_auxiliary_output_from_pp_tensors",
    "pp_boundary",
    "require_pp_observer",
    "require_pp_output",
    "verify_pipeline",
    "with_pp_transport",
]
