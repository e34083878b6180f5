"""What a scheduler's event loop and its weight sync must know of each other: paused, being written, torn.

One record for each scheduler, written by the hooks in its event loop and by the sync, which may run in another thread.
The hooks keep a scheduler paused while its weights are written or torn, answer new requests of a torn one with an error,
and keep SGLang's own weight updates out of a running sync. Since ranks run in step, each such decision is agreed among
them. What was in flight at the pause stays queued and continues once a later sync, or a reload from disk, has healed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rdt_core.errors import DeadlineError, EngineError, TornReplicaError

from .ranks import Ranks

log = logging.getLogger(__name__)

Phase = Literal["idle", "open", "writing", "received", "torn"]

_ATTRIBUTE = "_rdt_sync_state"
#: seconds that a paused event loop rests in every turn while weights are written: it turns without a pause of its own, and
#: would take the interpreter from the thread that pulls them
REST_S = 0.0005
#: seconds beyond a phase's own deadline in which the driver may take the next step
SLACK_S = 30.0


class SyncState:
    """Where one scheduler stands. All methods may be called from any thread.

    Attributes:
        paused: mode of the pause that this scheduler has acknowledged; None while it generates.
        phase: `open` from begin to the first byte, `writing` until every byte has landed, `received` until the last step
            is done, then `idle`; `torn` after a failure from `writing` on.
        version: that the running sync brings; None between syncs.
        reason: why the scheduler is torn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expires: float | None = None
        self._foreign = False
        self.paused: str | None = None
        self.phase: Phase = "idle"
        self.version: int | None = None
        self.reason: str | None = None
        #: called when a reload from disk has healed the scheduler
        self.on_healed: Callable[[], None] | None = None

    # ------------------------------------------------------------------ the event loop

    def acknowledge(self, mode: str) -> None:
        """The event loop has paused: no forward pass is started any more."""
        with self._changed:
            self.paused = mode
            self._changed.notify_all()

    def leave_pause(self) -> str | None:
        """The event loop is about to generate again: from here no sync can begin.

        Returns:
            Why it must stay paused, and then the pause stands; None if it may go on.
        """
        with self._changed:
            held = self._held()
            if held is None:
                self.paused = None
            return held

    def held(self) -> str | None:
        """Why the scheduler must stay paused; None if it may go on."""
        with self._changed:
            return self._held()

    def torn(self) -> str | None:
        """Why the scheduler's weights are of two versions; None while they are not."""
        with self._changed:
            self._expire()
            return self.reason if self.phase == "torn" else None

    def reserve(self) -> bool:
        """Keeps a sync from being opened until `release`; False if one is running already."""
        with self._changed:
            self._expire()
            if self.phase not in ("idle", "torn"):
                return False
            self._foreign = True
            return True

    def release(self) -> None:
        """Undoes `reserve`."""
        with self._changed:
            self._foreign = False

    def heal(self) -> None:
        """SGLang itself has loaded every weight again."""
        with self._changed:
            if self.phase != "torn":
                return
            self._close()
            healed = self.on_healed
        if healed is not None:
            healed()

    # ------------------------------------------------------------------ a sync

    def open(self, version: int, timeout_s: float) -> bool:
        """A sync begins, as soon as a pause has been acknowledged; nothing is written yet.

        Args:
            version: that it brings.
            timeout_s: seconds to wait for the acknowledgement; and for the next step to follow, with some slack.

        Returns:
            Whether the scheduler was torn: only a complete sync heals it.

        Raises:
            DeadlineError: the event loop acknowledged no pause in time.
            EngineError: SGLang is updating weights itself, or another sync is running.
        """
        with self._changed:
            # an earlier pause may still show, of which the end is on its way; then that end no longer takes effect
            if not self._changed.wait_for(lambda: self.paused is not None, max(timeout_s, 0.0)):
                raise DeadlineError(
                    f"the scheduler acknowledged no pause within {timeout_s:.1f} s: pause generation first (route "
                    "/pause_generation, mode retract or in_place), and only then begin"
                )
            self._expire()
            if self._foreign:
                raise EngineError("SGLang is in the middle of a weight update of its own")
            if self.phase in ("writing", "received"):
                raise EngineError(f"version {self.version} is still being received; end that sync first")
            was_torn = self.phase == "torn"
            if not was_torn:
                self.phase = "open"
            self.version = version
            self._allow(timeout_s)
            return was_torn

    def writing(self) -> None:
        """The first byte is about to be written."""
        with self._changed:
            if self.phase == "idle" or self.paused is None:
                raise EngineError("the sync was closed before its first byte was written")
            self.phase = "writing"
            self.reason = None
            self._expires = None

    def received(self, timeout_s: float) -> None:
        """Every byte has landed."""
        with self._changed:
            if self.phase != "writing":
                raise EngineError(f"the bytes of version {self.version} landed, but the sync was ended meanwhile")
            self.phase = "received"
            self._allow(timeout_s)

    def finishing(self, version: int) -> None:
        """The last step begins: from here the time that the driver took no longer counts.

        Raises:
            EngineError: `version` was not received completely, or the sync was ended meanwhile.
        """
        with self._changed:
            self._expire()
            if self.phase != "received" or self.version != version:
                found = f"torn: {self.reason}" if self.phase == "torn" else f"{self.phase}, version {self.version}"
                raise EngineError(f"version {version} cannot be finished: it was not received completely (now {found})")
            self._expires = None

    def done(self) -> None:
        """The sync is complete: the scheduler may generate."""
        with self._changed:
            self._close()

    def revoke(self, reason: str) -> None:
        """A sync that was done here is not committed: the scheduler is torn."""
        with self._changed:
            if self.phase == "idle":
                self._tear(reason)

    def fail(self, reason: str) -> None:
        """The sync ended without a version. A scheduler that was written to is torn; else it is as it was."""
        with self._changed:
            if self.phase in ("writing", "received"):
                self._tear(reason)
            elif self.phase == "open":
                self._close()
            elif self.phase == "torn":
                self.version, self._expires = None, None

    # ------------------------------------------------------------------ inside

    def _held(self) -> str | None:
        self._expire()
        if self.phase == "idle":
            return None
        if self.phase == "torn":
            return f"its weights are torn ({self.reason})"
        return f"version {self.version} is being received"

    def _allow(self, timeout_s: float) -> None:
        self._expires = time.monotonic() + timeout_s + SLACK_S

    def _expire(self) -> None:
        """A driver that died between two steps must not leave the scheduler waiting for ever."""
        if self._expires is None or time.monotonic() < self._expires:
            return
        if self.phase == "received":
            self._tear(f"version {self.version} was received, but the driver of the sync never finished it")
        elif self.phase == "open":
            log.error("the sync of version %s was begun and never went on; it is closed", self.version)
            self._close()
        else:
            self.version, self._expires = None, None

    def _tear(self, reason: str) -> None:
        self.phase, self.reason = "torn", reason
        self.version, self._expires = None, None

    def _close(self) -> None:
        self.phase, self.reason = "idle", None
        self.version, self._expires = None, None


def state_of(scheduler: Any) -> SyncState:
    """Returns the record of an SGLang `Scheduler`, made at the first call."""
    return scheduler.__dict__.setdefault(_ATTRIBUTE, SyncState())


# ---------------------------------------------------------------------- hooks; they run in the event loop


def after_pause(_result: Any, scheduler: Any, recv_req: Any) -> None:
    """AFTER `Scheduler.pause_generation`: only now has the pause taken effect."""
    state_of(scheduler).acknowledge(str(recv_req.mode))


def around_continue(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND `Scheduler.continue_generation`: none of the ranks goes on if one of them must not."""
    state = state_of(scheduler)
    mode = state.paused
    if mode is not None:
        # not asked first and done later: a sync could begin in between, and write while the model runs
        held = _some(_control(), state.leave_pause())
        if held is not None:
            state.acknowledge(mode)
            log.warning("generation stays paused: %s", held)
            return None
    return original(scheduler, recv_req)


def around_requests(original: Callable[..., Any], scheduler: Any, recv_reqs: list[Any]) -> Any:
    """AROUND `Scheduler.process_input_requests`: a torn replica answers new requests at once, with an error."""
    state = state_of(scheduler)
    if state.paused is None or not any(_is_work(request) for request in recv_reqs):
        if state.paused is not None and state.phase != "idle" and not recv_reqs:
            time.sleep(REST_S)
        return original(scheduler, recv_reqs)
    torn = _some(Ranks.work(_parallel()), state.torn())
    if torn is None:
        return original(scheduler, recv_reqs)
    error = TornReplicaError(
        f"this replica refuses to generate: {torn}. Its weights may be of two versions; run a complete sync, or reload it "
        "from disk"
    )
    for request in recv_reqs:
        if _is_work(request):
            _refuse(scheduler, request, str(error))
    return original(scheduler, [request for request in recv_reqs if not _is_work(request)])


#: methods of SGLang's weight updater that must stay out of a running sync, and what each answers
FOREIGN: Mapping[str, str] = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
}


def around_foreign(name: str) -> Callable[..., Any]:
    """AROUND a method of `SchedulerWeightUpdaterManager`; one of `FOREIGN`."""

    def hook(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        if manager.scheduler is None:
            return original(manager, recv_req)
        state = state_of(manager.scheduler)
        reserved = state.reserve()
        try:
            # paused is the same on every rank, and no sync runs without it
            if state.paused is not None and not all(_control().gather(reserved)):
                return _foreign_refusal(name)
            result = original(manager, recv_req)
        finally:
            if reserved:
                state.release()
        if name == "update_weights_from_disk" and result.success:
            state.heal()
        return result

    return hook


def _foreign_refusal(name: str) -> Any:
    from sglang.srt.managers import io_struct

    message = f"{name} is refused while rdt receives weights; wait for that sync to end"
    extra = {"num_paused_requests": 0} if name == "update_weights_from_disk" else {}
    return getattr(io_struct, FOREIGN[name])(success=False, message=message, **extra)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _control() -> Ranks:
    return Ranks.control(_parallel())


def _some(ranks: Ranks, own: str | None) -> str | None:
    return next((reason for reason in ranks.gather(own) if reason is not None), None)


def _is_work(request: Any) -> bool:
    from sglang.srt.managers import io_struct

    return isinstance(
        request,
        io_struct.TokenizedGenerateReqInput
        | io_struct.TokenizedEmbeddingReqInput
        | io_struct.BatchTokenizedGenerateReqInput
        | io_struct.BatchTokenizedEmbeddingReqInput,
    )


def _refuse(scheduler: Any, request: Any, message: str) -> None:
    """Answers a request that never enters the scheduler; only the rank that talks to clients sends anything."""
    from http import HTTPStatus

    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for one in scheduler._tokenized_requests(request):
        for item in getattr(one.mm_inputs, "mm_items", None) or ():
            item.release_transport_proxies()
        reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, TornReplicaError.__name__)
        scheduler.send_abort_output(AbortReq(rid=one.rid, finished_reason=reason.to_json()), one)
