"""Makes a tiny GPTModel on this rank, wrapped as a trainer would, with values that show whose they are."""

from __future__ import annotations

import copy
import zlib
from datetime import timedelta
from typing import Any

import torch

from .. import models
from .config import padded_vocabulary, transformer_config
from .layout import Layout

TIMEOUT_S = 60


def initialize(layout: Layout, rank: int, rendezvous: str) -> None:
    """Makes this process one rank of a layout.

    Args:
        layout: of the world.
        rank: of this process, 0 to `layout.world` - 1.
        rendezvous: a file that does not exist yet, the same for all ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=layout.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp or None,
    )  # fmt: skip


def build(kind: models.Kind, layout: Layout, **changes: Any) -> tuple[Any, list[torch.nn.Module]]:
    """Makes this rank's chunks of `models.config(kind, **changes)`, in evaluation mode.

    Needs `initialize` and `shim.cpu_megatron`. Values are Megatron's initial ones: the same on every expert parallel rank.

    Returns:
        Megatron's configuration, and one model for each chunk, wrapped in Float16Module and DDP where the layout says so.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    theirs = models.config(kind, **changes)
    config = transformer_config(kind, layout, **changes)
    chunks: list[torch.nn.Module] = []
    for number in range(layout.vpp):
        stage = number if layout.vpp > 1 else None
        if stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        spec, last = _layers(config, stage)
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=stage) if layout.mtp else None
        rope = theirs.rope_parameters
        chunk = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=padded_vocabulary(theirs.vocab_size, layout),
            max_sequence_length=theirs.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True, share_embeddings_and_output_weights=theirs.tie_word_embeddings,
            position_embedding_type="rope", rotary_base=rope["rope_theta"],
            rotary_percent=rope.get("partial_rotary_factor", 1.0), mtp_block_spec=mtp, vp_stage=stage,
        )  # fmt: skip
        if layout.grouped:
            _allow_grouped(chunk)
        chunks.append(_wrap(chunk, config, layout).eval())
    return config, chunks


def _layers(config: Any, stage: int | None) -> tuple[Any, Any]:
    """Returns the specs of this stage's layers, and of what multi-token prediction copies its layer from."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp

    options = {"use_transformer_engine": False, "normalization": "RMSNorm"}
    block = get_gpt_decoder_block_spec(config, vp_stage=stage, **options)
    last = get_gpt_decoder_layer_specs(config, **options)[-1]
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in (*block.layer_specs, last):
            # there is no low-rank query to be normalised: ignored up to 0.18, refused from 0.19 on
            layer.submodules.self_attention.submodules.q_layernorm = IdentityOp
    return block, last


def _allow_grouped(chunk: torch.nn.Module) -> None:
    """Grouped experts ask for bfloat16, which only their kernel needs; `shim` has one that does not."""
    for name, module in chunk.named_modules():
        if name.endswith(".experts"):
            module.config = copy.copy(module.config)
            module.config.bf16 = True


def _wrap(chunk: torch.nn.Module, config: Any, layout: Layout) -> torch.nn.Module:
    if layout.bf16:
        from megatron.core.transformer.module import Float16Module

        chunk = Float16Module(config, chunk)
    if layout.distopt:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        options = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        chunk = DistributedDataParallel(config, options, chunk)
    return chunk


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Returns the GPTModel below whatever wraps it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def make_optimizer(chunks: list[torch.nn.Module], layout: Layout) -> Any:
    """Returns Megatron's own optimizer (Adam, distributed where the layout says so, masters in float32)."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=0.01, clip_grad=0.0, bf16=layout.bf16, use_distributed_optimizer=layout.distopt,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
    )  # fmt: skip
    return get_megatron_optimizer(options, chunks)


@torch.no_grad()
def fill(chunks: list[torch.nn.Module], seed: int) -> None:
    """Gives every parameter, and the routers' biases, values of its name, place and seed.

    Ranks that hold the same part hold the same values (data and context parallel ranks, replicated parameters, tied
    embeddings); all others differ, so that a part in the wrong place is noticed.
    """
    from megatron.core import parallel_state

    tensor, stage = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    for number, chunk in enumerate(unwrapped(chunk) for chunk in chunks):
        tied = chunk.share_embeddings_and_output_weights
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))
        for name, parameter in (*chunk.named_parameters(), *biases):
            place: tuple[Any, ...] = (stage, number)
            if ".experts." in name:
                expert = parallel_state.get_expert_model_parallel_rank()
                place += ("expert", expert, parallel_state.get_expert_tensor_parallel_rank())
            elif getattr(parameter, "tensor_model_parallel", False):
                place += (tensor,)
            if name.startswith("embedding.") or (tied and name.startswith("output_layer.")):
                # the table, or its copy on the last stage
                name, place = "embedding", (tensor,)
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, name, place)).encode()))
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.08 * values)
