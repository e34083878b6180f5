"""What processes of one engine tell each other through CPU process groups, each wait with a deadline.

It is for adapters whose engine runs its ranks in step: what one of them alone knows has to be agreed on before the next
collective. Refuses to wait for a rank that does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .errors import DeadlineError


def gather(groups: Sequence[Any], value: Any, timeout_s: float, who: str, others: str) -> list[Any]:
    """Returns what every rank passed, in no particular order. A collective.

    Args:
        groups: CPU process groups of torch that reach all ranks one after the other.
        value: picklable.
        timeout_s: seconds within which all ranks must have arrived, group by group.
        who: names this rank in errors.
        others: what it waits for.

    Raises:
        DeadlineError: a rank did not arrive, or died; its engine is then of no more use.
    """
    import torch.distributed as dist

    values = [value]
    for group in groups:
        try:
            dist.monitored_barrier(group, timedelta(seconds=timeout_s), wait_all_ranks=True)
            lists: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(lists, values, group=group)
        except RuntimeError as error:
            raise DeadlineError(f"{who} waited {timeout_s:.0f} s for {others}: {error}") from error
        values = [item for part in lists for item in part]
    return values
