"""Promises of the pytest plug-in: an author's own test file passes, or says what is wrong."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
TESTS = pathlib.Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()


def run_pytest(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_example_of_the_readme_passes(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (plugin,) = (block for block in blocks if block.startswith("# my_plugin.py"))
    (tests,) = (block for block in blocks if block.startswith("# test_my_plugin.py"))
    (tmp_path / "my_plugin.py").write_text(plugin)
    (tmp_path / "test_my_plugin.py").write_text(tests)
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


WRONG = """
import torch
from pipeline_observers import Good, Inactive, NoState, Observer, Unsupported
from pp_protocol.pytest_plugin import assert_pp_capable

SHARED = Good()

class Stateful(Good):
    def after_sample(self, state, token_ids):
        self.state = state
        return super().after_sample(state, token_ids)
    def from_pp_tensors(self, tensors):
        return self.state

def test_not_capable(): assert_pp_capable(Unsupported())
def test_shared(pp_round_trip): pp_round_trip(lambda: SHARED)
def test_needs_the_sender_s_state(pp_round_trip): pp_round_trip(Stateful)
def test_pipeline(pp_pipeline): pp_pipeline(Unsupported, steps=1)
def test_no_output(pp_pipeline): pp_pipeline(Inactive, steps=1)
"""
RIGHT = """
import torch
from pipeline_observers import Good, Inactive, NoState
from pp_protocol import add_auxiliary_output_to_pp_tensors
from pp_protocol.pytest_plugin import assert_pp_capable

def test_capable(): assert_pp_capable(Good())
def test_no_state(pp_round_trip): assert pp_round_trip(NoState) is None
def test_values(pp_round_trip):
    logits = torch.zeros(2, 4)
    output = pp_round_trip(Good, logits, torch.tensor([1, 2]))
    assert torch.allclose(output.tensors["logsumexp"], torch.tensor(4.0).log().expand(2))
def test_inactive(pp_round_trip): assert pp_round_trip(Inactive) is None
def test_token_that_is_allowed(pp_round_trip):
    from pp_protocol.reference import LogprobObserver
    output = pp_round_trip(LogprobObserver, torch.tensor([[0.0, 9.0, 1.0, 0.0]]))
    assert output.token_logprobs.item() == torch.tensor([0.0, 9.0, 1.0, 0.0]).log_softmax(0)[2]
def test_wire(pp_wire):
    before = dict(pp_wire)
    add_auxiliary_output_to_pp_tensors(pp_wire, None)
    assert pp_wire == before
"""


def test_what_is_wrong_fails_with_the_report(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "5 failed" in done.stdout
    for text in (
        "it has from_pp_tensors set to None",
        "make() gave the same observer twice",
        "no attribute 'state'",
        "[unsupported-observer] stage 0, from_pp_tensors",
        "the observer gave no output in any step",
    ):
        assert text in done.stdout, text


def test_what_is_right_passes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_right.py").write_text(RIGHT)
    done = run_pytest(tmp_path)
    assert "6 passed" in done.stdout, done.stdout


def test_a_run_that_does_not_use_it_imports_no_torch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_plugin_is_loaded(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('pp_protocol')\n"
        "def test_no_torch(): assert not {'torch', 'beartype'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path)
    assert "2 passed" in done.stdout, done.stdout
