"""Max-min fair sharing: how fast flows go that pass through resources of limited capacity, vectorised."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


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
