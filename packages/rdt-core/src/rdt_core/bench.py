"""`rdt bench`: how long a sync takes next to one copy of the same bytes, measured in the same run.

Source ranks and engine ranks are Ray actors that hold tensors of a named model's real shapes, sharded as FSDP shards them
and fused as engines fuse them; planner, publisher, receiver and links are the real ones. The floor is one copy of the
same bytes inside the reader. Numbers are only comparable inside one run.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from . import wire
from .errors import RdtError, SourceError
from .memory import settle
from .replica import ModuleReplica, ModuleWorker
from .shapes import checkpoint_tensors
from .sources.base import Shard
from .sync import WeightSync

#: how engines fuse checkpoint tensors: part, fused name, order
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


class Cell(wire.Struct, frozen=True):
    """One measured configuration.

    Attributes:
        mode, kind: publish mode and link kind.
        first_s: the first sync, set-up of the links included.
        seconds: the later ones.
        copy_s: one copy of the same bytes in the reader, median of those measured before and after.
        phases: medians over the later syncs.
        exact: whether the reader held the trainer's bytes after the last sync.
        error: why it could not run; empty otherwise.
    """

    mode: str
    kind: str
    bytes: int = 0
    first_s: float = 0.0
    seconds: tuple[float, ...] = ()
    copy_s: float = 0.0
    phases: dict[str, float] = msgspec.field(default_factory=dict)
    reader_phases: dict[str, float] = msgspec.field(default_factory=dict)
    exact: bool = False
    error: str = ""

    @property
    def p50(self) -> float:
        """Median of the later syncs, in seconds."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def ratio(self) -> float:
        """Median sync time over one copy of the same bytes."""
        return self.p50 / self.copy_s if self.copy_s else float("nan")


class BenchReport(wire.Struct, frozen=True):
    """What `rdt bench` measured."""

    model: str
    device: str
    ranks: int
    rounds: int
    cells: tuple[Cell, ...]


class RowSharded:
    """A source that holds its row range of every tensor of a named model, uneven where rows do not divide (as FSDP2)."""

    def __init__(self, model: str, rank: int, world_size: int, device: str) -> None:
        self._tensors = checkpoint_tensors(model)
        self._shards: list[Shard] = []
        for meta in self._tensors:
            size = -(-meta.shape[0] // world_size)
            start, end = min(meta.shape[0], rank * size), min(meta.shape[0], (rank + 1) * size)
            tensor = torch.zeros((end - start, *meta.shape[1:]), dtype=getattr(torch, meta.dtype), device=device)
            self._shards.append(Shard(meta.name, (start,) + (0,) * (len(meta.shape) - 1), tensor))

    def metadata(self) -> Sequence[wire.TensorMeta]:
        """See `WeightSource.metadata`."""
        return self._tensors

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`."""
        return self._shards

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return ()

    def fill(self, seed: int) -> None:
        """Gives every element a value that differs by seed."""
        for number, shard in enumerate(self._shards):
            if shard.tensor.numel():
                generator = torch.Generator(shard.tensor.device).manual_seed(seed * 1_000_003 + number)
                shard.tensor.normal_(generator=generator)


class SourceRank:
    """A source rank of the bench, as a Ray actor."""

    def __init__(self, model: str, rank: int, world_size: int, device: str) -> None:
        torch.set_num_threads(max(1, torch.get_num_threads()))
        self.rank, self.world_size = rank, world_size
        self.source = RowSharded(model, rank, world_size, device)
        self.sync: WeightSync | None = None

    def join(self, group: str, mode: str, kind: str, timeout_s: float) -> None:
        """Joins a fresh group."""
        self.sync = WeightSync.join(
            group,
            source=self.source,
            rank=self.rank,
            world_size=self.world_size,
            mode=mode,
            kinds=(kind,),
            timeout_s=timeout_s,
        )

    def attach(self, workers: Sequence[Any]) -> None:
        """Attaches the replica (rank 0)."""
        self._joined().attach(ModuleReplica(workers))

    def fill(self, seed: int) -> None:
        """Gives the weights new values."""
        self.source.fill(seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def publish(self, version: int) -> tuple[float, wire.SyncReport]:
        """Publishes; returns the seconds that it took and the report."""
        started = time.perf_counter()
        report = self._joined().publish(version)
        return time.perf_counter() - started, report

    def digests(self) -> dict[str, list[int]]:
        """Position-sensitive sums of this rank's shards, by name: one for each row range held."""
        return {
            shard.name: [shard.offset[0], shard.tensor.shape[0], _digest(shard.tensor)]
            for shard in self.source.shards()
        }

    def leave(self) -> None:
        """Leaves the group."""
        if self.sync is not None:
            self.sync.leave()
            self.sync = None

    def _joined(self) -> WeightSync:
        if self.sync is None:
            raise SourceError("this source rank of the bench has not joined a group")
        return self.sync


class Fused(torch.nn.Module):
    """A named model's tensors as an engine holds them: q, k, v in one parameter, gate and up in one."""

    def __init__(self, model: str, device: str) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int, int]] = {}
        parts: dict[str, list[tuple[int, wire.TensorMeta]]] = {}
        for meta in checkpoint_tensors(model):
            pieces = meta.name.split(".")
            fused, order = _FUSED.get(pieces[-2], (pieces[-2], 0))
            parts.setdefault("/".join([*pieces[:-2], fused, pieces[-1]]), []).append((order, meta))
        for name, members in parts.items():
            members.sort(key=lambda member: member[0])
            row = 0
            for _, meta in members:
                self.places[meta.name] = (name, row, meta.shape[0])
                row += meta.shape[0]
            first = members[0][1]
            tensor = torch.zeros((row, *first.shape[1:]), dtype=getattr(torch, first.dtype), device=device)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def part(self, name: str) -> torch.Tensor:
        """The rows of a fused parameter that hold a checkpoint tensor."""
        fused, row, count = self.places[name]
        return self.get_parameter(fused).data.narrow(0, row, count)


def _load_fused(module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    assert isinstance(module, Fused)
    for name, tensor in weights:
        module.part(name).copy_(tensor)


def _digest(tensor: torch.Tensor) -> int:
    """Sum of 16-bit patterns times odd position weights, modulo 2**64: notices moved and swapped values."""
    values = tensor.contiguous().view(torch.int16).flatten()
    total = 0
    for index, chunk in enumerate(values.split(1 << 26)):
        positions = torch.arange(chunk.numel(), device=chunk.device, dtype=torch.int64) + (index << 26)
        total += int((chunk.to(torch.int64) * ((positions * 2_654_435_761) & 0x7FFFFFFF | 1)).sum())
    return total & (1 << 64) - 1


def _digest_rows(module: torch.nn.Module, ranges: Sequence[tuple[str, int, int]]) -> list[int]:
    assert isinstance(module, Fused)
    return [_digest(module.part(name).narrow(0, start, count)) for name, start, count in ranges]


def _copy_seconds(module: torch.nn.Module, repeats: int = 5) -> float:
    """Median seconds of one copy of as many bytes as the module has, inside this process."""
    sample = next(module.parameters())
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    source = torch.ones(nbytes, dtype=torch.uint8, device=sample.device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(repeats + 1):
        settle(sample.device)
        started = time.perf_counter()
        target.copy_(source)
        settle(sample.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def run(
    model: str,
    *,
    ranks: int = 2,
    device: str = "cpu",
    modes: Sequence[str] = ("live", "snapshot", "bucket"),
    kinds: Sequence[str] = ("mapped", "prepared", "ray"),
    rounds: int = 5,
    timeout_s: float = 120.0,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measures every combination of modes and link kinds. The caller has connected this process to Ray.

    Args:
        model: a name of `shapes.MODELS`.
        ranks: source ranks.
        device: "cpu" or "cuda".
        modes: publish modes.
        kinds: link kinds.
        rounds: syncs after the first, for each combination.
        timeout_s: deadline of every wait.
        progress: told what is being measured.

    Raises:
        RdtError: the actors could not be made. A combination that fails is reported in its cell instead.
    """
    import ray

    checkpoint_tensors(model)
    options: dict[str, Any] = {"num_cpus": 0, "enable_tensor_transport": True, "max_concurrency": 2}
    cells = []
    progress(f"{ranks} source ranks and a reader with the shapes of {model}")
    sources = [ray.remote(SourceRank).options(**options).remote(model, rank, ranks, device) for rank in range(ranks)]
    try:
        for mode in modes:
            for kind in kinds:
                progress(f"mode {mode}, link kind {kind}")
                cells.append(_cell(sources, options, model, device, mode, kind, rounds, timeout_s))
    finally:
        for source in sources:
            ray.kill(source)
    return BenchReport(model=model, device=device, ranks=ranks, rounds=rounds, cells=tuple(cells))


def _cell(
    sources: Sequence[Any],
    options: dict[str, Any],
    model: str,
    device: str,
    mode: str,
    kind: str,
    rounds: int,
    timeout_s: float,
) -> Cell:
    import ray

    worker = ray.remote(ModuleWorker).options(**options).remote(lambda: Fused(model, device), 0, 1, _load_fused)
    try:
        group = f"bench-{uuid.uuid4().hex[:8]}"
        ray.get([s.join.remote(group, mode, kind, timeout_s) for s in sources])
        ray.get(sources[0].attach.remote([worker]))
        before = ray.get(worker.call.remote(_copy_seconds))
        taken: list[tuple[float, wire.SyncReport]] = []
        for version in range(rounds + 1):
            ray.get([s.fill.remote(version) for s in sources])
            taken.append(max(ray.get([s.publish.remote(version) for s in sources]), key=lambda one: one[0]))
        after = ray.get(worker.call.remote(_copy_seconds))
        exact = True
        for held in ray.get([s.digests.remote() for s in sources]):
            ranges = [(name, start, count) for name, (start, count, _) in held.items() if count]
            digests = ray.get(worker.call.remote(lambda module, ranges=ranges: _digest_rows(module, ranges)))
            exact = exact and digests == [held[name][2] for name, _, _ in ranges]
        later = [report for _, report in taken[1:]]
        return Cell(
            mode=mode,
            kind=kind,
            bytes=later[0].bytes,
            first_s=taken[0][0],
            seconds=tuple(seconds for seconds, _ in taken[1:]),
            copy_s=statistics.median([before, after]),
            phases={name: statistics.median(r.phases.get(name, 0.0) for r in later) for name in later[0].phases},
            reader_phases={
                name: statistics.median(r.readers[0].phases.get(name, 0.0) for r in later)
                for name in later[0].readers[0].phases
            },
            exact=exact,
        )
    except (RdtError, ray.exceptions.RayError) as error:
        return Cell(mode=mode, kind=kind, error=str(getattr(error, "cause", None) or error).strip())
    finally:
        ray.get([s.leave.remote() for s in sources])
        ray.kill(worker)
