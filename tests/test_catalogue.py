"""Promises of `pp-protocol explain`: every code is there, with lines that run."""

from __future__ import annotations

import pytest

from pp_protocol.catalogue import CATALOGUE, explained, listed
from pp_protocol.cli import main


@pytest.mark.parametrize("code", CATALOGUE)
def test_the_lines_of_each_entry_run(code: str) -> None:
    assert len(CATALOGUE[code].example.splitlines()) <= 8
    example = compile(CATALOGUE[code].example, code, "exec", dont_inherit=True)
    exec(example, {"__name__": "example"})


@pytest.mark.parametrize("code", CATALOGUE)
def test_an_entry_is_printed_whole_in_100_columns(code: str, capsys) -> None:
    assert main(["explain", code]) == 0
    text = capsys.readouterr().out
    assert text == explained(code) + "\n"
    folded = " ".join(text.split())
    entry = CATALOGUE[code]
    for part in (code, entry.when, *entry.causes, entry.fix, entry.prevent):
        assert " ".join(part.split()) in folded
    assert max(map(len, text.splitlines())) <= 100
    assert all(f"    {line}" in text for line in entry.example.splitlines())


def test_without_a_code_all_are_listed(capsys) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert text == listed() + "\n"
    assert max(map(len, text.splitlines())) <= 100
    assert [line.split()[0] for line in text.splitlines()] == list(CATALOGUE)


def test_an_unknown_code_is_exit_2_with_what_may_have_been_meant(capsys) -> None:
    assert main(["explain", "unsuported-observer"]) == 2
    assert "did you mean unsupported-observer" in capsys.readouterr().err
