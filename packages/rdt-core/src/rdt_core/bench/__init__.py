"""`rdt bench`: how long a sync takes next to one copy of the same bytes and to other designs, measured in the same run.

Source ranks and engine ranks are Ray actors that hold tensors of a named model's real shapes, as FSDP or Megatron spreads
them and as engines lay them out; planner, publisher, receiver and links are the real ones. Bytes are compared after
every piece. Numbers are only comparable inside one run.
"""

from .measure import run
from .options import BenchOptions
from .results import BenchReport, Cell, Floors, PeerRow, p50, p95, ratio, to_dict

__all__ = ["BenchOptions", "BenchReport", "Cell", "Floors", "PeerRow", "p50", "p95", "ratio", "run", "to_dict"]
