"""Words that the engine's errors carry and the clients look for; the only thing that both sides must agree on.

vLLM hands an error of a worker to its caller as text, over HTTP and over Ray alike, so text is what there is.
"""

from __future__ import annotations

#: what an engine is stamped with from the first byte of a sync to its commit, before the version
RECEIVING = "receiving "
#: the sync was ended by `update_weights` with `abort`, as asked
ABORTED = "rdt-aborted"
#: vLLM's own words for a call that does not fit a worker's weight update: one that is not open, and one that is
NOT_OPEN = ("must be called before", "without a matching")
ALREADY_OPEN = "already active"
#: a step of a sync that was taken in one call failed; followed by its name and a semicolon
AT_STEP = "rdt-step:"
#: an earlier weight update never ended; followed by a colon and the ranks of which the update is open
LEFT_OPEN = "rdt-left-open"
OPEN_ON_ALL = "all"
OPEN_ON_LAST = "last"  # `finish` failed
OPEN_ON_OTHERS = "others"  # `start` or `update` failed
