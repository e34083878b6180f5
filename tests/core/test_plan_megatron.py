"""The rules of a plan's Megatron layout against the real thing: the boxes that MegatronSource declares on stock megatron-core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_core.errors import SourceError
from rdt_core.plan.trainers import make_manifests
from rdt_core.routing import Routing
from rdt_core.shapes import config_of, read_config, tensors_of
from rdt_core.trainers import MegatronLayout
from rdt_core.wire import NodeMeta, SourceManifest
from rdt_testbed import models
from rdt_testbed.megatron import Layout
from rdt_testbed.megatron.config import PADDING
from rdt_testbed.megatron.ranks import Ranks

PROGRAM = Path(__file__).parents[1] / "megatron" / "layout_ranks.py"
Boxes = set[tuple[str, tuple[int, ...], tuple[int, ...]]]

#: every rule, and ranks that are numbered in every way: kind, layout, layers, vocabulary
CELLS = [
    ("llama", Layout(tp=4), 2, 20),  # the last rank holds nothing but padding
    pytest.param("llama-tied", Layout(tp=2, pp=2), 2, 250, marks=pytest.mark.thorough),
    ("qwen2", Layout(tp=4), 2, 250),  # fewer query groups than ranks
    pytest.param("qwen3-moe", Layout(tp=2, dp=2, ep=2, etp=2), 2, 250, marks=pytest.mark.thorough),
    pytest.param("deepseek-v3", Layout(tp=2, dp=2, ep=4, etp=1), 2, 250, marks=pytest.mark.thorough),
    ("deepseek-v3", Layout(tp=2, pp=2, last=1, ep=2, etp=1), 4, 250),
    ("glm4-moe", Layout(pp=2, vpp=2), 4, 250),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(PROGRAM) as ranks:
        yield ranks


def node(rank: int) -> NodeMeta:
    return NodeMeta(node_id=f"n{rank}", boot_id=f"n{rank}", hostname="host", pid=rank + 1)


def boxes(manifest: SourceManifest) -> Boxes:
    return {(manifest.tensors[shard.tensor].name, shard.offset, shard.shape) for shard in manifest.shards}


def planned(layout: Layout) -> MegatronLayout:
    return MegatronLayout(
        ranks=layout.world, tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp or layout.tp, vpp=layout.vpp,
        first=layout.first, last=layout.last, cut_latent=True, vocabulary_multiple=PADDING,
    )  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "layout", "layers", "vocabulary"), CELLS, ids=lambda value: getattr(value, "name", None)
)
def test_boxes_are_those_of_the_real_source(
    kind: models.Kind, layout: Layout, layers: int, vocabulary: int, ranks: Ranks, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": vocabulary}
    observed = ranks.run("observe", layout, kind, changes, torch.zeros(2, 16, dtype=torch.long), timeout_s=120)
    (tmp_path / "config.json").write_text(json.dumps(models.config(kind, **changes).to_dict()))
    config = read_config(tmp_path)
    tensors = tensors_of(config, "float32")
    manifests = make_manifests(planned(layout), tensors, config, [node(rank) for rank in range(layout.world)])
    for one, manifest in zip(observed, manifests, strict=True):
        assert boxes(manifest) == {(name, tuple(offset), tuple(value.shape)) for name, offset, value in one["shards"]}
        declared = {(meta.name, meta.shape, meta.dtype) for meta in manifest.tensors}
        assert declared == {(name, tuple(shape), dtype) for name, shape, dtype in one["metadata"]}


@pytest.mark.unit
@pytest.mark.parametrize("mode", ["live", "snapshot"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-mla", MegatronLayout(ranks=12, tp=2, pp=3, ep=4)),
        ("tiny-mla", MegatronLayout(ranks=8, tp=2, pp=1, ep=2, etp=2)),
        ("tiny-moe", MegatronLayout(ranks=16, tp=4, pp=2, ep=4)),
        ("tiny", MegatronLayout(ranks=8, tp=4, pp=2)),
    ],
)
def test_every_element_has_an_owner_and_shards_do_not_share_memory(
    model: str, layout: MegatronLayout, mode: str
) -> None:
    config = config_of(model)
    tensors = tensors_of(config)
    manifests = make_manifests(layout, tensors, config, [node(rank) for rank in range(layout.ranks)], mode=mode)
    routing = Routing(manifests)  # refuses gaps and overlaps
    assert {meta.name: meta for meta in routing.tensors} == {meta.name: meta for meta in tensors}
    for manifest in manifests:
        used = {region.id: torch.zeros(region.nbytes, dtype=torch.bool) for region in manifest.regions}
        for shard in manifest.shards:
            item = 4 if manifest.tensors[shard.tensor].dtype == "float32" else 2
            places = used[shard.region][shard.byte_offset :: item].as_strided(
                shard.shape, [stride * item for stride in shard.strides], shard.byte_offset
            )
            assert not places.any(), "two shards share memory"
            places.fill_(True)


@pytest.mark.unit
def test_layouts_that_cannot_be_are_refused() -> None:
    kimi, dense = config_of("kimi-k2"), config_of("qwen3-8b")
    for layout, config, text in [
        (MegatronLayout(ranks=100, tp=8), kimi, "no multiple of tp x pp = 8"),
        (MegatronLayout(ranks=8, ep=5), kimi, "no multiple of etp x ep x pp = 5"),
        (MegatronLayout(ranks=80, ep=5), kimi, "ep=5 does not divide the 384 experts"),
        (MegatronLayout(ranks=8, ep=2), dense, "this model has none"),
        (MegatronLayout(ranks=8, pp=8, last=6), kimi, "61 layers, 0 on the first and 6 on the last stage"),
        (MegatronLayout(ranks=8, pp=8, vpp=2), kimi, "do not divide into 2 chunks"),
    ]:
        with pytest.raises(SourceError, match=text):
            layout.check(config)
    config = config_of("tiny")
    with pytest.raises(SourceError, match="3 tensor parallel ranks do not divide"):
        make_manifests(MegatronLayout(ranks=3, tp=3), tensors_of(config), config, [node(rank) for rank in range(3)])


@pytest.mark.unit
def test_layers_are_spread_as_a_pipeline_would() -> None:
    assert [len(stage) for stage in MegatronLayout(ranks=8, pp=8).layers(61)] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert [len(stage) for stage in MegatronLayout(ranks=8, pp=8, last=5).layers(61)] == [8] * 7 + [5]
    assert MegatronLayout(ranks=2, pp=2, vpp=2).layers(8) == [[0, 1, 4, 5], [2, 3, 6, 7]]
