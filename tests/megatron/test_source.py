"""`MegatronSource` over modules that are named like Megatron's, without Megatron's own code: names, errors, memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rdt_core.errors import SourceError
from rdt_core.sources import WatchedSource, WeightSource
from rdt_megatron import Family, MegatronSource, Parallel, Rows, Skip, Whole, known_families
from rdt_megatron.families import family_of

pytestmark = pytest.mark.unit

HUGGING_FACE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 30,
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "num_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4,
            "num_moe_experts": None, "mtp_num_layers": None, "tensor_model_parallel_size": 1,
        }
        | changes
    )  # fmt: skip


class Parameters(nn.Module):
    """Parameters under dotted names."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.add(name.replace("__", "."), shape)

    def add(self, name: str, shape: tuple[int, ...], *, buffer: bool = False) -> None:
        *path, key = name.split(".")
        owner: nn.Module = self
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        value = torch.randn(shape)
        if buffer:
            owner.register_buffer(key, value)
        else:
            owner.register_parameter(key, nn.Parameter(value))


def chunk(
    layers: dict[int, list[tuple[str, tuple[int, ...]]]], outside: dict[str, tuple[int, ...]], **more: Any
) -> Any:
    """A model chunk whose layers are numbered globally by `layers`' keys."""
    made: Any = Parameters()
    made.decoder = nn.Module()
    made.decoder.layers = nn.ModuleList()
    for number, parameters in layers.items():
        layer: Any = Parameters()
        layer.layer_number = number + 1
        for name, shape in parameters:
            layer.add(name, shape)
        made.decoder.layers.append(layer)
    for name, shape in outside.items():
        made.add(name, shape)
    made.config = more.pop("config", config())
    made.share_embeddings_and_output_weights = more.pop("shares", False)
    made.pre_process = "embedding.word_embeddings.weight" in outside
    return made


LOCAL = [
    ("input_layernorm.weight", (8,)),
    ("self_attention.linear_qkv.weight", (32, 8)),
    ("self_attention.linear_proj.weight", (8, 16)),
    ("mlp.linear_fc1.weight", (12, 8)),
    ("mlp.linear_fc2.weight", (8, 6)),
    ("pre_mlp_layernorm.weight", (8,)),
]
ENGINE = [
    ("self_attention.linear_qkv.layer_norm_weight", (8,)),
    ("self_attention.linear_qkv.weight", (32, 8)),
    ("self_attention.linear_proj.weight", (8, 16)),
    ("mlp.linear_fc1.layer_norm_weight", (8,)),
    ("mlp.linear_fc1.weight", (12, 8)),
    ("mlp.linear_fc2.weight", (8, 6)),
]
OUTSIDE = {
    "embedding.word_embeddings.weight": (32, 8),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (32, 8),
}
LAYER_TENSORS = {
    "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
}  # fmt: skip


def source(model: Any, hugging_face: Any = HUGGING_FACE, **more: Any) -> MegatronSource:
    return MegatronSource(model, hugging_face, **{"parallel": Parallel(), **more})


def names(made: MegatronSource) -> set[str]:
    return {tensor.name for tensor in made.metadata()}


@pytest.mark.parametrize("parameters", [LOCAL, ENGINE], ids=["local", "transformer-engine"])
def test_names_of_local_and_transformer_engine_layers(parameters: list[tuple[str, tuple[int, ...]]]) -> None:
    made = source(chunk({0: parameters, 3: parameters}, OUTSIDE))
    assert isinstance(made, WeightSource)
    assert isinstance(made, WatchedSource)
    expected = {f"model.layers.{layer}.{name}" for layer in (0, 3) for name in LAYER_TENSORS}
    assert names(made) == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert {shard.name for shard in made.shards()} == names(made)


def test_shards_are_views() -> None:
    model = chunk({1: LOCAL}, OUTSIDE)
    made = source(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert all((shard.tensor == 7).all() for shard in made.shards())
    assert (
        sum(shard.tensor.numel() for shard in made.shards())
        == sum(parameter.numel() for parameter in model.parameters()) - 2 * (32 - 30) * 8
    )


@pytest.mark.parametrize("place", ["object", "mapping", "folder", "file", "text_config"])
def test_where_the_configuration_comes_from(place: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    given = {
        "object": SimpleNamespace(to_dict=lambda: HUGGING_FACE),
        "mapping": HUGGING_FACE,
        "folder": tmp_path,
        "file": str(tmp_path / "config.json"),
        "text_config": {"model_type": "some_vl", "text_config": HUGGING_FACE},
    }[place]
    made = source(chunk({0: LOCAL}, OUTSIDE), given)
    assert (made.facts.family.name, made.facts.vocab_size, made.facts.tied) == ("qwen3", 30, False)


def test_megatrons_own_configuration_needs_family_and_vocabulary() -> None:
    model = chunk({0: LOCAL}, OUTSIDE)
    with pytest.raises(SourceError, match="`family=` and `vocab_size=` too"):
        source(model, model.config)
    made = source(model, model.config, family="llama", vocab_size=31)
    assert {tensor.name: tensor.shape for tensor in made.metadata()}["lm_head.weight"] == (31, 8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers=5 there and num_layers=4 in Megatron"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 there and num_query_groups=2 in Megatron"),
        ({"model_type": "nonsense"}, "no table of rules for model type 'nonsense' .known: deepseek_v2"),
        ({"tie_word_embeddings": True}, "ties its output layer .* share_embeddings_and_output_weights=False"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"vocab_size": 33}, "all ranks hold 32 rows of a vocabulary of 33"),
    ],
)
def test_configurations_that_contradict_the_model(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SourceError, match=text):
        source(chunk({0: LOCAL}, OUTSIDE), HUGGING_FACE | changes)


def test_no_configuration_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no Hugging Face configuration can be read from .*config\.json"):
        source(chunk({0: LOCAL}, OUTSIDE), tmp_path)
    with pytest.raises(
        SourceError, match=r"folder with config\.json on this node, .* names on the hub are not looked up"
    ):
        source(chunk({0: LOCAL}, OUTSIDE), "Qwen/Qwen3-8B")


def test_a_dtype_by_name_is_refused() -> None:
    with pytest.raises(SourceError, match=r"dtype='bf16' is a str; expected a torch\.dtype"):
        source(chunk({0: LOCAL}, OUTSIDE), dtype="bf16")


def test_a_parameter_without_a_rule_is_named_with_the_rule_to_write() -> None:
    model = chunk({2: [*LOCAL, ("self_attention.linear_gate.weight", (4, 8))]}, OUTSIDE)
    gate = model.decoder.layers[0].self_attention.linear_gate.weight
    gate.tensor_model_parallel, gate.partition_dim = True, 0
    with pytest.raises(SourceError) as raised:
        source(model)
    text = str(raised.value)
    assert "'decoder.layers.2.self_attention.linear_gate.weight' of shape (4, 8) has no rule in family 'qwen3'" in text
    start, end = text.index("rules=["), text.index("]", text.index("rules=["))
    suggested = eval(text[start + len("rules=[") : end], {"Rows": Rows})  # noqa: S307 - our own message
    assert suggested.parameter == "decoder.layers.{layer}.self_attention.linear_gate.weight"
    assert "model.layers.2.NAME.weight" in names(source(model, rules=[suggested]))


def test_rules_of_ones_own_come_first_and_may_leave_out() -> None:
    model = chunk({0: LOCAL}, OUTSIDE)
    rules = [
        Whole("decoder.final_layernorm.weight", "model.last_norm.weight"),
        Skip("decoder.layers.{layer}.mlp.linear_fc1.weight"),
    ]
    found = names(source(model, rules=rules))
    assert "model.last_norm.weight" in found
    assert not {"model.norm.weight", "model.layers.0.mlp.gate_proj.weight"} & found


def test_a_family_of_ones_own() -> None:
    model = chunk({0: [("x.weight", (4, 8))]}, {"embedding.word_embeddings.weight": (32, 8)})
    mine = Family("mine", (Rows("decoder.layers.{layer}.x.weight", "h.{layer}.x"), *family_of("llama").rules))
    assert names(source(model, family=mine)) == {"h.0.x", "model.embed_tokens.weight"}


def test_latent_projections_that_transformer_engine_duplicates() -> None:
    parameters = [
        ("self_attention.linear_q_down_proj.weight", (6, 8)),
        ("self_attention.linear_kv_down_proj.weight", (7, 8)),
    ]
    latent = config(multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=4, qk_pos_emb_head_dim=3)
    model = chunk({0: parameters}, {}, config=latent)
    for parameter in model.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # as Transformer-Engine marks every weight
    made = source(model, HUGGING_FACE | {"model_type": "deepseek_v3"}, parallel=Parallel(tp_size=2, tp_rank=1))
    assert [(shard.offset, tuple(shard.tensor.shape)) for shard in made.shards()] == [
        ((0, 0), (6, 8)),
        ((0, 0), (7, 8)),
    ]
    assert [tensor.shape for tensor in made.metadata()] == [(6, 8), (7, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        {"layernorm_zero_centered_gamma": True}, {"rotary_interleaved": True}, {"moe_mlp_glu_interleave_size": 32},
        {"moe_shared_expert_glu_interleave_size": 32},
    ],
)  # fmt: skip
def test_parameters_that_hold_other_numbers_than_a_checkpoint_are_refused(changes: dict[str, Any]) -> None:
    model = chunk({0: LOCAL}, OUTSIDE, config=config(**changes))
    for given in ((HUGGING_FACE,), (model.config, "qwen3", 30)):
        with pytest.raises(SourceError, match=rf"says {next(iter(changes))}=.*pass a Family of your own"):
            source(model, *given[:1], **dict(zip(("family", "vocab_size"), given[1:], strict=False)))
    assert source(model, family=family_of("qwen3"))


def test_two_chunks_with_the_same_layers_are_refused() -> None:
    with pytest.raises(SourceError, match=r"two of the model's chunks hold 'decoder.layers.1.input_layernorm.weight'"):
        source([chunk({0: LOCAL, 1: LOCAL}, OUTSIDE), chunk({1: LOCAL}, {})])


def test_two_parameters_for_one_tensor_are_refused() -> None:
    model = chunk({0: [*LOCAL, ("self_attention.linear_qkv.layer_norm_weight", (8,))]}, OUTSIDE)
    with pytest.raises(SourceError, match=r"would both be checkpoint tensor 'model.layers.0.input_layernorm.weight'"):
        source(model)


@pytest.mark.parametrize("given", [{"tensor": "w.{layer}", "offset": 5}, {"tensor": "w.{layer}", "start": 30}])
def test_a_wrong_rule_never_reads_outside(given: dict[str, Any]) -> None:
    class Wrong:
        parameter = "decoder.layers.{layer}.x"

        def pieces(self, local: Any) -> Any:
            from rdt_megatron import Piece

            return [
                Piece(
                    local.tensor(given["tensor"]),
                    (8, 8),
                    (given.get("offset", 0), 0),
                    (4, 8),
                    given.get("start", 0),
                    (8, 1),
                )
            ]

    with pytest.raises(SourceError, match="outside of it, or outside of its own shape"):
        source(chunk({0: [("x", (4, 8))]}, {}), rules=[Wrong()])


class TestExperts:
    def model(self, names_of_experts: list[tuple[str, tuple[int, ...]]]) -> Any:
        return chunk({0: names_of_experts}, {}, config=config(num_moe_experts=8))

    @pytest.mark.parametrize(
        "parameters",
        [
            [(f"mlp.experts.local_experts.{i}.linear_fc{k}.weight", s) for i in range(2) for k, s in ((1, (12, 8)), (2, (8, 6)))],
            [(f"mlp.experts.linear_fc{k}.weight{i}", s) for i in range(2) for k, s in ((1, (12, 8)), (2, (8, 6)))],
            [("mlp.experts.weight1", (8, 24)), ("mlp.experts.weight2", (12, 8))],
        ],
        ids=["sequential", "grouped linear", "grouped gemm"],
    )  # fmt: skip
    def test_experts_are_numbered_over_all_ranks(self, parameters: list[tuple[str, tuple[int, ...]]]) -> None:
        at = Parallel(tp_size=2, tp_rank=1, ep_size=4, ep_rank=3, etp_size=2, etp_rank=1)
        made = source(self.model(parameters), HUGGING_FACE | {"model_type": "qwen3_moe", "num_experts": 8}, parallel=at)
        kinds = ("gate_proj", "up_proj", "down_proj")
        assert names(made) == {f"model.layers.0.mlp.experts.{e}.{kind}.weight" for e in (6, 7) for kind in kinds}
        shapes = {tensor.name.split(".")[-2]: tensor.shape for tensor in made.metadata()}
        assert shapes == {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
        offsets = {shard.name.split(".")[-2]: shard.offset for shard in made.shards()}
        assert offsets == {"gate_proj": (6, 0), "up_proj": (6, 0), "down_proj": (0, 6)}

    def test_names_of_mixtral(self) -> None:
        parameters = [("mlp.router.weight", (8, 8)), ("mlp.experts.linear_fc1.weight0", (12, 8))]
        made = source(
            self.model(parameters), HUGGING_FACE | {"model_type": "mixtral"}, parallel=Parallel(ep_size=8, ep_rank=5)
        )
        start = "model.layers.0.block_sparse_moe"
        assert names(made) == {f"{start}.gate.weight", f"{start}.experts.5.w1.weight", f"{start}.experts.5.w3.weight"}

    def test_the_bias_of_a_router_is_a_buffer_and_travels_as_it_is(self) -> None:
        model = self.model([("mlp.router.weight", (8, 8))])
        model.decoder.layers[0].add("mlp.router.expert_bias", (8,), buffer=True)
        model.decoder.layers[0].mlp.router.register_buffer("local_tokens_per_expert", torch.zeros(8), persistent=False)
        made = source(model, HUGGING_FACE | {"model_type": "glm4_moe"}, dtype=torch.bfloat16)
        assert {tensor.name.split("gate.")[1]: tensor.dtype for tensor in made.metadata()} == {
            "weight": "bfloat16",
            "e_score_correction_bias": "float32",
        }
        with pytest.raises(SourceError, match=r"buffer 'decoder.layers.0.mlp.router.expert_bias' .* has no rule"):
            source(model, HUGGING_FACE | {"model_type": "qwen3_moe"})


def test_the_bias_of_a_router_that_was_cast_with_the_model_travels_as_the_router_will_keep_it() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("expert_bias", torch.ones(8))

        def _maintain_float32_expert_bias(self) -> None:  # as Megatron's does, in its first forward pass
            self.expert_bias.data = self.expert_bias.data.float()

    model = chunk({0: [("mlp.linear_fc2.weight", (8, 6))]}, {})
    model.decoder.layers[0].mlp.router = Router()
    model.bfloat16()  # as Float16Module does
    made = source(model, HUGGING_FACE | {"model_type": "glm4_moe"})
    model.decoder.layers[0].mlp.router._maintain_float32_expert_bias()
    assert {shard.name.split(".")[-1]: shard.tensor.dtype for shard in made.shards()} == {
        "weight": torch.bfloat16,
        "e_score_correction_bias": torch.float32,
    }


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_prediction_layers_count_on_and_need_not_be_taken(inner: str) -> None:
    # the last stage of a pipeline: prediction layers with the embedding that they need once more
    model = chunk({3: []}, {"output_layer.weight": (32, 8)}, config=config(mtp_num_layers=1))
    model.add("embedding.word_embeddings.weight", (32, 8))
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([Parameters()])
    layer = model.mtp.layers[0]
    layer.layer_number = 1
    layer.add("enorm.weight", (8,))
    layer.add("eh_proj.weight", (8, 16))
    layer.add("final_layernorm.weight", (8,))
    layer.add(f"{inner}.self_attention.linear_proj.weight", (8, 16))
    made = source(model, HUGGING_FACE | {"model_type": "glm4_moe"})
    extra = {
        f"model.layers.4.{name}.weight"
        for name in ("enorm", "eh_proj", "shared_head.norm", "shared_head.head", "self_attn.o_proj")
    }
    assert names(made) == extra | {"lm_head.weight"}
    assert set(made.ignored()) == extra
    copy = next(shard for shard in made.shards() if shard.name == "model.layers.4.shared_head.head.weight")
    assert copy.tensor.data_ptr() == model.output_layer.weight.data_ptr()


def test_a_tied_output_layer_is_not_declared_whatever_the_last_stage_holds() -> None:
    last = chunk({3: LOCAL}, {"output_layer.weight": (32, 8)}, shares=True)
    found = names(source(last, HUGGING_FACE | {"tie_word_embeddings": True}))
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & found


def test_names_that_engines_need_not_take() -> None:
    made = source(chunk({0: LOCAL, 1: LOCAL}, {}), ignored=["*.0.mlp.*", "nothing.here"])
    assert {name.rpartition("mlp.")[2] for name in made.ignored()} == {
        "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    }  # fmt: skip


class TestMemory:
    def test_the_fingerprint_changes_when_a_parameter_moves(self) -> None:
        model = chunk({0: LOCAL}, OUTSIDE)
        made = source(model)
        before = made.fingerprint()
        weight = model.decoder.layers[0].mlp.linear_fc2.weight
        with torch.no_grad():
            weight.add_(1)
        assert made.fingerprint() == before
        weight.data = weight.data.clone()
        assert made.fingerprint() != before

    def test_parameters_that_were_offloaded_are_refused(self) -> None:
        model = chunk({0: LOCAL}, OUTSIDE)
        made = source(model)
        storage = model.decoder.layers[0].mlp.linear_fc2.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        for call in (made.fingerprint, made.shards, lambda: source(model)):
            with pytest.raises(SourceError, match=r"'decoder.layers.0.mlp.linear_fc2.weight' .* it is offloaded"):
                call()
        storage.resize_(size)
        assert made.shards()

    def test_parameters_that_were_emptied_are_refused(self) -> None:
        model = chunk({0: LOCAL}, OUTSIDE)
        made = source(model)
        weight = model.decoder.layers[0].mlp.linear_fc2.weight
        weight.data = torch.empty(0)
        with pytest.raises(SourceError, match="If it was offloaded, bring it back before publish"):
            made.fingerprint()

    @pytest.mark.parametrize("how", ["replaced", "added", "taken away"])
    def test_modules_that_changed_are_noticed(self, how: str) -> None:
        model = chunk({0: LOCAL}, OUTSIDE)
        made = source(model)
        mlp = model.decoder.layers[0].mlp
        if how == "replaced":
            mlp.linear_fc2 = copy.deepcopy(mlp.linear_fc2)
        elif how == "added":
            mlp.linear_fc2.adapter = nn.Linear(6, 2, bias=False)
        else:
            del mlp.linear_fc2
        for call in (made.fingerprint, made.shards):
            with pytest.raises(SourceError, match="modules of the model were replaced, added or taken away"):
                call()

    @pytest.mark.parametrize("kind", ["Float8", "DTensor"])
    def test_parameters_that_are_more_than_memory_are_refused(self, kind: str) -> None:
        class Float8(torch.Tensor):
            """Dequantises for whatever is asked of it, and cannot be flattened."""

            @staticmethod
            def __new__(cls, data: torch.Tensor) -> Any:
                return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

            def __init__(self, data: torch.Tensor) -> None:
                self.held = data

            @classmethod
            def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.detach.default:
                    return cls(args[0].held)
                return func(*(one.held.float() if isinstance(one, cls) else one for one in args), **(kwargs or {}))

        class Sharded(DTensor):
            __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

            def __new__(cls, data: torch.Tensor) -> Any:
                return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

            def __init__(self, data: torch.Tensor) -> None:
                pass

            def detach(self) -> Any:
                return self

        model = chunk({0: LOCAL}, OUTSIDE)
        given = torch.ones(8, 6, dtype=torch.int8)
        hidden = Float8(given) if kind == "Float8" else Sharded(given)
        model.decoder.layers[0].mlp.linear_fc2._parameters["weight"] = hidden
        with pytest.raises(SourceError, match=r"hides its memory" if kind == "Float8" else r"a DTensor, cut by FSDP"):
            source(model)

    def test_a_parameter_that_is_gone_is_refused(self) -> None:
        model = chunk({0: LOCAL}, OUTSIDE)
        made = source(model)
        model.decoder.layers[0].mlp.linear_fc2.weight = None
        with pytest.raises(SourceError, match="its module no longer has it"):
            made.shards()


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_taken_off() -> None:
    model = chunk({0: LOCAL}, OUTSIDE)
    assert names(source([Wrapper(Wrapper(model))])) == names(source(model))


def test_parameters_that_are_gathered_lazily_are_refused() -> None:
    wrapper: Any = Wrapper(Wrapper(chunk({0: LOCAL}, OUTSIDE)))
    wrapper.ddp_config = SimpleNamespace(overlap_param_gather=True)
    wrapper.remove_forward_pre_hook_handles = {}
    made = source([wrapper])
    made.fingerprint()
    wrapper.remove_forward_pre_hook_handles = {"module": "handle"}
    for call in (made.fingerprint, made.shards, lambda: source([wrapper])):
        with pytest.raises(SourceError, match=r"gathers parameters lazily here .*disable_forward_pre_hook"):
            call()


def test_parameters_that_are_gathered_lazily_are_refused_without_their_wrapper_too() -> None:
    class DistributedDataParallel(Wrapper):
        def _make_forward_pre_hook(self) -> Any:
            def hook(module: Any, *unused: Any) -> None: ...

            return hook

    model = chunk({0: LOCAL}, OUTSIDE)
    made = source(model)
    model.register_forward_pre_hook(lambda *_: None)
    handle = model.register_forward_pre_hook(DistributedDataParallel(model)._make_forward_pre_hook())
    for call in (made.fingerprint, made.shards, lambda: source(model)):
        with pytest.raises(SourceError, match="gathers parameters lazily here"):
            call()
    handle.remove()
    assert made.shards()


def test_other_wrappers_that_spread_parameters_are_refused() -> None:
    wrapper: Any = Wrapper(chunk({0: LOCAL}, OUTSIDE))
    wrapper.ddp_config = SimpleNamespace(overlap_param_gather=True)
    with pytest.raises(SourceError, match=r"wrapped by Wrapper, which spreads parameters .* DistributedDataParallel"):
        source(wrapper)


def test_a_model_around_a_language_model() -> None:
    outer = nn.Module()
    outer.language_model = chunk({0: LOCAL}, OUTSIDE)
    with pytest.raises(SourceError, match=r"found a Module .* pass its `language_model`"):
        source(outer)


@pytest.mark.parametrize("model", [[], nn.Linear(2, 2), "nothing"])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(SourceError, match=r"no chunks|where a model chunk was expected"):
        source(model)


def test_without_groups_there_is_no_place() -> None:
    with pytest.raises(SourceError, match="parallel_state is not initialised"):
        source(chunk({0: LOCAL}, OUTSIDE), parallel=None)


def test_every_family_of_the_readme_is_known() -> None:
    assert {
        "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe",
    } <= set(known_families())  # fmt: skip
