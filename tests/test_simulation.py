"""The protocol as a whole under random schedules, and with bugs put in, which have to be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulate import BUGS, find

SEEDS, TRIES = 800, 2000
"""Runs without a bug (`python -m tests.simulate` makes more of them), and at most with each bug."""
ROOT = Path(__file__).parents[1]


def test_random_schedules_end_equal_on_every_stage() -> None:
    code, out, failure = _simulate("--seeds", str(SEEDS), "--jobs", str(os.cpu_count()))
    assert code == 0 and "nothing found" in out, failure


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(bug: str) -> None:
    assert find(bug, TRIES) is not None


def _simulate(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tests.simulate", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout, done.stderr


def test_a_failure_is_replayed_by_its_seed() -> None:
    bug = "the oldest request is retracted"
    code, _, first = _simulate("--break", bug)
    assert code == 1
    last = first.splitlines()[-1]
    assert last.endswith("was retracted, the oldest that ran")
    seed = last.split()[1].rstrip(":")
    assert _simulate("--break", bug, "--seed", seed) == (1, "", first)
    code, trace, _ = _simulate("--seed", seed, "--trace")
    assert code == 0 and "log: Prefill" in trace


def test_unknown_bugs_are_refused() -> None:
    code, _, error = _simulate("--break", "none")
    assert code == 2 and "--break 'none' is not one of" in error
