"""Stock megatron-core on a CPU: tiny models in any parallel layout, and ranks to run them in.

`layout` says how a model is spread, `config` and `build` make it from `models.config`, `forward` runs it, `ranks` gives a
function to forked processes, and `trainer` feeds a sync. `shim` is what makes all of that possible without a GPU; nothing
outside of tests may use it. Importing this package imports neither Megatron nor torch.
"""

from __future__ import annotations

from .layout import Layout

__all__ = ["Layout"]
