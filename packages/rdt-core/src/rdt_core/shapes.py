"""Checkpoint tensors of models from their published configurations: names, shapes and dtype, no weights.

For benchmarks and plans of models that are not at hand, by name or by the `config.json` of their checkpoint. Names are those
of the Hugging Face checkpoints, experts one by one; the layers for multi-token prediction that some checkpoints carry are left
out, and what is published in float8 is given in the dtype that it is trained in. Families that are not known are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import SourceError
from .wire import TensorMeta


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers of a decoder-only transformer that decide its tensors.

    Attributes:
        layers: decoder layers.
        hidden, intermediate: widths of the residual stream and of a dense MLP.
        heads, kv_heads, head_dim: of attention; `kv_heads` and `head_dim` say nothing where `kv_lora` is set.
        vocabulary: rows of the embedding.
        tied: whether the output layer is the embedding.
        qk_norm: whether queries and keys are normalised per head.
        qkv_bias: whether q, k and v have biases.
        experts, expert_intermediate: routed experts of a layer and their width; 0 without.
        shared: width of the shared experts of a layer, in experts.
        dense_layers: first layers that have a dense MLP in a model with experts.
        router_bias: whether the router has a correction bias (float32).
        q_lora, kv_lora, nope_dim, rope_dim, value_dim: multi-head latent attention; 0 without.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    expert_intermediate: int = 0
    shared: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0


_DEEPSEEK = Config(
    61, 7168, 18_432, 128, 128, 0, 129_280, experts=256, expert_intermediate=2048, shared=1, dense_layers=3,
    router_bias=True, q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, value_dim=128,
)  # fmt: skip

MODELS: dict[str, Config] = {
    "tiny": Config(2, 64, 128, 4, 2, 16, 512),
    "tiny-moe": Config(2, 64, 128, 4, 2, 16, 512, qk_norm=True, experts=4, expert_intermediate=32),
    "tiny-mla": Config(
        3, 64, 128, 4, 4, 0, 500, experts=4, expert_intermediate=32, shared=1, dense_layers=1, router_bias=True,
        q_lora=32, kv_lora=16, nope_dim=16, rope_dim=8, value_dim=16,
    ),
    "smollm2-135m": Config(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
    "qwen3-8b": Config(36, 4096, 12_288, 32, 8, 128, 151_936, qk_norm=True),
    "qwen3-30b-a3b": Config(48, 2048, 6144, 32, 4, 128, 151_936, qk_norm=True, experts=128, expert_intermediate=768),
    "qwen3-235b-a22b": Config(
        94, 4096, 12_288, 64, 4, 128, 151_936, qk_norm=True, experts=128, expert_intermediate=1536
    ),
    "glm-4.5-air": Config(
        46, 4096, 10_944, 96, 8, 128, 151_552, qkv_bias=True, experts=128, expert_intermediate=1408, shared=1,
        dense_layers=1, router_bias=True,
    ),
    "deepseek-v3": _DEEPSEEK,
    "kimi-k2": replace(_DEEPSEEK, heads=64, kv_heads=64, vocabulary=163_840, experts=384, dense_layers=1),
}  # fmt: skip


def config_of(model: str, layers: int = 0) -> Config:
    """Returns the configuration of a named model.

    Args:
        model: a name of `MODELS`.
        layers: keep only so many of its decoder layers; 0 keeps all.

    Raises:
        SourceError: an unknown name (lists the known ones), or more layers than it has.
    """
    config = MODELS.get(model)
    if config is None:
        raise SourceError(f"no shapes are known for model {model!r}; known: {', '.join(MODELS)}")
    if not 0 <= layers <= config.layers:
        raise SourceError(f"{model} has {config.layers} layers; {layers} cannot be kept of them")
    return replace(config, layers=layers) if layers else config


#: what configurations of a family do not say, by `model_type`
_FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}, "qwen3_moe": {"qk_norm": True},
    "glm4_moe": {"router_bias": True}, "deepseek_v3": {"router_bias": True}, "kimi_k2": {"router_bias": True},
}  # fmt: skip
#: names of `Config`'s fields in a Hugging Face configuration; the first that is there counts
_FIELDS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",), "hidden": ("hidden_size",), "intermediate": ("intermediate_size",),
    "heads": ("num_attention_heads",), "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "vocabulary": ("vocab_size",), "head_dim": ("head_dim",), "tied": ("tie_word_embeddings",), "qk_norm": ("use_qk_norm",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"), "expert_intermediate": ("moe_intermediate_size",),
    "shared": ("n_shared_experts",), "dense_layers": ("first_k_dense_replace",), "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",), "nope_dim": ("qk_nope_head_dim",), "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}  # fmt: skip
_REQUIRED = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary")


def read_config(path: Path) -> Config:
    """Reads the `config.json` of a checkpoint.

    Args:
        path: of the file, or of its folder.

    Raises:
        SourceError: no such file, no JSON, a family or a form of it that is not known here, or a number that is missing.
    """
    if not os.path.exists(path):  # Path.exists raises for names that no file system takes
        raise SourceError(f"{path} does not exist; a checkpoint's config.json, or its folder, is expected there")
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"no configuration can be read from {str(file)!r}: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{file} holds no configuration")
    if isinstance(found.get("text_config"), dict) and "num_hidden_layers" not in found:
        found = {**found, **found["text_config"]}
    kind = found.get("model_type")
    if kind not in _FAMILIES:
        raise SourceError(f"{file}: model_type {kind!r} is not known here; known: {', '.join(_FAMILIES)}")
    fields: dict[str, Any] = {}
    for name, keys in _FIELDS.items():
        value = next((found[key] for key in keys if found.get(key) is not None), None)
        if value is None and name in _REQUIRED:
            raise SourceError(f"{file} has no {' or '.join(keys)}, which decides the shapes")
        if value is not None:
            fields[name] = value
    if kind == "glm4_moe":
        fields["qkv_bias"] = bool(found.get("attention_bias"))
    fields |= _FAMILIES[kind]
    fields["head_dim"] = 0 if fields.get("kv_lora") else fields.get("head_dim", fields["hidden"] // fields["heads"])
    _refuse_unusual(file, kind, found, fields)
    return Config(**fields)


def _refuse_unusual(file: Path, kind: str, found: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuses forms of the known families that have other tensors."""
    wrong = [f"{key}={found[key]}" for key in ("decoder_sparse_step", "moe_layer_freq") if found.get(key, 1) != 1]
    wrong += [f"{key}={found[key]}" for key in ("mlp_only_layers", "mlp_bias") if found.get(key)]
    if found.get("attention_bias") and kind != "glm4_moe":
        wrong.append("attention_bias=true")
    if fields.get("kv_lora") and not fields.get("q_lora"):
        wrong.append("latent attention without q_lora_rank")
    if wrong:
        raise SourceError(f"{file}: {', '.join(wrong)}: such a {kind} has tensors that are not known here")


def checkpoint_tensors(model: str, dtype: str = "bfloat16", layers: int = 0) -> tuple[TensorMeta, ...]:
    """Returns the checkpoint tensors of a named model, in checkpoint order.

    Args:
        model: a name of `MODELS`.
        dtype: of all tensors but the routers' correction biases.
        layers: as for `config_of`.

    Raises:
        SourceError: see `config_of`.
    """
    return tensors_of(config_of(model, layers), dtype)


def tensors_of(config: Config, dtype: str = "bfloat16") -> tuple[TensorMeta, ...]:
    """Returns the checkpoint tensors of a configuration, in checkpoint order; see `checkpoint_tensors`."""
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config.vocabulary, config.hidden))]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        tensors += _latent(prefix, config) if config.kv_lora else _attention(prefix, config)
        if config.experts and layer >= config.dense_layers:
            tensors += _experts(prefix, config)
        else:
            tensors += _mlp(f"{prefix}.mlp", config.intermediate, config.hidden)
        tensors += [(f"{prefix}.{one}_layernorm.weight", (config.hidden,)) for one in ("input", "post_attention")]
    tensors.append(("model.norm.weight", (config.hidden,)))
    if not config.tied:
        tensors.append(("lm_head.weight", (config.vocabulary, config.hidden)))
    return tuple(
        TensorMeta(name=name, shape=shape, dtype="float32" if name.endswith("e_score_correction_bias") else dtype)
        for name, shape in tensors
    )


def _attention(prefix: str, config: Config) -> list[tuple[str, tuple[int, ...]]]:
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    tensors: list[tuple[str, tuple[int, ...]]] = [
        (f"{prefix}.self_attn.{one}_proj.weight", (count, config.hidden)) for one, count in rows.items()
    ]
    if config.qkv_bias:
        tensors += [(f"{prefix}.self_attn.{one}_proj.bias", (count,)) for one, count in rows.items()]
    tensors.append((f"{prefix}.self_attn.o_proj.weight", (config.hidden, rows["q"])))
    if config.qk_norm:
        tensors += [(f"{prefix}.self_attn.{one}_norm.weight", (config.head_dim,)) for one in "qk"]
    return tensors


def _latent(prefix: str, config: Config) -> list[tuple[str, tuple[int, ...]]]:
    attention, heads = f"{prefix}.self_attn", config.heads
    return [
        (f"{attention}.q_a_proj.weight", (config.q_lora, config.hidden)),
        (f"{attention}.q_a_layernorm.weight", (config.q_lora,)),
        (f"{attention}.q_b_proj.weight", (heads * (config.nope_dim + config.rope_dim), config.q_lora)),
        (f"{attention}.kv_a_proj_with_mqa.weight", (config.kv_lora + config.rope_dim, config.hidden)),
        (f"{attention}.kv_a_layernorm.weight", (config.kv_lora,)),
        (f"{attention}.kv_b_proj.weight", (heads * (config.nope_dim + config.value_dim), config.kv_lora)),
        (f"{attention}.o_proj.weight", (config.hidden, heads * config.value_dim)),
    ]


def _mlp(prefix: str, width: int, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{prefix}.gate_proj.weight", (width, hidden)),
        (f"{prefix}.up_proj.weight", (width, hidden)),
        (f"{prefix}.down_proj.weight", (hidden, width)),
    ]


def _experts(prefix: str, config: Config) -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [(f"{prefix}.mlp.gate.weight", (config.experts, config.hidden))]
    if config.router_bias:
        tensors.append((f"{prefix}.mlp.gate.e_score_correction_bias", (config.experts,)))
    for expert in range(config.experts):
        tensors += _mlp(f"{prefix}.mlp.experts.{expert}", config.expert_intermediate, config.hidden)
    if config.shared:
        tensors += _mlp(f"{prefix}.mlp.shared_experts", config.shared * config.expert_intermediate, config.hidden)
    return tensors
