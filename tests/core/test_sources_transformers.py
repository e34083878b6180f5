"""What ModuleSource declares of transformers' models is what `save_pretrained` writes: names and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rdt_core.sources import ModuleSource
from rdt_core.sources.names import known_model_types

pytestmark = pytest.mark.integration

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "olmo2")

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 3, "num_local_experts": 3,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(model_type: str, **options: bool) -> torch.nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(generator=generator)
    return model


def check(model: torch.nn.Module, source: ModuleSource, folder: Path) -> None:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    metadata = {tensor.name: tensor for tensor in source.metadata()}
    assert metadata.keys() == saved.keys()
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shards = {shard.name: shard for shard in source.shards()}
    assert shards.keys() == saved.keys()
    for name, tensor in saved.items():
        assert metadata[name].shape == tuple(tensor.shape), name
        assert metadata[name].dtype == str(tensor.dtype).removeprefix("torch."), name
        assert shards[name].offset == (0,) * tensor.ndim
        assert torch.equal(shards[name].tensor, tensor), name
        assert shards[name].tensor.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("model_type", [*DENSE, *known_model_types()])
def test_equals_the_saved_checkpoint(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    check(model, ModuleSource(model), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
def test_tied_and_untied(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = build(model_type, tie_word_embeddings=tied)
    source = ModuleSource(model)
    assert ("lm_head.weight" in {tensor.name for tensor in source.metadata()}) is not tied
    check(model, source, tmp_path)


def test_a_model_that_was_loaded(tmp_path: Path) -> None:
    """A loaded model remembers the conversions of its checkpoint; the source must agree with those."""
    import transformers

    build("qwen3_moe").save_pretrained(tmp_path / "first")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    check(model, ModuleSource(model), tmp_path / "second")


def test_the_models_own_prefix_can_be_renamed() -> None:
    model = torch.nn.ModuleDict({"policy": build("mixtral")})
    model.config = model["policy"].config
    names = {tensor.name for tensor in ModuleSource(model, rename={"policy.": ""}).metadata()}
    assert "model.layers.0.block_sparse_moe.experts.2.w2.weight" in names
    assert not any(name.startswith("policy") for name in names)
