"""What the scheduler processes of one SGLang engine tell each other, so that all of them decide alike.

SGLang's ranks run their event loops in step: every rank handles the same requests in the same order. Whatever one rank
alone knows (its weights are torn, its pull failed) has to be agreed on first, or the next collective of a forward pass
waits for ever. Only the event loop's own thread may do so, and every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rdt_core.ranks import gather

#: seconds that the ranks of one engine may be apart where they answer the same request
GRACE_S = 30.0


class Ranks:
    """The ranks that handle the same requests.

    Args:
        rank: of this process, for errors.
        groups: CPU process groups that reach all of them one after the other; only those of more than one rank.
    """

    def __init__(self, rank: int, groups: Sequence[Any] = ()) -> None:
        self.rank = rank
        self._groups = tuple(groups)

    @classmethod
    def control(cls, parallel: Any) -> Ranks:
        """The ranks that handle the same control requests: a whole tensor parallel group.

        Args:
            parallel: SGLang's `runtime_context.get_parallel()`.
        """
        return cls(parallel.tp_rank, [parallel.tp_group.cpu_group] if parallel.tp_size > 1 else [])

    @classmethod
    def work(cls, parallel: Any) -> Ranks:
        """The ranks that handle the same generation requests: with DP attention fewer than a tensor parallel group."""
        if not parallel.attn_dp_enabled:
            return cls.control(parallel)
        groups = []
        if parallel.attn_tp_size > 1:
            groups.append(parallel.attn_tp_group.cpu_group)
        if parallel.attn_cp_size > 1:
            groups.append(parallel.attn_cp_group.cpu_group)
        return cls(parallel.tp_rank, groups)

    def gather(self, value: Any, timeout_s: float = GRACE_S) -> list[Any]:
        """Returns what every rank passed, in no particular order.

        Args:
            value: picklable.
            timeout_s: seconds within which all ranks must have arrived.

        Raises:
            DeadlineError: a rank did not; its engine is then of no more use.
        """
        return gather(
            self._groups, value, timeout_s, f"rank {self.rank}", "the other scheduler processes of its engine"
        )
