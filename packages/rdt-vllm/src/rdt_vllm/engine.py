"""The vLLM worker's side: weight transfer backend `rdt`, on the life cycle that vLLM gives every backend.

`init` connects this engine rank to its sync group; `start`, `update`, `finish` are one sync. A version counts only when
`finish` has accounted for every byte on every rank and the driver has stamped it. After a failure the rank is torn: the model
refuses to run until a complete sync. It refuses expert load balancing (a traced plan would write into the wrong expert) and
draft models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rdt_core.connector import DEFAULT_KINDS
from rdt_core.errors import EngineError, SyncError
from rdt_core.rates import check_slow_links
from rdt_core.receiver import Receiver
from rdt_core.rendezvous import ensure_ray, open_coordinator

from .landing import VllmLanding
from .protocol import ABORTED, LEFT_OPEN, OPEN_ON_ALL, OPEN_ON_LAST, OPEN_ON_OTHERS
from .ranks import GRACE_S, Ranks
from .versions import check_vllm

log = logging.getLogger(__name__)


@dataclass
class RdtInitInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes; the fields of `rdt_core.engines.ConnectInfo`.

    Attributes:
        group: name of the sync group.
        replica: name of this replica, unique in the group.
        namespace: Ray namespace of the coordinator.
        address: of the Ray cluster; empty: `RAY_ADDRESS`, or the cluster that this worker is in already.
        kinds: link kinds allowed, in order of preference.
        timeout_s: seconds, deadline of every single wait.
        pack_threshold: bytes below which a piece is packed; 0: the kind's own default.
        slow_links: links far below what they should do: "refuse", "warn", or a floor in GB/s.
        attempt: names this connect of the replica; a rank that comes with an older one is refused.
        check: id of a check that runs: digests of what this rank holds are handed in, and nothing is connected; 0: connect.
    """

    group: str
    replica: str
    namespace: str = "rdt"
    address: str = ""
    kinds: list[str] = field(default_factory=lambda: list(DEFAULT_KINDS))
    timeout_s: float = 60.0
    pack_threshold: int = 0
    slow_links: str | float = "refuse"
    attempt: str = ""
    check: int = 0


@dataclass
class RdtUpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes.

    Attributes:
        version: to pull, the one that the trainer publishes now; or to abort, -1: whichever is being received.
        timeout_s: seconds, deadline of every single wait of this pull; 0: as connected.
        abort: reason for which the sync that was started, or finished and not committed, ends; empty: pull.
    """

    version: int
    timeout_s: float = 0.0
    abort: str = ""


class RdtWeightTransferEngine(WeightTransferEngine[RdtInitInfo, RdtUpdateInfo]):
    """Receives weights for one vLLM worker. Built by vLLM; see `WeightTransferEngine` for its arguments.

    Raises:
        VersionError: this vLLM was not tested.
        EngineError: expert load balancing is on.
    """

    init_info_cls = RdtInitInfo
    update_info_cls = RdtUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        check_vllm()
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        if parallel.enable_eplb:
            raise EngineError(
                "weight transfer backend rdt does not work with expert load balancing: it moves experts while serving, and the "
                "traced plan would write into the wrong ones. Start vLLM without --enable-eplb"
            )
        self.rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.world_size = parallel.world_size_across_dp
        self._ranks: Ranks | None = None
        self._landing: VllmLanding | None = None
        self._receiver: Receiver | None = None
        self._timeout_s = 60.0
        self._asked: int | None = None  # version of the pull in this weight update
        self._version: int | None = None  # that it brought completely
        self._failed: str | None = None
        self._open = False  # vLLM's worker has a weight update open; only it may close it

    @property
    def torn(self) -> str | None:
        """Why this rank must not generate; None while it may."""
        return None if self._landing is None else self._landing.torn

    # ------------------------------------------------------------------ vLLM's life cycle

    def init_transfer_engine(self, init_info: RdtInitInfo) -> None:
        """Connects to the sync group: reads the manifests, traces, plans, posts the read requests. May be repeated.

        Raises:
            RdtError: on the last rank, for whatever failed on any of them.
        """
        self._timeout_s = init_info.timeout_s
        ranks = self._all_ranks()
        if init_info.check:
            error = self._try(lambda: self._connected().check(init_info.check))
            failure = ranks.agree(error, self._timeout_s + GRACE_S)
            if failure is not None:
                self._raise(failure, error)
            return
        states = ranks.gather((ranks.speaks, self._open), self._timeout_s + GRACE_S)
        if any(is_open for _, is_open in states):
            # vLLM offers no way to ask; without this the next start would be refused on some ranks only
            everywhere, last = all(is_open for _, is_open in states), (True, True) in states
            where = OPEN_ON_ALL if everywhere else OPEN_ON_LAST if last else OPEN_ON_OTHERS
            if ranks.speaks:
                raise EngineError(f"{LEFT_OPEN}:{where} an earlier weight update of this engine never ended")
            return
        error = self._try(lambda: self._connect(init_info))
        failure = ranks.agree(error, self._timeout_s + GRACE_S)
        if failure is not None:
            self.shutdown()  # all ranks are connected or none
            self._raise(failure, error)

    def start_weight_update(self) -> None:
        """Opens a sync. Nothing is written yet; a failure before it is forgotten, but not healed."""
        # No talk between ranks here: after a failed `finish` vLLM's worker refuses this call on the last rank alone.
        self._failed = self._asked = self._version = None
        if self._receiver is None:
            self._failed = "backend rdt is not connected; call init_weight_transfer_engine with group and replica first"
            self._raise(self._failed, None)
        self._open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pulls one version, or ends the sync. See `RdtUpdateInfo`.

        Raises:
            RdtError: on the last rank, for whatever failed on any of them.
        """
        error: Exception | None = None
        info: RdtUpdateInfo | None = None
        try:
            info = self.parse_update_info(update_info)
        except ValueError as wrong:
            error = EngineError(f"{wrong}; backend rdt takes version, timeout_s and abort")
        self._update(info, error)

    def receive_weights(self, update_info: RdtUpdateInfo) -> None:
        """See `update_weights`."""
        self._update(update_info, None)

    def finish_weight_update(self) -> None:
        """Runs what remains of the post-load step and accounts for every byte.

        Raises:
            RdtError: on the last rank, if any rank received less than a whole version, or its last step failed.
        """
        error, failure = None, self._failed
        if failure is None:
            error = self._try(self._finish)
            failure = self._all_ranks().agree(error, self._timeout_s + GRACE_S)
        # With a failure from before, the last rank has raised and is closed, so its worker refuses this call; with that
        # the call fails and no version is stamped. What is left to do on the others is to close as well.
        if failure is not None:
            self._abort(self._asked, failure)
            self._raise(failure, error)
        self._open = False

    def shutdown(self) -> None:
        """Leaves the group and releases every link. Idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    # ------------------------------------------------------------------ inside

    def _connect(self, info: RdtInitInfo) -> None:
        ensure_ray(info.address or None, info.namespace)
        control = open_coordinator(
            info.group, namespace=info.namespace, world_size=None, create=False, timeout_s=info.timeout_s
        )
        self.shutdown()
        if self._landing is None:  # one for life: a torn model stays torn when it connects again
            self._landing = VllmLanding(self.model, self.model_config, self.device, self.vllm_config)
        self._landing.who = f"{info.replica}/{self.rank} of group {info.group}"
        receiver = Receiver(
            self._landing,
            control=control,
            group=info.group,
            replica=info.replica,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            kinds=tuple(info.kinds),
            timeout_s=info.timeout_s,
            pack_threshold=info.pack_threshold,
            slow_links=check_slow_links(info.slow_links),
        )
        receiver.connect(info.attempt)
        self._receiver = receiver

    def _update(self, info: RdtUpdateInfo | None, error: Exception | None) -> None:
        ranks = self._all_ranks()
        if info is not None and info.abort:
            self._abort(info.version if info.version >= 0 else self._asked, info.abort)
            if ranks.speaks:
                self._open = False
                raise SyncError(f"{ABORTED}: {info.abort}")
            return
        if self._failed is not None:
            if not ranks.speaks:
                return  # the last rank is closed: its worker refuses this call for all
            # `finish` failed, so this rank stayed open through the `start` that the others saw
            self._failed = self._version = None
        timeout_s = self._timeout_s
        if info is not None:
            request, timeout_s = info, info.timeout_s or timeout_s
            self._asked = info.version
            error = self._try(lambda: self._pull(request, timeout_s))
        failure = ranks.agree(error, timeout_s + GRACE_S)
        if failure is not None:
            self._abort(self._asked, failure)
            if ranks.speaks:
                self._open = False
            self._raise(failure, error)

    def _pull(self, info: RdtUpdateInfo, timeout_s: float) -> None:
        if self._version is not None:
            raise SyncError(f"version {self._version} was pulled already in this weight update; finish it first")
        receiver = self._connected()
        receiver.forget()
        receiver.pull(info.version, timeout_s)
        self._version = info.version

    def _finish(self) -> None:
        receiver = self._connected()
        if self._version is None:
            raise SyncError("no version was pulled in this weight update; nothing was committed")
        receiver.finish(self._version)
        log.info("%s/%d holds version %d", receiver.replica, self.rank, self._version)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise EngineError("backend rdt is not connected")
        return self._receiver

    def _abort(self, version: int | None, reason: str) -> None:
        self._failed = self._failed or reason
        if self._receiver is not None and version is not None:
            self._receiver.abort(version, reason)

    @staticmethod
    def _try(step: Callable[[], None]) -> Exception | None:
        try:
            step()
        except Exception as error:
            log.exception("a step of the weight transfer failed")
            return error
        return None

    def _raise(self, failure: str, error: Exception | None) -> None:
        """Raises on the last rank and only there, so that no answer of a worker is left unread (see `Ranks`)."""
        ranks = self._all_ranks()
        if not ranks.speaks:
            return
        if ranks.world_size == 1 and error is not None:
            raise error
        raise EngineError(failure) from error

    def _all_ranks(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks.of_worker(self.parallel_config)
        return self._ranks
