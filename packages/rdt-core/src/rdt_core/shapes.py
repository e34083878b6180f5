"""Checkpoint tensors of named models, from their published configurations: names, shapes and dtype, no weights."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SourceError
from .wire import TensorMeta


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers of a decoder-only transformer that decide its tensors."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_intermediate: int = 0


MODELS: dict[str, Config] = {
    "tiny": Config(2, 64, 128, 4, 2, 16, 512),
    "smollm2-135m": Config(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
    "qwen3-8b": Config(36, 4096, 12_288, 32, 8, 128, 151_936, qk_norm=True),
    "qwen3-30b-a3b": Config(48, 2048, 6144, 32, 4, 128, 151_936, qk_norm=True, experts=128, expert_intermediate=768),
}


def checkpoint_tensors(model: str, dtype: str = "bfloat16") -> tuple[TensorMeta, ...]:
    """Returns the checkpoint tensors of a named model, in checkpoint order.

    Raises:
        SourceError: an unknown name; lists the known ones.
    """
    config = MODELS.get(model)
    if config is None:
        raise SourceError(f"no shapes are known for model {model!r}; known: {', '.join(MODELS)}")
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config.vocabulary, config.hidden))]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        tensors += [
            (f"{prefix}.self_attn.q_proj.weight", (config.heads * config.head_dim, config.hidden)),
            (f"{prefix}.self_attn.k_proj.weight", (config.kv_heads * config.head_dim, config.hidden)),
            (f"{prefix}.self_attn.v_proj.weight", (config.kv_heads * config.head_dim, config.hidden)),
            (f"{prefix}.self_attn.o_proj.weight", (config.hidden, config.heads * config.head_dim)),
        ]
        if config.qk_norm:
            tensors += [(f"{prefix}.self_attn.{one}_norm.weight", (config.head_dim,)) for one in "qk"]
        if config.experts:
            tensors.append((f"{prefix}.mlp.gate.weight", (config.experts, config.hidden)))
        blocks = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.experts)] or [f"{prefix}.mlp"]
        width = config.expert_intermediate or config.intermediate
        for block in blocks:
            tensors += [
                (f"{block}.gate_proj.weight", (width, config.hidden)),
                (f"{block}.up_proj.weight", (width, config.hidden)),
                (f"{block}.down_proj.weight", (config.hidden, width)),
            ]
        tensors += [(f"{prefix}.{one}_layernorm.weight", (config.hidden,)) for one in ("input", "post_attention")]
    tensors.append(("model.norm.weight", (config.hidden,)))
    if not config.tied:
        tensors.append(("lm_head.weight", (config.vocabulary, config.hidden)))
    return tuple(TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape in tensors)
