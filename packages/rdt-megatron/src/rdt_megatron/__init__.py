"""The Megatron-Core side of rdt: a source for models that train under any of Megatron's parallelisms.

`MegatronSource` declares a rank's own shards under their checkpoint names, as views of its parameters and without any
gather. Importing this package is cheap and needs no Megatron; making a source refuses a Megatron-Core that was not
tested, naming the command that mends it.
"""

from . import _release as _release  # first: it refuses another release of the core
from .chunks import Parallel
from .families import Family, in_layer, known_families
from .rules import (
    Columns,
    GroupedColumns,
    GroupedRows,
    Local,
    Piece,
    QueryKeyValue,
    Rows,
    RowsIfCut,
    Rule,
    Skip,
    Stacked,
    Vocabulary,
    Whole,
)
from .source import MegatronSource
from .versions import MissingMegatronError, check_megatron

__all__ = [
    "Columns",
    "Family",
    "GroupedColumns",
    "GroupedRows",
    "Local",
    "MegatronSource",
    "MissingMegatronError",
    "Parallel",
    "Piece",
    "QueryKeyValue",
    "Rows",
    "RowsIfCut",
    "Rule",
    "Skip",
    "Stacked",
    "Vocabulary",
    "Whole",
    "check_megatron",
    "in_layer",
    "known_families",
]
