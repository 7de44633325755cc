from typing import NamedTuple

class Entry(NamedTuple):
    when: str
    causes: tuple[str, ...]
    fix: str
    prevent: str

CATALOGUE: dict[str, Entry]
