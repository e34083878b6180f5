"""A Ray actor that hosts stock SGLang in Ray mode: its HTTP server in a thread, its schedulers as actors in given bundles.

It is for trainers that place engines in their own Ray cluster; a deployment of its own is better served by SGLang's own
launcher. The actor outlives a failure of its engine long enough to say why. It refuses bundles that are not this
engine's own, and being started on any node but that of rank 0.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rdt_core.errors import EngineError
from rdt_core.servers import Generation, end

from .callers import ActorCaller
from .controls import settings_of
from .hosting import HostedEngine
from .protocol import STEPPING
from .receiving import OneCall
from .versions import check_sglang

__all__ = ["Generation", "SGLangServer", "end", "environment", "launch"]


class SGLangServer:
    """Hosts one engine. Make it an actor with `launch`; the constructor returns when the server answers.

    Args:
        model: path or name, as for SGLang.
        placement_group: whose bundles the schedulers take; None: SGLang makes one of its own, which ends with this actor.
        bundle_indices: the bundle of each rank, in rank order; default: the first ones. Rank 0's must be on this node.
        timeout_s: deadline of the start, in seconds.
        server_args: keyword arguments of SGLang's `ServerArgs`, e.g. `tp_size=2`. An engine over several nodes takes
            `nnodes` and no `node_rank`: it is started once, here, and its ranks go where their bundles are.

    Raises:
        VersionError: SGLang is missing or was not tested.
        EngineError: the bundles do not fit, or SGLang did not start; says why.
        DeadlineError: it was not up within `timeout_s`.
    """

    def __init__(
        self,
        model: str,
        *,
        placement_group: Any = None,
        bundle_indices: Sequence[int] | None = None,
        timeout_s: float = 900.0,
        **server_args: Any,
    ) -> None:
        check_sglang()
        if server_args.get("node_rank"):
            raise EngineError(
                f"node_rank={server_args['node_rank']}: an SGLangServer is started once, on the node of rank 0; the bundles "
                "say where its other ranks go"
            )
        if server_args.setdefault("use_ray", True) is not True:
            raise EngineError("use_ray=False: an SGLangServer has scheduler actors; use SGLang's own launcher instead")
        if bundle_indices is not None:
            if placement_group is None:
                raise EngineError("bundle_indices needs the placement_group that they belong to")
            os.environ["SGLANG_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundle_indices))
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="rdt-weights")
        self._engine = HostedEngine(
            model, placement_group=placement_group, timeout_s=timeout_s, server_args=server_args
        )
        self._syncs = OneCall(self, self._tell, self._engine.check)

    # what a trainer needs

    async def ready(self) -> str:
        """Returns the engine's name and version; it can generate.

        Raises:
            EngineError: it died; says why.
        """
        self._engine.check()
        return f"sglang {check_sglang()}"

    async def is_alive(self) -> bool:
        """Whether every process of the engine lives; `ready` and all other calls say why not."""
        return self._engine.alive

    async def url(self) -> str:
        """Returns the URL of SGLang's HTTP server."""
        self._engine.check()
        return self._engine.url

    async def actors(self) -> list[Any]:
        """Returns the handles of the schedulers' actors, in rank order."""
        self._engine.check()
        return list(self._engine.handles)

    async def settings(self) -> dict[str, Any]:
        """Returns the engine's sizes, as SGLang resolved them: `tp_size`, `pp_size`, `dp_size`, `tokenizer_worker_num`."""
        return settings_of(self._engine.server_args)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str = ""
    ) -> list[Generation]:
        """Samples from one prompt. A request that is paused in the middle of a sync goes on after it.

        Args:
            prompt_token_ids: the prompt.
            sampling: SGLang's sampling parameters, e.g. `max_new_tokens`, `temperature`, `n`, `stop_token_ids`.
            request_id: unique among requests in flight; made up where empty.

        Returns:
            One entry per sample (`n` of them), with log-probabilities as sampled: at temperature 1 those of the model itself.

        Raises:
            EngineError: SGLang refused the request, or the engine died; says why.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=list(prompt_token_ids),
            sampling_params=dict(sampling),
            return_logprob=True,
            rid=request_id or uuid.uuid4().hex,
        )
        answer = await self._engine.run(self._engine.generate(request))
        return [_generation(sample) for sample in (answer if isinstance(answer, list) else [answer])]

    # what a sync needs

    async def receive_version(self, version: int, *, mode: str, reset_cache: bool, limit_s: float) -> dict[str, float]:
        """A sync from the pause to the last post-load step in one call, in SGLang's own calls; the version is not stamped.

        Args:
            version: that the trainer publishes now.
            mode: see `pause_generation`.
            reset_cache: whether the prefix cache is dropped, beside the last step.
            limit_s: deadline of all steps together, in seconds.

        Returns:
            Seconds of each step. The engine is stamped as receiving the version, and paused.

        Raises:
            StepError: a step failed, or was not done in time; names the first one. Steps after it were not sent. So does a
                later call that ends this sync: nothing is sent after an abort, a resumption, or another sync.
            EngineError: the engine is dead; says why.
        """
        return await self._syncs.receive(version, mode=mode, reset_cache=reset_cache, limit_s=limit_s)

    async def stamp_and_resume(self, expected: str, version: str) -> tuple[str, str]:
        """Stamps the engine and lets it generate if it says `expected`; returns what it says before and after."""
        return await self._syncs.stamp_and_resume(expected, version)

    async def restore_version(self, version: int) -> bool:
        """Stamps the engine with what it said before `receive_version(version)`, of which no byte was written.

        Returns:
            Whether it was that sync's stamp that was taken back: not if the last sync was another one, or anybody has stamped
            the engine since.
        """
        return await self._syncs.restore(version)

    async def pause_generation(self, mode: str = "retract") -> None:
        """SGLang's own; it is not acknowledged by the schedulers."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode not in ("retract", "in_place"):
            raise EngineError(f"pause mode {mode!r}; choose retract or in_place (abort would lose requests in flight)")
        await self._engine.run(self._engine.manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    async def continue_generation(self) -> None:
        """SGLang's own."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._syncs.ended()
        await self._engine.run(self._engine.manager.continue_generation(ContinueGenerationReqInput()))

    async def flush_cache(self) -> tuple[bool, str]:
        """SGLang's own: whether the prefix cache was dropped, and what SGLang says about it."""
        answer = await self._engine.run(self._engine.manager.flush_cache())
        return bool(answer.success), str(answer.message or "")

    async def update_weight_version(self, version: str) -> None:
        """SGLang's own, without aborting anything."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._engine.run(self._engine.manager.update_weight_version(request))

    async def get_weight_version(self) -> str:
        """The version that the engine says it serves."""
        self._engine.check()
        return str(self._engine.manager.config_value("weight_version"))

    async def update_weights_from_disk(self, model_path: str) -> None:
        """SGLang's own loader: the engine serves the weights of this checkpoint, whatever was synced before.

        Raises:
            EngineError: SGLang refused.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        self._syncs.ended()
        success, told, _ = await self._engine.run(
            self._engine.manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=model_path))
        )
        if not success:
            raise EngineError(f"SGLang did not load {model_path}: {told}")

    async def weights(self, call: str, arguments: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Runs one call of a sync on every scheduler and returns what each answered; see `callers.Caller.call`.

        Args:
            call: of `protocol.CALLS`.
            arguments: by name.
            timeout_s: seconds within which all schedulers must have answered.
        """
        if call in STEPPING:
            self._syncs.ended()
        self._engine.check()
        try:
            return await self._tell(call, arguments, timeout_s)
        except EngineError:
            self._engine.check()  # who died first says more than those that were ended after it
            raise

    def _tell(self, call: str, arguments: Mapping[str, Any], timeout_s: float) -> asyncio.Future[list[dict[str, Any]]]:
        deadline = time.monotonic() + timeout_s
        caller = ActorCaller(self._engine.handles, "the engine")
        # sent here and now, so that what is asked later comes later; only the answers are waited for in a thread
        refs = caller.send(call, arguments)
        answers = functools.partial(caller.answers, call, refs, deadline=deadline)
        return asyncio.get_running_loop().run_in_executor(self._pool, answers)

    async def shutdown(self) -> None:
        """Ends every process of the engine, and removes what it leaves in the file system. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._engine.close, "it was shut down")


def _generation(sample: Mapping[str, Any]) -> Generation:
    meta = sample["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise EngineError(f"SGLang ended the request: {reason.get('message') or 'aborted'}")
    return Generation(
        token_ids=tuple(sample["output_ids"]),
        logprobs=tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ()),
        finish_reason=str(reason.get("type", "")),
        versions=tuple(
            str(span["version"])
            for span in meta.get("weight_versions") or ()
            for _ in range(span["start"], span["end"])
        ),
    )


def environment() -> dict[str, str]:
    """Returns what the environment of the server's actor needs; its schedulers inherit it."""
    return {
        # the actor itself asks for no GPU, and Ray would hide all of them from it: SGLang looks at one when it starts
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # SGLang's actors select their GPU by the node's own number, which must not be renumbered by a mask
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }


def launch(
    model: str,
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    placement_group: Any = None,
    bundle_indices: Sequence[int] | None = None,
    **server_args: Any,
) -> Any:
    """Starts an `SGLangServer` as a Ray actor and returns its handle at once; `handle.ready.remote()` tells when it serves.

    To start an engine again after a crash, `end` the old handle and launch into the same bundles.

    Args:
        model: see `SGLangServer`.
        name: of the actor; None: anonymous.
        options: further options of the actor (`num_cpus`, `runtime_env`, …).
        placement_group: see `SGLangServer`. The actor itself takes no bundle; it is placed on the node of rank 0's.
        bundle_indices: see `SGLangServer`.
        server_args: see `SGLangServer`, `timeout_s` included.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # concurrent: a pause has to get through while requests are being generated
    settings: dict[str, Any] = {"name": name, "num_cpus": 0, "num_gpus": 0, "max_concurrency": 1000, **(options or {})}
    runtime_env = dict(settings.get("runtime_env") or {})
    settings["runtime_env"] = {**runtime_env, "env_vars": {**environment(), **runtime_env.get("env_vars", {})}}
    if placement_group is not None:
        # SGLang's rank 0 and its server talk over files of one node
        settings["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group,
            placement_group_bundle_index=bundle_indices[0] if bundle_indices else 0,
            placement_group_capture_child_tasks=False,
        )
    actor = ray.remote(SGLangServer).options(**settings)
    return actor.remote(model, placement_group=placement_group, bundle_indices=bundle_indices, **server_args)
