from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from .contract import CommittedTokens
from .payload import Local, TensorPayload, TensorSpec

@dataclass(frozen=True)
class TokenScores:
    output_index: int
    token_id: int
    logprob: float
    entropy: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

OnToken = Callable[[Any, TokenScores], None]

class LogprobOutput(TensorPayload):
    token_logprobs: Annotated[Tensor, TensorSpec()]
    entropies: Annotated[Tensor, TensorSpec()]
    top_ids: Annotated[Tensor, TensorSpec()]
    top_logprobs: Annotated[Tensor, TensorSpec()]
    on_token: Annotated[OnToken, Local()]
    def consume(self, batch: Any, commits: Sequence[CommittedTokens | None]) -> None: ...

class LogprobObserver:
    top_k: int
    def __init__(self, top_k: int = 5, on_token: OnToken | None = None) -> None: ...
    def is_active(self, sampling_info: Any) -> bool: ...
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> tuple[Tensor, ...]: ...
    def after_sample(self, state: tuple[Tensor, ...], token_ids: Tensor) -> LogprobOutput: ...
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> LogprobOutput: ...
    def take(self, rid: Any) -> list[TokenScores]: ...
