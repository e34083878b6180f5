"""Layouts on paper, FSDP's and engines': every element where a rank would have it, and configurations read from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_core.bench.layouts import EngineModule, EngineRank
from rdt_core.bench.source import RowSharded
from rdt_core.errors import SourceError
from rdt_core.plan.cluster import Cluster, Gpu, read_cluster, seat
from rdt_core.plan.trainers import make_manifests
from rdt_core.routing import Routing
from rdt_core.shapes import MODELS, Config, checkpoint_tensors, config_of, read_config, tensors_of
from rdt_core.trainers import FsdpLayout
from rdt_core.wire import NodeMeta

pytestmark = pytest.mark.unit


def nodes(count: int) -> list[NodeMeta]:
    return [Gpu(rank, 0).meta() for rank in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "tiny-mla"])
def test_fsdp_boxes_are_those_of_the_bench(model: str, ranks: int) -> None:
    config = config_of(model)
    tensors = tensors_of(config)
    for rank, manifest in enumerate(make_manifests(FsdpLayout(ranks, apart=True), tensors, config, nodes(ranks))):
        theirs = RowSharded(tensors, rank, ranks, "cpu").shards()
        assert {(manifest.tensors[one.tensor].name, one.offset, one.shape) for one in manifest.shards} == {
            (one.name, one.offset, tuple(one.tensor.shape)) for one in theirs if one.tensor.numel()
        }


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (8, 1), (6, 2)])
def test_fused_experts_are_split_by_expert_and_replicas_hold_the_same(ranks: int, replicas: int) -> None:
    config = config_of("tiny-moe")
    routing = Routing(make_manifests(FsdpLayout(ranks, replicas), tensors_of(config), config, nodes(ranks)))
    for index, meta in enumerate(routing.tensors):
        owners = routing.owners(index)
        assert all(len(holders) == replicas for _, holders in owners)
        if ".experts." in meta.name:
            assert [box.shape for box, _ in owners] == [meta.shape]
    with pytest.raises(SourceError, match="4 replicas do not divide 6 source ranks"):
        FsdpLayout(6, 4).check(config)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny", {"tp": 2, "pp": 2}),
        ("tiny-moe", {"tp": 4, "ep": 4}),
        ("tiny-moe", {"tp": 4, "ep": 2}),
        ("tiny-mla", {"tp": 2, "ep": 2, "pp": 2}),
        ("tiny-mla", {"tp": 4, "ep": 2, "pp": 3}),
        ("tied", {"tp": 2, "pp": 2}),
    ],
)
def test_engine_ranks_hold_every_element_where_its_box_says(model: str, sizes: dict[str, int], engine: str) -> None:
    config = Config(2, 64, 128, 4, 2, 16, 512, tied=True) if model == "tied" else config_of(model)
    tensors = tensors_of(config)
    generator = torch.Generator().manual_seed(1)
    weights = {
        meta.name: torch.randn(meta.shape, generator=generator).to(getattr(torch, meta.dtype)) for meta in tensors
    }
    seen = {name: torch.zeros(value.shape, dtype=torch.int32) for name, value in weights.items()}
    for rank in range(sizes["tp"] * sizes.get("pp", 1)):
        module = EngineModule(tensors, config, EngineRank(engine, rank, **sizes), "cpu")
        module.load_weights(weights.items())
        for box in module.boxes():
            assert torch.equal(module.part(box.name), weights[box.name].narrow(box.axis, box.start, box.count))
            seen[box.name].narrow(box.axis, box.start, box.count).add_(1)
        assert sum(module.part(box.name).numel() for box in module.boxes()) == sum(
            one.numel() for one in module.parameters()
        )
    assert all(bool((count > 0).all()) for count in seen.values())
    # an expert's parts lie on the ranks that share it, and nowhere else
    assert all(bool((count == 1).all()) for name, count in seen.items() if ".experts." in name)
    if model == "tied":
        assert bool((seen["model.embed_tokens.weight"] == 2).all()), "the last stage needs them for its output"


def test_uneven_pipelines_are_split_as_each_engine_does() -> None:
    def sizes(engine: str, pp: int) -> list[int]:
        return [len(EngineRank(engine, stage, pp=pp).layers(61)) for stage in range(pp)]

    assert sizes("vllm", 4) == [15, 15, 16, 15]
    assert sizes("sglang", 4) == [15, 15, 15, 16]
    assert sizes("vllm", 8) == [7, 7, 8, 8, 8, 8, 8, 7]
    assert sizes("sglang", 8) == [7, 7, 7, 8, 8, 8, 8, 8]


def test_loaders_refuse_names_that_no_rank_has() -> None:
    config = config_of("tiny")
    module = EngineModule(tensors_of(config), config, EngineRank("vllm", 0, tp=2, pp=2), "meta")
    with pytest.raises(KeyError, match="unheard"):
        module.load_weights([("unheard.of.weight", torch.zeros(1))])


def test_a_stretch_of_experts_that_does_not_divide_is_refused() -> None:
    config = config_of("tiny-moe")
    with pytest.raises(SourceError, match="3 expert parallel ranks do not divide 4 experts"):
        EngineModule(tensors_of(config), config, EngineRank("vllm", 0, tp=3, ep=3), "meta")


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False, "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
        "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "moe_intermediate_size": 1408,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False,
    },
    "kimi-k2": {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "attention_bias": False, "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8"},
    },
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configurations_give_the_known_shapes(model: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED[model]))
    assert read_config(file) == read_config(tmp_path) == MODELS[model]
    assert tensors_of(read_config(file)) == checkpoint_tensors(model)
    file.write_text(json.dumps({"model_type": "wrapper", "text_config": PUBLISHED[model]}))
    assert read_config(file) == MODELS[model]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt9"}, "model_type 'gpt9' is not known here; known: llama"),
        ({"vocab_size": None}, "no vocab_size, which decides the shapes"),
        ({"attention_bias": True}, "attention_bias=true: such a qwen3_moe has tensors"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"kv_lora_rank": 16}, "latent attention without q_lora_rank"),
    ],
)
def test_configurations_of_other_forms_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-30b-a3b"] | changes))
    with pytest.raises(SourceError, match=text):
        read_config(tmp_path)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no configuration can be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SourceError, match="holds no configuration"):
        read_config(tmp_path)


def test_clusters_are_read_and_impossible_ones_refused(tmp_path: Path) -> None:
    assert read_cluster(None) == Cluster()
    file = tmp_path / "cluster.json"
    file.write_text('{"gpus": 4, "nic_gbs": 25}')
    assert read_cluster(file) == Cluster(gpus=4, nic_gbs=25.0)
    for text, found in [
        ('{"gpu": 4}', "unknown field `gpu`"),
        ('{"gpus": 0}', "gpus is 0; it must be more than 0"),
        ('{"call_ms": -1}', "call_ms is -1"),
        ('{"device": "tpu"}', "device 'tpu' is unknown; known: cuda, cpu"),
        ('{"nic_gbs": "fast"}', "Expected `float`"),
        ("", "no cluster description can be read"),
    ]:
        file.write_text(text)
        with pytest.raises(SourceError, match=found):
            read_cluster(file)


def test_ranks_fill_nodes_and_replicas_begin_on_fresh_ones() -> None:
    cluster = Cluster(gpus=4, nics=2)
    seats = seat(cluster, 6, 3, 2, "separate")
    assert seats.sources[4] == Gpu(1, 0)
    assert seats.readers == (Gpu(2, 0), Gpu(2, 1), Gpu(2, 2), Gpu(2, 3), Gpu(3, 0), Gpu(3, 1))
    assert seats.nodes == 4
    assert [gpu.nic(cluster) for gpu in seats.readers[:4]] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    wide = seat(cluster, 4, 2, 6, "separate")
    assert (wide.readers[0], wide.readers[5], wide.readers[6]) == (Gpu(1, 0), Gpu(2, 1), Gpu(3, 0))
    assert seat(cluster, 8, 2, 2, "together").readers == tuple(Gpu(0, index) for index in range(4))
    assert seat(cluster, 1, 2, 1, "beside").readers == (Gpu(0, 1), Gpu(0, 2))
    with pytest.raises(SourceError, match="do not fit on the 4 GPUs"):
        seat(cluster, 4, 3, 2, "together")
    with pytest.raises(SourceError, match="placement 'apart' is unknown"):
        seat(cluster, 4, 3, 2, "apart")
