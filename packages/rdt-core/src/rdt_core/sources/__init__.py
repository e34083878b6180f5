"""What trainers publish: the source protocols, and the sources for modules and for full-tensor iterators."""

from .base import IterableWeightSource, Shard, WatchedSource, WeightSource
from .checkpoint import CheckpointSource
from .full import FullTensors
from .iterable import IterableSource
from .module import ModuleSource
from .names import FusedExperts, NameRule, Part, Renamed

__all__ = [
    "CheckpointSource",
    "FullTensors",
    "FusedExperts",
    "IterableSource",
    "IterableWeightSource",
    "ModuleSource",
    "NameRule",
    "Part",
    "Renamed",
    "Shard",
    "WatchedSource",
    "WeightSource",
]
