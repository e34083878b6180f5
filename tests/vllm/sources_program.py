"""Run by test_interplay.py in a process of its own: what vLLM's trainer side reads of every source of rdt's.

Each source is asked as vLLM's backends ask theirs, on all ranks of its group: metadata, then passes in gather groups, of two
steps' weights. The oracle is the checkpoint that transformers writes. Prints one JSON object on its last line.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rdt_core import ModuleSource
from rdt_core.sources import CheckpointSource, IterableSource
from rdt_core.wire import TensorMeta
from rdt_testbed import models
from rdt_testbed.megatron import Layout

#: kind of model, changes to it, ranks; more layers than nine, so that an order of names is not one of numbers
CASES: dict[str, tuple[models.Kind, dict[str, Any], Layout]] = {
    "checkpoint": ("qwen3", {"num_hidden_layers": 11}, Layout()),
    "plain": ("glm4-moe", {}, Layout()),
    "tied": ("llama-tied", {}, Layout()),
    "fsdp2": ("glm4-moe", {}, Layout(dp=2)),
    "megatron": ("qwen3", {}, Layout(tp=2, pp=2)),
    "megatron experts": ("glm4-moe", {}, Layout(tp=2, pp=2, ep=2, etp=1)),
    "iterable": ("qwen3", {"num_hidden_layers": 11}, Layout(dp=2)),
}
STEPS = (1, 2)

Tensors = dict[str, torch.Tensor]
#: a source, and what gives it the weights of a step
Made = tuple[Any, Callable[[int, Tensors], Any]]


def saved(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def checkpoint(kind: models.Kind, changes: dict[str, Any], layout: Layout, folder: Path) -> Made:
    copy = folder.with_name("copy")
    models.save(models.build(kind, seed=0, **changes), copy, shard_size="500KB")
    source = CheckpointSource(copy)
    mapped = {shard.name: shard.tensor for shard in source.shards()}
    return source, lambda step, full: [mapped[name].copy_(full[name]) for name in mapped]


def module(kind: models.Kind, changes: dict[str, Any], layout: Layout, folder: Path) -> Made:
    model = models.build(kind, seed=0, **changes)
    return ModuleSource(model), lambda step, full: models.fill(model, step)


def fsdp2(kind: models.Kind, changes: dict[str, Any], layout: Layout, folder: Path) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = models.build(kind, seed=0, **changes)
    mesh = init_device_mesh("cpu", (layout.world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    source = ModuleSource(model)
    return source, lambda step, full: write(source, full)


def megatron(kind: models.Kind, changes: dict[str, Any], layout: Layout, folder: Path) -> Made:
    from rdt_megatron import MegatronSource
    from rdt_testbed.megatron.build import build

    _, chunks = build(kind, layout, **changes)
    source = MegatronSource(chunks, models.config(kind, **changes))
    return source, lambda step, full: write(source, full)


def iterable(kind: models.Kind, changes: dict[str, Any], layout: Layout, folder: Path) -> Made:
    """Sorted by name, in another dtype than it travels in, one after the other in the same memory."""
    now: Tensors = saved(folder)
    metadata = [TensorMeta(name=name, shape=tuple(now[name].shape), dtype="float32") for name in sorted(now)]
    buffer = torch.empty(max(tensor.numel() for tensor in now.values()), dtype=torch.float64)

    def iterate() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(now):
            yield name, buffer[: now[name].numel()].view(now[name].shape).copy_(now[name])

    return IterableSource(metadata, iterate), lambda step, full: now.update(full)


@torch.no_grad()
def write(source: Any, full: Tensors) -> None:
    for shard in source.shards():
        box = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.tensor.shape, strict=True))
        shard.tensor.copy_(full[shard.name][box])


MAKERS = {"checkpoint": checkpoint, "tied": module, "plain": module, "fsdp2": fsdp2, "iterable": iterable}


def read(layout: Layout, case: str, folder: Path) -> dict[str, Any]:
    """What one rank is given."""
    from vllm.distributed.weight_transfer.base import WeightSource, layerwise_groups

    from rdt_vllm import vllm_source

    kind, changes, _ = CASES[case]
    ours, put = MAKERS.get(case, megatron)(kind, changes, layout, folder / f"{case} {STEPS[0]}")
    source = vllm_source(ours, dist.group.WORLD if layout.world > 1 else None)
    metadata = source.metadata()
    names = [meta.name for meta in metadata]
    found: dict[str, Any] = {
        "is vLLM's": isinstance(source, WeightSource),
        "holds": "all" if source.held_names() is None else "a part",
        "metadata": [(meta.name, str(meta.dtype), list(meta.shape)) for meta in metadata],
        "wrong": [],
    }
    for step in STEPS:
        full = saved(folder / f"{case} {step}")
        put(step, full)
        batches = [(names, [tensor.clone() for tensor in tensors]) for names, tensors in source.iter_groups()]
        if [given for given, _ in batches] != layerwise_groups(names):
            found["wrong"].append(f"step {step}: groups")
        given = {name: tensor for names, tensors in batches for name, tensor in zip(names, tensors, strict=True)}
        if [(name, one.dtype, tuple(one.shape)) for name, one in given.items()] != [
            (meta.name, meta.dtype, meta.shape) for meta in metadata
        ]:
            found["wrong"].append(f"step {step}: other than the metadata")
        found["wrong"] += [f"step {step}: {name} is missing" for name in full.keys() - given.keys()]
        found["wrong"] += [f"step {step}: {name} is in no checkpoint" for name in given.keys() - full.keys()]
        found["wrong"] += [
            f"step {step}: {name}"
            for name in full.keys() & given.keys()
            if full[name].dtype != given[name].dtype or not torch.equal(full[name], given[name])
        ]
    return found


def main(folder: Path) -> dict[str, Any]:
    from rdt_testbed.megatron import rank_server
    from rdt_testbed.megatron.shim import cpu_megatron

    # once, before the ranks are forked
    importlib.import_module("vllm.distributed.weight_transfer.base")
    importlib.import_module("rdt_megatron")

    found: dict[str, Any] = {}
    with cpu_megatron():
        for case, (kind, changes, layout) in CASES.items():
            for step in STEPS:
                models.save(models.build(kind, seed=step, **changes), folder / f"{case} {step}")
            answers = rank_server.run(read, layout, (case, folder), 60.0)
            found[case] = [answer if good else {"wrong": [answer]} for good, answer in answers]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        result = main(Path(place))
    print(json.dumps(result), flush=True)
