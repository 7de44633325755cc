from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .contract import CommittedTokens

@dataclass(frozen=True)
class TokenScores:
    output_index: int
    token_id: int
    logprob: float
    entropy: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

OnToken = Callable[[Any, TokenScores], None]

@dataclass(frozen=True, eq=False)
class LogprobOutput:
    token_logprobs: Tensor
    entropies: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    on_token: OnToken
    def to_pp_tensors(self) -> dict[str, Tensor]: ...
    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> LogprobOutput: ...
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None: ...

class LogprobObserver:
    top_k: int
    def __init__(self, top_k: int = 5, on_token: OnToken | None = None) -> None: ...
    def is_active(self, sampling_info: Any) -> bool: ...
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[Tensor, ...]: ...
    def after_sample(self, state: tuple[Tensor, ...], token_ids: Tensor) -> LogprobOutput: ...
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> LogprobOutput: ...
    def take(self, rid: Any) -> list[TokenScores]: ...
