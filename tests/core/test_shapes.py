"""Shapes of named models: totals as transformers counts them, cuts, and names."""

from __future__ import annotations

import math

import pytest

from rdt_core.errors import SourceError
from rdt_core.shapes import MODELS, checkpoint_tensors, config_of

pytestmark = pytest.mark.unit

#: tensors, and parameters of transformers' model of the published configuration, without routers' correction biases
TOTALS = {
    "smollm2-135m": (272, 134_515_008),
    "qwen3-8b": (399, 8_190_735_360),
    "qwen3-30b-a3b": (18_867, 30_532_122_624),
    "qwen3-235b-a22b": (36_945, 235_093_634_560),
    "glm-4.5-air": (17_925, 106_852_245_504),
    "deepseek-v3": (45_395, 671_026_404_352),
    "kimi-k2": (69_975, 1_026_408_209_408),
}


@pytest.mark.parametrize("model", TOTALS)
def test_totals_are_those_of_the_published_configuration(model: str) -> None:
    tensors = checkpoint_tensors(model)
    names = {tensor.name for tensor in tensors}
    assert len(names) == len(tensors)
    biases = [tensor for tensor in tensors if tensor.name.endswith("e_score_correction_bias")]
    assert all(tensor.dtype == "float32" for tensor in biases)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors) - sum(math.prod(tensor.shape) for tensor in biases)
    assert (len(tensors), parameters) == TOTALS[model]


@pytest.mark.parametrize("model", ["glm-4.5-air", "deepseek-v3", "qwen3-8b"])
def test_a_cut_keeps_the_first_layers_and_what_is_outside_of_layers(model: str) -> None:
    whole = checkpoint_tensors(model)
    cut = checkpoint_tensors(model, layers=4)
    assert cut == tuple(t for t in whole if "layers." not in t.name or int(t.name.split(".")[2]) < 4)
    assert config_of(model, 4).layers == 4


def test_small_models_equal_transformers() -> None:
    import torch
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=500, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=16,
        q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, first_k_dense_replace=1, n_group=1,
        topk_group=1, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    # transformers fuses experts when it loads; everything else has the checkpoint's own names
    ours = {t.name: t.shape for t in checkpoint_tensors("tiny-mla") if ".experts." not in t.name}
    assert ours == {name: tuple(value.shape) for name, value in theirs.items() if ".experts." not in name}


def test_unknown_models_and_impossible_cuts_are_refused() -> None:
    with pytest.raises(SourceError, match=r"no shapes are known for model 'gpt-9'; known: tiny, "):
        checkpoint_tensors("gpt-9")
    with pytest.raises(SourceError, match="qwen3-8b has 36 layers; 37 cannot be kept"):
        checkpoint_tensors("qwen3-8b", layers=37)
    assert set(TOTALS) <= set(MODELS)
