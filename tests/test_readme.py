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


def run(command: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", ["my_plugin", "my_short_plugin"])
def test_the_plug_ins_pass_the_command_and_mypy(name: str, tmp_path: pathlib.Path) -> None:
    (plugin,) = (block for block in blocks("python") if block.startswith(f"# {name}.py"))
    (tmp_path / f"{name}.py").write_text(plugin)
    (command,) = re.findall(r"^\$ pp-protocol (check .*)$", README, re.MULTILINE)
    command = command.replace("my_plugin", name)
    done = run(f"pp_protocol {command}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^r0 0 \(\d+,\) \d\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^  static +ok .*mypy: no error$", done.stdout, re.MULTILINE)
    assert "10 outputs (tensors of 1 name) in 10 of 12 steps" in done.stdout
    (strict,) = re.findall(r"run: pp-protocol (check .*)$", README, re.MULTILINE)
    done = run(f"pp_protocol {strict.replace('my_plugin', name)}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (mypy,) = re.findall(r"run: (mypy .*)$", README, re.MULTILINE)
    done = run(f"{mypy.replace('my_plugin', name)} --cache-dir={ROOT / '.mypy_cache'}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


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
