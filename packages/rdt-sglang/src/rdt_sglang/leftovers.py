"""What SGLang leaves in the file system when its processes are killed, and its removal on every node of the engine.

SGLang ends its processes by SIGKILL, which skips their own clean-up. Only files that carry the engine's own names are
removed: its socket files, and shared memory named after one of its processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rdt_core.transport.nodes import start_time

_SHARED = Path("/dev/shm")


class Leftovers:
    """What one engine will leave behind; made while it lives, since the dead do not tell their process ids.

    Args:
        ports: SGLang's `PortArgs`.
        handles: of the schedulers' actors.
        pids: further processes of the engine on this node.

    Attributes:
        first_node: id of the node of the first scheduler.
    """

    def __init__(self, ports: Any, handles: Sequence[Any], pids: Sequence[int] = ()) -> None:
        from ray._private.state import actors
        from sglang.srt.managers.load_snapshot import shm_path_for

        names = [getattr(ports, field) for field in dir(ports) if field.endswith("_ipc_name")]
        self._files = [one.removeprefix("ipc://") for one in names if isinstance(one, str) and one.startswith("ipc://")]
        self._files.append(shm_path_for(ports.instance_id))
        self._here = [os.getpid(), *pids]
        self._elsewhere: dict[str, list[int]] = {}
        self.first_node = ""
        for handle in handles:
            known = actors(handle._actor_id.hex())
            node = str(known["Address"]["NodeID"])
            self.first_node = self.first_node or node
            self._elsewhere.setdefault(node, []).append(int(known["Pid"]))

    def remove(self, timeout_s: float) -> None:
        """Removes it all, once the processes are dead; leaves alone what cannot be reached in time.

        Args:
            timeout_s: seconds for what lies on other nodes.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for name in self._files:
            with contextlib.suppress(OSError):
                os.unlink(name)
        own = ray.get_runtime_context().get_node_id()
        remove_shared([*self._here, *self._elsewhere.get(own, [])])
        away = ray.remote(remove_shared)
        refs = [
            away.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(pids)
            for node, pids in self._elsewhere.items()
            if node != own
        ]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)


def remove_shared(pids: Sequence[int]) -> int:
    """Removes the shared memory that SGLang named after these processes, where they are dead.

    Args:
        pids: of processes on this node.

    Returns:
        The number of files removed.
    """
    removed = 0
    for pid in pids:
        for path in _SHARED.glob(f"sgl_shm_*_{pid}_*"):
            if pid != os.getpid() and start_time(pid) is not None:
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed
