"""The loop of the demo: sample, check, learn, publish; and the start and end of everything that takes part.

Version 0 is the checkpoint as the engine loaded it. Every later version is trained from the samples of the one before,
published by all ranks together and checked before it counts. Nothing is tolerated: another version than the one
trained, a rank or engine that died, a byte count that is not the plan's: all end the run with an error, and every
process with it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..distributions import rdt_version
from ..errors import DeadlineError, RdtError, SourceError, SyncError
from ..localcluster import cluster
from ..wire import SyncReport
from . import model as checkpoint
from .engines import Completion, RolloutEngine, load_engine
from .options import DemoOptions
from .report import CheckpointReport, DemoReport, StepReport, draw
from .reward import advantages, encode_prompts, reward
from .show import Display, Silence
from .trainer import FsdpTrainer, Sample, Score

#: largest difference allowed between the engine's log-probabilities and the trainer's, by the engine's dtype. One
#: optimiser step moves some token's log-probability by a tenth and more, float32 rounding by less than a thousandth.
#: In bfloat16 rounding is as large as a step: there the bound only catches weights that are wrong.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}


class DemoError(RdtError):
    """The run showed something that must not happen; the message says at which version, found and expected."""


def run(options: DemoOptions, display: Display | None = None) -> DemoReport:
    """Runs the demo; writes `report.json`, which it returns, and `report.png` to `options.out`.

    Args:
        options: what to run.
        display: who watches; default nobody.

    Raises:
        OptionError: an option cannot work; raised before anything was started.
        DemoError: a version served differs from the version trained.
        RdtError: a rank, the engine or a sync failed.
    """
    options.check()
    display = display or Silence()
    if options.model is None:
        known = checkpoint.is_prepared()
        with display.activity("finding the checkpoint" if known else f"expanding {checkpoint.NAME} (once, about 20 s)"):
            model_dir = checkpoint.prepare()
        name = checkpoint.NAME
    else:
        model_dir = options.model.resolve()
        name = model_dir.name
    with display.activity("loading the tokenizer"):
        batch = _Batch(options, model_dir)
    with contextlib.ExitStack() as stack:
        with display.activity("starting Ray"):
            # logical CPUs: ranks and engine take turns, so that two cores are enough
            cpus = options.trainer_spec.get("ranks") + options.engine_spec.get("tp") + 1
            family = stack.enter_context(cluster(cpus, gpus=options.engine_spec.get("tp")))
        # both at once: the ranks load the model while the engine warms up
        with display.activity(f"starting {options.trainer} and {options.engine} (the engine takes about 40 s)"):
            trainers = _Trainers(options, model_dir, stack)
            engine = _start_engine(options, model_dir, batch.longest + options.max_tokens, stack)
            # before the engine is asked to end: what it does not end is ended with the cluster
            stack.callback(family.note)
            display.note(f"{engine.name} is up; {trainers.start():,} weights on {trainers.count} ranks")
        with display.activity("connecting: the engine's loaders are traced, both sides plan"):
            trainers.connect(engine)
        report = _train(options, display, batch, trainers, engine, name)
        with display.activity("ending every process"):
            trainers.leave()
            stack.close()
    (options.out / "report.json").write_bytes(report.json())
    draw(report, options.out / "report.png")
    return report


def _train(
    options: DemoOptions, display: Display, batch: _Batch, trainers: _Trainers, engine: RolloutEngine, name: str
) -> DemoReport:
    steps: list[StepReport] = []
    first = CheckpointReport(reward=0.0, max_abs_logprob_error=0.0)
    sync: SyncReport | None = None
    for version in range(options.steps + 1):
        with display.activity(f"version {version}: {engine.name} samples"):
            samples, mean = batch.sample(engine, version, options)
        last = version == options.steps
        with display.activity(f"version {version}: the ranks check{'' if last else ' and learn'}"):
            error = trainers.evaluate(samples, learn=not last)
        bound = TOLERANCE[options.dtype]
        if not error <= bound:
            raise DemoError(
                f"version {version}: the engine's log-probabilities differ from the trainer's by {error:.3g}, allowed "
                f"is {bound:.3g} in {options.dtype}; the weights served are not the weights trained"
            )
        if sync is None:
            first = CheckpointReport(reward=mean, max_abs_logprob_error=error)
            display.note(f"version 0 (the checkpoint): reward {mean:.3f}, logprob error {error:.1e}")
        else:
            step = StepReport(
                version=version,
                reward=mean,
                seconds=sync.seconds,
                phases=sync.phases,
                bytes=sync.bytes,
                mode=sync.mode,
                links=sync.links,
                max_abs_logprob_error=error,
            )
            steps.append(step)
            display.step(step)
        if not last:
            trainers.step()
            with display.activity(f"version {version + 1}: sync"):
                sync = trainers.publish(version + 1)
    return DemoReport(
        trainer=str(options.trainer_spec),
        engine=engine.name,
        model=name,
        rdt=rdt_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        mode_reason=sync.mode_reason if sync else "",
        checkpoint=first,
        steps=tuple(steps),
    )


class _Batch:
    """The prompts of a run, and the samples that an engine makes of them."""

    def __init__(self, options: DemoOptions, model_dir: Path) -> None:
        self._tokenizer = checkpoint.load_tokenizer(model_dir)
        self._stop = checkpoint.stop_tokens(model_dir, self._tokenizer)
        self._prompts = encode_prompts(self._tokenizer, options.prompts)
        if len(self._prompts) < options.prompts:
            raise SourceError(f"{options.prompts} prompts were asked for, there are {len(self._prompts)}")
        self.longest = max(len(prompt) for prompt in self._prompts)

    def sample(self, engine: RolloutEngine, version: int, options: DemoOptions) -> tuple[list[Sample], float]:
        """Returns the engine's samples with their advantages, and their mean reward.

        Raises:
            DemoError: the engine serves, before or after, another version than `version`.
        """
        _check_version(engine, version, options.timeout_s)
        groups = engine.generate(
            self._prompts,
            samples=options.samples,
            max_tokens=options.max_tokens,
            stop=self._stop,
            seed=(options.seed * 1_000_003 + version) % 2**31,
            timeout_s=options.timeout_s,
        )
        _check_version(engine, version, options.timeout_s)
        pairs = [(prompt, item) for prompt, group in zip(self._prompts, groups, strict=True) for item in group]
        if len(pairs) != options.prompts * options.samples or not all(_whole(item) for _, item in pairs):
            raise DemoError(
                f"version {version}: {engine.name} returned {len(pairs)} samples, or some without tokens or logprobs"
            )
        stamped = frozenset().union(*(item.versions for _, item in pairs))
        if not stamped <= {version or None}:
            raise DemoError(
                f"version {version}: {engine.name} stamped its samples with versions {sorted(map(str, stamped))}"
            )
        rewards = [reward(self._tokenizer.decode(item.tokens, skip_special_tokens=True)) for _, item in pairs]
        samples = [
            Sample(tuple(prompt), item.tokens, item.logprobs, advantage)
            for (prompt, item), advantage in zip(pairs, advantages(rewards, options.samples), strict=True)
        ]
        return samples, sum(rewards) / len(rewards)


def _whole(item: Completion) -> bool:
    return 0 < len(item.tokens) == len(item.logprobs)


def _check_version(engine: RolloutEngine, version: int, timeout_s: float) -> None:
    served = engine.version(timeout_s=timeout_s)
    # before the first sync an engine knows no version: that is the checkpoint, version 0
    if served != (version or None):
        raise DemoError(
            f"{engine.name} says that it serves version {served}; version {version} was trained and published"
        )


class _Trainers:
    """The ranks as actors, driven together: every call goes to all of them and the first failure ends the wait."""

    def __init__(self, options: DemoOptions, model_dir: Path, stack: contextlib.ExitStack) -> None:
        import ray

        self._options = options
        self.count = options.trainer_spec.get("ranks")
        rendezvous = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdt-demo-"))) / "rendezvous"
        environment = {
            # all ranks are on this machine: the interface of the host's name may not exist inside a container
            "GLOO_SOCKET_IFNAME": "lo",
            # the checkpoint is a local directory; without this transformers asks the hub first and waits for an answer
            "HF_HUB_OFFLINE": "1",
            # one rank per core would otherwise start a thread for each core, and ranks would wait for one another
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.count)),
        }
        actor = ray.remote(
            num_cpus=1, max_restarts=0, runtime_env={"env_vars": environment}, enable_tensor_transport=True
        )(FsdpTrainer)
        self._ranks = [
            actor.remote(rank, self.count, str(rendezvous), model_dir, options.learning_rate, options.seed)
            for rank in range(self.count)
        ]

    def start(self) -> int:
        """Waits until every rank is up; returns the number of weights."""
        return self._all("the ranks to load the model", [rank.ready.remote() for rank in self._ranks])[0]

    def connect(self, engine: RolloutEngine) -> None:
        """Joins the ranks to a group and attaches the engine to it."""
        options = self._options
        # a name of its own, so that an earlier run's coordinator is never met
        group = f"demo-{uuid.uuid4().hex[:8]}"
        self._all(
            "the ranks to join",
            [
                rank.join.remote(group, options.mode, options.kinds, options.dtype, options.timeout_s)
                for rank in self._ranks
            ],
        )
        self._all(f"{engine.name} to connect", [self._ranks[0].attach.remote(engine.client)])

    def evaluate(self, samples: Sequence[Sample], *, learn: bool) -> float:
        """Returns the largest log-probability difference; with `learn`, gradients are kept for `step`."""
        parts = [samples[rank :: self.count] for rank in range(self.count)]
        total = sum(len(sample.response) for sample in samples)
        scores: list[Score] = self._all(
            "the ranks to evaluate a batch",
            [
                rank.learn.remote(part, total) if learn else rank.score.remote(part)
                for rank, part in zip(self._ranks, parts, strict=True)
            ],
        )
        if sum(score.tokens for score in scores) != total:
            raise DemoError(f"the ranks evaluated {sum(score.tokens for score in scores)} tokens of {total}")
        return max(score.max_abs_logprob_error for score in scores)

    def step(self) -> None:
        """One optimiser step on every rank."""
        self._all("the optimiser step", [rank.step.remote() for rank in self._ranks])

    def publish(self, version: int) -> SyncReport:
        """Publishes on every rank at once and checks the report.

        Raises:
            SyncError: the ranks report different outcomes, another version, or bytes that are not the plan's.
        """
        reports = self._all(f"version {version} to be served", [rank.publish.remote(version) for rank in self._ranks])
        report: SyncReport = reports[0]
        if any((other.version, other.bytes) != (version, report.bytes) for other in reports):
            found = ", ".join(
                f"rank {rank}: version {each.version}, {each.bytes} bytes" for rank, each in enumerate(reports)
            )
            raise SyncError(f"version {version}: the ranks disagree about the sync: {found}")
        for reader in report.readers:
            if reader.version != version or reader.bytes != reader.expected_bytes:
                raise SyncError(
                    f"version {version}: {reader.reader} reports version {reader.version} and {reader.bytes} bytes "
                    f"of {reader.expected_bytes}"
                )
        if not report.readers:
            raise SyncError(f"version {version}: no engine rank took part in the sync")
        return report

    def leave(self) -> None:
        """Every rank leaves the group."""
        self._all("the ranks to leave", [rank.leave.remote() for rank in self._ranks])

    def _all(self, what: str, refs: Sequence[Any]) -> list[Any]:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        deadline = time.monotonic() + self._options.timeout_s
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [refs.index(ref) for ref in pending]
                raise DeadlineError(
                    f"waited {self._options.timeout_s:.0f} s for {what}; no answer to call {late} of {len(refs)}"
                )
            try:
                ray.get(done[0])
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, RdtError):
                    raise cause from error
                raise DemoError(
                    f"trainer rank {refs.index(done[0])} failed while the run waited for {what}: {error}"
                ) from error
            except RayActorError as error:
                raise DemoError(
                    f"trainer rank {refs.index(done[0])} died while the run waited for {what}: {error}"
                ) from error
        return ray.get(list(refs))


def _start_engine(
    options: DemoOptions, model_dir: Path, max_model_len: int, stack: contextlib.ExitStack
) -> RolloutEngine:
    spec = options.engine_spec
    tp = spec.get("tp")
    engine = load_engine(spec.name)(
        model_dir,
        tp=tp,
        dtype=options.dtype,
        max_model_len=max_model_len,
        seed=options.seed,
        # the ranks rest while the engine samples, so that it may use every core
        threads=max(1, (os.cpu_count() or 1) // tp),
        timeout_s=options.timeout_s,
    )
    stack.callback(engine.shutdown)
    return engine
