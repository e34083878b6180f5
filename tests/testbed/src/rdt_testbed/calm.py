"""Makes NIXL's progress threads yield to everything else: each of them keeps a core busy, and a test has more than cores.

They poll without a pause from the first agent to the end of the process, in every trainer and engine rank. Here they get
the lowest priority, which costs them nothing while a core is free. The product does nothing of the kind.
"""

from __future__ import annotations

import os
import threading
from typing import Any

_LOWEST = 19


def calm_nixl() -> None:
    """From now on, every NIXL agent of this process and its forks starts its threads with the lowest priority."""
    from nixl import _api

    stock = _api.nixl_agent.__init__
    if hasattr(stock, "rdt_testbed"):
        return

    def calm(self: Any, *arguments: Any, **options: Any) -> None:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, _LOWEST)  # inherited by the threads that it starts
        try:
            stock(self, *arguments, **options)
        finally:
            os.setpriority(os.PRIO_PROCESS, thread, before)

    calm.rdt_testbed = True  # type: ignore[attr-defined]
    _api.nixl_agent.__init__ = calm
