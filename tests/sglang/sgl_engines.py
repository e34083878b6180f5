"""A stock SGLang engine in Ray mode for the programs of this folder, with a way to look into its schedulers.

The actor class is the product's; `Probe` adds one method to it, which runs a function of the program beside the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 8


@contextmanager
def engine(model: Path, tp: int, *, plain: bool = False, **options: Any) -> Iterator[Any]:
    """Starts an engine on a CPU.

    In Ray mode Ray must be up with as many logical GPUs as `tp`; `plain` starts SGLang's own scheduler processes instead.
    """
    if plain:
        from sglang import Engine as Kind
    else:
        use_probe()
        from sglang.srt.ray.engine import RayEngine as Kind

    started = Kind(
        model_path=str(model), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True, tp_size=tp,
        max_total_tokens=2048, max_running_requests=8, mem_fraction_static=0.6, log_level="error", dtype="float32",
        random_seed=0, use_ray=not plain, disable_cuda_graph=True, **options,
    )  # fmt: skip
    # its loop runs in a thread of its own, so that requests and control calls come from anywhere
    thread = threading.Thread(target=started.loop.run_forever, name="engine-loop", daemon=True)
    thread.start()
    try:
        yield started
    finally:
        import atexit

        started.loop.call_soon_threadsafe(started.loop.stop)
        thread.join(10)
        started.shutdown()
        atexit.unregister(started.shutdown)  # it would start a Ray of its own once this one is down


def use_probe() -> None:
    """Makes the plugin take the product's actor with one method more."""
    import ray

    from rdt_sglang import actor

    class Probe(actor.WeightsSchedulerActor):
        @ray.method(concurrency_group=actor.WEIGHTS_GROUP)
        def probe(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(self.scheduler, *arguments)

    actor.SchedulerActor = ray.remote(concurrency_groups={actor.WEIGHTS_GROUP: 1}, enable_tensor_transport=True)(Probe)


def actors_of(started: Any) -> list[Any]:
    return list(started._scheduler_init_result.scheduler_actors)


def call(handles: list[Any], method: str, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Calls all schedulers at the same time and returns what each answered, in order."""
    import ray

    return ray.get([getattr(handle, method).remote(*arguments) for handle in handles], timeout=timeout)


def probe(handles: list[Any], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return call(handles, "probe", function, *arguments)


def ask(started: Any, work: Coroutine[Any, Any, Any], timeout: float = 120.0) -> Any:
    """Runs a coroutine on the engine's loop."""
    return asyncio.run_coroutine_threadsafe(work, started.loop).result(timeout)


def generate(started: Any, tokens: int = TOKENS) -> list[list[int]]:
    """Greedy tokens for `PROMPTS`, computed anew: what is cached may come from older weights."""
    ask(started, started.tokenizer_manager.flush_cache())
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    work = started.async_generate(input_ids=PROMPTS, sampling_params=params)
    return [one["output_ids"] for one in ask(started, work)]


def load_from_disk(started: Any, folder: Path) -> None:
    """SGLang's own update, the oracle."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput, UpdateWeightFromDiskReqInput

    manager = started.tokenizer_manager
    request = UpdateWeightFromDiskReqInput(model_path=str(folder))
    success, message = ask(started, manager.update_weights_from_disk(request, None))[:2]
    assert success, message
    # rank 0 answers for itself; another may still be at its post-load step, but takes part in this only afterwards
    ask(started, manager.check_weights(CheckWeightsReqInput(action="checksum")))


# ---------------------------------------------------------------------- run inside a scheduler


def fingerprints(scheduler: Any) -> dict[str, str]:
    """SHA-256 of every parameter, buffer and derived tensor of the target model."""
    import hashlib

    from rdt_core.sources.watch import attribute_tensors

    model = scheduler.tp_worker.model_runner.model
    named = (
        dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers()) | attribute_tensors(model)
    )
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in named.items()
        if tensor.numel()
    }
