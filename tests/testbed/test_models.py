"""The tiny models are what they say: names, ties, checkpoints that load back equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rdt_testbed import models

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", models.KINDS)
def test_checkpoint_loads_back_equal(kind: models.Kind, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = models.build(kind, seed=3)
    folder = models.save(model, tmp_path / "checkpoint")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_ties() -> None:
    tied, untied = models.build("llama-tied"), models.build("llama")
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert not torch.equal(untied.get_input_embeddings().weight, untied.get_output_embeddings().weight)


def test_checkpoint_of_experts_has_a_tensor_for_each(tmp_path: Path) -> None:
    model = models.build("qwen3-moe")
    stored = load_file(models.save(model, tmp_path) / "model.safetensors")
    for expert in range(8):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.1.mlp.experts.{expert}.{projection}.weight" in stored


def test_checkpoint_of_mixtral_has_its_own_names(tmp_path: Path) -> None:
    stored = load_file(models.save(models.build("mixtral"), tmp_path) / "model.safetensors")
    assert {f"model.layers.1.block_sparse_moe.experts.7.w{part}.weight" for part in (1, 2, 3)} <= stored.keys()


def test_glm_has_what_the_other_families_have_one_by_one(tmp_path: Path) -> None:
    stored = load_file(models.save(models.build("glm4-moe"), tmp_path) / "model.safetensors")
    assert {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"} <= stored.keys()
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight"} <= stored.keys()
    moe = "model.layers.1.mlp."
    assert {moe + name for name in ("gate.e_score_correction_bias", "shared_experts.up_proj.weight")} <= stored.keys()
    assert stored[moe + "gate.e_score_correction_bias"].abs().min() > 0
    assert not any(name.startswith("model.layers.2.") for name in stored)


def test_seed_decides_the_values() -> None:
    one, same, other = (models.build("qwen3", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one)


def test_checkpoint_replaces_the_older_one(tmp_path: Path) -> None:
    models.save(models.build("llama", seed=1), tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    models.save(models.build("llama", seed=2), tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_unknown_kind_names_the_known() -> None:
    with pytest.raises(ValueError, match="llama-tied"):
        models.config("gpt")  # type: ignore[arg-type]
