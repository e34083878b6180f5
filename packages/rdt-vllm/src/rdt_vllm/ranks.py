"""One outcome for all engine ranks that one vLLM executor drives: whoever fails, exactly one rank raises.

vLLM's multiprocess and Ray executors read the answers of their workers in rank order and stop at the first failure; the
answers behind it then stay queued and every later call takes an earlier call's answer. So the ranks first tell each
other how it went, and only the last one raises, with what all of them have to say. A wait here has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rdt_core.ranks import gather

#: seconds that the ranks of one executor may be apart at the end of a step that has a deadline of its own
GRACE_S = 30.0


class Ranks:
    """The ranks of one executor.

    Args:
        rank: of this worker in its executor.
        world_size: workers of the executor.
        groups: CPU process groups that reach all of them one after the other; only those of more than one rank.
    """

    def __init__(self, rank: int, world_size: int, groups: Sequence[Any] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self._groups = tuple(groups)

    @classmethod
    def of_worker(cls, parallel_config: Any) -> Ranks:
        """The ranks that share this vLLM worker's executor (tensor, pipeline and prefill-context parallel)."""
        from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

        groups = [get_tp_group(), get_pp_group(), get_pcp_group()] if parallel_config.world_size > 1 else []
        return cls(
            parallel_config.rank,
            parallel_config.world_size,
            [group.cpu_group for group in groups if group.world_size > 1],
        )

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that raises for all."""
        return self.rank == self.world_size - 1

    def gather(self, value: Any, timeout_s: float) -> list[Any]:
        """Returns what every rank passed, in no particular order.

        Args:
            value: picklable.
            timeout_s: seconds within which all ranks must have arrived.

        Raises:
            DeadlineError: a rank did not; its executor is then of no more use.
        """
        who = f"rank {self.rank} of {self.world_size}"
        return gather(self._groups, value, timeout_s, who, "the other workers of its engine")

    def agree(self, error: Exception | None, timeout_s: float) -> str | None:
        """Tells every rank of the failures of all.

        Args:
            error: how this rank's part went.
            timeout_s: see `gather`.

        Returns:
            None when all ranks succeeded, else what failed where, the same on all. Only the rank that `speaks` may
            raise it.
        """
        told = None if error is None else f"rank {self.rank}: {type(error).__name__}: {error}"
        failures = [failure for failure in self.gather(told, timeout_s) if failure is not None]
        return "; ".join(sorted(failures)) or None
