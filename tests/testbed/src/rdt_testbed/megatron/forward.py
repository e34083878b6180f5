"""Runs a tiny model through Megatron's own pipeline schedule and returns whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .build import unwrapped
from .layout import Layout
from .shim import context_positions


@torch.no_grad()
def forward(
    config: Any, chunks: list[torch.nn.Module], layout: Layout, tokens: torch.Tensor, vocabulary: int
) -> list[torch.Tensor] | None:
    """Computes logits on all ranks together; gathers, so that only tests may call it.

    Args:
        config: of `build`.
        chunks: of `build`.
        layout: of `build`.
        tokens: of shape [batch, length], the same on every rank; length a multiple of 2 * tp * cp.
        vocabulary: entries without padding.

    Returns:
        On the last stage: logits of shape [batch, length, vocabulary], of the model and then of each layer for multi-token
        prediction. On other stages: None.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch, length = tokens.shape
    context = parallel_state.get_context_parallel_group()
    own = context_positions(length, context.rank(), layout.cp) if layout.cp > 1 else torch.arange(length)
    part, positions = tokens[:, own], own.expand(batch, -1).contiguous()
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    outputs: list[torch.Tensor] = []
    hooks = [
        # a loss is computed in place
        head.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].clone()))
        for head in (getattr(unwrapped(chunk), "output_layer", None) for chunk in chunks)
        if head is not None
    ]
    # a model that predicts more tokens wants something to compare them with
    labels = {"labels": part} if layout.mtp else {}

    def step(iterator: Any, model: Any) -> Any:
        return model(part, positions, mask, **labels), lambda output, non_loss_data=False: output

    rounds = layout.pp if layout.vpp > 1 else 1
    iterators = [iter(range(rounds)) for _ in chunks]
    run = get_forward_backward_func()
    run(
        forward_step_func=step, data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=rounds, seq_length=length,
        micro_batch_size=batch, forward_only=True, collect_non_loss_data=True,
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    if not outputs:
        return None
    # the last round's, the model's own first (which Megatron computes after those of the further tokens)
    last = outputs[-1 - layout.mtp :]
    return [_whole(one, layout, length)[..., :vocabulary] for one in (last[-1], *last[:-1])]


def _whole(part: torch.Tensor, layout: Layout, length: int) -> torch.Tensor:
    """[length / cp, batch, vocabulary / tp] of each rank to [batch, length, vocabulary]."""
    from megatron.core import parallel_state

    columns = _gather(part, parallel_state.get_tensor_model_parallel_group())
    rows = torch.cat(_gather(torch.cat(columns, -1), parallel_state.get_context_parallel_group()))
    if layout.cp > 1:
        order = torch.cat([context_positions(length, rank, layout.cp) for rank in range(layout.cp)])
        rows = rows[order.argsort()]
    return rows.transpose(0, 1).float().contiguous()


def _gather(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
