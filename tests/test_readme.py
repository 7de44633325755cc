"""Promises of README.md: its plug-in passes its command, its table of errors is complete."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

from pp_protocol import errors
from pp_protocol.catalogue import CATALOGUE

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.processes
def test_the_plug_in_passes_the_command_beside_it(tmp_path: pathlib.Path) -> None:
    (plugin,) = (block for block in blocks("python") if block.startswith("# my_plugin.py"))
    (tmp_path / "my_plugin.py").write_text(plugin)
    (command,) = re.findall(r"^\$ pp-protocol (check .*)$", README, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "pp_protocol", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^r0 0 \(\d+,\) \d\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^  static +ok .*mypy: no error$", done.stdout, re.MULTILINE)
    assert "10 outputs (tensors of 1 name) in 10 of 12 steps" in done.stdout


def test_what_an_engine_imports_is_there() -> None:
    (block,) = (block for block in blocks("python") if "from pp_protocol import (" in block)
    namespace: dict[str, object] = {}
    exec(block, namespace)
    assert len([name for name in namespace if "__" not in name]) == 7


def test_the_table_names_every_error_class_with_its_code() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \|", README, re.MULTILINE))
    classes = {
        (kind.code, kind.__name__)
        for kind in vars(errors).values()
        if inspect.isclass(kind)
        and issubclass(kind, errors.PPProtocolError)
        and "code" in vars(kind)
    }
    assert rows == classes - {("pp-protocol", "PPProtocolError")}


def test_every_code_is_mentioned() -> None:
    assert set(CATALOGUE) <= set(re.findall(r"`([a-z-]+)`", README))
