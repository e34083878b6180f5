"""A Ray cluster of this process's own on this machine, and the end of every process in it, and of their shared memory.

For runs that must leave nothing behind, however they end: engines start processes of their own, and one that is
interrupted while it starts them would leave some that notice only much later that they are alone. Refuses to share:
a process that is connected to a cluster already is turned away, and no address in the environment is followed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from .errors import RdtError

NAMESPACE = "rdt"
OBJECT_STORE_BYTES = 256 << 20
#: seconds in which processes may end by themselves once the cluster is down
GRACE_S = 5.0
#: shared memory of Python's `multiprocessing`, which stays where its owner and the tracker beside it are killed
_SEGMENT = re.compile(r"/dev/shm/psm_[0-9a-f]+")


class Family:
    """The processes below this one that started after it was made.

    They are kept by process, not by number: a number that the system gave to somebody else is never signalled. A
    process whose parent ends leaves the tree, so `note` is called before anything is ended.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._members: set[psutil.Process] = set()
        self._segments: set[str] = set()

    def note(self) -> None:
        """Remembers every process that is there now, and the shared memory that it has mapped."""
        roots = (psutil.Process(), *self._members)
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._members.update(set(root.children(recursive=True)) - self._before)
        for member in self._members:
            self._segments.update(_segments(member.pid) if member.is_running() else ())

    def end(self, grace_s: float = GRACE_S) -> None:
        """Waits for the processes that were noted, then kills what is left, with the children it has by then.

        Shared memory that they had mapped, and nobody else has, is removed then.
        """
        _, alive = psutil.wait_procs(self._members, timeout=grace_s)
        if alive:
            self.note()
            for process in self._members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(self._members, timeout=grace_s)
        left = {path for path in self._segments if Path(path).exists()}
        if left:
            left -= {path for pid in psutil.pids() for path in _segments(pid)}  # somebody outside has it
        for path in left:
            Path(path).unlink(missing_ok=True)


def _segments(pid: int) -> set[str]:
    """The shared memory of `multiprocessing` that a process has mapped; none of one that is gone or somebody else's."""
    try:
        return set(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except OSError:
        return set()


@contextlib.contextmanager
def cluster(cpus: int, gpus: int = 0) -> Iterator[Family]:
    """Starts Ray here and connects this process to it; at the end nothing of it is left.

    Args:
        cpus: logical CPUs, whatever the machine has.
        gpus: logical GPUs, for engines whose ranks ask for one each even on a CPU; 0: those that the machine has.

    Raises:
        RdtError: this process is connected to a cluster already.
    """
    import ray

    if ray.is_initialized():
        raise RdtError("this process is connected to a Ray cluster already; the demo starts and ends one of its own")
    family = Family()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",  # never somebody's cluster that RAY_ADDRESS names: this one is shut down at the end
            num_cpus=cpus,
            num_gpus=gpus or None,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,  # no weights pass through it
            logging_level=logging.ERROR,  # it warns of the token that it makes for this very cluster
        )
        if threading.current_thread() is threading.main_thread():
            # Ray puts one of its own in place of the caller's
            signal.signal(signal.SIGTERM, handler)
        yield family
    finally:
        family.note()
        ray.shutdown()
        family.end()
