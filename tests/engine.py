"""The released engine's own files, from its wheel on PyPI, without what they would import.

To look at another release, change ENGINE_VERSION; the tests that use it say what has drifted.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

ENGINE_VERSION = "0.5.23"
MODULES = (
    "srt/managers/auxiliary_output.py",
    "srt/sampling/sampling_observer.py",
    "srt/sampling/sampling_observer_pp.py",
    "srt/plugins/hook_registry.py",
)
STORE = pathlib.Path(sys.prefix) / "engine"


def engine_path() -> pathlib.Path:
    """A directory to put on the path: `sglang` with empty packages around its real modules."""
    place = STORE / ENGINE_VERSION
    if place.exists():
        return place
    fresh = STORE / f"{ENGINE_VERSION}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with zipfile.ZipFile(_download(fresh)) as wheel:
        for module in MODULES:
            target = fresh / "sglang" / module
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(f"sglang/{module}"))
    for folder in [fresh / "sglang", *(p for p in (fresh / "sglang").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").touch()
    for wheel_file in fresh.glob("*.whl"):
        wheel_file.unlink()
    fresh.rename(place)
    return place


def _download(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    # it is read, not run: the platform and the Python that it was built for do not matter
    command += ["--only-binary=:all:", "--platform=manylinux_2_34_x86_64", "--python-version=3.11"]
    subprocess.run([*command, f"sglang=={ENGINE_VERSION}"], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel
