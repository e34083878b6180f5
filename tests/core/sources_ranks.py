"""Run by test_sources_fsdp.py: shards modules over gloo ranks and writes down what their sources say.

`python sources_ranks.py FOLDER RANKS SCENARIO...` forks the ranks from one process (torch is imported once), runs one
scenario after the other in them and leaves FOLDER/SCENARIO.RANK.pt, or .txt with the traceback, for each rank.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from rdt_core.errors import SourceError
from rdt_core.sources import ModuleSource

VIEWS = {"aten.detach.default", "aten.as_strided.default", "aten.slice.Tensor", "aten.view.default"}


class Record(TorchDispatchMode):
    """Writes down every operator that runs, collectives included."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between an embedding and a head, which are one parameter if `tied`."""

    def __init__(self, vocabulary: int = 12, width: int = 8, inner: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, inner) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.rand(3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.sum()


def net(**sizes: Any) -> Net:
    torch.manual_seed(7)
    return Net(**sizes)


def shard2(model: Net, mesh, **options: Any) -> Net:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model: nn.Module, vocabulary: int = 12) -> None:
    """One step of training, so that shards are looked at as they are between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(6).remainder(vocabulary).view(2, 3)
    model(tokens).square().sum().backward()
    optimizer.step()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The oracle: gathers every parameter and persistent buffer."""
    named = dict(model.named_parameters())
    for path, owner in model.named_modules():
        kept = owner._buffers.keys() - owner._non_persistent_buffers_set
        named |= {f"{path}.{key}".lstrip("."): owner._buffers[key] for key in kept}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named.items()
    }


def observe(model: nn.Module, oracle: Callable[[], dict[str, torch.Tensor]] | None = None, **options: Any) -> dict:
    """Declares and reads shards once before and once after the values change in place, and writes down both."""
    with Record() as declaring:
        source = ModuleSource(model, **options)
        metadata = source.metadata()
        shards = source.shards()
    with Record() as reading:
        again = source.shards()
    storages = {
        (value._local_tensor if isinstance(value, DTensor) else value).untyped_storage().data_ptr()
        for value in (*model.parameters(), *model.buffers())
    }
    return {
        "ops": sorted(set(declaring.ops + reading.ops) - VIEWS),
        "metadata": [(tensor.name, tensor.shape, tensor.dtype) for tensor in metadata],
        "shards": [(shard.name, shard.offset, shard.tensor.clone()) for shard in shards],
        "same": [a.tensor.data_ptr() == b.tensor.data_ptr() for a, b in zip(shards, again, strict=True)],
        "aliases": [shard.tensor.untyped_storage().data_ptr() in storages for shard in shards],
        "full": (oracle or (lambda: full(model)))(),
    }


def refusal(act: Callable[[], Any]) -> dict:
    try:
        act()
    except SourceError as error:
        return {"error": str(error)}
    return {"error": ""}


def even(rank: int) -> dict:
    model = shard2(net(), init_device_mesh("cpu", (2,)))
    step(model)
    return observe(model)


def uneven(rank: int) -> dict:
    """4 ranks: 7 rows are 2, 2, 2, 1; 5 rows are 2, 2, 1 and none; 3 rows leave one rank without any."""
    model = shard2(net(vocabulary=7, width=5, inner=3), init_device_mesh("cpu", (4,)))
    step(model, 7)
    return observe(model)


def columns(rank: int) -> dict:
    """Shards along the last axis."""

    def last(parameter: nn.Parameter) -> Shard:
        return Shard(parameter.ndim - 1)

    model = shard2(net(), init_device_mesh("cpu", (4,)), shard_placement_fn=last)
    step(model)
    return observe(model)


def hybrid(rank: int) -> dict:
    model = shard2(net(width=5), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    step(model)
    return observe(model)


def tied(rank: int) -> dict:
    model = shard2(net(tied=True), init_device_mesh("cpu", (2,)))
    step(model)
    return observe(model)


def ignored_by_fsdp(rank: int) -> dict:
    """A parameter that FSDP leaves alone is whole on every rank."""
    model = net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params={model.head.weight})
    return observe(model)


def tensor_parallel(rank: int) -> dict:
    """FSDP over TP: rows are dealt out twice along one axis, and come to lie in an order of their own."""
    model = net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    result = observe(model)
    result["placements"] = str(model.layers[0].up.weight.placements)
    return result


def strided(rank: int) -> dict:
    """Rows that come to lie in several stretches on each rank, unevenly."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(5, 11)
    torch.manual_seed(7)
    weight = torch.rand(11, 5)
    spread = distribute_tensor(weight, mesh, [_StridedShard(0, split_factor=3), Shard(1)], src_data_rank=None)
    model.weight = nn.Parameter(spread)
    bias = distribute_tensor(
        torch.arange(11.0), mesh, [Replicate(), _StridedShard(0, split_factor=2)], src_data_rank=None
    )
    model.bias = nn.Parameter(bias)
    return observe(model, lambda: {"weight": weight, "bias": torch.arange(11.0)})


def off_mesh(rank: int) -> dict:
    """Ranks 2 and 3 are not in the mesh: they know the names and hold nothing."""
    from torch.distributed.device_mesh import DeviceMesh

    model = nn.Linear(4, 6, bias=False)
    torch.manual_seed(7)
    weight = torch.rand(6, 4)
    model.weight = nn.Parameter(distribute_tensor(weight, DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None))
    return observe(model, lambda: {"weight": weight})


def experts(rank: int) -> dict:
    """transformers' Qwen3-MoE with 5 experts over 4 ranks; fused tensors along different axes."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.core_model_loading import revert_weight_conversion

    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_experts=5, num_experts_per_tok=2,
        decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    mesh = init_device_mesh("cpu", (4,))

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.shape == (5, 24, 16) else None  # gate_up_proj: cut in the middle of both halves

    for index, layer in enumerate(model.model.layers):
        fully_shard(layer, mesh=mesh, shard_placement_fn=place if index else None)
    fully_shard(model, mesh=mesh)
    return observe(model, lambda: revert_weight_conversion(model, full(model)), dtype=torch.bfloat16)


def fsdp1(rank: int, **options: Any) -> dict:
    model = net(**options)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        use_orig_params=True, device_id=torch.device("cpu"),
    )  # fmt: skip
    step(wrapped, model.embed.num_embeddings)
    return observe(wrapped, lambda: full1(wrapped))


def full1(model: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in full(model).items()}


def fsdp1_even(rank: int) -> dict:
    return fsdp1(rank)


def fsdp1_uneven(rank: int) -> dict:
    return fsdp1(rank, vocabulary=23, width=5, inner=13)


def fsdp1_tied(rank: int) -> dict:
    return fsdp1(rank, vocabulary=23, width=5, tied=True)


def fsdp1_hybrid(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True, device_id=torch.device("cpu"),
    )  # fmt: skip
    return observe(model, lambda: full1(model))


def fsdp1_whole(rank: int) -> dict:
    model = FullyShardedDataParallel(
        net(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True, device_id=torch.device("cpu")
    )
    step(model)
    return observe(model, lambda: full1(model))


def ddp(rank: int) -> dict:
    model = nn.parallel.DistributedDataParallel(net())
    step(model)
    return observe(model, lambda: full(model.module))


def refuse_unsharded(rank: int) -> dict:
    """A forward pass without a backward pass leaves the root of FSDP2 unsharded."""
    model = shard2(net(), init_device_mesh("cpu", (2,)))
    source = ModuleSource(model)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    late, early = refusal(source.shards), refusal(lambda: ModuleSource(model))
    model.reshard()
    after = refusal(source.shards)
    model.layers[1].unshard()
    return {"late": late, "early": early, "after": after, "child": refusal(source.shards)}


def refuse_fsdp1_flat(rank: int) -> dict:
    model = FullyShardedDataParallel(net(), use_orig_params=False, device_id=torch.device("cpu"))
    return refusal(lambda: ModuleSource(model))


def refuse_fsdp1_unsharded(rank: int) -> dict:
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    source = ModuleSource(model)
    with FullyShardedDataParallel.summon_full_params(model):
        inside = refusal(source.shards)
    return {**inside, "after": refusal(source.shards)}


def refuse_partial(rank: int) -> dict:
    model = nn.Linear(3, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(DTensor.from_local(torch.rand(4, 3), mesh, [Partial()], run_check=False))
    return refusal(lambda: ModuleSource(model).shards())


def refuse_local_shape(rank: int) -> dict:
    """Ranks made their own local tensors, of sizes that torch.chunk would not give."""
    model = nn.Linear(3, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.rand(1 if rank == 0 else 3, 3)
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 3]), stride=(3, 1))
    model.weight = nn.Parameter(made)
    return refusal(lambda: ModuleSource(model).shards())


SCENARIOS: dict[str, Callable[[int], dict]] = {
    scenario.__name__: scenario
    for scenario in (
        even, uneven, columns, hybrid, tied, ignored_by_fsdp, tensor_parallel, strided, off_mesh, experts, fsdp1_even,
        fsdp1_uneven, fsdp1_tied, fsdp1_hybrid, fsdp1_whole, ddp, refuse_unsharded, refuse_fsdp1_flat,
        refuse_fsdp1_unsharded, refuse_partial, refuse_local_shape,
    )
}  # fmt: skip


def rank_main(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous.{ranks}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        for name in names:
            try:
                torch.save(SCENARIOS[name](rank), Path(folder) / f"{name}.{rank}.pt")
            except Exception:
                (Path(folder) / f"{name}.{rank}.txt").write_text(traceback.format_exc())
            dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    folder, ranks, *names = sys.argv[1:]
    if "experts" in names:
        import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  once, before the ranks are forked
    mp.start_processes(rank_main, (int(ranks), folder, names), nprocs=int(ranks), start_method="fork")


if __name__ == "__main__":
    main()
