"""What a plan can be told, and the checks that come before anything is planned."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import SourceError
from ..notation import OptionError, engine_spec, trainer_spec
from ..shapes import MODELS, Config, config_of, read_config
from ..trainers import FsdpLayout, MegatronLayout, layout_of
from .cluster import PLACEMENTS, Cluster
from .readers import LANDINGS, EngineLayout
from .trainers import MODES

#: more ranks on one side than any cluster has; a plan goes through every one of them
MOST_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """One plan.

    Attributes:
        model: a name of `shapes.MODELS`, or a checkpoint's `config.json` or folder.
        config: of the model.
        trainer, engine: the layouts.
        trainer_text, engine_text: as they were written.
        cluster: the machines.
        placement: of `cluster.PLACEMENTS`.
        mode: of `trainers.MODES`.
        simulate: whether the plan is executed in a simulation beside the prediction.
    """

    model: str
    config: Config
    trainer: FsdpLayout | MegatronLayout
    engine: EngineLayout
    trainer_text: str
    engine_text: str
    cluster: Cluster = field(default_factory=Cluster)
    placement: str = "separate"
    mode: str = "live"
    simulate: bool = False

    @property
    def stages(self) -> int:
        """Pipeline stages of the trainer."""
        return self.trainer.pp if isinstance(self.trainer, MegatronLayout) else 1

    def check(self) -> PlanOptions:
        """Returns itself. Raises OptionError for something that cannot work."""
        for option, value, known in (
            ("--placement", self.placement, PLACEMENTS),
            ("--mode", self.mode, MODES),
            ("--landing", self.engine.landing, LANDINGS),
        ):
            if value not in known:
                raise OptionError(f"{option} {value!r} is unknown; known: {', '.join(known)}")
        for option, text, ranks in (
            ("--trainer", self.trainer_text, self.trainer.ranks),
            ("--engine", self.engine_text, self.engine.ranks * self.engine.replicas),
        ):
            if ranks > MOST_RANKS:
                raise OptionError(f"{option} {text}: these are {ranks} ranks; a plan has at most {MOST_RANKS}")
        if self.engine.tp > self.config.heads:
            raise OptionError(f"--engine tp={self.engine.tp}: {self.model} has {self.config.heads} attention heads")
        if self.engine.tp % self.engine.ep:
            raise OptionError(f"--engine ep={self.engine.ep} does not divide tp={self.engine.tp}")
        if self.engine.ep > 1 and not self.config.experts:
            raise OptionError(f"--engine ep={self.engine.ep} spreads experts, and {self.model} has none")
        if self.engine.pp > self.config.layers:
            raise OptionError(f"--engine pp={self.engine.pp}: {self.model} has {self.config.layers} layers")
        try:
            self.trainer.check(self.config)
        except SourceError as error:
            raise OptionError(f"--trainer {self.trainer_text}: {error}") from error
        return self


def _is_path(model: str) -> bool:
    """Whether a file or folder is meant: something that is there, or that no model is called like."""
    return model not in MODELS and (os.path.exists(model) or Path(model).name != model or model.endswith(".json"))


def read_options(
    model: str,
    trainer: str,
    engine: str,
    *,
    layers: int = 0,
    cluster: Cluster | None = None,
    placement: str = "separate",
    mode: str = "live",
    landing: str = "in_place",
    simulate: bool = False,
) -> PlanOptions:
    """Reads what a command line says.

    Args:
        model: see `PlanOptions`.
        trainer: "fsdp:ranks=N[,replicas=M][,apart=1]" or "megatron:ranks=N", with any of tp, pp, ep, etp, cp, vpp, first, last as
            ",tp=..".
        engine: "vllm" or "sglang", with ":tp=..,ep=..,pp=..,replicas=..".
        layers: keep only so many decoder layers; 0 keeps all.
        cluster, placement, mode, landing, simulate: see `PlanOptions` and `EngineLayout`.

    Raises:
        OptionError: something that cannot work.
    """
    try:
        config = read_config(Path(model)) if _is_path(model) else config_of(model)
    except SourceError as error:
        raise OptionError(f"--model: {error}") from error
    if not 0 <= layers <= config.layers:
        raise OptionError(f"--layers: {model} has {config.layers} layers; {layers} cannot be kept of them")
    config = replace(config, layers=layers) if layers else config
    spec, wanted = trainer_spec(trainer), engine_spec(engine)
    return PlanOptions(
        model=model,
        config=config,
        trainer=layout_of(spec),
        engine=EngineLayout(wanted.name, **dict(wanted.settings), landing=landing),
        trainer_text=trainer,
        engine_text=engine,
        cluster=cluster or Cluster(),
        placement=placement,
        mode=mode,
        simulate=simulate,
    ).check()
