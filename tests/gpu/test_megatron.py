"""Megatron trainers on every GPU there is, with NCCL at work, feed tensor-parallel readers; see `megatron_program.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", [0, 8])
def test_every_kind_is_exact_while_collectives_run(experts: int) -> None:
    program = Path(__file__).with_name("megatron_program.py")
    command = [sys.executable, str(program), "--hidden", "1024", "--vocab", "10000", "--experts", str(experts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert [cell["kind"] for cell in result["cells"]] == ["mapped", "prepared", "ray", "prepared"]
    for cell in result["cells"]:
        assert all(sync["exact"] and sync["kinds"] == [cell["kind"]] and sync["bytes"] for sync in cell["syncs"])
        assert cell["syncs"][0]["collectives_meanwhile"] > 0
    assert len(set(result["loss"])) == len(result["loss"])  # the trainers really moved between syncs
