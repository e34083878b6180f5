"""`MegatronSource` keeps the protocol of sources: modules named and cut like Megatron's, two tensor parallel ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rdt_core.testing import SourceSuite
from rdt_megatron import MegatronSource, Parallel

pytestmark = pytest.mark.unit

CONFIG = {
    "model_type": "qwen3", "vocab_size": 30, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip


def layers(tp: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (8,),
        "self_attention.linear_qkv.weight": (32 // tp, 8),
        "self_attention.linear_proj.weight": (8, 16 // tp),
        "mlp.linear_fc1.weight": (12 // tp, 8),
        "mlp.linear_fc2.weight": (8, 6 // tp),
        "pre_mlp_layernorm.weight": (8,),
    }


def add(owner: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    *path, key = name.split(".")
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    # what every rank holds is equal on all of them
    value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape)
    owner.register_parameter(key, nn.Parameter(value))


def chunk(tp: int) -> nn.Module:
    made = nn.Module()
    made.decoder = nn.Module()
    made.decoder.layers = nn.ModuleList()
    for number in range(2):
        layer = nn.Module()
        layer.layer_number = number + 1
        for name, shape in layers(tp).items():
            add(layer, name, shape)
        made.decoder.layers.append(layer)
    add(made, "embedding.word_embeddings.weight", (32 // tp, 8))
    add(made, "decoder.final_layernorm.weight", (8,))
    add(made, "output_layer.weight", (32 // tp, 8))
    made.config = SimpleNamespace(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, kv_channels=4, num_moe_experts=None,
        mtp_num_layers=None, tensor_model_parallel_size=tp,
    )  # fmt: skip
    made.share_embeddings_and_output_weights = False
    made.pre_process = True
    return made


class TestMegatronSource(SourceSuite):
    world_size = 2

    def make_source(self, rank: int, world_size: int) -> MegatronSource:
        made = chunk(world_size)
        self.chunks = [*getattr(self, "chunks", ()), made]
        return MegatronSource(made, CONFIG, parallel=Parallel(tp_size=world_size, tp_rank=rank))

    def move(self) -> None:
        for made in self.chunks:
            for parameter in made.parameters():
                parameter.data = parameter.data.clone() + 1
