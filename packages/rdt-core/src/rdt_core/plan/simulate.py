"""Executes a plan in time: transfers share what they pass through by max-min fairness, event after event.

Each engine rank posts its first two chunks at once, and one more whenever a chunk has arrived and landed, as the receiver
does; the bytes of a posted transfer flow at the rate that is fair among all that flow. Nothing is random. An event is the
arrival of transfers or the end of a landing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .fairness import fair_rates
from .traffic import Traffic

Array = np.ndarray
#: transfers that would end within this part of an event's time end with it
_TOGETHER = 1e-9


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated sync.

    Attributes:
        seconds: from the first post until the last chunk has landed.
        finished: [readers] when each engine rank was done.
        events: that were handled.
    """

    seconds: float
    finished: Array
    events: int


def simulate(reader: Array, chunk: Array, nbytes: Array, traffic: Traffic, land: Array) -> Run:
    """Runs all transfers of a sync.

    Args:
        reader, chunk: [N] engine rank of each transfer, and its chunk there; sorted by reader, then chunk.
        nbytes: [N] of each transfer.
        traffic: what they need.
        land: [readers, chunks] seconds from the arrival of a chunk until it has landed.
    """
    readers = len(land)
    finished = np.zeros(readers)
    if not len(reader):
        return Run(0.0, finished, 0)
    size = np.maximum(nbytes, 1).astype(np.float64)
    weight = traffic.need / size[:, None]
    # each reader's steps: its transfers by chunk
    edges = np.flatnonzero(np.concatenate([[True], (np.diff(reader) != 0) | (np.diff(chunk) != 0)])).tolist()
    steps: list[list[Array]] = [[] for _ in range(readers)]
    step_of = np.zeros(len(reader), np.int64)
    for begin, end in zip(edges, [*edges[1:], len(reader)], strict=True):
        mine = steps[int(reader[begin])]
        step_of[begin:end] = len(mine)
        mine.append(np.arange(begin, end))
    missing = [[len(members) for members in one] for one in steps]
    posted, processed, landing = [0] * readers, [0] * readers, [False] * readers
    active = np.zeros(len(reader), bool)
    remaining = size.copy()
    timers: list[tuple[float, int]] = []
    now, events = 0.0, 0

    def post(rank: int) -> None:
        if posted[rank] < len(steps[rank]):
            active[steps[rank][posted[rank]]] = True
            posted[rank] += 1

    def proceed(rank: int) -> None:
        """Starts the landing of the reader's oldest chunk if it has arrived."""
        step = processed[rank]
        if not landing[rank] and step < posted[rank] and not missing[rank][step]:
            landing[rank] = True
            heapq.heappush(timers, (now + float(land[rank, chunk[steps[rank][step][0]]]), rank))

    for rank in range(readers):
        post(rank)
        post(rank)
    while True:
        flowing = np.flatnonzero(active)
        arrival, done = np.inf, flowing[:0]
        if len(flowing):
            rates = fair_rates(traffic.way[flowing], weight[flowing], len(traffic.resources))
            left = remaining[flowing] / rates
            arrival = float(left.min())
        timer = timers[0][0] - now if timers else np.inf
        passed = min(arrival, timer)
        if passed == np.inf:
            return Run(float(finished.max(initial=0.0)), finished, events)
        events += 1
        if len(flowing):
            remaining[flowing] -= rates * passed
            if arrival <= timer:
                done = flowing[left <= arrival * (1 + _TOGETHER) + 1e-15]
        now += passed
        active[done] = False
        for at in done.tolist():
            missing[int(reader[at])][int(step_of[at])] -= 1
        for rank in np.unique(reader[done]).tolist():
            proceed(rank)
        while timers and timers[0][0] <= now * (1 + _TOGETHER):
            _, rank = heapq.heappop(timers)
            landing[rank] = False
            processed[rank] += 1
            finished[rank] = now
            post(rank)
            proceed(rank)
