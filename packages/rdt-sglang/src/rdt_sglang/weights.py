"""One SGLang scheduler's side of a weight sync: prepare, begin, pull, finish, abort.

Made once for each scheduler, and called either in the "weights" thread of a scheduler that is a Ray actor, or in the event
loop of a plain scheduler process through SGLang's RPC. No step begins before this very scheduler has acknowledged a pause;
from the first byte until the last step is done the scheduler cannot be resumed, and after a failure it is torn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch

from rdt_core.engines import ConnectInfo
from rdt_core.errors import DeadlineError, EngineError, SyncError, WireError
from rdt_core.memory import settle
from rdt_core.rates import check_slow_links
from rdt_core.receiver import Receiver
from rdt_core.rendezvous import ensure_ray, open_coordinator
from rdt_core.wire import EngineManifest

from .checks import Configuration, check, check_quantised_layout
from .guard import SyncState, state_of
from .versions import check_sglang

log = logging.getLogger(__name__)

_ATTRIBUTE = "_rdt_weights"


class SchedulerWeights:
    """What one scheduler does for a sync. One caller at a time.

    Args:
        scheduler: SGLang's `Scheduler`.
        plain_processes: reached through SGLang's RPC, in the thread of the event loop.
        pump: lets the event loop handle the requests that have arrived; given where the caller blocks it. Returns False
            when there is no more time.

    Raises:
        VersionError: this SGLang was not tested.
    """

    def __init__(
        self, scheduler: Any, *, plain_processes: bool = False, pump: Callable[[float], bool] | None = None
    ) -> None:
        check_sglang()
        self._scheduler = scheduler
        self._plain_processes = plain_processes
        self._pump = pump
        self._state: SyncState = state_of(scheduler)
        self._state.on_healed = self._healed
        self._device = _device_of(scheduler)
        self._stream: Any = None
        self._info: ConnectInfo | None = None
        self._selector = "all"
        self._landing: Any = None
        self._receiver: Receiver | None = None
        self._version: int | None = None
        self._written: frozenset[str] = frozenset()  # models that hold bytes of a sync that did not end well
        self._warned: set[str] = set()
        self.tp_rank, self.rank, self.world_size = _place(plain_processes)

    # ------------------------------------------------------------------ set-up

    def prepare(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Connects to a sync group: reads the manifests, traces, plans, posts the read requests. The engine may serve on.

        Repeatable: the same group again plans again only if the trainer's memory moved.

        Args:
            info: the fields of `rdt_core.engines.ConnectInfo`, and `selector`: "target", "draft" or "all". With `check`
                digests of what this rank holds are handed in, and nothing is connected.

        Returns:
            `rank`, `world_size`, `tp_rank`, `slices` (of the trace), `bytes` (that each sync moves to this rank), `seconds`,
            and `warnings` (a list of sentences).

        Raises:
            WireError: `info` is not what it should be.
            EngineError: this engine's configuration or model cannot be updated; see `checks` and `layers`.
            CoverageError: the trainer does not offer all that the model needs.
            RdtError: see `Receiver.connect`.
        """
        started = time.perf_counter()
        asked = dict(info)
        selector = asked.pop("selector", "all")
        try:
            wanted = msgspec.convert(asked, ConnectInfo)
        except msgspec.ValidationError as error:
            raise WireError(f"what to connect to does not fit: {error}") from error
        who = f"{wanted.replica}/{self.rank} of group {wanted.group}"
        if wanted.check:
            return self._check(wanted.check, started)
        held = self._state.held()
        if held is not None and self._state.torn() is None:
            raise EngineError(f"{who}: {held}; end that sync before connecting again")
        found = Configuration.of(self._scheduler, plain_processes=self._plain_processes)
        warnings = check(found, selector, who)
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s: %s", who, warning)
        with self._on_device():
            manifest = self._connect(wanted, selector, who)
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tp_rank": self.tp_rank,
            "slices": self._landing.slices,
            "bytes": manifest.nbytes,
            "seconds": time.perf_counter() - started,
            "warnings": warnings,
        }

    def _check(self, number: int, started: float) -> dict[str, Any]:
        """Hands in digests of what this rank holds; it stays connected as it is."""
        receiver = self._connected()
        if "weights" in self._scheduler.weight_updater.offload_tags:
            raise EngineError(f"{self._who}: the weights are released; call resume_memory_occupation first")
        with self._on_device():
            receiver.check(number)
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "tp_rank": self.tp_rank,
            "slices": self._landing.slices,
            "bytes": 0,
            "seconds": time.perf_counter() - started,
            "warnings": [],
        }

    def _connect(self, info: ConnectInfo, selector: str, who: str) -> EngineManifest:
        attempt, info = info.attempt, msgspec.structs.replace(info, attempt="")
        if self._receiver is not None and (self._info, self._selector) == (info, selector):
            try:
                return self._receiver.connect(attempt)
            except (SyncError, DeadlineError) as error:
                log.info("%s: the group that this rank was connected to is gone (%s); it connects anew", who, error)
        ensure_ray(info.address or None, info.namespace)
        control = open_coordinator(
            info.group, namespace=info.namespace, world_size=None, create=False, timeout_s=info.timeout_s
        )
        self._disconnect()
        self._landing = self._make_landing(selector, who)
        receiver = Receiver(
            self._landing,
            control=control,
            group=info.group,
            replica=info.replica,
            rank=self.rank,
            world_size=self.world_size,
            device=self._device,
            kinds=info.kinds,
            timeout_s=info.timeout_s,
            pack_threshold=info.pack_threshold,
            slow_links=check_slow_links(info.slow_links),
        )
        manifest = receiver.connect(attempt)
        self._receiver, self._info, self._selector = receiver, info, selector
        return manifest

    def _make_landing(self, selector: str, who: str) -> Any:
        from sglang.srt.model_executor.model_runner_components.weight_updater import (
            _unsupported_derived_weight_cache_error,
        )

        from .landing import SglangLanding

        runners = self._scheduler.weight_updater._select_runners(selector)
        for _, runner in runners:
            check_quantised_layout(runner.model, who)
            cached = _unsupported_derived_weight_cache_error(runner.model)
            if cached is not None:
                raise EngineError(f"{who}: {cached}")
        return SglangLanding(runners, self._device, who=who, on_begin=self._writing)

    # ------------------------------------------------------------------ one sync

    def begin(self, version: int, timeout_s: float) -> None:
        """Opens a sync. Nothing is written; after it the scheduler stays paused until `finish` or `abort`.

        Args:
            version: that will be pulled.
            timeout_s: seconds to wait for this scheduler's own acknowledgement of a pause, and for `pull` to follow.

        Raises:
            DeadlineError: no pause was acknowledged in time.
            EngineError: not connected; SGLang is updating weights itself; weights are released; another sync is running.
        """
        self._connected()
        deadline = time.monotonic() + timeout_s
        if self._pump is not None:
            while self._state.paused is None and self._pump(deadline):
                pass
        updater = self._scheduler.weight_updater
        if updater._session is not None:
            raise EngineError(
                f"{self._who}: a weight update of SGLang's own is open (begin_weight_update); end it with end_weight_update first"
            )
        if "weights" in updater.offload_tags:
            raise EngineError(f"{self._who}: the weights are released; call resume_memory_occupation first")
        left = self._written - self._landing.roles
        if left and self._state.torn() is not None:
            raise EngineError(
                f"{self._who}: {', '.join(sorted(left))} is torn too, and selector {self._selector!r} does not reach it; "
                "heal it with the selector that it was written with"
            )
        self._state.open(version, max(deadline - time.monotonic(), 0.0))
        try:
            with self._on_device():
                settle(self._device)  # what was queued before the pause may still read the weights
                self._landing.prepare_models()
                settle(self._device)
        except Exception as error:
            self._state.fail(f"version {version} failed in begin: {error}")
            raise

    def pull(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Receives and lands every byte.

        Args:
            version: as in `begin`.
            timeout_s: seconds, deadline of each wait.

        Returns:
            `bytes` that were moved to this rank and `seconds` that it took.

        Raises:
            EngineError: no sync of this version was begun.
            RdtError: see `Receiver.pull`. If bytes were written, the scheduler is torn.
        """
        receiver = self._connected()
        if self._state.version != version or self._state.phase not in ("open", "torn"):
            raise EngineError(
                f"{self._who}: version {version} was not begun (now {self._state.phase}, version {self._state.version})"
            )
        started = time.perf_counter()
        try:
            receiver.forget()
            with self._on_device():
                report = receiver.pull(version, timeout_s)
                settle(self._device)
            self._state.received(timeout_s)
        except Exception as error:
            self._fail(f"version {version} failed half-way: {error}")
            raise
        return {"bytes": report.bytes, "seconds": time.perf_counter() - started}

    def finish(self, version: int, timeout_s: float) -> None:
        """Runs SGLang's own post-load step, checks addresses and accounts for every byte. Then this rank has the version.

        Args:
            version: as in `begin`.
            timeout_s: not waited for by this rank; part of the interface.

        Raises:
            EngineError: the version was not received completely, or an address changed.
            RdtError: see `Receiver.finish`. The scheduler is torn.
        """
        receiver = self._connected()
        self._state.finishing(version)
        try:
            with self._on_device():
                receiver.finish(version)
                settle(self._device)
        except Exception as error:
            self._fail(f"version {version} failed in its last step: {error}")
            raise
        self._version, self._written = version, frozenset()
        self._state.done()
        log.info("%s holds version %d", self._who, version)

    def abort(self, version: int, reason: str) -> None:
        """Ends a sync that failed, here or elsewhere; a scheduler that was written to is torn, finished or not. Idempotent."""
        if self._receiver is not None and self._state.phase != "open":  # where nothing of it was written
            self._receiver.abort(version, reason)
        if self._version == version and self._receiver is not None and self._receiver.torn is not None:
            self._state.revoke(reason)
        self._fail(reason)

    def status(self) -> dict[str, Any]:
        """Where this scheduler stands.

        Returns:
            `rank`, `version` (that this rank holds completely, or None), `torn` (why, or None), `paused` (mode of the
            acknowledged pause, or None), `connected`, `phase` (idle, open, writing, received, torn), `selector`, `group`,
            `replica`.
        """
        torn = self._state.torn()
        info = self._info if self._receiver is not None else None
        return {
            "rank": self.rank,
            "version": self._version if torn is None else None,
            "torn": torn,
            "paused": self._state.paused,
            "connected": info is not None,
            "phase": self._state.phase,
            "selector": self._selector,
            "group": info.group if info else None,
            "replica": info.replica if info else None,
        }

    def close(self) -> None:
        """Leaves the group and releases every link. A torn scheduler stays torn. Idempotent."""
        if self._state.held() is not None:
            self._fail("the scheduler left its sync group in the middle of a sync")
        self._disconnect()

    # ------------------------------------------------------------------ inside

    @property
    def _who(self) -> str:
        return self._landing.who if self._landing is not None else f"engine rank {self.rank}"

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise EngineError(f"engine rank {self.rank} is not connected to a sync group; prepare it first")
        return self._receiver

    def _disconnect(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _fail(self, reason: str) -> None:
        self._state.fail(reason)
        if self._state.torn() is not None:
            self._version = None

    def _writing(self) -> None:
        self._state.writing()
        self._written |= self._landing.roles

    def _healed(self) -> None:
        self._version, self._written = None, frozenset()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The scheduler's own device and a stream apart from the event loop's, with which `settle` orders it."""
        if self._device.type != "cuda":
            yield
            return
        # a new thread starts on device 0, whatever the process was given
        torch.cuda.set_device(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            yield


def weights_of(scheduler: Any, **options: Any) -> SchedulerWeights:
    """Returns the `SchedulerWeights` of a scheduler, made at the first call with these options."""
    weights = scheduler.__dict__.get(_ATTRIBUTE)
    if weights is None:
        weights = scheduler.__dict__[_ATTRIBUTE] = SchedulerWeights(scheduler, **options)
    return weights


def _device_of(scheduler: Any) -> torch.device:
    if scheduler.device == "cpu":
        return torch.device("cpu")
    from sglang.srt.runtime_context import get_device

    return torch.device(scheduler.device, int(get_device().gpu_id))


def _place(plain_processes: bool) -> tuple[int, int, int]:
    """Tensor parallel rank, rank of this scheduler among all of its engine's, and how many there are."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    replica, replicas = 0, 1
    if not parallel.attn_dp_enabled:
        replica, replicas = int(parallel.dp_rank or 0), int(parallel.num_dp_ranks)
    size = int(parallel.tp_size) * int(parallel.pp_size)
    tp_rank = int(parallel.tp_rank)
    return tp_rank, replica * size + int(parallel.pp_rank) * int(parallel.tp_size) + tp_rank, replicas * size
