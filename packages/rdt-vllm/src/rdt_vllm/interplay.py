"""A source of rdt's as a source of vLLM's own weight transfer backends (`nccl`, `ipc`, `sharded_rdt`).

For a trainer that feeds a stock vLLM worker without `rdt-vllm` in it, or that changes over engine by engine. vLLM's trainer side
takes full tensors, so each is gathered when its turn comes; see docs/interplay.md for what that costs and what is missing. It
needs vLLM in the trainer's environment, and refuses a release that was not tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rdt_core.sources import FullTensors, IterableWeightSource, WeightSource

from .versions import check_vllm


def vllm_source(
    source: WeightSource | IterableWeightSource, group: Any = None, *, device: torch.device | str | None = None
) -> Any:
    """Returns a `vllm.distributed.weight_transfer.base.WeightSource` over a source of rdt's.

    Args:
        source: of this trainer rank.
        group: the `torch.distributed` process group of the source's ranks; None: this rank holds everything. Every rank makes
            and iterates it, in step.
        device: where full tensors are given; default: where this rank's shards lie. `nccl` and `ipc` need a GPU, so that
            `CheckpointSource` needs `device="cuda"` there.

    Raises:
        MissingVllmError: vLLM is not installed here, or not a tested release.
        CoverageError: the ranks of the group do not hold a tensor as a whole.
    """
    check_vllm()
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource

    # in vLLM's own order of gather groups, and the same on every rank, as `sharded_rdt` wants it
    full = FullTensors(source, group, device=device)
    declared = [ParamMeta(meta.name, getattr(torch, meta.dtype), tuple(meta.shape)) for meta in full.metadata()]

    class RdtSource(VllmWeightSource):
        """Full tensors under checkpoint names, in the wire dtype; every rank holds all of them."""

        def metadata(self) -> list[Any]:
            return list(declared)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(full)

    return RdtSource()
