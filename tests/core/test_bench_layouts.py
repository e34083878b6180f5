"""Engine layouts, row shards and sums of the bench: every element in its place on some rank, and every change noticed."""

from __future__ import annotations

import pytest
import torch

from rdt_core.bench import digests
from rdt_core.bench.layouts import EngineModule, EngineRank
from rdt_core.bench.source import RowSharded
from rdt_core.landing import ModuleLanding
from rdt_core.shapes import checkpoint_tensors, config_of

pytestmark = pytest.mark.unit

SMALL = ("tiny", "tiny-moe", "tiny-mla")


def full(model: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        meta.name: torch.randn(meta.shape, generator=generator).to(getattr(torch, meta.dtype))
        for meta in checkpoint_tensors(model)
    }


def module(model: str, rank: int, tp: int, engine: str = "vllm") -> EngineModule:
    return EngineModule(checkpoint_tensors(model), config_of(model), EngineRank(engine, rank, tp), "cpu")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", SMALL)
def test_the_ranks_together_hold_every_element_where_its_box_says(model: str, tp: int) -> None:
    weights = full(model)
    covered = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in weights.items()}
    for rank in range(tp):
        one = module(model, rank, tp)
        one.load_weights(weights.items())
        for box in one.boxes():
            assert torch.equal(one.part(box.name), weights[box.name].narrow(box.axis, box.start, box.count))
            covered[box.name].narrow(box.axis, box.start, box.count).fill_(True)
        # no parameter has an element that nothing is loaded into
        assert sum(one.part(box.name).numel() for box in one.boxes()) == sum(p.numel() for p in one.parameters())
    assert all(bool(mask.all()) for mask in covered.values())


def test_fused_parameters_are_as_engines_hold_them() -> None:
    weights = full("tiny-moe")
    one = module("tiny-moe", 1, 2)
    one.load_weights(weights.items())
    held = dict(one.named_parameters())
    layer = "model.layers.0"
    assert torch.equal(
        held[f"{layer}.self_attn.qkv_proj.weight"],
        torch.cat([weights[f"{layer}.self_attn.{p}_proj.weight"].chunk(2)[1] for p in "qkv"]),
    )
    experts = [f"{layer}.mlp.experts.{e}" for e in range(4)]
    assert torch.equal(
        held[f"{layer}.mlp.experts.w13_weight"],
        torch.stack(
            [torch.cat([weights[f"{e}.{p}_proj.weight"].chunk(2)[1] for p in ("gate", "up")]) for e in experts]
        ),
    )
    assert torch.equal(
        held[f"{layer}.mlp.experts.w2_weight"],
        torch.stack([weights[f"{e}.down_proj.weight"].chunk(2, dim=1)[1] for e in experts]),
    )
    assert torch.equal(held["model.embed_tokens.weight"], weights["model.embed_tokens.weight"].chunk(2)[1])


def test_key_value_heads_are_shared_where_ranks_are_more() -> None:
    weights = full("tiny")  # two key-value heads of 16 rows
    for rank, head in enumerate((0, 0, 1, 1)):
        one = module("tiny", rank, 4)
        one.load_weights(weights.items())
        name = "model.layers.1.self_attn.k_proj.weight"
        assert torch.equal(one.part(name), weights[name][16 * head : 16 * head + 16])


def test_engines_differ_in_names() -> None:
    assert "model.layers.0.self_attn.fused_qkv_a_proj.weight" in dict(module("tiny-mla", 0, 1).named_parameters())
    assert "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight" in dict(
        module("tiny-mla", 0, 1, "sglang").named_parameters()
    )


@pytest.mark.parametrize("model", SMALL)
def test_the_loader_can_be_traced(model: str) -> None:
    one = module(model, 1, 2)
    landing = ModuleLanding(one, one.load_weights)
    assert set(landing.trace(checkpoint_tensors(model)).taken) == set(full(model))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", SMALL)
def test_sums_of_all_source_ranks_are_the_readers(model: str, ranks: int) -> None:
    tensors = checkpoint_tensors(model)
    sources = [RowSharded(tensors, rank, ranks, "cpu") for rank in range(ranks)]
    weights = {
        meta.name: torch.cat([source.shards()[number].tensor for source in sources])
        for number, meta in enumerate(tensors)
    }
    assert all(weights[meta.name].shape == meta.shape for meta in tensors)
    for rank in range(2):
        one = module(model, rank, 2)
        one.load_weights(weights.items())
        boxes = one.boxes()
        assert digests.add(s.digests(boxes) for s in sources) == digests.collect(one.digests())
        sources[0].change()
        stale = digests.add(s.digests(boxes) for s in sources)
        held = digests.collect(one.digests())
        assert all(a != b for a, b, box in zip(stale, held, boxes, strict=True) if box.start == 0 and box.count)
        weights = {
            meta.name: torch.cat([source.shards()[number].tensor for source in sources])
            for number, meta in enumerate(tensors)
        }


def test_a_swap_a_shift_a_transposition_and_one_bit_change_the_sum() -> None:
    tensor = torch.randn(64, 64, dtype=torch.bfloat16)
    spoiled = [tensor.clone() for _ in range(5)]
    spoiled[0][[3, 9]] = tensor[[9, 3]]
    spoiled[1][:, [3, 9]] = tensor[:, [9, 3]]
    spoiled[2] = tensor.roll(1, 0)
    spoiled[3] = tensor.t().contiguous()
    spoiled[4].view(torch.int16)[63, 63] ^= 1
    sums = digests.collect(digests.digest(one) for one in (tensor, *spoiled))
    assert len(set(sums)) == 6
    assert digests.collect([digests.digest(tensor[8:, :], 8), digests.digest(tensor[:8])]) != sums[:1]
    assert (
        digests.add([[one] for one in digests.collect([digests.digest(tensor[8:], 8), digests.digest(tensor[:8])])])
        == sums[:1]
    )
    columns = [digests.digest(tensor[:, :5]), digests.digest(tensor[:, 5:], 0, 5)]
    assert digests.add([[one] for one in digests.collect(columns)]) == sums[:1]


def test_all_words_change_from_sync_to_sync_and_stay_finite() -> None:
    source = RowSharded(checkpoint_tensors("tiny-mla"), 0, 2, "cpu")
    for _ in range(20):
        before = [shard.tensor.view(torch.int16).clone() for shard in source.shards()]
        assert all(bool(shard.tensor.isfinite().all()) for shard in source.shards())
        source.change()
        assert all(
            bool((a != shard.tensor.view(torch.int16)).all()) for a, shard in zip(before, source.shards(), strict=True)
        )
