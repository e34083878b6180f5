"""The tables: for each model family, which parameter of Megatron holds which tensors of its checkpoints.

Rules are relative to a layer and are used for decoder layers and for the layer inside a multi-token-prediction block,
whose index in the checkpoint counts on from the decoder's. Names of Megatron's local, Transformer-Engine and grouped-GEMM
modules stand side by side. A new family is a new tuple of rules; nothing here is guessed for one that is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rdt_core.errors import SourceError

from .rules import (
    Columns,
    GroupedColumns,
    GroupedRows,
    QueryKeyValue,
    Rows,
    RowsIfCut,
    Rule,
    Stacked,
    Vocabulary,
    Whole,
)


@dataclass(frozen=True)
class Family:
    """How checkpoints of a model family are named.

    Attributes:
        name: as errors call it.
        rules: of parameters outside of layers, and of those in layers, with full names; the first that matches counts.
        copies: checkpoint tensors of which checkpoints hold one more copy for each multi-token-prediction layer, and
            the copy's name. They are further names of the same memory.
    """

    name: str
    rules: tuple[Rule, ...]
    copies: Mapping[str, str] = field(default_factory=dict)


_OUTSIDE: tuple[Rule, ...] = (
    Vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Vocabulary("output_layer.weight", "lm_head.weight"),
    Whole("decoder.final_layernorm.weight", "model.norm.weight"),
)

# Relative to `decoder.layers.{layer}.` and `model.layers.{layer}.` from here on.
_NORMS: tuple[Rule, ...] = (
    Whole("input_layernorm.weight", "input_layernorm.weight"),
    Whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Whole("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

_ATTENTION: tuple[Rule, ...] = (
    Whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    QueryKeyValue(
        "self_attention.linear_qkv.{kind}",
        "self_attn.q_proj.{kind}",
        "self_attn.k_proj.{kind}",
        "self_attn.v_proj.{kind}",
    ),
    Columns("self_attention.linear_proj.{kind}", "self_attn.o_proj.{kind}"),
    Whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

_LATENT_ATTENTION: tuple[Rule, ...] = (
    Rows("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    RowsIfCut("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", ("q_lora_rank",)),
    Whole("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    Whole("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    Rows("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    RowsIfCut(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        ("kv_lora_rank", "qk_pos_emb_head_dim"),
    ),
    Whole("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    Whole("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    Rows("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Columns("self_attention.linear_proj.{kind}", "self_attn.o_proj.{kind}"),
)

_DENSE: tuple[Rule, ...] = (
    Stacked("mlp.linear_fc1.{kind}", ("mlp.gate_proj.{kind}", "mlp.up_proj.{kind}")),
    Columns("mlp.linear_fc2.{kind}", "mlp.down_proj.{kind}"),
)


def _experts(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules for routed experts with these names of their projections, each with {expert}."""
    return (
        Stacked("mlp.experts.local_experts.{expert}.linear_fc1.{kind}", (f"{gate}.{{kind}}", f"{up}.{{kind}}")),
        Columns("mlp.experts.local_experts.{expert}.linear_fc2.{kind}", f"{down}.{{kind}}"),
        Stacked("mlp.experts.linear_fc1.{kind}{expert}", (f"{gate}.{{kind}}", f"{up}.{{kind}}")),
        Columns("mlp.experts.linear_fc2.{kind}{expert}", f"{down}.{{kind}}"),
        GroupedRows("mlp.experts.weight1", (f"{gate}.weight", f"{up}.weight")),
        GroupedColumns("mlp.experts.weight2", f"{down}.weight"),
    )


_MOE: tuple[Rule, ...] = (
    Whole("mlp.router.weight", "mlp.gate.weight"),
    *_experts("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj", "mlp.experts.{expert}.down_proj"),
)

_MIXTRAL_MOE: tuple[Rule, ...] = (
    Whole("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *_experts(
        "block_sparse_moe.experts.{expert}.w1",
        "block_sparse_moe.experts.{expert}.w3",
        "block_sparse_moe.experts.{expert}.w2",
    ),
)

_ROUTER_BIAS: tuple[Rule, ...] = (Whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)


def _shared(name: str) -> tuple[Rule, ...]:
    return (
        Stacked("mlp.shared_experts.linear_fc1.weight", (f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight")),
        Columns("mlp.shared_experts.linear_fc2.weight", f"mlp.{name}.down_proj.weight"),
    )


_PREDICTION: tuple[Rule, ...] = (
    Whole("mtp.layers.{layer}.enorm.weight", "model.layers.{layer}.enorm.weight"),
    Whole("mtp.layers.{layer}.hnorm.weight", "model.layers.{layer}.hnorm.weight"),
    Rows("mtp.layers.{layer}.eh_proj.weight", "model.layers.{layer}.eh_proj.weight"),
    Whole("mtp.layers.{layer}.final_layernorm.weight", "model.layers.{layer}.shared_head.norm.weight"),
)
_COPIES = {
    "model.embed_tokens.weight": "model.layers.{layer}.embed_tokens.weight",
    "lm_head.weight": "model.layers.{layer}.shared_head.head.weight",
}


def in_layer(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns rules that are relative to a layer with the full names of Megatron's and of the checkpoint's layers."""

    def prefixed(rule: Any) -> Rule:
        changes: dict[str, Any] = {}
        for key in (one.name for one in fields(rule) if one.metadata.get("is_name", True)):
            value = getattr(rule, key)
            prefix = "decoder.layers.{layer}." if key == "parameter" else "model.layers.{layer}."
            changes[key] = tuple(prefix + one for one in value) if isinstance(value, tuple) else prefix + value
        return replace(rule, **changes)

    return tuple(map(prefixed, rules))


def _family(name: str, *layer: Sequence[Rule], predicts: bool = False) -> Family:
    inside = in_layer([rule for rules in (_NORMS, *layer) for rule in rules])
    outside = (*_OUTSIDE, *(_PREDICTION if predicts else ()))
    return Family(name, (*outside, *inside), _COPIES if predicts else {})


_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family("llama", _ATTENTION, _DENSE),
        _family("mistral", _ATTENTION, _DENSE),
        _family("qwen2", _ATTENTION, _DENSE),
        _family("qwen3", _ATTENTION, _DENSE),
        _family(
            "qwen2_moe", _ATTENTION, _DENSE, _MOE, _shared("shared_expert"),
            [Whole("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight")],
        ),
        _family("qwen3_moe", _ATTENTION, _DENSE, _MOE),
        _family("mixtral", _ATTENTION, _MIXTRAL_MOE),
        _family("deepseek_v2", _LATENT_ATTENTION, _DENSE, _MOE, _shared("shared_experts")),
        _family("deepseek_v3", _LATENT_ATTENTION, _DENSE, _MOE, _ROUTER_BIAS, _shared("shared_experts"), predicts=True),
        _family("kimi_k2", _LATENT_ATTENTION, _DENSE, _MOE, _ROUTER_BIAS, _shared("shared_experts"), predicts=True),
        _family("glm4_moe", _ATTENTION, _DENSE, _MOE, _ROUTER_BIAS, _shared("shared_experts"), predicts=True),
    )
}  # fmt: skip


def known_families() -> tuple[str, ...]:
    """Returns the `model_type`s that have a table."""
    return tuple(sorted(_FAMILIES))


def family_of(name: str | None) -> Family:
    """Returns the table of a transformers `model_type`.

    Raises:
        SourceError: there is none.
    """
    found = _FAMILIES.get(name or "")
    if found is None:
        raise SourceError(
            f"there is no table of rules for model type {name!r} (known: {', '.join(known_families())}); pass `family=` "
            f"the one whose checkpoints are named alike, or a Family of your own"
        )
    return found
