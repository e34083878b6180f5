"""Run by test_landing.py in a process of its own: one stock vLLM engine in process, landed in by hand.

Prints one JSON object on its last line. Every value in it is something that was compared here, next to the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rdt_testbed import models

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 6


def main(kind: str, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    steps = {name: models.build(kind, seed=seed, **changes) for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    for name, model in steps.items():
        models.save(model, folder / name)

    from vllm import LLM

    llm = LLM(
        model=str(folder / "a"), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        max_num_seqs=4, enable_prefix_caching=False,
    )  # fmt: skip
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()

    from rdt_core.testing import LandingCase, check_landing
    from rdt_vllm import VllmLanding, layers

    results: dict[str, Any] = {"kind": kind}
    checkpoints = {name: checkpoint(folder / name) for name in steps}
    landing = VllmLanding(model, worker.model_config, worker.device, worker.vllm_config, who="test/0")
    metas = [meta(name, tensor) for name, tensor in checkpoints["a"].items()]

    before, loaders = digest(model), loader_ids(model)
    trace = landing.trace(metas)
    results["trace_wrote_nothing"] = digest(model) == before
    results["loaders_restored"] = loader_ids(model) == loaders
    results["all_taken"] = list(trace.taken) == [m.name for m in metas]
    results["in_place"] = sorted(key for key, d in landing.destinations().items() if d.in_place)
    results["moved"] = sorted(key for key, d in landing.destinations().items() if not d.in_place)

    # vLLM's own loader first, as the oracle: parameters after `reload_weights` of the checkpoint at the same step
    oracle = {}
    for name in ("b", "c"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / name)})
        oracle[name] = worker.compute_weight_checksums()
    results["oracle_differs"] = oracle["b"] != oracle["c"]
    addresses = addresses_of(model)
    for name in ("b", "c", "b"):
        land(landing, trace, checkpoints[name])
        results.setdefault("equals_loader", []).append(worker.compute_weight_checksums() == oracle[name])
        results.setdefault("log_probability_error", []).append(difference(llm, steps[name]))
        results.setdefault("wrong_model_error", []).append(difference(llm, steps["c" if name == "b" else "b"]))
    results["addresses_kept"] = addresses_of(model) == addresses
    results["torn_after"] = landing.torn

    before, loaders = digest(model), loader_ids(model)
    results["errors"] = {
        "missing": raised(
            lambda: landing.trace([m for m in metas if m.name != "model.layers.1.self_attn.k_proj.weight"])
        ),
        "unknown": raised(lambda: landing.trace([*metas, meta("model.layers.9.what.weight", torch.zeros(2))])),
        "shape": raised(
            lambda: landing.trace([meta(m.name, torch.zeros(3, 5)) if "o_proj" in m.name else m for m in metas])
        ),
    }
    landing.trace(metas)
    results["kept_after_errors"] = digest(model) == before and loader_ids(model) == loaders
    results["serves_after_errors"] = difference(llm, steps["b"])

    # a sync that dies half-way, and the next one
    sizes = {id(module): len(module._forward_pre_hooks) for module in model.modules()}
    landing.begin()
    halfway = sorted({d.module for d in landing.destinations().values() if not d.in_place})[:2]
    landing.open(halfway, memory_for(landing, halfway))
    results["errors"]["opened_twice"] = raised(lambda: layers.materialise(model.get_submodule(halfway[0]), {}))
    results["errors"]["forward_in_sync"] = raised(
        lambda: model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    )
    landing.abort("the trainer died")
    results["errors"]["forward_torn"] = raised(
        lambda: model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    )
    results["errors"]["logits_torn"] = raised(lambda: model.compute_logits(torch.zeros(1, 64)))
    results["torn"] = landing.torn
    results["addresses_kept_torn"] = addresses_of(model) == addresses
    land(landing, trace, checkpoints["c"])
    results["healed"] = landing.torn is None and worker.compute_weight_checksums() == oracle["c"]
    results["healed_error"] = difference(llm, steps["c"])
    results["hooks_gone"] = sizes == {id(module): len(module._forward_pre_hooks) for module in model.modules()}

    def make(rank: int, ranks: int) -> Any:
        return VllmLanding(model, worker.model_config, worker.device, worker.vllm_config, who=f"test/{rank}")

    case = LandingCase(
        make,
        lambda number: list(checkpoints.values())[number - 1],
        state=lambda landing: {n: p for n, p in model.named_parameters() if p.numel()},
        load=lambda landing, pairs: worker.model_runner.reload_weights(weights_iterator=pairs),
        refuses=lambda landing: landing.torn is not None,
        needed="model.layers.1.self_attn.k_proj.weight",
    )
    results["conformance"] = raised(lambda: check_landing(case))

    landing.trace(metas)
    landing.begin()
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.numel())
    parameter.data = parameter.data.clone()
    results["moved_parameter"] = name
    results["errors"]["address"] = raised(landing.finish)
    landing.trace(metas)
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if buffer.numel())
    buffer.data = buffer.data.clone()
    results["moved_buffer"] = name
    results["errors"]["address_at_begin"] = raised(landing.begin)

    if kind == "glm4-moe":
        first, second = (model.get_submodule(f"model.layers.{index}.mlp.experts.routed_experts") for index in (1, 2))
        second.register_parameter("w2_weight", first.w2_weight)
        offered = [m for m in metas if not (m.name.startswith("model.layers.2.mlp.experts.") and "down" in m.name)]
        results["errors"]["half_tied"] = raised(lambda: landing.trace(offered))
    return results


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def meta(name: str, tensor: torch.Tensor) -> Any:
    from rdt_core.wire import TensorMeta

    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def memory_for(landing: Any, modules: list[str]) -> dict[str, torch.Tensor]:
    """Receive memory with whatever an earlier sync left in it."""
    return {
        key: torch.full((d.nbytes + 256,), 0xA5, dtype=torch.uint8)[64 : 64 + d.nbytes]
        for key, d in landing.destinations().items()
        if d.module in modules and not d.in_place
    }


def land(landing: Any, trace: Any, tensors: dict[str, torch.Tensor]) -> None:
    """What a receiver does with whole tensors at hand: one module after the other, in the order of their first slice."""
    from rdt_core.connection import typed_view
    from rdt_core.geometry import replay

    landing.begin()
    destinations = landing.destinations()
    for module in dict.fromkeys(destinations[piece.destination].module for piece in trace.slices):
        memory = memory_for(landing, [module])
        landing.open([module], memory)
        for piece in trace.slices:
            destination = destinations[piece.destination]
            if destination.module != module:
                continue
            storage = landing.storage(piece.destination) if destination.in_place else memory[piece.destination]
            target = typed_view(storage, piece.dtype, piece.offset, piece.shape, piece.strides)
            target.copy_(replay(tensors[piece.name], piece.chain).reshape(piece.shape))
        landing.close(module)
        for span in memory.values():
            span.fill_(0x5A)  # it belongs to the next module now
    landing.finish()


def digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        total.update(name.encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def addresses_of(model: torch.nn.Module) -> dict[str, int]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.data_ptr() for name, tensor in named}


def loader_ids(model: torch.nn.Module) -> dict[str, int]:
    """Which function loads each tensor, in its serving and in its load-time form."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def function(tensor: torch.Tensor) -> int:
        loader = getattr(tensor, "weight_loader", None)
        return id(getattr(loader, "__func__", loader))

    found = {name: function(parameter) for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for kind in get_layerwise_info(module).restore_metadata:
            found |= {f"load-time {name}.{own}": function(tensor) for own, tensor in kind.items()}
    return found


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def difference(llm: Any, model: Any) -> float:
    """Largest difference between the engine's log-probabilities of its own samples and the trainer's."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    worst = 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sample = output.outputs[0]
        ids = [*prompt, *sample.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for index, token in enumerate(sample.token_ids):
            engine = sample.logprobs[index][token].logprob
            worst = max(worst, abs(engine - float(logits[len(prompt) + index - 1, token])))
    return worst


if __name__ == "__main__":
    result = main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(result), flush=True)
