"""Posting transfers together, and waiting for all of them at once while each is timed by itself.

A reader posts to all owners before it waits for any; here each transfer is looked at in turn until all have landed, so
that a slow one does not make those behind it look slow. `Flight.waited` is time that the reader really lost: posting,
and its share by bytes of the time in which it could do nothing but wait. Refuses nothing; errors are the transfers' own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import PreparedTransfer, Turn

_SPIN_S = 200e-6
_SLEEP_S = (50e-6, 100e-6)


@dataclass(slots=True)
class Flight:
    """One transfer that was posted.

    Attributes:
        source: rank that owns the bytes.
        transfer: what was posted.
        posted: when, by `time.perf_counter`.
        landed: when it was first seen to have landed.
        waited: seconds that the reader spent on it and on nothing else.
        alone: seconds that it would have waited had this been the only transfer: those in which others were on their way as
            well count in full.
    """

    source: int
    transfer: PreparedTransfer
    posted: float
    landed: float
    waited: float
    alone: float


def post_all(transfers: Sequence[tuple[int, PreparedTransfer]], device: torch.device) -> list[Flight]:
    """Posts transfers in the order given; none is waited for.

    Args:
        transfers: source rank and transfer.
        device: that the reader works on. What is queued there counts for no transfer: agents, which know no streams, wait
            for it before they post.
    """
    flights = []
    is_settled = device.type != "cuda"
    for source, transfer in transfers:
        if not is_settled and transfer.turn in (Turn.AGENT, Turn.WAITED):
            torch.cuda.current_stream(device).synchronize()
            is_settled = True
        began = time.perf_counter()
        transfer.post()
        ended = time.perf_counter()
        flights.append(Flight(source, transfer, began, ended, ended - began, ended - began))
    return flights


def wait_all(flights: Sequence[Flight], deadline: float) -> None:
    """Returns when every byte has landed and may be used by work queued afterwards on the current stream.

    Args:
        flights: from `post_all`.
        deadline: `time.monotonic()` value.

    Raises:
        DeadlineError: one has not landed by then.
        TransportError: a move failed.
    """
    pending = []
    for flight in flights:
        if flight.transfer.turn is not Turn.WAITED:
            pending.append(flight)
            continue
        began = time.perf_counter()
        flight.transfer.wait(deadline)
        flight.landed = time.perf_counter()
        flight.waited += flight.landed - began
        flight.alone += flight.landed - began
    started = last = time.perf_counter()
    pause = _SLEEP_S[0]
    while pending:
        left = [flight for flight in pending if not flight.transfer.poll()]
        now = time.perf_counter()
        for flight in pending:
            flight.landed = now
        # what had landed by the first look was not waited for, however long ago that was
        total = sum(flight.transfer.nbytes for flight in left) or 1
        for flight in left:
            flight.waited += (now - last) * flight.transfer.nbytes / total
            flight.alone += now - last
        last = now
        pending = left
        if pending and time.monotonic() >= deadline:
            pending[0].transfer.wait(deadline)  # says what did not land
        if pending and now - started > _SPIN_S:
            time.sleep(pause)
            pause = min(pause * 1.2, _SLEEP_S[1])
    for flight in flights:
        if flight.transfer.turn is not Turn.WAITED:
            flight.transfer.wait(deadline)
