"""A Ray actor that hosts a stock vLLM engine and offers what a trainer needs: generate, and the calls of a sync.

It is for trainers that place engines in their own Ray cluster; a deployment of its own is better served by `vllm serve`.
The engine is vLLM's `AsyncLLM`, untouched, with weight transfer backend `rdt`. `shutdown` ends EngineCore and workers;
killing the actor instead leaves them to end by themselves.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError
from rdt_core.servers import Generation

from .ahead import Ahead, Policy, Sent, send
from .plugin import BACKEND
from .protocol import AT_STEP, RECEIVING
from .steps import UpdateRequest
from .versions import check_vllm

__all__ = ["Generation", "VllmServer", "launch"]

#: seconds that EngineCore gets to end by itself
SHUTDOWN_S = 20.0
#: seconds that workers get less for a pull than the whole sync has, so that their own error, which says who was late, comes first
OWN_S = 1.0


class VllmServer:
    """Hosts one engine. Make it an actor with `launch`, or with `ray.remote(VllmServer).options(...)`.

    Args:
        model: path or name, as for vLLM.
        env: environment variables set before vLLM is imported; its subprocesses inherit them.
        engine_args: keyword arguments of vLLM's `AsyncEngineArgs`, e.g. `tensor_parallel_size=2`. The weight transfer
            backend is set to `rdt`.

    Raises:
        VersionError: vLLM is missing or was not tested.
        EngineError: another weight transfer backend was asked for.
    """

    _turn = 0  # counts the calls that begin or end a sync, or stamp the engine
    _said: str | None = (
        None  # what the engine says of its version, where the latest such call knows: nobody else stamps it
    )

    def __init__(self, model: str, *, env: Mapping[str, str] | None = None, **engine_args: Any) -> None:
        os.environ.update(env or {})
        import ray

        if ray.is_initialized():
            # EngineCore is a subprocess; without this a Ray executor in it would start a cluster of its own
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        check_vllm()
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = engine_args.pop("weight_transfer_config", None) or {"backend": BACKEND}
        backend = config["backend"] if isinstance(config, Mapping) else config.backend
        if backend != BACKEND:
            raise EngineError(f"VllmServer uses weight transfer backend {BACKEND!r}; {backend!r} was asked for")
        self._host(
            AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=model, weight_transfer_config=WeightTransferConfig(backend=BACKEND), **engine_args
                )
            )
        )

    def _host(self, llm: Any) -> None:
        """Takes vLLM's `AsyncLLM` that is to be hosted."""
        self._llm = llm
        self._ahead = Ahead(llm)

    async def ready(self) -> str:
        """Returns the engine's name and version once it can generate."""
        return f"vllm {check_vllm()}"

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str = ""
    ) -> list[Generation]:
        """Samples from one prompt.

        Args:
            prompt_token_ids: the prompt.
            sampling: keyword arguments of vLLM's `SamplingParams`; `logprobs` is set to 0 (the sampled token's own).
            request_id: unique among requests in flight; made up where empty.

        Returns:
            One entry per sample (`n` of them), with log-probabilities under the model itself, before temperature and filters.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **{"detokenize": False, "logprobs": 0, **sampling, "output_kind": RequestOutputKind.FINAL_ONLY}
        )
        prompt: Any = {"prompt_token_ids": list(prompt_token_ids)}
        final = None
        async for output in self._llm.generate(prompt, params, request_id or uuid.uuid4().hex):
            final = output
        if final is None:
            raise EngineError("vLLM ended the request without an output")
        return [_generation(sample) for sample in final.outputs]

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = True) -> None:
        """See `AsyncLLM.pause_generation`."""
        await self._ahead.used()
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def receive_version(self, version: int, *, mode: str, clear_cache: bool, limit_s: float) -> dict[str, float]:
        """A sync from the pause to the last post-load step in one call, in vLLM's own calls; it is not stamped.

        EngineCore executes the calls of one client in the order in which they come, so that those that need no answer of another
        one are sent together: the update is opened, which writes nothing, while the engine pauses; then it is said to be
        receiving, pulls and finishes.

        Args:
            version: that the trainer publishes now.
            mode: see `AsyncLLM.pause_generation`.
            clear_cache: see there. Its sleep, which gives callers their last outputs before it returns, is left out.
            limit_s: deadline of all steps together, in seconds.

        Returns:
            Seconds of each step.

        Raises:
            EngineError: names the first step that failed (`protocol.AT_STEP`). After "pull" the engine may have finished as well,
                or do so later. So does a later call that ends this sync: nothing is sent after an abort, a resumption, or another
                sync.
        """
        policy = Policy(mode, clear_cache)
        turn, opening = self._turn, self._ahead.claim(policy)
        if opening is None:
            turn, _ = await self._next_turn()
            self._check_turn(turn, "pause")
            opening = self._ahead.open(policy)
        end = time.monotonic() + limit_s
        llm = self._llm

        async def pull() -> None:
            left_s = max(end - time.monotonic() - OWN_S, 1.0)
            await llm.update_weights(UpdateRequest({"version": version, "timeout_s": left_s}))

        said = f"{RECEIVING}{version}"
        stamp = partial(llm.update_weight_version, said)
        seconds = dict.fromkeys(STEPS, 0.0)

        async def done(sent: Sent) -> None:
            try:
                for name, one in sent:
                    started = time.monotonic()
                    await asyncio.wait_for(one, max(end - started, 0.0))
                    seconds[name] += time.monotonic() - started
            except TimeoutError:
                raise EngineError(f"{AT_STEP}{name}; it was not done {limit_s:g} s after the sync began") from None
            except Exception as error:
                raise EngineError(f"{AT_STEP}{name}; {type(error).__name__}: {error}") from error
            finally:
                for _, one in sent:  # EngineCore executes what was sent, whether or not somebody waits
                    one.cancel()

        await done(opening)
        self._check_turn(turn, "pull")
        await done(send(("pull", stamp), ("pull", pull), ("finish", llm.finish_weight_update)))
        if turn == self._turn:
            self._said = said
        return seconds

    async def pause_ahead(self, ticket: str, mark: str, *, mode: str, clear_cache: bool) -> None:
        """Sends what `receive_version` begins with, before the sync has begun; the next one goes on from there.

        Nothing is sent if anybody used the engine since it was stamped with this mark: another driver may be in the middle of a
        sync of it.

        Args:
            ticket: for `take_back`.
            mark: see `stamp_and_resume`.
            mode, clear_cache: see `receive_version`.
        """
        if self._ahead.begin(ticket, mark, Policy(mode, clear_cache)):
            self._turn += 1
            self._said = None

    async def take_back(self, ticket: str, mark: str) -> bool:
        """Ends what was sent ahead and lets the engine generate, unless any other call of a sync came since.

        Args:
            ticket, mark: as at `pause_ahead`.

        Returns:
            Whether the engine goes on as before.
        """
        return await self._ahead.take_back(ticket, mark)

    async def _next_turn(self) -> tuple[int, int]:
        """The running sync goes no further.

        Returns:
            The numbers of this turn, and of this use of the engine; while the caller waited others may have had theirs.
        """
        self._turn += 1
        self._said = None
        turn = self._turn
        return turn, await self._ahead.used()

    def _check_turn(self, turn: int, step: str) -> None:
        if turn != self._turn:
            raise EngineError(f"{AT_STEP}{step}; its sync was ended by a later call")

    async def stamp_and_resume(self, expected: str, version: str, mark: str = "") -> tuple[str, str]:
        """Stamps the engine and lets it generate if it says `expected`; returns what it says before and after.

        Args:
            expected: what it says while it receives.
            version: that it is stamped with.
            mark: of the driver's own, by which it pauses the engine ahead of its next sync.

        Raises:
            EngineError: another call of a sync came before the engine was stamped.
        """
        before = self._said
        turn, uses = await self._next_turn()
        if before is None:
            before = await self._llm.get_weight_version()
        if before != expected:
            return before, before
        if turn != self._turn:
            raise EngineError(
                f"the engine was not stamped with version {version}: another call of a sync came meanwhile"
            )
        llm = self._llm
        # executed in this order
        _, _, after = await asyncio.gather(
            llm.update_weight_version(version), llm.resume_generation(), llm.get_weight_version()
        )
        self._ahead.leave(uses, mark)
        return before, after

    async def resume_generation(self) -> None:
        """See `AsyncLLM.resume_generation`."""
        await self._next_turn()
        await self._llm.resume_generation()

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return await self._llm.is_paused()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See `AsyncLLM.init_weight_transfer_engine`."""
        await self._ahead.used()
        await self._llm.init_weight_transfer_engine(request)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Every worker leaves its sync group."""
        await self._llm.shutdown_weight_transfer_engine()

    async def start_weight_update(self) -> None:
        """See `AsyncLLM.start_weight_update`."""
        await self._ahead.used()
        await self._llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """See `AsyncLLM.update_weights`."""
        await self._next_turn()  # a pull by itself, or an abort: no sync in one call goes on
        await self._llm.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `AsyncLLM.finish_weight_update`."""
        await self._llm.finish_weight_update(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        """See `AsyncLLM.update_weight_version`."""
        await self._next_turn()
        await self._llm.update_weight_version(new_version)

    async def get_weight_version(self) -> str:
        """The version that the engine says it serves."""
        return await self._llm.get_weight_version()

    async def compute_weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every parameter of every worker, by `dp:pp:pcp:tp:name`."""
        return {name: digest for rank in await self._llm.compute_weight_checksums() for name, digest in rank.items()}

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a method of every worker by name, as `AsyncLLM.collective_rpc`."""
        return await self._llm.collective_rpc(method, args=args, kwargs=dict(kwargs or {}))

    async def check_health(self) -> None:
        """Raises if the engine died."""
        await self._llm.check_health()

    async def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Ends EngineCore and the workers. Idempotent.

        Args:
            timeout_s: seconds that EngineCore gets to end its workers and unlink their shared memory, before it is killed and the
                memory stays. vLLM's own default of 5 is less than a busy machine takes.
        """
        self._llm.shutdown(timeout=timeout_s)


def _generation(sample: Any) -> Generation:
    tokens = tuple(sample.token_ids)
    logprobs = tuple(float(step[token].logprob) for token, step in zip(tokens, sample.logprobs or [], strict=False))
    spans = sample.weight_versions or []
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=str(sample.finish_reason),
        versions=tuple(str(span.version) for span in spans for _ in range(span.start, span.end)),
    )


def launch(model: str, *, name: str | None = None, options: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Starts a `VllmServer` as a Ray actor and returns its handle at once; `handle.ready.remote()` tells when it serves.

    Args:
        model: see `VllmServer`.
        name: of the actor; None: anonymous.
        options: further options of the actor (`num_gpus`, `runtime_env`, `scheduling_strategy`, …).
        arguments: see `VllmServer`.
    """
    import ray

    # concurrent: a pause has to get through while requests are being generated
    actor = ray.remote(VllmServer).options(**{"name": name, "num_cpus": 0, "max_concurrency": 1000, **(options or {})})
    return actor.remote(model, **arguments)
