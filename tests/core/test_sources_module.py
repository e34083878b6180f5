"""ModuleSource over modules of one process: names, dtypes, tied tensors, buffers, views, and what it refuses."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rdt_core import wire
from rdt_core.errors import SourceError
from rdt_core.sources import FusedExperts, ModuleSource, WatchedSource, WeightSource

pytestmark = pytest.mark.unit


class Head(nn.Module):
    """An embedding, a layer and a head that is the embedding; one buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("bias", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


def declared(source: ModuleSource) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in source.metadata()}


def test_declares_what_a_checkpoint_holds() -> None:
    source = ModuleSource(Head())
    assert isinstance(source, WeightSource)
    assert declared(source) == {
        "bias": ((3,), "float32"),
        "steps": ((), "int64"),
        "embed.weight": ((6, 4), "float32"),
        "layer.weight": ((4, 4), "bfloat16"),
        "layer.bias": ((4,), "bfloat16"),
    }
    assert source.metadata() is source.metadata()


def test_shards_are_the_parameters_own_memory() -> None:
    module = Head()
    source = ModuleSource(module)
    shards = {shard.name: shard for shard in source.shards()}
    assert shards.keys() == declared(source).keys()
    own = module.state_dict()
    for name, shard in shards.items():
        assert shard.offset == (0,) * own[name].ndim
        assert shard.tensor.data_ptr() == own[name].data_ptr()
        assert not shard.tensor.requires_grad
    with torch.no_grad():
        module.embed.weight.fill_(3)
    assert bool((shards["embed.weight"].tensor == 3).all())


def test_shards_follow_memory_that_moved() -> None:
    module = nn.Linear(3, 2)
    source = ModuleSource(module)
    before = source.shards()[0].tensor
    module.weight.data = torch.full((2, 3), 7.0)
    after = source.shards()[0].tensor
    assert after.data_ptr() == module.weight.data_ptr() != before.data_ptr()
    module.weight = nn.Parameter(torch.full((3, 2), 8.0).t())
    moved = source.shards()[0].tensor
    assert moved.stride() == (1, 2)
    assert torch.equal(moved, module.weight)


def test_a_transposed_or_sliced_parameter_keeps_its_strides() -> None:
    module = nn.Linear(3, 2, bias=False)
    storage = torch.arange(40.0).view(5, 8)
    module.weight = nn.Parameter(storage[1:4, 2:6:2].t())
    (shard,) = ModuleSource(module).shards()
    assert shard.tensor.stride() == (2, 8)
    assert shard.tensor.data_ptr() == storage[1:, 2:].data_ptr()
    assert torch.equal(shard.tensor, storage[1:4, 2:6:2].t())


def test_memory_that_was_replaced_is_not_kept_alive() -> None:
    module = nn.Linear(3, 2)
    source = ModuleSource(module)
    source.shards()
    storage = StorageWeakRef(module.weight.untyped_storage())
    assert not storage.expired()
    module.weight.data = torch.ones(2, 3)
    assert storage.expired()


def test_dtype_on_the_wire() -> None:
    module = Head()
    source = ModuleSource(module, dtype=torch.float16)
    assert {name: dtype for name, (_, dtype) in declared(source).items()} == {
        "bias": "float32", "steps": "int64",
        "embed.weight": "float16", "layer.weight": "float16", "layer.bias": "float16",
    }  # fmt: skip
    assert {shard.tensor.dtype for shard in source.shards()} == {torch.float32, torch.int64, torch.bfloat16}
    chosen = ModuleSource(module, dtype=lambda name, own: torch.float64 if name == "bias" else None)
    assert declared(chosen)["bias"][1] == "float64"
    assert declared(chosen)["layer.weight"][1] == "bfloat16"
    with pytest.raises(SourceError, match=r"'bias' would have dtype 'complex64'.*known: bool"):
        ModuleSource(module, dtype=lambda name, own: torch.complex64)


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        ("bf16", r"dtype='bf16' is a str; expected a torch\.dtype, a function .*: e\.g\. dtype=torch\.bfloat16$"),
        ("bfloat16", r"dtype='bfloat16' is a str; .*: write dtype=torch\.bfloat16$"),
        (float, r"dtype=<class 'float'> is a type; expected a torch\.dtype"),
        (
            lambda name, own: "bf16",
            r"dtype= gave 'bf16' for 'weight', a str; expected a torch\.dtype, or None for its own",
        ),
    ],
)
def test_what_is_no_dtype(dtype: Any, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        ModuleSource(nn.Linear(3, 2), dtype=dtype)


def test_a_megatron_model_is_told_where_it_belongs(caplog: pytest.LogCaptureFixture) -> None:
    kind = type("ColumnParallelLinear", (nn.Linear,), {"__module__": "megatron.core.tensor_parallel.layers"})
    model = nn.Sequential(kind(3, 2))
    ModuleSource(model, rename={"0.": "lm_head."})  # who maps its names knows
    assert not caplog.records
    ModuleSource(model)
    assert "rdt_megatron.MegatronSource declares such a model as its checkpoint" in caplog.text


def test_a_source_that_narrows_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rdt_core.sources.dtypes"):
        ModuleSource(nn.Linear(3, 2))
        ModuleSource(nn.Linear(3, 2), dtype=torch.float64)
        assert not caplog.records
        ModuleSource(nn.Linear(3, 2), dtype=torch.bfloat16)
        ModuleSource(nn.Linear(3, 2), dtype=torch.float8_e4m3fn)
    narrow = "2 tensors travel in fewer bits than their parameters have: float32 -> "
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", f"{narrow}bfloat16"),
        ("WARNING", f"{narrow}float8_e4m3fn, cast as they are, without scales"),
    ]


@pytest.mark.parametrize(
    ("include", "expected"), [(True, {"bias", "steps"}), (False, set()), (["st*", "inv_freq"], {"steps"})]
)
def test_buffers(include: bool | list[str], expected: set[str]) -> None:
    names = declared(ModuleSource(Head(), include_buffers=include)).keys()
    assert names & {"bias", "steps", "inv_freq"} == expected


def test_rename_by_function_and_by_prefix() -> None:
    module = nn.ModuleDict({"base": Head(), "value": nn.Linear(2, 1)})
    by_prefix = ModuleSource(module, rename={"base.": "model.", "base.lay": "model.lay", "value.": None})
    by_function = ModuleSource(
        module, rename=lambda name: None if name.startswith("value") else name.replace("base.", "model.")
    )
    expected = {"model.embed.weight", "model.layer.weight", "model.layer.bias", "model.bias", "model.steps"}
    assert declared(by_prefix).keys() == declared(by_function).keys() == expected
    assert {shard.name for shard in by_prefix.shards()} == expected
    with pytest.raises(SourceError, match=r"'1\.weight' and '0\.weight' would both be checkpoint tensor 'x'"):
        ModuleSource(nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]), rename=lambda name: "x")


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = declared(ModuleSource(plain)).keys()
    plain[1] = checkpoint_wrapper(plain[1])
    wrapped = torch.compile(plain, backend="eager")
    source = ModuleSource(wrapped)
    assert declared(source).keys() == expected
    assert len(source.shards()) == 4


def test_the_tied_name_that_the_checkpoint_keeps_is_declared() -> None:
    module = Head()
    module.all_tied_weights_keys = {"embed.weight": "lm_head.weight"}
    names = list(declared(ModuleSource(module)))
    assert "lm_head.weight" in names
    assert "embed.weight" not in names


def test_ignored_names_and_patterns() -> None:
    source = ModuleSource(Head(), ignored=["layer.*", "lm_head.weight", "layer.bias"])
    assert source.ignored() == ("layer.weight", "layer.bias", "lm_head.weight")


def test_a_scalar_and_an_empty_parameter() -> None:
    module = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "none": nn.Parameter(torch.empty(0, 3))})
    source = ModuleSource(module)
    assert declared(source) == {"scale": ((), "float32"), "none": ((0, 3), "float32")}
    assert [(shard.name, shard.offset, shard.tensor.item()) for shard in source.shards()] == [("scale", (), 2.0)]


class Experts(nn.Module):
    def __init__(self, model_type: str | None) -> None:
        super().__init__()
        if model_type:
            self.config = SimpleNamespace(model_type=model_type)
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.rand(3, 8, 5))
        self.mlp.experts.down_proj = nn.Parameter(torch.rand(3, 5, 4))


def test_fused_experts_become_views_of_the_fused_parameter() -> None:
    module = nn.ModuleDict({"layer": Experts(None)})
    module.config = SimpleNamespace(model_type="qwen3_moe")
    source = ModuleSource(module)
    shards = {shard.name: shard.tensor for shard in source.shards()}
    assert len(shards) == 9
    fused = module["layer"].mlp.experts
    for expert in range(3):
        prefix = f"layer.mlp.experts.{expert}"
        assert torch.equal(shards[f"{prefix}.gate_proj.weight"], fused.gate_up_proj[expert, :4])
        assert torch.equal(shards[f"{prefix}.up_proj.weight"], fused.gate_up_proj[expert, 4:])
        assert torch.equal(shards[f"{prefix}.down_proj.weight"], fused.down_proj[expert])
        assert shards[f"{prefix}.up_proj.weight"].data_ptr() == fused.gate_up_proj[expert, 4:].data_ptr()


@pytest.mark.parametrize("model_type", [None, "somebodys_moe"])
def test_fused_experts_of_unknown_layout_are_refused(model_type: str | None) -> None:
    with pytest.raises(SourceError, match=r"'mlp\.experts\.gate_up_proj' of shape \(3, 8, 5\).*rules="):
        ModuleSource(Experts(model_type))


def test_rules_of_the_caller_come_first_and_may_transpose() -> None:
    rules = [
        FusedExperts(r"(.*)\.gate_up_proj", (r"\1.{expert}.up", r"\1.{expert}.gate")),
        FusedExperts(r"(.*)\.down_proj", (r"\1.{expert}.down",), transposed=True),
    ]
    module = Experts(None)
    source = ModuleSource(module, rules=rules)
    shards = {shard.name: shard.tensor for shard in source.shards()}
    assert declared(source)["mlp.experts.2.down"] == ((4, 5), "float32")
    assert torch.equal(shards["mlp.experts.2.down"], module.mlp.experts.down_proj[2].t())
    assert torch.equal(shards["mlp.experts.1.gate"], module.mlp.experts.gate_up_proj[1, 4:])


def test_refuses_a_parameter_that_changed() -> None:
    module = nn.Linear(3, 2)
    source = ModuleSource(module)
    module.weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(
        SourceError, match=r"'weight' is a Parameter of shape \(4, 3\), and was a plain tensor of shape"
    ):
        source.shards()
    module.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    with pytest.raises(SourceError, match=r"'weight' has dtype torch.bfloat16, and had torch.float32"):
        source.shards()
    module.weight = None
    with pytest.raises(SourceError, match=r"'weight' was declared, but its module no longer has it"):
        source.shards()


def test_a_meta_module_has_names_and_no_bytes() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    source = ModuleSource(module)
    assert declared(source)["weight"] == ((2, 3), "float32")
    with pytest.raises(SourceError, match="'weight' is on the meta device"):
        source.shards()


def test_refuses_subclasses_that_hide_their_memory() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(TwoTensor(torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(SourceError, match="'weight' is a TwoTensor"):
        ModuleSource(module)


class Quantised(torch.Tensor):
    """As quantised parameters are: it shows another tensor's values and says nothing of what it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        args = [arg.inner.float() if isinstance(arg, cls) else arg for arg in args]
        return function(*args, **(kwargs or {}))


def test_refuses_subclasses_that_do_not_even_say_that_they_wrap() -> None:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(Quantised(torch.ones(2, 3, dtype=torch.bfloat16)), requires_grad=False)
    with pytest.raises(SourceError, match="'weight' is a Quantised"):
        ModuleSource(module)


def test_manifest_of_a_source_is_valid() -> None:
    tensors = tuple(ModuleSource(Head(), dtype=torch.bfloat16).metadata())
    assert wire.decode(wire.encode(tensors), tuple[wire.TensorMeta, ...]) == tensors


def test_shards_of_hundreds_of_parameters_take_milliseconds() -> None:
    module = nn.ModuleList([nn.Linear(4, 4) for _ in range(200)])
    source = ModuleSource(module)
    source.shards()
    times = []
    for _ in range(7):
        start = time.process_time()
        assert len(source.shards()) == 400
        times.append(time.process_time() - start)
    assert min(times) < 0.02, f"{min(times) * 1e3:.1f} ms"


@pytest.mark.gpu
def test_parameters_on_several_devices() -> None:
    module = nn.Sequential(nn.Linear(3, 2).cuda(), nn.Linear(2, 2))
    shards = {shard.name: shard.tensor for shard in ModuleSource(module).shards()}
    assert shards["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert {name: tensor.device.type for name, tensor in shards.items()} == {
        "0.weight": "cuda", "0.bias": "cuda", "1.weight": "cpu", "1.bias": "cpu",
    }  # fmt: skip


def test_the_fingerprint_follows_memory_and_makes_no_view() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    source = ModuleSource(module)
    assert isinstance(source, WatchedSource)
    before = source.fingerprint()
    with torch.no_grad():
        module[0].weight.add_(1)
    assert source.fingerprint() == before
    module[1].weight.data = module[1].weight.data.clone()
    moved = source.fingerprint()
    assert moved != before
    module[1].weight.data = module[1].weight.data.t().contiguous().t()
    assert source.fingerprint() != moved
    module[0].bias = None
    with pytest.raises(SourceError, match=r"'0\.bias' was declared"):
        source.fingerprint()


def test_modules_that_were_replaced_or_added_are_refused_and_wrappers_are_not() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    source = ModuleSource(module)
    before = source.fingerprint()
    module[1].add_module("probe", nn.Identity())
    assert source.fingerprint() == before
    kept = module[0]
    module[0] = torch.nn.Linear(4, 3)
    for call in (source.fingerprint, source.shards):
        with pytest.raises(SourceError, match=r"replaced, added or taken away .*: '0\.bias', '0\.weight'; make a new"):
            call()
    module[0] = kept
    assert source.fingerprint() == before
    module.append(torch.nn.Linear(2, 2))
    with pytest.raises(SourceError, match=r"'2\.bias', '2\.weight'"):
        source.fingerprint()
