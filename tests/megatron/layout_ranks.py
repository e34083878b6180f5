"""What `test_layouts.py` asks of Megatron ranks: what their sources declare, and what the model computes."""

from __future__ import annotations

from typing import Any

import torch

from rdt_megatron import MegatronSource
from rdt_testbed import models
from rdt_testbed.megatron import Layout
from rdt_testbed.megatron.build import build, fill, make_optimizer, unwrapped
from rdt_testbed.megatron.forward import forward
from rdt_testbed.megatron.recording import Record


def observe(layout: Layout, kind: models.Kind, changes: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    """Declares and reads a model's shards, after a step where there is an optimizer, and runs the model."""
    config, chunks = build(kind, layout, **changes)
    fill(chunks, seed=1)
    theirs = models.config(kind, **changes)
    with Record() as record:
        source = MegatronSource(chunks, theirs)
        metadata = source.metadata()
        before = source.shards()
        place = source.fingerprint()
    moved = [shard.tensor.clone() for shard in before]
    if layout.distopt:
        step(chunks, layout)
    with record:
        shards = source.shards()
        still = source.fingerprint() == place
    stored = {
        tensor.untyped_storage().data_ptr()
        for chunk in map(unwrapped, chunks)
        for tensor in (*chunk.parameters(), *chunk.buffers())
    }
    return {
        "metadata": [(one.name, tuple(one.shape), one.dtype) for one in metadata],
        "ignored": list(source.ignored()),
        "shards": [(one.name, one.offset, one.tensor.clone()) for one in shards],
        "views": all(one.tensor.untyped_storage().data_ptr() in stored for one in shards),
        "same": still and all(a.tensor.data_ptr() == b.tensor.data_ptr() for a, b in zip(before, shards, strict=True)),
        "trained": sum(not torch.equal(a, b.tensor) for a, b in zip(moved, shards, strict=True)),
        "storages": len({one.tensor.untyped_storage().data_ptr() for one in shards}),
        "collectives": record.collectives,
        "largest": record.largest,
        "logits": forward(config, chunks, layout, tokens, theirs.vocab_size),
    }


def step(chunks: list[torch.nn.Module], layout: Layout) -> None:
    """One step of Megatron's optimizer, with gradients that are equal wherever parameters are."""
    optimizer = make_optimizer(chunks, layout)
    for chunk in chunks:
        for parameter in unwrapped(chunk).parameters():
            parameter.main_grad.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    good, *_ = optimizer.step()
    assert good


def notice(layout: Layout) -> tuple[list[str], int]:
    """What `Record` sees of a collective and of a new tensor."""
    with Record() as record:
        torch.distributed.all_reduce(torch.ones(1000))
    return record.collectives, record.largest
