"""The processes of a bench: source ranks and engine ranks as Ray actors, made, asked, and ended for certain.

Processes that registered memory with NIXL keep it for life, and killed ones give their GPU memory back only when they are
gone: so they are made anew where that matters, and their end is waited for. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import wire
from ..errors import DeadlineError, RdtError
from . import layouts
from .laidout import LaidOutRank
from .options import BenchOptions
from .placement import Placement, environment
from .reader import EngineRank
from .source import SourceRank

_END_S = 30.0
_GRACE_S = 1.0


class Fleet:
    """The actors of one bench.

    Args:
        options: checked.
        tensors: of the checkpoint.
        placement: GPU of each rank.
        gpus: that this process sees.

    Attributes:
        sources: handles of the source ranks; empty before `start`.
        readers: handles of the engine ranks; likewise.
        device_name: as the source ranks say.
        expandable: whether their weights lie in expandable segments.
        in_group: whether the source ranks are in a process group.
        agents: whether NIXL agents were made in these processes; each keeps a core busy until its process ends.
    """

    def __init__(
        self, options: BenchOptions, tensors: Sequence[wire.TensorMeta], placement: Placement, gpus: int
    ) -> None:
        self.options, self.placement = options, placement
        self.sources: list[Any] = []
        self.readers: list[Any] = []
        self.device_name = options.device
        self.expandable = False
        self._tensors = tuple(tensors)
        self._gpus = gpus
        self._pids: dict[int, list[int]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="rdt-bench-")
        self._numbers = itertools.count()
        self.in_group = False
        self.agents = False

    def _actor(self, kind: type, gpu: int | None, *arguments: Any, expandable: bool = False) -> Any:
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2}
        if gpu is not None:
            options["runtime_env"] = {"env_vars": environment(gpu, self._gpus, expandable=expandable)}
        return ray.remote(kind).options(**options).remote(*arguments)

    def _source(self, rank: int, gpu: int | None) -> Any:
        one = self.options
        if one.megatron is None:
            given: tuple[Any, ...] = (self._tensors, rank, one.ranks, one.device)
            return self._actor(SourceRank, gpu, *given, expandable=one.expandable)
        given = (self._tensors, one.config, one.megatron, rank, one.device)
        return self._actor(LaidOutRank, gpu, *given, expandable=one.expandable)

    def start(self) -> None:
        """Makes the source ranks and the engine ranks, unless they are there."""
        one = self.options
        new_sources, new_readers = not self.sources, not self.readers
        if new_sources:
            self.sources = [
                self._source(rank, gpu) for rank, gpu in enumerate(self.placement.sources or (None,) * one.ranks)
            ]
        if new_readers:
            spread = [layouts.EngineRank(one.engine, rank, one.tp, one.ep, one.pp) for rank in range(one.readers)]
            self.readers = [
                self._actor(EngineRank, gpu, self._tensors, one.config, at, one.device, one.timeout_s)
                for at, gpu in zip(spread, self.placement.readers or (None,) * one.readers, strict=True)
            ]
        if new_sources:
            answers = self.ask(self.sources, "ready")
            self._pids[id(self.sources)] = [pid for pid, _, _ in answers]
            self.device_name = answers[0][1]
            self.expandable = any(expandable for _, _, expandable in answers)
        if new_readers:
            self._pids[id(self.readers)] = self.ask(self.readers, "ready")

    def ask(self, actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all actors at once and waits for all."""
        return self.wait([getattr(actor, method).remote(*arguments) for actor in actors], method)

    def wait(self, calls: Sequence[Any], what: str) -> list[Any]:
        """Waits for calls.

        Raises:
            RdtError: an actor raised it.
            DeadlineError: no answer; waits inside of a call are shorter than this one.
            RayError: an actor died, or raised something else.
        """
        import ray

        limit = 3 * self.options.timeout_s
        calls = list(calls)
        try:
            return list(ray.get(calls, timeout=limit))
        except ray.exceptions.GetTimeoutError:
            raise Stuck(f"{what} of the bench's processes was not done after {limit:.0f} s") from None
        except ray.exceptions.RayError as error:
            # the others mostly fail for the same reason: looked at, so that Ray does not log them as unhandled
            for call in ray.wait(calls, num_returns=len(calls), timeout=_GRACE_S)[0]:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(call)
            cause = getattr(error, "cause", None)
            if isinstance(cause, RdtError):
                raise cause from None
            raise

    def enter(self, readers: bool) -> None:
        """Puts the source ranks, and the engine ranks if asked for, into a fresh process group."""
        self.exit()
        rendezvous = str(Path(self._folder.name) / f"group-{next(self._numbers)}")
        ranks, timeout = self.options.ranks, self.options.timeout_s
        size = ranks + (len(self.readers) if readers else 0)
        calls = [one.enter.remote(rendezvous, rank, size, timeout) for rank, one in enumerate(self.sources)]
        if readers:
            calls += [
                one.enter.remote(rendezvous, ranks + rank, size, ranks, timeout)
                for rank, one in enumerate(self.readers)
            ]
        self.in_group = True
        self.wait(calls, "entering a process group")

    def exit(self) -> None:
        """Takes everybody out of the process group."""
        if self.in_group:
            self.in_group = False
            self.ask([*self.sources, *self.readers], "exit")

    def end_readers(self) -> None:
        """Ends the engine ranks and waits until their processes are gone."""
        self._end(self.readers)
        self.readers = []

    def end_sources(self) -> None:
        """Ends the source ranks likewise."""
        self._end(self.sources)
        self.sources = []

    def end(self) -> None:
        """Ends all of it. Idempotent."""
        self.in_group = self.agents = False
        self.end_readers()
        self.end_sources()

    def close(self) -> None:
        """Ends all of it for good."""
        self.end()
        self._folder.cleanup()

    def _end(self, actors: list[Any]) -> None:
        end_actors(actors, self._pids.pop(id(actors), []))


def end_actors(actors: Sequence[Any], pids: Sequence[int]) -> None:
    """Kills actors and waits until their processes are gone, with what they held on a GPU.

    Args:
        actors: handles.
        pids: of their processes.
    """
    import ray

    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for actor in actors:
        ray.kill(actor)
    psutil.wait_procs(processes, timeout=_END_S)


class Stuck(DeadlineError):
    """Processes of the bench did not answer and cannot be used again."""
