"""Peer `sharded_rdt` of `rdt bench`: vLLM's own backend and rdt in one real engine, each exact, and nothing left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rdt_core.bench import BenchOptions
from rdt_core.bench.plugins import provider
from rdt_core.shapes import MODELS, config_of
from rdt_testbed import warm
from rdt_vllm.bench import ShardedRdt, hf_config


@pytest.mark.unit
def test_it_says_why_it_cannot_run() -> None:
    stock = ShardedRdt()
    assert "--device cuda runs it" in stock.reason(BenchOptions())
    assert "on one GPU with one trainer" in stock.reason(BenchOptions(device="cuda", gpus="separate", ranks=1))
    one = BenchOptions(device="cuda", gpus="shared", ranks=1)
    assert stock.reason(one) == ""
    assert "it is vLLM's" in stock.reason(dataclasses.replace(one, engine="sglang"))
    assert "no vLLM configuration is written for models like kimi-k2" in stock.reason(
        dataclasses.replace(one, model="kimi-k2")
    )
    assert provider("sharded_rdt", dataclasses.replace(one, engine="sglang"))[0] is None


@pytest.mark.unit
def test_configurations_that_vllm_takes() -> None:
    written = {name: hf_config(config_of(name)) for name in MODELS}
    kinds = {name: config["model_type"] for name, config in written.items() if config}
    assert kinds == {
        "tiny": "llama", "smollm2-135m": "llama", "qwen3-8b": "qwen3", "tiny-moe": "qwen3_moe", "qwen3-30b-a3b": "qwen3_moe",
        "qwen3-235b-a22b": "qwen3_moe",
    }  # fmt: skip


@pytest.mark.engine
@pytest.mark.thorough
@pytest.mark.parametrize(("model", "tp"), [("tiny", 1), ("tiny-moe", 2)])
def test_both_ways_into_one_engine_are_exact(
    warm_vllm: warm.Warm | None, monkeypatch: pytest.MonkeyPatch, model: str, tp: int
) -> None:
    if warm_vllm is not None:
        monkeypatch.setenv(warm.VARIABLE, warm_vllm.python)
    options = BenchOptions(model=model, ranks=2, tp=tp, peer_rounds=2).check()
    one, reason = provider("sharded_rdt", options)
    assert one is not None, reason
    stock, mapped, prepared = one.measure(options)
    assert stock.name == "sharded_rdt"
    assert "no pause, no stamp" in stock.what
    assert stock.phases.keys() == {"start_weight_update", "update_weights", "finish_weight_update"}
    assert (mapped.name, prepared.name) == ("rdt, live, mapped", "rdt, live, prepared")
    for row in (stock, mapped, prepared):
        assert (row.exact, row.notes, row.error, len(row.seconds)) == (True, (), "", 2)
        assert row.first_s > 0
        assert row.inside.startswith("vllm 0.32")
    for row in (mapped, prepared):
        assert row.what.startswith("a whole publish: pause")
        assert "pull" in row.phases
    assert not list(Path("/dev/shm").glob("rdt-testbed-sharded-*"))
