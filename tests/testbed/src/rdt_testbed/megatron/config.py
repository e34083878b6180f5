"""Megatron's configuration of a tiny model, derived from transformers' one so that both compute the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import models
from .layout import Layout

PADDING = 8
#: nothing here that a CPU, or gloo, does not have
_PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "transformer_impl": "local",
    "use_cpu_initialization": True, "bias_dropout_fusion": False, "bias_activation_fusion": False,
    "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
    "persist_layer_norm": False, "batch_p2p_comm": False, "deallocate_pipeline_outputs": False,
}  # fmt: skip


def padded_vocabulary(size: int, layout: Layout) -> int:
    """Rows of the embedding over all tensor parallel ranks: Megatron makes each rank's share a multiple of `PADDING`."""
    multiple = PADDING * layout.tp
    return -(-size // multiple) * multiple


def transformer_config(kind: models.Kind, layout: Layout, **changes: Any) -> Any:
    """Returns the `TransformerConfig` (or `MLATransformerConfig`) of `models.config(kind, **changes)` in a layout."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    theirs = models.config(kind, **changes)
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    options = _PLAIN | {
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "ffn_hidden_size": theirs.intermediate_size,
        "num_attention_heads": theirs.num_attention_heads,
        "num_query_groups": theirs.num_key_value_heads,
        "layernorm_epsilon": theirs.rms_norm_eps,
        "bf16": layout.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp or (layout.tp > 1 and _experts(theirs) > 0),
        "num_layers_in_first_pipeline_stage": layout.first or None,
        "num_layers_in_last_pipeline_stage": layout.last or None,
        "mtp_num_layers": layout.mtp or None,
    }
    if _experts(theirs):
        options |= _moe(theirs, layout)
    if hasattr(theirs, "kv_lora_rank"):
        return MLATransformerConfig(**options | _mla(theirs))
    # as transformers decides them: from the class for Qwen, from the configuration for GLM
    qwen2, qwen3 = kind.startswith("qwen2"), kind.startswith("qwen3")
    return TransformerConfig(
        **options,
        kv_channels=theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads,
        add_qkv_bias=qwen2 or bool(getattr(theirs, "attention_bias", False)),
        qk_layernorm=qwen3 or bool(getattr(theirs, "use_qk_norm", False)),
    )


def _experts(theirs: Any) -> int:
    return next((getattr(theirs, name) for name in ("num_experts", "n_routed_experts") if hasattr(theirs, name)), 0)


def _moe(theirs: Any, layout: Layout) -> dict[str, Any]:
    size = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    dense = getattr(theirs, "first_k_dense_replace", 0)
    shared = getattr(theirs, "n_shared_experts", 0)
    # DeepSeek-V3's router: sigmoid scores, chosen with a bias, in the best groups
    biased = theirs.model_type in ("deepseek_v3", "glm4_moe")
    options = {
        "num_moe_experts": _experts(theirs),
        "moe_ffn_hidden_size": size,
        "moe_layer_freq": [0] * dense + [1] * (theirs.num_hidden_layers - dense),
        "moe_router_topk": theirs.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": layout.grouped,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "moe_shared_expert_intermediate_size": shared * size or None,
        # normalised over the chosen ones, or taken as they were among all
        "moe_router_pre_softmax": not biased and not getattr(theirs, "norm_topk_prob", True),
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
        "moe_router_topk_scaling_factor": getattr(theirs, "routed_scaling_factor", None),
    }
    if biased:
        options |= {"moe_router_num_groups": theirs.n_group, "moe_router_group_topk": theirs.topk_group}
    return options


def _mla(theirs: Any) -> dict[str, Any]:
    rope = theirs.rope_parameters
    return {
        "num_query_groups": theirs.num_attention_heads,
        "kv_channels": theirs.v_head_dim,
        "qk_layernorm": True,
        "q_lora_rank": theirs.q_lora_rank,
        "kv_lora_rank": theirs.kv_lora_rank,
        "qk_head_dim": theirs.qk_nope_head_dim,
        "qk_pos_emb_head_dim": theirs.qk_rope_head_dim,
        "v_head_dim": theirs.v_head_dim,
        "rope_type": rope["rope_type"],
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        **{name: rope[name] for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
