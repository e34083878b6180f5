"""What a run of the demo did: the structs of `report.json`, and the picture of reward and sync time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..logline import SEQUENCE, rest
from ..report import new_figure
from ..wire import LinkReport, Struct


class StepReport(Struct, frozen=True):
    """One version: the sync that brought it to the engine, and what the engine made of it.

    `seconds` and `phases` (seconds) are the sync's, from the finished optimiser step to the engine serving; `reward` is
    the mean over the samples that this version generated, `max_abs_logprob_error` the largest difference over all their
    tokens between the engine's log-probabilities and the trainer's.
    """

    version: int
    reward: float
    seconds: float
    phases: dict[str, float]
    bytes: int
    mode: str
    links: tuple[LinkReport, ...]
    max_abs_logprob_error: float


class CheckpointReport(Struct, frozen=True):
    """Version 0: the checkpoint as the engine loaded it, before any sync. Fields as in `StepReport`."""

    reward: float
    max_abs_logprob_error: float


class DemoReport(Struct, frozen=True):
    """A whole run, as `report.json` holds it."""

    trainer: str
    engine: str
    model: str
    rdt: str  # version of rdt
    date: str  # when the run ended, ISO 8601, UTC
    mode_reason: str  # why the publish mode was chosen
    checkpoint: CheckpointReport
    steps: tuple[StepReport, ...]

    def json(self) -> bytes:
        """Returns the report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def draw(report: DemoReport, path: Path) -> None:
    """Draws mean reward and sync time by version to a PNG.

    Args:
        report: of the run, at least one step.
        path: the file to write.
    """
    from matplotlib.ticker import MaxNLocator

    versions = [step.version for step in report.steps]
    figure = new_figure(8, 6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(
        [0, *versions], [report.checkpoint.reward, *(step.reward for step in report.steps)], marker="o", color="#1f6fb2"
    )
    top.set_ylabel("mean reward")
    top.margins(y=0.1)
    top.set_ylim(bottom=0)
    top.set_title(f"{report.model}: trained by {report.trainer}, served by {report.engine}", fontsize=11)
    base = [0.0] * len(versions)
    for name in (*SEQUENCE, "rest"):
        heights = [1000 * _part(step, name) for step in report.steps]
        if any(heights):
            bottom.bar(versions, heights, bottom=base, label=name.replace("_", " "), width=0.6)
            base = [low + high for low, high in zip(base, heights, strict=True)]
    bottom.set_ylabel("sync, ms")
    bottom.set_xlabel("version")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", fontsize=8, ncols=7, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _part(step: StepReport, name: str) -> float:
    if name != "rest":
        return step.phases.get(name, 0.0)
    return rest(step.phases, step.seconds)
