"""Tiny models with the structure of real ones, for every test that needs a model: no hub, no tokenizer, milliseconds.

Built from transformers' own configurations, so that trainers, checkpoints and engines see the names and layouts of the
real families. Sizes keep what layouts depend on: several layers, grouped KV heads, head and expert sizes that engines
on a CPU accept with two tensor parallel ranks. Nothing here generates sensible text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

Kind = Literal[
    "llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3", "glm4-moe"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
#: as GLM-4.5: biases of query, key and value, norms of query and key, rotary positions in half of each head
_GLM: dict[str, Any] = {
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # transformers counts a layer for multi-token prediction where this is not said, and builds none
    "num_nextn_predict_layers": 0,
}
#: the router of the third version, as its published configuration names it
_NOAUX: dict[str, Any] = {
    "q_lora_rank": 24,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}


def config(kind: Kind, **changes: Any) -> PreTrainedConfig:
    """Returns the configuration of a tiny model.

    Args:
        kind: `llama` (untied embeddings), `llama-tied` (as SmolLM2), `qwen2` (query, key and value biases), `qwen3`
            (query and key norms), `qwen3-moe` and `mixtral` (8 experts in every layer), `deepseek-v2` or `deepseek-v3`
            (MLA, without and with a low-rank query; a dense layer, then 8 experts and a shared one), `glm4-moe` (biases,
            norms and half-rotary heads over the same layers).
        changes: fields of the configuration to set otherwise, e.g. `vocab_size=250` for padded vocabularies.
    """
    match kind:
        case "llama":
            return LlamaConfig(**_BASE | changes)
        case "llama-tied":
            return LlamaConfig(**_BASE | {"tie_word_embeddings": True} | changes)
        case "qwen2":
            # engines take hidden size / heads for it, whatever the configuration says
            return Qwen2Config(**_BASE | {"head_dim": _BASE["hidden_size"] // _BASE["num_attention_heads"]} | changes)
        case "qwen3":
            return Qwen3Config(**_BASE | changes)
        case "qwen3-moe":
            return Qwen3MoeConfig(**_BASE | _MOE | changes)
        case "mixtral":
            return MixtralConfig(**_BASE | {"num_local_experts": 8, "num_experts_per_tok": 2} | changes)
        case "deepseek-v2":
            return DeepseekV2Config(**_BASE | _MLA | {"q_lora_rank": None, "scoring_func": "softmax"} | changes)
        case "deepseek-v3":
            return DeepseekV3Config(**_BASE | _MLA | _NOAUX | changes)
        case "glm4-moe":
            return Glm4MoeConfig(**_BASE | _GLM | changes)
    raise ValueError(f"no tiny model {kind!r}; there are {', '.join(KINDS)}")


def build(kind: Kind, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Returns a tiny model on the CPU, in evaluation mode, with the values of `fill(model, seed)`.

    Args:
        kind: see `config`.
        seed: equal seeds give equal values, on every rank.
        dtype: of every parameter.
        changes: see `config`.
    """
    model = AutoModelForCausalLM.from_config(config(kind, **changes), dtype=dtype)
    fill(model, seed)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter and stored buffer values that differ by name, place and seed; tied parameters stay tied.

    Norms stay near 1, so that logits stay finite and differ clearly between two seeds.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * values if "norm" in name else 0.08 * values)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(0.08 * torch.randn(buffer.shape, generator=generator))


def save(model: PreTrainedModel, folder: Path, *, shard_size: str = "5GB") -> Path:
    """Writes a checkpoint as an engine loads it (config and safetensors, checkpoint names, no tokenizer).

    Args:
        model: what `build` returned, whatever was trained since.
        folder: made where missing; what it held of an earlier checkpoint is replaced.
        shard_size: largest file; a small one gives a checkpoint of several files.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder
