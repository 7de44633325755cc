from dataclasses import dataclass

@dataclass(frozen=True)
class Entry:
    when: str
    causes: tuple[str, ...]
    fix: str
    prevent: str
    example: str

CATALOGUE: dict[str, Entry]

def listed() -> str: ...
def explained(code: str) -> str: ...
