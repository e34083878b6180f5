"""`rdt soak`: hundreds of syncs over real Ray, and whether anything grows meanwhile.

Source ranks and engine ranks with a small model, joined again and attached again every so often. After each sync every
process says what it holds (memory, open files, threads, shared memory, registrations, references) and how long it took;
at the end each series is judged flat or growing by a robust slope.
"""

from .judge import Verdict, judge
from .options import SoakOptions
from .probe import Held, measure

__all__ = ["Held", "SoakOptions", "Verdict", "judge", "measure"]
