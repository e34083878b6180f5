"""Sources of rdt's with vLLM's own backends: what vLLM's trainer side reads, and a stock worker that is fed by it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from rdt_testbed.programs import VLLM_ENVIRONMENT, run
from rdt_testbed.vllm_sharded import SHARED, VARIABLE
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("interplay_program.py")
SOURCES = Path(__file__).with_name("sources_program.py")


def test_every_source_gives_the_whole_checkpoint_alike_on_every_rank(warm_vllm: Warm | None) -> None:
    found = run(SOURCES, timeout_s=200, environment=VLLM_ENVIRONMENT, fork=warm_vllm)
    assert {case: len(ranks) for case, ranks in found.items()} == {
        "checkpoint": 1, "plain": 1, "tied": 1, "fsdp2": 2, "megatron": 4, "megatron experts": 4, "iterable": 2,
    }  # fmt: skip
    for case, ranks in found.items():
        for rank in ranks:
            assert rank["wrong"] == [], case
            assert rank["is vLLM's"], case
            assert rank["holds"] == "all", case
            assert rank["metadata"] == ranks[0]["metadata"], f"{case}: ranks differ"


@pytest.mark.thorough
def test_a_stock_worker_with_sharded_rdt_is_fed_by_our_source(warm_vllm: Warm | None) -> None:
    prefix = f"rdt-interplay-{uuid.uuid4().hex[:8]}-"
    try:
        found = run(PROGRAM, "qwen3", timeout_s=400, environment={**VLLM_ENVIRONMENT, VARIABLE: prefix}, fork=warm_vllm)
    finally:
        for left in SHARED.glob(f"{prefix}*"):
            left.unlink(missing_ok=True)
    assert found["before"] > 0.1
    assert max(found["errors"]) < 1e-4
