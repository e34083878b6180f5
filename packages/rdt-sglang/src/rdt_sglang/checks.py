"""Which configurations of an SGLang engine a weight sync refuses, and which it warns about. Called when it connects.

Every rule names what was found, why it matters and the way out. Refused is what would serve wrong weights, write into the
wrong place or hang; what works with a limit is a warning, logged once and handed to the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rdt_core.errors import EngineError

Selector = Literal["target", "draft", "all"]
SELECTORS: tuple[Selector, ...] = ("target", "draft", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What of an engine's configuration a sync depends on. Names are SGLang's own server arguments where there is one.

    Attributes:
        pp_size: pipeline stages.
        dp_size: replicas behind one data parallel controller, without DP attention.
        attn_dp_size: groups of DP attention.
        local_control: `enable_dp_attention_local_control_broadcast`.
        enable_eplb: experts are moved between ranks while serving.
        elastic_ep: backend of elastic expert parallelism, or None.
        weight_cache_mode: "off", or how weights are shared with a daemon.
        enable_memory_saver: weights may be unmapped and mapped again.
        disaggregation: "null", "prefill" or "decode".
        enable_lora: adapters may be loaded beside the base weights.
        hicache_storage: storage backend of the hierarchical cache, or None.
        has_draft: a draft model with weights of its own is loaded.
        plain_processes: called through SGLang's RPC instead of an actor's methods.
    """

    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    local_control: bool = False
    enable_eplb: bool = False
    elastic_ep: str | None = None
    weight_cache_mode: str = "off"
    enable_memory_saver: bool = False
    disaggregation: str = "null"
    enable_lora: bool = False
    hicache_storage: str | None = None
    has_draft: bool = False
    plain_processes: bool = False

    @classmethod
    def of(cls, scheduler: Any, *, plain_processes: bool) -> Configuration:
        """Reads the configuration of an SGLang `Scheduler` in its own process."""
        from sglang.srt import runtime_context as context

        parallel, features = context.get_parallel(), context.get_exec()
        attn_dp_size = int(parallel.attn_dp_size) if parallel.attn_dp_enabled else 1
        draft = scheduler.draft_worker
        return cls(
            pp_size=int(parallel.pp_size),
            dp_size=int(parallel.num_dp_ranks) // attn_dp_size,
            attn_dp_size=attn_dp_size,
            local_control=bool(parallel.enable_dp_attention_local_control_broadcast),
            enable_eplb=bool(features.moe.enable_eplb),
            elastic_ep=features.moe.elastic_ep_backend,
            weight_cache_mode=str(context.get_model().weight_cache_mode),
            enable_memory_saver=bool(features.features.enable_memory_saver),
            disaggregation=str(context.get_disagg().disaggregation_mode),
            enable_lora=bool(context.get_lora().enable_lora),
            hicache_storage=context.get_memory().hicache_storage_backend,
            has_draft=draft is not None and bool(draft.weight_update_runners()),
            plain_processes=plain_processes,
        )


def check(found: Configuration, selector: str, who: str) -> list[str]:
    """Judges a configuration.

    Args:
        found: the engine's.
        selector: which models are to be updated.
        who: the engine rank, for errors.

    Returns:
        Warnings: what works, but not as one might expect.

    Raises:
        EngineError: lists everything that cannot work.
    """
    refused = list(_refused(found, selector))
    if refused:
        raise EngineError(f"{who}: this engine's weights cannot be synchronised: {'; '.join(refused)}")
    return list(_warned(found, selector))


def _refused(found: Configuration, selector: str) -> Iterable[str]:
    if selector not in SELECTORS:
        yield f"selector {selector!r} is unknown; there are {', '.join(SELECTORS)}"
    if selector == "draft" and not found.has_draft:
        yield "selector 'draft' was given, but the engine has no draft model with weights of its own; use 'target'"
    if found.enable_eplb:
        yield (
            "expert load balancing moves experts between ranks while serving, and a traced plan would write into the wrong "
            "ones; start SGLang without --enable-eplb"
        )
    if found.elastic_ep:
        yield f"elastic expert parallelism ({found.elastic_ep}) changes which rank holds which expert; start without it"
    if found.pp_size > 1:
        yield (
            f"pipeline parallelism (pp_size {found.pp_size}): SGLang's event loop of pipeline stages does not stop at a pause, "
            "so weights would change under running batches; use tensor parallelism"
        )
    if found.attn_dp_size > 1 and found.dp_size > 1:
        yield f"DP attention inside {found.dp_size} replicas; start each replica as an engine of its own"
    if found.local_control:
        yield (
            "with enable_dp_attention_local_control_broadcast the ranks of one batch pause at different times; start SGLang "
            "without it"
        )
    if found.plain_processes and found.dp_size * found.attn_dp_size > 1:
        yield (
            f"SGLang's RPC reaches one of {found.dp_size * found.attn_dp_size} data parallel schedulers only; start SGLang "
            "with --use-ray, or each replica as an engine of its own"
        )
    if found.weight_cache_mode != "off":
        yield (
            f"the weight cache ({found.weight_cache_mode}) shares this engine's weights with others, which would be written "
            "too; start SGLang with --weight-cache-mode off"
        )
    if found.enable_memory_saver:
        yield (
            "the memory saver maps weights to other memory when they are released and resumed, and registered addresses "
            "would read or write elsewhere; start SGLang without --enable-memory-saver"
        )


def _warned(found: Configuration, selector: str) -> Iterable[str]:
    if found.disaggregation == "prefill":
        yield (
            "PD disaggregation, prefill engine: pause with mode retract. A request in the middle of a chunked prefill keeps "
            "the chunks of the old version; whatever was prefilled before is sent to decode engines as it is. Sync prefill and "
            "decode engines in the same step, before either resumes, with no prefill in flight"
        )
    if found.disaggregation == "decode":
        yield (
            "PD disaggregation, decode engine: with mode retract every running request is prefilled again under the new "
            "version after the resume, which needs its prefill engine at that version first; with mode in_place it goes on "
            "from the old version's KV cache"
        )
    if found.enable_lora:
        yield "LoRA: the base weights are updated; adapters that are loaded stay as they are, trained against older base weights"
    if found.hicache_storage:
        yield (
            f"hierarchical cache with storage ({found.hicache_storage}): a cache reset does not reach what lies there, so "
            "prefixes of older versions may come back; clear it (route /hicache/storage-backend) after each sync"
        )
    if selector == "target" and found.has_draft:
        yield (
            "selector 'target': the draft model keeps its weights; outputs stay right, but fewer drafted tokens are accepted "
            "as the target moves on. Give the trainer's source the draft's tensors and use 'all'"
        )
    if found.attn_dp_size > 1:
        yield f"DP attention ({found.attn_dp_size} groups) is planned for, but was never run by the tests of this package"


def check_blocks(block: tuple[int, int], partitions: Mapping[str, tuple[int, int]]) -> list[str]:
    """Finds quantised layers whose scale blocks do not divide under tensor parallelism.

    Args:
        block: rows and columns that share one scale, as in `weight_block_size` of a checkpoint's quantisation.
        partitions: by name of the layer: rows and columns that one rank holds.

    Returns:
        One line for each layer whose rows or columns are no multiple of the block: two ranks would share a scale.
    """
    return [
        f"{name}: {rows} x {columns} per rank against blocks of {block[0]} x {block[1]}"
        for name, (rows, columns) in partitions.items()
        if rows % block[0] or columns % block[1]
    ]


def check_quantised_layout(model: torch.nn.Module, who: str) -> None:
    """Refuses block-quantised layers that tensor parallelism cuts inside a block.

    Raises:
        EngineError: names the layers and the sizes.
    """
    block = getattr(getattr(model, "quant_config", None), "weight_block_size", None)
    if not block:
        return
    partitions = {
        name: (int(module.output_size_per_partition), int(module.input_size_per_partition))
        for name, module in model.named_modules()
        if hasattr(module, "output_size_per_partition") and hasattr(module, "input_size_per_partition")
    }
    wrong = check_blocks((int(block[0]), int(block[1])), partitions)
    if wrong:
        raise EngineError(
            f"{who}: {len(wrong)} layers are cut inside a quantisation block, so that no rank holds a whole scale: "
            f"{'; '.join(wrong[:8])}. Use a tensor parallel size that divides into blocks"
        )
