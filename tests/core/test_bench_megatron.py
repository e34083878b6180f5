"""Megatron ranks of the bench: memory as Megatron fills it, replicas that agree, sums that add up, layouts that are refused."""

from __future__ import annotations

from math import prod

import pytest
import torch

from rdt_core.bench import BenchOptions, digests
from rdt_core.bench import options as read
from rdt_core.bench.laidout import LaidOut
from rdt_core.bench.layouts import EngineModule, EngineRank
from rdt_core.shapes import Config, checkpoint_tensors, config_of
from rdt_core.trainers import MegatronLayout

pytestmark = pytest.mark.unit

LAYOUTS = [
    ("tiny", MegatronLayout(4, tp=2, pp=2)),
    ("tiny", MegatronLayout(8, tp=4, cp=2)),  # fewer query groups than ranks, each rank twice
    ("tiny-moe", MegatronLayout(4, tp=2, pp=2, ep=2)),
    ("tiny-moe", MegatronLayout(8, tp=2, ep=2, etp=2)),
    ("tiny-mla", MegatronLayout(6, tp=2, pp=3, ep=2)),  # a vocabulary that is padded
]
Weights = dict[str, torch.Tensor]


def sources(model: str, layout: MegatronLayout) -> list[LaidOut]:
    return [LaidOut(checkpoint_tensors(model), config_of(model), layout, rank, "cpu") for rank in range(layout.ranks)]


def gathered(model: str, ranks: list[LaidOut]) -> Weights:
    """The checkpoint out of all shards; boxes that several ranks hold must hold the same."""
    weights = {
        meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in checkpoint_tensors(model)
    }
    seen = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in weights.items()}
    for source in ranks:
        for shard in source.shards():
            box = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.tensor.shape, strict=True))
            held, words = weights[shard.name][box], shard.tensor.contiguous().view(torch.int16)
            if bool(seen[shard.name][box].any()):
                assert torch.equal(held.contiguous().view(torch.int16), words), shard.name
            held.copy_(shard.tensor)
            seen[shard.name][box] = True
    assert all(bool(mask.all()) for mask in seen.values())
    return weights


def converted(name: str, weights: Weights, config: Config, rank: int, tp: int) -> torch.Tensor:
    """A rank's parameter as checkpoint converters for Megatron make it out of checkpoint tensors."""
    path, _, kind = name.rpartition(".")
    if path.endswith(".qkv"):
        parts = [weights[f"{path[:-3]}{one}_proj.{kind}"] for one in "qkv"]
        grouped = [one.reshape(config.kv_heads, -1, *one.shape[1:]) for one in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp)[rank]
    if path.endswith(".gate_up"):
        return torch.cat([weights[f"{path[:-7]}{one}_proj.{kind}"].chunk(tp)[rank] for one in ("gate", "up")])
    whole = weights[name]
    if path.endswith(("embed_tokens", "lm_head")):
        rows = -(-whole.shape[0] // (128 * tp)) * 128 * tp
        return torch.cat([whole, whole.new_zeros(rows - whole.shape[0], whole.shape[1])]).chunk(tp)[rank]
    if path.endswith(("o_proj", "down_proj")):
        return whole.chunk(tp, dim=1)[rank]
    return whole.chunk(tp)[rank] if path.endswith(("q_b_proj", "kv_b_proj")) else whole


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_memory_is_as_converters_for_megatron_fill_it(model: str, layout: MegatronLayout) -> None:
    ranks, config = sources(model, layout), config_of(model)
    weights = gathered(model, ranks)
    for rank, source in enumerate(ranks):
        within = rank % layout.stage_ranks
        for parameter, flat in zip(source.parameters, source.flat, strict=True):
            expert = ".experts." in parameter.name
            tp, at = (layout.etp, within % layout.etp) if expert else (layout.tp, within % layout.tp)
            want = converted(parameter.name, weights, config, at, tp).flatten().view(torch.int16)
            found = flat.view(torch.int16)
            assert found.shape == want.shape
            inside = sum(prod(piece.shape) for piece in parameter.pieces)
            kept = inside * flat.element_size() // 2  # padding stands at the end
            assert torch.equal(found[:kept], want[:kept]), parameter.name


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_sums_of_all_ranks_are_the_readers_and_replicas_count_once(model: str, layout: MegatronLayout) -> None:
    tensors, ranks = checkpoint_tensors(model), sources(model, layout)
    for _ in range(2):
        weights = gathered(model, ranks)
        for rank in range(2):
            one = EngineModule(tensors, config_of(model), EngineRank("vllm", rank, 2), "cpu")
            one.load_weights(weights.items())
            boxes = one.boxes()
            assert digests.add(source.digests(boxes) for source in ranks) == digests.collect(one.digests())
        before = [shard.tensor.clone() for source in ranks for shard in source.shards()]
        assert all(bool(one.isfinite().all()) for one in before)
        for source in ranks:
            source.change()
        after = [shard.tensor for source in ranks for shard in source.shards()]
        assert all(bool((a.view(torch.int16) != b.view(torch.int16)).all()) for a, b in zip(before, after, strict=True))


def test_ranks_know_what_they_hold_and_padding_is_nobodys() -> None:
    ranks = sources("tiny-mla", MegatronLayout(6, tp=2, pp=3, ep=2))
    names = [{meta.name for meta in source.metadata()} for source in ranks]
    assert names[0] == {shard.name for shard in ranks[0].shards()}
    assert "model.embed_tokens.weight" in names[0]
    assert not names[0] & names[2]
    assert "lm_head.weight" in names[5]
    assert any(".experts.0." in name for name in names[2])
    assert not any(".experts.0." in name for name in names[3])
    (number,) = (at for at, one in enumerate(ranks[1].parameters) if "embed" in one.name)
    rows = [source.flat[number].view(256, 64)[-12:] for source in ranks[:2]]
    assert 500 % 256 == 256 - 12
    assert not torch.equal(rows[0].view(torch.int16), rows[1].view(torch.int16))


def test_layouts_that_megatron_refuses_are_refused_by_name() -> None:
    for model, layout, words in [
        (
            "smollm2-135m",
            "tp=2,ranks=2",
            "--trainer megatron:ranks=2,tp=2: Megatron holds no smollm2-135m like this: 2 tensor",
        ),
        ("tiny", "tp=2,cp=2,ranks=6", "6 source ranks are no multiple of tp x cp x pp = 4"),
        ("tiny", "ep=2,ranks=2", "this model has none"),
        ("tiny-moe", "etp=3,ranks=3", "3 tensor parallel ranks do not divide the 32 of"),
        ("tiny-mla", "pp=4,ranks=4", "3 layers leave some of the 4 stages without any"),
        ("qwen3-30b-a3b", "tp=3,ranks=3", "do not divide the 32 attention heads"),
        ("qwen3-8b", "vpp=2,ranks=1", "pp=1 has none"),
    ]:
        with pytest.raises(read.OptionError, match=words):
            options(model, layout).check()
    assert options("tiny", "tp=2,cp=2,ranks=4").check().trainer == "megatron:ranks=4,tp=2,cp=2"
    with pytest.raises(read.OptionError, match="a layout of 4 ranks for 2 source ranks"):
        BenchOptions(model="tiny", megatron=MegatronLayout(4)).check()


def options(model: str, layout: str) -> BenchOptions:
    spec = read.trainer(f"megatron:{layout}")
    return BenchOptions(model=model, ranks=spec.get("ranks"), megatron=read.megatron(spec))
