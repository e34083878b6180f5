"""Lets stock megatron-core run without CUDA: gloo, CPU tensors, local modules. A test fixture, never part of a product.

Megatron names CUDA where any device would do, and its local modules refuse a few combinations that only
TransformerEngine supports on a GPU. `cpu_megatron` replaces those names while its block lasts and puts them back after.
What differs between releases of megatron-core is here and nowhere else in this package.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """Makes Megatron work on CPU tensors in this process while the block lasts; its random state stays replaced."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in [*_torch(), *_megatron()]:
            missing = object()
            before = vars(owner).get(name, missing)
            setattr(owner, name, value)
            stack.callback(
                delattr if before is missing else setattr, owner, name, *([] if before is missing else [before])
            )
        stack.enter_context(_CudaIsCpu())
        # a tracker with the usual interface that never asks for a CUDA generator
        from megatron.core.tensor_parallel import random

        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield


def has_grouped() -> bool:
    """Whether this release has grouped experts of its own (`Layout.grouped`); later ones have TransformerEngine's only."""
    return Version(importlib.metadata.version("megatron-core")) < Version("0.17")


class _CudaIsCpu(TorchFunctionMode):
    """Factories that are told `device="cuda"`, or to pin memory, make plain CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Stream:
    """Stands for CUDA streams and events: the CPU has done everything already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record


def _torch() -> Iterator[tuple[Any, str, Any]]:
    stream, kind = _Stream(), torch.Tensor.type
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # the optimizer compares names of types
        found = kind(tensor, *args, **kwargs)
        named = isinstance(found, str) and not found.startswith("torch.cuda.")
        return found.replace("torch.", "torch.cuda.", 1) if named else found

    def all_gather(outputs: list, given: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        # gloo wants equal sizes, NCCL does not
        if len({tuple(one.shape) for one in outputs}) == 1:
            return gather(outputs, given, group=group, async_op=async_op)
        padded = given.new_zeros((max(len(one) for one in outputs), *given.shape[1:]))
        padded[: len(given)] = given
        whole = [torch.empty_like(padded) for _ in outputs]
        gather(whole, padded, group=group)
        for output, one in zip(outputs, whole, strict=True):
            output.copy_(one[: len(output)])
        return None

    def reduce_scatter(
        output: torch.Tensor, given: list, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({tuple(one.shape) for one in given}) == 1:
            return scatter(output, given, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(given))
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(one) for one in given])[dist.get_rank(group)])
        return None

    yield torch.cuda, "current_device", lambda: CPU
    yield torch.cuda, "synchronize", lambda *args, **kwargs: None
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "Event", _Stream
    yield torch.cuda, "current_stream", lambda *args, **kwargs: stream
    yield torch.cuda, "default_stream", lambda *args, **kwargs: stream
    yield torch.cuda, "stream", lambda stream: contextlib.nullcontext()
    yield torch.Tensor, "cuda", lambda self, *args, **kwargs: self
    yield torch.Tensor, "type", type_
    yield dist, "all_gather", all_gather
    yield dist, "reduce_scatter", reduce_scatter


def _megatron() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        # sequence parallelism asks no more of a norm than this mark
        made = torch.nn.RMSNorm(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    yield torch_norm.WrappedTorchNorm, "__new__", norm
    # it counts TransformerEngine as there when Megatron's own wrapper module can be imported
    yield multi_latent_attention, "HAVE_TE", False
    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config") is not None:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

        fused = QKNormConfigResolver._mla_fused_linear_or_default

        def linear(self: Any, module_spec: Any, name: str) -> Any:
            # 0.19 takes a norm of key and value for one of the query too, which DeepSeek-V2-Lite has none of
            return module_spec if name == "linear_q_proj" else fused(self, module_spec, name)

        yield QKNormConfigResolver, "_mla_fused_linear_or_default", linear
    yield token_dispatcher, "maybe_move_tensor_to_cpu", to_cpu
    yield LocalSpecProvider, "core_attention", lambda self: _attention()
    if has_grouped():
        from megatron.core.transformer.moe import grouped_gemm_util

        yield grouped_gemm_util, "assert_grouped_gemm_is_available", lambda: None
        yield grouped_gemm_util, "ops", types.SimpleNamespace(gmm=_grouped_product)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 reads the name without having set it
        yield moe_utils, "te_general_gemm", None


def _grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """What the grouped GEMM kernel computes: stretches of rows, each times its own matrix."""
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ (weight.T if trans_b else weight) for part, weight in parts])


def context_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Which positions of a sequence a context parallel rank computes: an early and a late stretch of equal length."""
    part = length // (2 * size)
    positions = torch.arange(length).view(2 * size, part)
    return positions[[rank, 2 * size - 1 - rank]].reshape(-1)


def _attention() -> type:
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """Megatron's local attention, for values narrower than keys (MLA) and for context parallel ranks as well."""

        def __init__(
            self, config: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
        ) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)
            self.context = parallel_state.get_context_parallel_group()

        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            if (size := self.context.size()) > 1:
                length = query.size(0) * size
                own = context_positions(length, self.context.rank(), size)
                whole = torch.cat([context_positions(length, rank, size) for rank in range(size)])
                attention_mask = (own[:, None] < whole[None, :])[None, None]
                key, value = (self._whole(one) for one in (key, value))
            return super().forward(query, key, value, attention_mask, *args, **kwargs)

        def _whole(self, part: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(part) for _ in range(self.context.size())]
            dist.all_gather(parts, part.contiguous(), group=self.context)
            return torch.cat(parts)

    return Attention
