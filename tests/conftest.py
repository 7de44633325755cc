"""What is built once for all tests: the wheel that ships, and an environment that has only that."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parent.parent


SLOW = ("test_typing", "test_static", "test_cli", "test_package", "test_sglang_plugin")
"""Files that take minutes: they go first, so that no core waits for the last of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in SLOW)


def build(*arguments: object) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel, built from the sdist, so that what the sdist lacks is missed."""
    out = tmp_path_factory.mktemp("dist")
    build("--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The bin directory of an environment with the built wheel, the sources out of reach.

    torch and the tools come from this environment by a .pth file; the .pth file that makes the
    sources visible here is not read by that one.
    """
    place = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=120)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=120)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    here = sysconfig.get_path("purelib")
    (pathlib.Path(there.stdout.strip()) / "tools_of_the_tests.pth").write_text(here)
    where = subprocess.run(
        [python, "-c", "import pp_protocol; print(pp_protocol.__file__)"],
        cwd=place,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert str(place) in where
    return python.parent
