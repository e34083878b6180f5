"""Measured transfers: pairs of fresh processes, by device and kind of link, on one node or between nodes.

Each process is an actor that sees what Ray gives to actors of its node. A pair that does not answer in time, or dies, is
ended and named; the next kind gets a fresh one. All processes end with the measurement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from .. import wire
from ..errors import DeadlineError, RdtError
from ..gpus import MASK
from .facts import Facts, Measured
from .lanes import log_variables
from .options import Sizes
from .probe import Lent, Probe, Taken

#: seconds in which a process may start: it imports torch and makes a CUDA context
START_S = 120.0
_ALL_PAIRS = 4  # GPUs up to which each is measured with each other one; beyond, with its neighbour
_ALL_NODES = 8
_END_S = 5.0
#: not this process's folder for such files, which another node may not have
_LOG = "/tmp/rdt-doctor-%p.log"
_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

Observe = Callable[[str], None]
#: one end of a pair: index of the node, role, device
End = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """One transfer to measure: from a device to a device by a kind of link, on a node or between two."""

    source: int  # index of the node
    reader: int
    from_device: str
    to_device: str
    kind: str

    @property
    def device(self) -> str:
        """As it is reported."""
        return self.from_device if self.from_device == self.to_device else f"{self.from_device} to {self.to_device}"


def node_steps(facts: Facts, index: int = 0) -> list[Step]:
    """What is measured on one node: each device with itself, pairs of GPUs, and Ray objects once.

    Args:
        facts: of the node.
        index: of the node among those that are examined.
    """
    gpus = [f"cuda:{number}" for number in range(facts.device_count)]
    steps = []
    for device in ["cpu", *gpus]:
        kinds = ("mapped", "prepared", "ray") if device == (gpus or ["cpu"])[0] else ("mapped", "prepared")
        steps += [Step(index, index, device, device, kind) for kind in kinds]
    pairs = list(itertools.combinations(gpus, 2)) if len(gpus) <= _ALL_PAIRS else _ring(gpus)
    steps += [Step(index, index, one, other, kind) for one, other in pairs for kind in ("mapped", "prepared")]
    return steps


def cross_rounds(nodes: Sequence[Facts]) -> list[list[Step]]:
    """What is measured between nodes, in rounds in which no node takes part twice: all pairs of up to 8, else a ring."""
    count = len(nodes)
    pairs = list(itertools.combinations(range(count), 2)) if count <= _ALL_NODES else _ring(list(range(count)))
    rounds: list[list[Step]] = []
    for one, other in pairs:
        devices = ["cuda:0" if nodes[end].device_count else "cpu" for end in (one, other)]
        step = Step(one, other, devices[0], devices[1], "prepared")
        free = (steps for steps in rounds if not {one, other} & {end for s in steps for end in (s.source, s.reader)})
        target = next(free, None)
        if target is None:
            rounds.append([step])
        else:
            target.append(step)
    return rounds


def _ring(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(one, items[(index + 1) % len(items)]) for index, one in enumerate(items)]


@dataclass
class Bench:
    """The processes of a measurement.

    Attributes:
        nodes: facts by index of the node.
        sizes: bytes moved at a time.
        timeout_s: deadline of one transfer, with its set-up, in seconds.
    """

    nodes: Sequence[Facts]
    sizes: Sizes = field(default_factory=Sizes)
    timeout_s: float = 60.0
    _actors: dict[End, Any] = field(default_factory=dict)
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def measure(self, step: Step) -> Measured:
        """Measures one transfer; what goes wrong is in the result."""
        source, reader = self.nodes[step.source], self.nodes[step.reader]
        common: dict[str, Any] = {
            "source": source.hostname, "reader": reader.hostname, "device": step.device, "kind": step.kind,
            "cross_node": step.source != step.reader,
        }  # fmt: skip
        ends = _ends(step)
        try:
            nbytes = min(self.sizes.of(step.from_device), self.sizes.of(step.to_device))
            giver, taker = self._pair(ends)
            lent, refs = self._get(giver.lend.remote(step.kind, seed := next(self._seeds)), "lending memory")
            packed = self._get(
                taker.read.remote(lent, refs, step.kind, seed, self.timeout_s),
                f"moving {nbytes} bytes by {step.kind} links",
            )
        except RdtError as error:
            # whatever state they are in, the next transfer does not start from it
            for end in ends:
                self._end(end)
            return Measured(**common, error=f"{type(error).__name__}: {error}")
        given, taken = wire.decode(lent, Lent), wire.decode(packed, Taken)
        return Measured(
            **common, memory=given.memory, nbytes=given.manifest.regions[0].nbytes, seconds=taken.seconds,
            first_seconds=taken.first_seconds, copy_seconds=taken.copy_seconds, backend=taken.backend, lane=taken.lane,
            lane_unknown=taken.lane_unknown, expandable=given.expandable, correct=taken.correct,
        )  # fmt: skip

    def run(self, steps: Sequence[Step], observe: Observe, stop: Event | None = None) -> list[Measured]:
        """Measures some transfers one after the other; a device's processes end once nothing more needs them.

        Args:
            steps: what to measure.
            observe: told of each when it is done.
            stop: when set, no further one begins.
        """
        results: list[Measured] = []
        for number, step in enumerate(steps):
            if stop is not None and stop.is_set():
                break
            results.append(self.measure(step))
            observe(f"{self.nodes[step.reader].hostname} {step.device} {step.kind}")
            later = {end for one in steps[number + 1 :] for end in _ends(one)}
            for end in set(_ends(step)) - later:
                self._end(end)
        return results

    def close(self) -> None:
        """Ends every process. Idempotent."""
        for end in list(self._actors):
            self._end(end)

    def _pair(self, ends: Sequence[End]) -> list[Any]:
        """The processes of both ends, started side by side."""
        missing = [end for end in ends if end not in self._actors]
        for end in missing:
            self._actors[end] = self._start(end[0], end[2])
        for end in missing:
            what = f"starting a process for {end[2]} on {self.nodes[end[0]].hostname}"
            self._get(self._actors[end].ready.remote(), what, START_S)
        return [self._actors[end] for end in ends]

    def _start(self, index: int, device: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        facts = self.nodes[index]
        options: dict[str, Any] = {
            "num_cpus": 0,
            "enable_tensor_transport": True,
            "runtime_env": {"env_vars": environment(device, facts)},
        }
        if facts.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
        place = "cpu" if device == "cpu" else "cuda:0"  # a process sees its own GPU first
        return ray.remote(**options)(Probe).remote(place, self.sizes.of(device))

    def _end(self, end: End) -> None:
        import ray

        actor = self._actors.pop(end, None)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.end.remote(), timeout=_END_S)
            ray.kill(actor)

    def _get(self, ref: Any, what: str, timeout_s: float | None = None) -> Any:
        import ray

        # a little more than the deadline inside, whose error says more
        limit = self.timeout_s + 10.0 if timeout_s is None else timeout_s
        try:
            return ray.get(ref, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"{what}: no answer within {limit:g} s") from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RdtError):
                raise cause from None
            text = str(cause or error).strip().splitlines()
            raise RdtError(f"{what} failed: {text[-1] if text else type(error).__name__}") from error


def environment(device: str, facts: Facts) -> dict[str, str]:
    """Environment of a process for a device: its GPU first, all others behind it, so that it can map what lies there.

    UCX's log is set here and not in the process: UCX reads where it logs when it is loaded, by whoever does that first.

    Args:
        device: "cpu", or "cuda:3" as processes of the node count without this.
        facts: of the node.
    """
    common = {_NOSET: "1", **log_variables(_LOG)}
    if device == "cpu":
        return common
    mask = [part.strip() for part in facts.environment.get(MASK, "").split(",") if part.strip()]
    seen = (mask or [str(index) for index in range(facts.device_count)])[: facts.device_count]
    own = int(device.partition(":")[2])
    others = [one for index, one in enumerate(seen) if index != own]
    return {**common, MASK: ",".join([seen[own], *others])}


def _ends(step: Step) -> tuple[End, End]:
    return (step.source, "source", step.from_device), (step.reader, "reader", step.to_device)
