"""Sources of rdt's with vLLM's own backends: what vLLM's trainer side reads, and a stock worker that is fed by it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from rdt_testbed.programs import VLLM_ENVIRONMENT, run
from rdt_testbed.vllm_sharded import SHARED, VARIABLE
from rdt_testbed.warm import Warm

pytestmark = [pytest.mark.engine, pytest.mark.thorough]

PROGRAM = Path(__file__).with_name("interplay_program.py")


def test_a_stock_worker_with_sharded_rdt_is_fed_by_our_source(warm_vllm: Warm | None) -> None:
    prefix = f"rdt-interplay-{uuid.uuid4().hex[:8]}-"
    try:
        found = run(PROGRAM, "qwen3", timeout_s=400, environment={**VLLM_ENVIRONMENT, VARIABLE: prefix}, fork=warm_vllm)
    finally:
        for left in SHARED.glob(f"{prefix}*"):
            left.unlink(missing_ok=True)
    assert found["before"] > 0.1
    assert max(found["errors"]) < 1e-4
