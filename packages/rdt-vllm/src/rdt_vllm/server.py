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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError
from rdt_core.servers import Generation

from .clients import UpdateRequest
from .plugin import BACKEND
from .protocol import AT_STEP, RECEIVING
from .versions import check_vllm

__all__ = ["Generation", "VllmServer", "launch"]

#: seconds that EngineCore gets to end by itself
SHUTDOWN_S = 20.0
#: seconds that workers get less for a pull than the whole sync has, so that their own error, which says who was late, comes first
OWN_S = 1.0


_Sent = list[tuple[str, asyncio.Future[Any]]]


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
    _pauses = 0  # counts those by themselves: whoever paused it may want it to stay so
    _stamped: tuple[int, int, str] | None = None  # both counts, and the version, when a sync let it generate
    _opening: tuple[str, _Sent] | None = None  # sent ahead of a sync that has not begun yet, and the ticket for it

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
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=model, weight_transfer_config=WeightTransferConfig(backend=BACKEND), **engine_args)
        )

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
        self._pauses += 1
        await self._drop_opening()
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
        (_, opening), self._opening = self._opening or ("", None), None
        if opening is None:
            await self._next_turn()
            opening = self._open(mode, clear_cache)
        turn, end = self._turn, time.monotonic() + limit_s
        llm = self._llm

        async def pull() -> None:
            left_s = max(end - time.monotonic() - OWN_S, 1.0)
            await llm.update_weights(UpdateRequest({"version": version, "timeout_s": left_s}))

        said = f"{RECEIVING}{version}"
        stamp = partial(llm.update_weight_version, said)
        seconds = dict.fromkeys(STEPS, 0.0)

        async def done(sent: _Sent) -> None:
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
        if turn != self._turn:
            raise EngineError(f"{AT_STEP}pull; its sync was ended by a later call")
        await done(_sent(("pull", stamp), ("pull", pull), ("finish", llm.finish_weight_update)))
        if turn == self._turn:
            self._said = said
        return seconds

    async def pause_ahead(self, ticket: str, version: str, *, mode: str, clear_cache: bool) -> None:
        """Sends what `receive_version` begins with; the next one goes on from there.

        Nothing is sent if the engine is not as it was left: another driver may be in the middle of a sync of it.

        Args:
            ticket: for `take_back`.
            version: that the engine was stamped with, in the latest call of a sync.
            mode, clear_cache: see `receive_version`.
        """
        if self._stamped == (self._turn, self._pauses, version):
            await self._next_turn()
            self._opening = ticket, self._open(mode, clear_cache)

    async def take_back(self, ticket: str) -> bool:
        """Ends what was sent ahead and lets the engine generate, unless any other call of a sync came since.

        Args:
            ticket: that it was sent with.

        Returns:
            Whether the engine goes on as before.
        """
        if self._opening is None or self._opening[0] != ticket:
            return False
        opening = self._opening
        await asyncio.wait([one for _, one in opening[1]])
        if self._opening is not opening:
            return False
        self._opening = None
        if any(one.cancelled() or one.exception() for _, one in opening[1]):
            return False
        counts, stamped = (self._turn, self._pauses), self._stamped
        self._close()
        ((_, resumed),) = _sent(("resume", self._llm.resume_generation))
        await resumed
        if stamped is not None:
            self._stamped = *counts, stamped[2]
        return True

    def _open(self, mode: str, clear_cache: bool) -> _Sent:
        llm = self._llm

        async def pause() -> None:
            if clear_cache:
                await llm.renderer.clear_mm_cache_async()
            await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

        return _sent(("pause", pause), ("begin", llm.start_weight_update))

    def _close(self) -> _Sent:
        """Ends an update of which nothing was received."""
        abort = UpdateRequest({"version": -1, "abort": "its sync could not begin"})
        return _sent(("abort", partial(self._llm.update_weights, abort)), ("finish", self._llm.finish_weight_update))

    async def _next_turn(self) -> None:
        """The running sync goes no further."""
        self._turn += 1
        self._said = None
        await self._drop_opening()

    async def _drop_opening(self) -> None:
        """What was sent ahead of a sync goes no further, and is executed before anything that the caller sends next."""
        (_, opening), self._opening = self._opening or ("", None), None
        if opening is not None:
            await asyncio.wait([one for _, one in (*opening, *self._close())])

    async def stamp_and_resume(self, expected: str, version: str) -> tuple[str, str]:
        """Stamps the engine and lets it generate if it says `expected`; returns what it says before and after."""
        before = self._said
        await self._next_turn()
        counts = self._turn, self._pauses
        if before is None:
            before = await self._llm.get_weight_version()
        if before != expected:
            return before, before
        llm = self._llm
        # executed in this order
        _, _, after = await asyncio.gather(
            llm.update_weight_version(version), llm.resume_generation(), llm.get_weight_version()
        )
        self._stamped = *counts, after
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
        await self._llm.init_weight_transfer_engine(request)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Every worker leaves its sync group."""
        await self._llm.shutdown_weight_transfer_engine()

    async def start_weight_update(self) -> None:
        """See `AsyncLLM.start_weight_update`."""
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


def _sent(*calls: tuple[str, Callable[[], Awaitable[Any]]]) -> _Sent:
    """Sends calls of named steps together, in this order."""
    sent: _Sent = [(name, asyncio.ensure_future(call())) for name, call in calls]
    for _, one in sent:  # seen: the first failure is told, also where nobody waits any more
        one.add_done_callback(lambda done: done.cancelled() or done.exception())
    return sent


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
