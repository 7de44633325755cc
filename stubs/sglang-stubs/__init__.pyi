# Partial stubs for the sampling-observer modules of SGLang 0.5.23, which ships without py.typed.
# They describe that release; tests/test_sglang_stubs.py holds them against its wheel. Everything
# else of sglang is Any here, whether sglang is installed or not, or what the checker finds itself.
from _typeshed import Incomplete

def __getattr__(name: str) -> Incomplete: ...
