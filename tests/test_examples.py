"""Promises of examples/: as their author would, beside the wheel that ships, and nothing else."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import build

pytestmark = pytest.mark.processes
EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "token-confidence"


def test_the_example_project_passes_its_own_tests_mypy_and_the_command(
    installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    project, dist = tmp_path / "project", tmp_path / "dist"
    shutil.copytree(EXAMPLE, project)
    build("--wheel", "--outdir", dist, project)
    (wheel,) = dist.glob("*.whl")
    place = tmp_path / "site"
    python = installed / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", place]
    subprocess.run([*pip, wheel], check=True, timeout=120)
    shutil.rmtree(project / "src")  # what is tested is what was installed
    cache = EXAMPLE.parent.parent / ".mypy_cache" / "typing"
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    environment["PYTHONPATH"] = str(place)

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(python), *command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "7 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    for what in (["-p", "token_confidence"], ["tests"]):
        said = run("-m", "mypy", f"--cache-dir={cache}", *what)
        assert "no issues found in 1 source file" in said
    said = run("-W", "ignore", "-m", "pp_protocol", "check", "--require", "static")
    assert "token_confidence:ConfidenceObserver" in said
    assert "mypy: no error" in said
    assert "equal bit for bit" in said
