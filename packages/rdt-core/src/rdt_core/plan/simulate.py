"""Executes a plan in time: transfers share what they pass through by max-min fairness, event after event.

Each engine rank posts its first two chunks at once, and one more whenever a chunk has arrived and landed, as the receiver
does; the bytes of a posted transfer flow at the rate that is fair among all that flow. Nothing is random. An event is the
arrival of transfers or the end of a landing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .cluster import Cluster
from .predict import landing_seconds
from .readers import Transfers
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


def fair_rates(way: Array, weight: Array, resources: int) -> Array:
    """Max-min fair rates.

    Args:
        way: [N, K] resources that each flow passes through.
        weight: [N, K] of a resource's second that a unit of the flow's rate takes each second; 0 where there is none. Every
            flow has one that is not 0.
        resources: number of resources; each has one second each second.

    Returns:
        [N] rates: none can grow without another one shrinking that is not larger.
    """
    rates = np.zeros(len(way))
    left = np.ones(resources)
    open_ = np.arange(len(way))
    while len(open_):
        passes, takes = way[open_], weight[open_]
        total = np.bincount(passes.ravel(), takes.ravel(), resources)
        share = np.where(total > 0, left / np.where(total > 0, total, 1.0), np.inf)
        own = np.where(takes > 0, share[passes], np.inf)
        fair = own.min(axis=1)
        # a resource where nobody is held back more by another one decides the rate of all that pass through it
        least = np.full(resources, np.inf)
        np.minimum.at(least, passes[takes > 0], np.broadcast_to(fair[:, None], takes.shape)[takes > 0])
        decides = least >= share * (1 - 1e-12)
        fixed = ((takes > 0) & decides[passes]).any(axis=1)
        rates[open_[fixed]] = fair[fixed]
        left -= np.bincount(passes[fixed].ravel(), (takes[fixed] * fair[fixed][:, None]).ravel(), resources)
        left = np.maximum(left, 0.0)
        open_ = open_[~fixed]
    return rates


def simulate(transfers: Transfers, traffic: Traffic, cluster: Cluster, ring: bool = False) -> Run:
    """Runs all transfers of a sync.

    Args:
        transfers: sorted by reader and chunk.
        traffic: what they need.
        cluster: rates of what happens after the arrival.
        ring: whether bytes go through receive buffers and a post-load step.
    """
    readers = int(transfers.reader.max(initial=-1)) + 1
    finished = np.zeros(readers)
    if not len(transfers):
        return Run(0.0, finished, 0)
    size = np.maximum(transfers.nbytes, 1).astype(np.float64)
    weight = traffic.need / size[:, None]
    land = np.zeros((readers, int(transfers.chunk.max()) + 1))
    np.add.at(land, (transfers.reader, transfers.chunk), landing_seconds(transfers, cluster, ring))
    # transfers of each reader by the order of its chunks
    steps: list[list[Array]] = [[] for _ in range(readers)]
    chunk_of: list[list[int]] = [[] for _ in range(readers)]
    key = transfers.reader * (land.shape[1] + 1) + transfers.chunk
    edges = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(key)], strict=True):
        reader = int(transfers.reader[begin])
        steps[reader].append(np.arange(begin, end))
        chunk_of[reader].append(int(transfers.chunk[begin]))
    step_of = np.zeros(len(key), np.int64)
    for one in steps:
        for number, members in enumerate(one):
            step_of[members] = number
    missing = [[len(members) for members in one] for one in steps]
    posted = [0] * readers
    processed = [0] * readers  # steps whose landing has begun
    landing = [False] * readers
    active = np.zeros(len(key), bool)
    remaining = size.copy()
    timers: list[tuple[float, int]] = []
    now, events = 0.0, 0

    def post(reader: int) -> None:
        if posted[reader] < len(steps[reader]):
            active[steps[reader][posted[reader]]] = True
            posted[reader] += 1

    def proceed(reader: int) -> None:
        """Starts the landing of the reader's oldest chunk if it has arrived."""
        step = processed[reader]
        if not landing[reader] and step < posted[reader] and not missing[reader][step]:
            landing[reader] = True
            heapq.heappush(timers, (now + float(land[reader, chunk_of[reader][step]]), reader))

    for reader in range(readers):
        post(reader)
        post(reader)
    while True:
        events += 1
        flowing = np.flatnonzero(active)
        arrival = np.inf
        if len(flowing):
            rates = fair_rates(traffic.way[flowing], weight[flowing], len(traffic.resources))
            left = remaining[flowing] / rates
            arrival = float(left.min())
        timer = timers[0][0] - now if timers else np.inf
        step_s = min(arrival, timer)
        if step_s == np.inf:
            break
        if len(flowing):
            remaining[flowing] -= rates * step_s
            if arrival <= timer:
                done = flowing[left <= arrival * (1 + _TOGETHER) + 1e-15]
                active[done] = False
        now += step_s
        if len(flowing) and arrival <= timer:
            for at in done.tolist():
                missing[int(transfers.reader[at])][int(step_of[at])] -= 1
            for reader in np.unique(transfers.reader[done]).tolist():
                proceed(reader)
        while timers and timers[0][0] <= now * (1 + _TOGETHER):
            _, reader = heapq.heappop(timers)
            landing[reader] = False
            processed[reader] += 1
            finished[reader] = now
            post(reader)
            proceed(reader)
    return Run(float(finished.max()), finished, events)


