"""The main job: a small model is trained with reinforcement learning while rdt keeps a stock engine up to date.

Two or more FSDP2 ranks train on samples that an unmodified inference engine generates; after every optimiser step the
ranks publish their shards and the engine serves the new version. Each version is checked twice: the engine's own
stamp, and its log-probabilities against the trainer's. Anything that differs ends the run with an error.
`rdt demo` is the command; `run` is the same from Python. No engine is imported here: see `engines`.
"""

from __future__ import annotations

from .loop import run
from .options import DemoOptions
from .report import DemoReport, StepReport

__all__ = ["DemoOptions", "DemoReport", "StepReport", "run"]
