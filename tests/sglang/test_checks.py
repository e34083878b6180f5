"""Which configurations are refused, which are warned about, and what each message says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rdt_core.errors import EngineError
from rdt_sglang.checks import Configuration, check, check_blocks, check_quantised_layout

pytestmark = pytest.mark.unit

REFUSED = {
    "eplb": ({"enable_eplb": True}, "all", "without --enable-eplb"),
    "elastic": ({"elastic_ep": "mooncake"}, "all", "elastic expert parallelism (mooncake)"),
    "pipeline": ({"pp_size": 2}, "all", "pp_size 2"),
    "dp-in-dp": ({"dp_size": 2, "attn_dp_size": 2}, "all", "DP attention inside 2 replicas"),
    "local-control": ({"local_control": True}, "all", "enable_dp_attention_local_control_broadcast"),
    "rpc-dp": ({"plain_processes": True, "dp_size": 2}, "all", "one of 2 data parallel schedulers"),
    "rpc-dp-attention": ({"plain_processes": True, "attn_dp_size": 2}, "all", "--use-ray"),
    "weight-cache": ({"weight_cache_mode": "client"}, "all", "--weight-cache-mode off"),
    "memory-saver": ({"enable_memory_saver": True}, "all", "without --enable-memory-saver"),
    "no-draft": ({}, "draft", "no draft model"),
    "selector": ({}, "everything", "target, draft, all"),
}
WARNED = {
    "prefill": ({"disaggregation": "prefill"}, "all", "keeps the chunks of the old version"),
    "decode": ({"disaggregation": "decode"}, "all", "needs its prefill engine at that version first"),
    "lora": ({"enable_lora": True}, "all", "adapters that are loaded stay as they are"),
    "hicache": ({"hicache_storage": "file"}, "all", "prefixes of older versions may come back"),
    "draft": ({"has_draft": True}, "target", "the draft model keeps its weights"),
    "dp-attention": ({"attn_dp_size": 2}, "all", "DP attention (2 groups)"),
}


@pytest.mark.parametrize(("changes", "selector", "says"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], selector: str, says: str):
    with pytest.raises(EngineError) as raised:
        check(Configuration(**changes), selector, "r/0 of group g")
    assert str(raised.value).startswith("r/0 of group g: this engine's weights cannot be synchronised")
    assert says in str(raised.value)


@pytest.mark.parametrize(("changes", "selector", "says"), WARNED.values(), ids=WARNED)
def test_warned(changes: dict[str, Any], selector: str, says: str):
    (warning,) = check(Configuration(**changes), selector, "r/0")
    assert says in warning


@pytest.mark.parametrize("selector", ["target", "all"])
def test_a_plain_engine_passes_in_silence(selector: str):
    assert check(Configuration(), selector, "r/0") == []


def test_drafts_that_are_updated_too_pass_in_silence():
    assert check(Configuration(has_draft=True), "all", "r/0") == []
    assert check(Configuration(has_draft=True), "draft", "r/0") == []


def test_everything_wrong_is_listed_at_once():
    with pytest.raises(EngineError) as raised:
        check(Configuration(pp_size=2, enable_eplb=True), "all", "r/0")
    assert "expert load balancing" in str(raised.value)
    assert "pipeline parallelism" in str(raised.value)


def test_blocks_that_do_not_divide_are_named():
    partitions = {"good": (256, 128), "rows": (192, 128), "columns": (128, 96)}
    wrong = check_blocks((128, 128), partitions)
    assert [line.split(":")[0] for line in wrong] == ["rows", "columns"]
    assert "192 x 128 per rank against blocks of 128 x 128" in wrong[0]


def test_a_model_cut_inside_a_block_is_refused():
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.output_size_per_partition, model.layer.input_size_per_partition = 96, 256
    check_quantised_layout(model, "r/0")
    model.quant_config = SimpleNamespace(weight_block_size=[128, 128])  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"r/0: 1 layers are cut inside a quantisation block.*layer: 96 x 256"):
        check_quantised_layout(model, "r/0")
    model.layer.output_size_per_partition = 128
    check_quantised_layout(model, "r/0")
