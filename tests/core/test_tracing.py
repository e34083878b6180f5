"""Loaders written the way inference engines write them, traced on live models: what is found, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rdt_core.errors import TracingError
from rdt_core.geometry import OPS, chain_shape, replay
from rdt_core.standins import StandIn
from rdt_core.tracing import Destinations, Fill, Trace, trace
from rdt_core.wire import TensorMeta

pytestmark = pytest.mark.unit

HIDDEN, HEADS, KV, DIM, FFN, EXPERTS, VOCAB, PADDED, LATENT = 8, 4, 2, 2, 6, 3, 10, 16, 4


def meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def metas(weights: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [meta(name, tensor) for name, tensor in weights.items()]


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        found.update(f"{name} {storage.data_ptr()} {tuple(tensor.shape)}".encode())
        found.update(bytes(storage))
    return found.hexdigest()


def land(found: Trace, weights: dict[str, torch.Tensor], destinations: Destinations) -> None:
    """What a receiver does with a trace, from whole checkpoint tensors."""
    for fill in found.fills:
        whole = destinations[fill.destination].data
        whole.as_strided(fill.shape, fill.strides, fill.offset).fill_(fill.value)
    for item in found.slices:
        whole = destinations[item.destination].data
        value = replay(weights[item.name], item.chain)
        view = whole.as_strided(item.shape, item.strides, item.offset)
        assert value.numel() == view.numel()
        assert str(whole.dtype) == f"torch.{item.dtype}"
        assert str(weights[item.name].dtype) == f"torch.{item.source_dtype}"
        view.copy_(value)


class Model(nn.Module):
    """One layer of a tensor-parallel decoder with fused, padded, expert and latent parameters, and their loaders."""

    def __init__(self, tp: int, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        self.q, self.kv = HEADS // tp * DIM, max(KV // tp, 1) * DIM
        ffn = FFN // tp

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape).to(dtype), requires_grad=False)

        self.embed = parameter(PADDED // tp, HIDDEN)
        self.qkv = parameter(self.q + 2 * self.kv, HIDDEN)
        self.qkv_bias = parameter(self.q + 2 * self.kv)
        self.o = parameter(HIDDEN, self.q)
        self.gate_up = parameter(2 * ffn, HIDDEN)
        self.down = nn.Parameter(torch.randn(ffn, HIDDEN).to(dtype).t(), requires_grad=False)
        self.w13 = parameter(EXPERTS, 2 * ffn, HIDDEN)
        self.w2 = parameter(EXPERTS, HIDDEN, ffn)
        self.fused_w13 = parameter(EXPERTS, 2 * FFN, HIDDEN)
        self.fused_w2 = parameter(EXPERTS, HIDDEN, FFN)
        self.latent = parameter(LATENT + LATENT + DIM, HIDDEN)
        self.rope = parameter(HEADS * DIM, HIDDEN)
        self.scales = parameter(3)
        self.norm = parameter(HIDDEN)
        self.register_buffer("bias", torch.randn(HIDDEN))
        self.register_buffer("inverse", torch.randn(4))

    def load_embed(self, weight: torch.Tensor) -> None:
        rows = PADDED // self.tp
        begin = min(self.rank * rows, VOCAB)
        end = min(begin + rows, VOCAB)
        own = weight.narrow(0, begin, end - begin)
        self.embed[: own.shape[0]].data.copy_(own)
        self.embed[own.shape[0] :].data.fill_(0)

    def load_qkv(self, param: nn.Parameter, which: str, weight: torch.Tensor) -> None:
        offset, size = {"q": (0, self.q), "k": (self.q, self.kv), "v": (self.q + self.kv, self.kv)}[which]
        shard = self.rank if which == "q" else self.rank // max(self.tp // KV, 1)
        own = weight.narrow(0, shard * size, size)
        data = param.data.narrow(0, offset, size)
        assert data.shape == own.shape
        data.copy_(own)

    def load_experts(self, name: str, weight: torch.Tensor) -> None:
        _, expert, proj = name.split(".")
        ffn = FFN // self.tp
        if proj == "down":
            self.w2.data[int(expert)].copy_(weight.narrow(1, self.rank * ffn, ffn))
        else:
            begin = 0 if proj == "gate" else ffn
            self.w13.data[int(expert)].narrow(0, begin, ffn).copy_(weight.narrow(0, self.rank * ffn, ffn))

    def load_fused(self, name: str, weight: torch.Tensor) -> None:
        if name == "fused.down":
            for expert, one in enumerate(weight.unbind(0)):
                self.fused_w2.data[expert] = one.transpose(-1, -2)
            return
        gate, up = weight.chunk(2, dim=-1)
        for expert in range(weight.size(0)):
            self.fused_w13.data[expert, :FFN] = gate[expert].t().contiguous()
            self.fused_w13.data[expert, FFN:].copy_(up[expert].T)

    def load_weights(self, weights) -> set[str]:
        loaded, cached = set(), {}
        for name, weight in weights:
            assert isinstance(weight, torch.Tensor)
            assert not hasattr(weight, "is_sharded_weight")
            loaded.add(name)
            ffn = FFN // self.tp
            if name == "embed":
                self.load_embed(weight)
            elif name in ("q", "k", "v"):
                self.load_qkv(self.qkv, name, weight)
            elif name in ("q_bias", "k_bias", "v_bias"):
                self.load_qkv(self.qkv_bias, name[0], weight)
            elif name == "o":
                self.o.data.copy_(weight[:, self.rank * self.q : (self.rank + 1) * self.q])
            elif name in ("gate", "up"):
                begin = 0 if name == "gate" else ffn
                self.gate_up.data[begin : begin + ffn] = weight.split(ffn, dim=0)[self.rank]
            elif name == "down":
                self.down.data.copy_(weight.narrow(1, self.rank * ffn, ffn))
            elif name.startswith("experts."):
                self.load_experts(name, weight)
            elif name.startswith("fused."):
                self.load_fused(name, weight)
            elif name in ("q_a", "kv_a"):
                cached[name] = weight
                if len(cached) == 2:
                    self.latent.data.copy_(torch.cat([cached["q_a"], cached["kv_a"]], dim=0))
            elif name == "rope":
                permuted = weight.view(HEADS, DIM // 2, 2, HIDDEN).transpose(1, 2).reshape(HEADS * DIM, HIDDEN)
                self.rope.data.copy_(permuted)
            elif name.startswith("scale."):
                index = int(name[-1])
                self.scales.data[index] = weight.reshape(())
            elif name == "norm":
                self.norm.data.copy_(weight.to(self.norm.device, self.norm.dtype))
            elif name == "bias":
                self.bias.copy_(weight)
            elif name == "unused":
                loaded.discard(name)
            else:
                raise KeyError(name)
        return loaded


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, HIDDEN),
        "q": (HEADS * DIM, HIDDEN),
        "k": (KV * DIM, HIDDEN),
        "v": (KV * DIM, HIDDEN),
        "q_bias": (HEADS * DIM,),
        "k_bias": (KV * DIM,),
        "v_bias": (KV * DIM,),
        "o": (HIDDEN, HEADS * DIM),
        "gate": (FFN, HIDDEN),
        "up": (FFN, HIDDEN),
        "down": (HIDDEN, FFN),
        **{f"experts.{e}.{proj}": (FFN, HIDDEN) for e in range(EXPERTS) for proj in ("gate", "up")},
        **{f"experts.{e}.down": (HIDDEN, FFN) for e in range(EXPERTS)},
        "fused.gate_up": (EXPERTS, HIDDEN, 2 * FFN),
        "fused.down": (EXPERTS, FFN, HIDDEN),
        "q_a": (LATENT, HIDDEN),
        "kv_a": (LATENT + DIM, HIDDEN),
        "rope": (HEADS * DIM, HIDDEN),
        **{f"scale.{i}": (1,) for i in range(3)},
        "norm": (HIDDEN,),
        "bias": (HIDDEN,),
        "unused": (3,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_landing_a_trace_equals_the_loader(tp: int, rank: int, wire: torch.dtype) -> None:
    model, weights = Model(tp, rank), checkpoint(wire)
    expected = copy.deepcopy(model)
    expected.load_weights(weights.items())
    before = digest(model)
    destinations = Destinations.of(model)
    found = trace(model.load_weights, metas(weights), destinations)
    assert digest(model) == before
    assert found.offered == tuple(weights)
    assert found.taken == tuple(name for name in weights if name != "unused")
    assert all(name in OPS for item in found.slices for name, _ in item.chain)
    land(found, weights, destinations)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_changed_weight_would_be_seen() -> None:
    model, weights = Model(1, 0), checkpoint()
    destinations = Destinations.of(model)
    found = trace(model.load_weights, metas(weights), destinations)
    land(found, weights | {"v": weights["v"] + 1}, destinations)
    expected = copy.deepcopy(model)
    expected.load_weights(weights.items())
    assert not torch.equal(expected.qkv, model.qkv)


def test_padding_is_recorded_and_the_live_model_keeps_it() -> None:
    model, weights = Model(2, 1), checkpoint()
    model.embed.data.fill_(7)
    found = trace(model.load_weights, metas({"embed": weights["embed"]}), Destinations.of(model))
    rows = VOCAB - PADDED // 2
    assert found.fills == (Fill("embed", rows * HIDDEN, (8 - rows, HIDDEN), (HIDDEN, 1), "float32", 0),)
    assert found.slices[0].chain == (("narrow", (0, 8, rows)),)
    assert bool((model.embed == 7).all())


def test_slice_of_a_strided_destination() -> None:
    model, weights = Model(1, 0), checkpoint()
    found = trace(model.load_weights, metas({"down": weights["down"]}), Destinations.of(model))
    (only,) = found.slices
    assert (only.destination, only.offset, only.shape, only.strides) == ("down", 0, (HIDDEN, FFN), (1, HIDDEN))
    assert only.chain == ()


def test_cat_splits_the_destination() -> None:
    model, weights = Model(1, 0), checkpoint()
    found = trace(model.load_weights, metas({name: weights[name] for name in ("q_a", "kv_a")}), Destinations.of(model))
    assert [(item.name, item.offset, item.shape) for item in found.slices] == [
        ("q_a", 0, (LATENT, HIDDEN)),
        ("kv_a", LATENT * HIDDEN, (LATENT + DIM, HIDDEN)),
    ]


def one(load, shape=(4, 6), dtype="float32", model: nn.Module | None = None, **kwargs) -> Trace:
    """Traces `load(module, stand-in)` on a module with a parameter `weight` of the same shape."""
    if model is None:
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(shape), requires_grad=False)
    before = digest(model)
    try:
        return trace(
            lambda weights: [load(model, weight) for _, weight in weights],
            [TensorMeta(name="layer.w", shape=shape, dtype=dtype)],
            Destinations.of(model),
            **kwargs,
        )
    finally:
        assert digest(model) == before


REFUSED = {
    "arithmetic": lambda m, w: m.weight.data.copy_(w * 2),
    "function": lambda m, w: torch.add(m.weight, w),
    "reflected": lambda m, w: 1 - w,
    "in place on the stand-in": lambda m, w: w.mul_(2),
    "fill of the stand-in": lambda m, w: w.fill_(0),
    "setitem on the stand-in": lambda m, w: w.__setitem__(0, 1.0),
    "copy into the stand-in": lambda m, w: w.copy_(m.weight),
    "item": lambda m, w: w[0, 0].item(),
    "tolist": lambda m, w: w.tolist(),
    "float()": lambda m, w: float(w[0, 0]),
    "bool": lambda m, w: bool(w[0, 0]),
    "comparison": lambda m, w: w == 0,
    "all": lambda m, w: w.all(),
    "mask": lambda m, w: w[w > 0],
    "mask of real": lambda m, w: w[m.weight > 0],
    "index tensor": lambda m, w: w[torch.tensor([1, 2])],
    "index list": lambda m, w: w[[1, 2]],
    "index_select": lambda m, w: w.index_select(0, torch.tensor([1])),
    "flip": lambda m, w: w.flip(0),
    "repeat": lambda m, w: w.repeat(2, 1),
    "expand": lambda m, w: w[:1].expand(4, 6),
    "bytes": lambda m, w: w.view(torch.uint8),
    "data": lambda m, w: w.data,
    "numpy": lambda m, w: w.numpy(),
    "data_ptr": lambda m, w: w.data_ptr(),
    "storage": lambda m, w: w.untyped_storage(),
    "deep copy": lambda m, w: copy.deepcopy(w),
    "parameter": lambda m, w: setattr(m, "weight", nn.Parameter(w)),
    "frozen parameter": lambda m, w: setattr(m, "weight", nn.Parameter(w, requires_grad=False)),
    "param.data =": lambda m, w: setattr(m.weight, "data", w),
    "param.data = real": lambda m, w: setattr(m.weight, "data", torch.zeros(4, 6)),
    "other.data =": lambda m, w: setattr(torch.zeros(4, 6), "data", w),
    "set_": lambda m, w: m.weight.set_(torch.zeros(4, 6)),
    "real in cat": lambda m, w: torch.cat([w, torch.zeros(4, 6)]),
    "reshape of cat": lambda m, w: torch.cat([w, w]).view(-1),
    "temporary": lambda m, w: torch.zeros(4, 6).copy_(w),
    "mul_ of the destination": lambda m, w: m.weight.data.mul_(2),
    "add_ of the stand-in": lambda m, w: m.weight.data.add_(w),
    "computed": lambda m, w: m.weight.data.copy_(-torch.exp(m.weight)),
    "random": lambda m, w: nn.init.normal_(m.weight),
    "out=": lambda m, w: torch.add(torch.ones(4, 6), 1, out=m.weight),
    "foreach": lambda m, w: torch._foreach_mul_([m.weight.data], 2),
    "masked setitem": lambda m, w: m.weight.data.__setitem__(m.weight > 0, 0.0),
    "mask takes the stand-in": lambda m, w: m.weight.data.__setitem__(m.weight > 0, w),
    "broadcast": lambda m, w: m.weight.data.copy_(w[0]),
    "broadcast by setitem": lambda m, w: m.weight.data.__setitem__(slice(None), w[:1]),
    "expanded destination": lambda m, w: m.weight.data[:1].expand(4, 6).copy_(w),
    "other shape, same count": lambda m, w: m.weight.data.view(6, 4).copy_(w),
    "narrow out of range": lambda m, w: w.narrow(0, 3, 2),
    "view of transposed": lambda m, w: w.t().view(24),
    "too many indices": lambda m, w: w[0, 0, 0],
    "complex": lambda m, w: w.to(torch.complex64),
}


@pytest.mark.parametrize("load", REFUSED.values(), ids=REFUSED.keys())
def test_refused(load) -> None:
    with pytest.raises(TracingError) as caught:
        one(load)
    assert f"{__file__}:" in str(caught.value)


def test_a_refusal_names_op_tensor_chain_and_line() -> None:
    def load(module: nn.Module, weight: torch.Tensor) -> None:
        weight.narrow(1, 2, 3).to(torch.bfloat16).sum()  # this line

    with pytest.raises(TracingError) as caught:
        one(load)
    text = str(caught.value)
    for part in ("torch.Tensor.sum", "'layer.w'", ".narrow(1, 2, 3)", ".to(bfloat16)", "in load", "# this line"):
        assert part in text


def test_a_refused_write_names_destination_and_op() -> None:
    with pytest.raises(TracingError, match=r"aten\.mul_.* destination 'weight'"):
        one(REFUSED["mul_ of the destination"])


def test_metadata_reads_work() -> None:
    seen = {}

    def load(module: nn.Module, w: torch.Tensor) -> None:
        seen.update(
            kind=isinstance(w, torch.Tensor), parameter=isinstance(w, nn.Parameter), shape=w.shape, size=w.size(),
            size0=w.size(0), dim=w.dim(), ndim=w.ndim, numel=w.numel(), dtype=w.dtype, device=w.device, item=w.itemsize,
            element=w.element_size(), nbytes=w.nbytes, contiguous=w.is_contiguous(), stride=w.stride(), length=len(w),
            floating=w.is_floating_point(), transposed=w.t().is_contiguous(), named=w.type(), tensor=torch.is_tensor(w),
            grad=w.requires_grad, offset=w.storage_offset(), rows=len(list(w)), has=hasattr(w, "weight_loader"),
            text=f"{w} {w!r}", same=w in {w: 1}, empty=torch.numel(w),
        )  # fmt: skip
        module.weight.data.copy_(w)

    assert len(one(load, dtype="bfloat16").slices) == 1
    assert seen.pop("text").count("layer.w") == 2
    assert seen == {
        "kind": True, "parameter": False, "shape": (4, 6), "size": (4, 6), "size0": 4, "dim": 2, "ndim": 2, "numel": 24,
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "item": 2, "element": 2, "nbytes": 48,
        "contiguous": True, "stride": (6, 1), "length": 4, "floating": True, "transposed": False,
        "named": "torch.BFloat16Tensor", "tensor": True, "grad": False, "offset": 0, "rows": 4, "has": False,
        "same": True, "empty": 24,
    }  # fmt: skip


def test_device_moves_change_nothing_but_the_label() -> None:
    devices = []

    def load(module: nn.Module, w: torch.Tensor) -> None:
        moved = w.to("cuda:1", non_blocking=True)
        devices.extend([w.device, moved.device, moved.cpu().device])
        module.weight.data.copy_(moved)

    assert one(load, device="cuda:0").slices[0].chain == ()
    assert devices == [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")]


def test_casts_come_last_and_the_copy_does_its_own() -> None:
    def chain(load) -> tuple:
        return one(load, dtype="float32").slices[0].chain

    assert chain(lambda m, w: m.weight.data[:2].copy_(w.bfloat16()[:2])) == (
        ("narrow", (0, 0, 2)),
        ("to", ("bfloat16",)),
    )
    assert chain(lambda m, w: m.weight.data.copy_(w.float())) == ()
    assert chain(lambda m, w: m.weight.data.copy_(w.to(torch.float16).type(torch.float32))) == (("to", ("float16",)),)


def test_a_loader_that_swallows_the_error_still_fails() -> None:
    def load(module: nn.Module, w: torch.Tensor) -> None:
        try:
            w.item()
        except Exception:
            module.weight.data.copy_(w)

    with pytest.raises(TracingError, match="item"):
        one(load)


def test_a_loader_that_turns_the_error_into_another_reports_the_first() -> None:
    def load(module: nn.Module, w: torch.Tensor) -> None:
        try:
            w.item()
        except TracingError:
            raise RuntimeError("could not load") from None

    with pytest.raises(TracingError, match="item"):
        one(load)


def test_an_error_of_the_loader_itself_comes_through_with_a_note() -> None:
    def load(module: nn.Module, w: torch.Tensor) -> None:
        raise KeyError("no such parameter")

    with pytest.raises(KeyError) as caught:
        one(load)
    assert "layer.w" in caught.value.__notes__[0]


def test_a_buffer_bound_to_a_stand_in_is_put_back() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(4, 6))
    with pytest.raises(TracingError, match="table"):
        one(lambda m, w: setattr(m, "table", w), model=model)
    assert type(model.table) is torch.Tensor


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(TracingError, match=r"'layer\.w' has dtype 'int3'"):
        one(lambda m, w: None, dtype="int3")


def test_thread_pools_run_inline_and_are_restored() -> None:
    submit, threads = ThreadPoolExecutor.submit, set()

    def load(weights) -> None:
        def rows(weight: torch.Tensor) -> None:
            threads.add(threading.get_ident())
            model.weight.data[:3].copy_(weight[:3])
            model.weight.data[3:].zero_()

        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(rows, weight) for _, weight in weights]
            for future in as_completed(futures):
                future.result()

    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, 6), requires_grad=False)
    found = trace(load, [TensorMeta(name="w", shape=(4, 6), dtype="float32")], Destinations.of(model))
    assert (len(found.slices), len(found.fills), threads) == (1, 1, {threading.get_ident()})
    assert bool((model.weight == 1).all())
    assert ThreadPoolExecutor.submit is submit


def test_another_threads_pool_is_left_alone_while_tracing() -> None:
    ran = []

    def other() -> None:
        with ThreadPoolExecutor(1) as pool:
            ran.append(pool.submit(threading.get_ident).result() != threading.get_ident())

    def load(module: nn.Module, w: torch.Tensor) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        module.weight.data.copy_(w)

    one(load)
    assert ran == [True]


def test_a_copy_from_a_thread_of_the_loaders_own_is_refused() -> None:
    failures = []

    def load(module: nn.Module, w: torch.Tensor) -> None:
        def copying() -> None:
            try:
                module.weight.data.copy_(w)
            except TracingError as error:
                failures.append(error)

        thread = threading.Thread(target=copying)
        thread.start()
        thread.join(10)

    with pytest.raises(TracingError, match="thread"):
        one(load)
    assert len(failures) == 1


def test_a_stand_in_kept_after_the_trace_is_refused() -> None:
    kept = []
    one(lambda m, w: (kept.append(w), m.weight.data.copy_(w)))
    with pytest.raises(TracingError, match="after the trace"):
        torch.zeros(4, 6).copy_(kept[0])


def test_meta_destinations_are_told_apart_and_counters_see_the_copies() -> None:
    class Counter(TorchDispatchMode):
        copied = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                assert args[0].numel() == args[1].numel()
                self.copied += args[0].numel()
            return func(*args, **(kwargs or {}))

    destinations, targets = Destinations(), {}
    for key in ("a", "b"):
        targets[key] = nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
        destinations.add(key, targets[key])

    counter = Counter()

    def load(weights) -> None:
        for _, weight in weights:
            with counter:
                for key in ("b", "a"):
                    targets[key].data.narrow(0, 1, 2).copy_(weight.narrow(0, 0, 2))

    found = trace(load, [TensorMeta(name="w", shape=(4, 6), dtype="float32")], destinations)
    assert [(item.destination, item.offset) for item in found.slices] == [("b", 6), ("a", 6)]
    assert counter.copied == 24


def test_on_write_sees_each_copy_and_cannot_write() -> None:
    seen = []

    def hook(destination: torch.Tensor, source: StandIn) -> None:
        seen.append((tuple(destination.shape), source.origin.name))
        destination.copy_(torch.full_like(destination, 3))
        destination.fill_(5)

    found = one(lambda m, w: m.weight.data[1:].copy_(w[1:]), on_write=hook)
    assert seen == [((3, 6), "layer.w")]
    assert (len(found.slices), found.fills) == (1, ())


def test_subclassed_parameters() -> None:
    """Engines' parameter classes may intercept torch functions themselves before a stand-in sees them."""

    class Custom(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = nn.Module()
    model.weight = Custom(torch.randn(4, 6), requires_grad=False)
    found = one(lambda m, w: m.weight.copy_(w.t().t()), model=model)
    assert (len(found.slices), found.slices[0].chain) == (1, (("permute", (1, 0)), ("permute", (1, 0))))


def test_inference_mode() -> None:
    with torch.inference_mode():
        found = one(lambda m, w: m.weight.data[1:].copy_(w.narrow(0, 1, 3)))
    assert found.slices[0].chain == (("narrow", (0, 1, 3)),)


def test_fill_before_a_slice_is_kept_and_after_it_refused() -> None:
    found = one(lambda m, w: (m.weight.data.zero_(), m.weight.data[:2].copy_(w[:2])))
    assert (len(found.fills), len(found.slices)) == (1, 1)
    with pytest.raises(TracingError, match=r"earlier copy of 'layer\.w'"):
        one(lambda m, w: (m.weight.data.copy_(w), m.weight.data[3:].zero_()))


def test_interleaved_fill_after_a_slice_is_compared_element_by_element() -> None:
    found = one(lambda m, w: (m.weight.data[:, :4].copy_(w[:, :4]), m.weight.data[:, 4:].fill_(1.5)))
    assert [fill.value for fill in found.fills] == [1.5]
    with pytest.raises(TracingError, match="slices land after fills"):
        one(lambda m, w: (m.weight.data[:, :4].copy_(w[:, :4]), m.weight.data[:, 3:].fill_(1.5)))


def test_numbers_by_setitem_are_fills() -> None:
    found = one(lambda m, w: (m.weight.data.__setitem__((slice(2, None), 0), 2), m.weight.data[:2].copy_(w[:2])))
    assert found.fills == (Fill("weight", 12, (2,), (6,), "float32", 2),)


def test_empty_copies_leave_no_slice() -> None:
    found = one(lambda m, w: m.weight.data[4:].copy_(w[4:]))
    assert (found.slices, found.taken) == ((), ())


def test_chains_fit_the_shapes_they_claim() -> None:
    weights = checkpoint()
    found = trace((model := Model(2, 1)).load_weights, metas(weights), Destinations.of(model))
    for item in found.slices:
        shape = chain_shape(weights[item.name].shape, item.chain)
        assert item.shape == (1,) * (len(item.shape) - len(shape)) + shape
