"""Ranks that hold the same shards are one set of owners: each reader reads a byte once, readers share the owners."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from rdt_core.publisher import Publisher
from rdt_core.routing import Routing
from rdt_core.transport import LocalExchange
from rdt_megatron import MegatronSource, Parallel

pytestmark = pytest.mark.unit

HIDDEN, EXPERTS, VOCABULARY = 16, 4, 64
HUGGING_FACE = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
}


class Config:
    num_layers, hidden_size, num_attention_heads, num_query_groups, kv_channels = 2, HIDDEN, 4, 4, 4
    num_moe_experts, mtp_num_layers, tensor_model_parallel_size = EXPERTS, None, 2


def model(tp: int, ep: int) -> nn.Module:
    """The parameters of one rank, in one buffer as Megatron's DDP keeps them."""
    shapes = {
        "embedding.word_embeddings.weight": (VOCABULARY // tp, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCABULARY // tp, HIDDEN),
    }
    for layer in range(2):
        shapes |= {
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": (3 * HIDDEN // tp, HIDDEN),
            f"decoder.layers.{layer}.self_attention.linear_proj.weight": (HIDDEN, HIDDEN // tp),
            f"decoder.layers.{layer}.mlp.router.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS // ep):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
            shapes |= {f"{name}.linear_fc1.weight": (48, HIDDEN), f"{name}.linear_fc2.weight": (HIDDEN, 24)}
    buffer = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes.values()), dtype=torch.bfloat16)
    made, at = nn.Module(), 0
    for name, shape in shapes.items():
        *path, key = name.split(".")
        owner = made
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        size = torch.Size(shape).numel()
        owner.register_parameter(key, nn.Parameter(buffer[at : at + size].view(shape), requires_grad=False))
        at += size
    for layer in range(2):
        getattr(made.decoder.layers, str(layer)).layer_number = layer + 1
    made.config = Config()
    return made


def publishers(tp: int, dp: int) -> list[Publisher]:
    """TP x DP ranks; experts are spread over all of them, and replicated where there are more ranks than experts."""
    world = tp * dp
    ep = min(world, EXPERTS)
    made = []
    for rank in range(world):
        at = Parallel(tp_size=tp, tp_rank=rank % tp, ep_size=ep, ep_rank=rank % ep)
        source = MegatronSource(model(tp, ep), HUGGING_FACE, parallel=at)
        made.append(
            Publisher(source, group="g", rank=rank, world_size=world, kinds=("local",), exchange=LocalExchange())
        )
    return made


def test_a_buffer_of_parameters_is_one_region() -> None:
    (publisher,) = publishers(1, 1)
    manifest = publisher.manifest
    assert len(manifest.regions) == 1
    assert manifest.regions[0].nbytes == sum(torch.Size(tensor.shape).numel() * 2 for tensor in manifest.tensors)


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (2, 4), (1, 8)])
def test_every_reader_reads_each_byte_once_and_owners_share_the_reading(tp: int, dp: int) -> None:
    routing = Routing([publisher.manifest for publisher in publishers(tp, dp)])
    total = sum(torch.Size(tensor.shape).numel() * 2 for tensor in routing.tensors)
    readers = 4
    served: Counter[int] = Counter()
    for reader in range(readers):
        route = routing.choose(reader, readers)
        nbytes = 2 * route.shape.prod(axis=1)
        assert nbytes.sum() == total
        for source, size in zip(route.source.tolist(), nbytes.tolist(), strict=True):
            served[source] += size
    assert set(served) == set(range(tp * dp))
    mean = sum(served.values()) / len(served)
    assert max(served.values()) <= 1.25 * mean, served
