"""Run by test_landing.py in a process of its own: one stock SGLang engine in Ray mode, landed in by hand.

Prints one JSON object on its last line. Every value in it is something that was compared inside the scheduler, next to
the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sgl_engines as engines
import torch

from rdt_testbed import models
from rdt_testbed.cluster import local_cluster


def main(kind: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        models.save(models.build(kind, seed=seed, **changes), folder / name)
    results: dict[str, Any] = {"kind": kind}
    with local_cluster(gpus=1), engines.engine(folder / "a", 1) as engine:
        (actor,) = engines.actors_of(engine)
        results["status"] = engines.call([actor], "weights_status")[0]
        before = engines.probe([actor], engines.fingerprints)[0]
        engines.generate(engine)  # some tensors are made by the first forward pass
        results["made_late"] = sorted(set(engines.probe([actor], engines.fingerprints)[0]) - set(before))
        oracle = {}
        for name in ("b", "c"):
            engines.load_from_disk(engine, folder / name)
            oracle[name] = engines.probe([actor], engines.fingerprints)[0], engines.generate(engine)
        results["oracle_differs"] = oracle["b"][0] != oracle["c"][0] and oracle["b"][1] != oracle["c"][1]
        results["derived"] = sorted(name for name in oracle["b"][0] if name.endswith(("w_kc", "w_vc")))
        for name in ("b", "c", "b"):
            results.setdefault("hand", []).append(engines.probe([actor], by_hand, str(folder / name))[0])
            found = engines.probe([actor], engines.fingerprints)[0], engines.generate(engine)
            results.setdefault("equals_disk", []).append(found[0] == oracle[name][0])
            results.setdefault("generates_equal", []).append(found[1] == oracle[name][1])
        results |= engines.probe([actor], faults, str(folder / "b"))[0]
        found = engines.probe([actor], engines.fingerprints)[0]
        results["kept_after_errors"] = found == oracle["b"][0]
    return results


# ---------------------------------------------------------------------- run inside the scheduler


def by_hand(scheduler: Any, folder: str) -> dict[str, Any]:
    """What a receiver does with whole tensors at hand."""
    from safetensors.torch import load_file

    from rdt_core.connection import typed_view
    from rdt_core.geometry import replay
    from rdt_core.sources.watch import attribute_tensors
    from rdt_core.wire import TensorMeta
    from rdt_sglang import SglangLanding

    tensors = load_file(Path(folder) / "model.safetensors")
    metas = [
        TensorMeta(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
    ]
    model = scheduler.tp_worker.model_runner.model
    landing = SglangLanding(scheduler.weight_updater._select_runners("all"), "cpu", who="test/0")
    before = engines.fingerprints(scheduler)
    versions = {name: tensor._version for name, tensor in model.named_parameters()}
    trace = landing.trace(metas)
    result = {
        "trace_wrote_nothing": before == engines.fingerprints(scheduler)
        and versions == {name: tensor._version for name, tensor in model.named_parameters()},
        "not_taken": sorted({meta.name for meta in metas} - set(trace.taken)),
        "fills": len(trace.fills),
        "in_place": all(d.in_place for d in landing.destinations().values()),
        "uncovered_buffers": sorted(set(dict(model.named_buffers())) - set(landing.destinations())),
        "engine": landing.engine,
    }
    for storage in (landing.storage(key) for key in landing.destinations()):
        storage.fill_(0x5A)  # whatever is not written below would show, padding too
    for value in attribute_tensors(model).values():
        value.zero_()
    landing.prepare_models()
    landing.begin()
    destinations = landing.destinations()
    for piece in trace.slices:
        target = typed_view(landing.storage(piece.destination), piece.dtype, piece.offset, piece.shape, piece.strides)
        target.copy_(replay(tensors[piece.name], piece.chain).reshape(piece.shape))
    for module in {d.module for d in destinations.values()}:
        landing.close(module)
    landing.finish()
    return result


def faults(scheduler: Any, folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    from rdt_core.wire import TensorMeta
    from rdt_sglang import SglangLanding, layers

    tensors = load_file(Path(folder) / "model.safetensors")
    metas = [
        TensorMeta(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
    ]
    model = scheduler.tp_worker.model_runner.model
    runners = scheduler.weight_updater._select_runners("all")
    landing = SglangLanding(runners, "cpu", who="test/0")

    def raised(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    small = [TensorMeta(name=m.name, shape=(3, 5), dtype=m.dtype) if "o_proj" in m.name else m for m in metas]
    errors = {
        "missing": raised(lambda: landing.trace([m for m in metas if "layers.1.self_attn.o_proj" not in m.name])),
        "shape": raised(lambda: landing.trace(small)),
        "device": raised(lambda: SglangLanding(runners, "meta", who="test/0").trace(metas)),
    }
    landing.trace(metas)
    linear = model.model.layers[1].self_attn.o_proj
    linear.use_intel_amx_backend = True
    errors["amx"] = raised(lambda: SglangLanding(runners, "cpu", who="test/0"))
    linear.use_intel_amx_backend = False

    class Packing(type(linear.quant_method)):  # type: ignore[misc]
        pass

    kept, linear.quant_method = linear.quant_method, Packing()
    errors["packing"] = raised(lambda: SglangLanding(runners, "cpu", who="test/0"))
    linear.quant_method = kept
    calls = []
    with layers.without_post_load(model):
        if hasattr(model, "post_load_weights"):
            calls.append(model.post_load_weights())
    parameter = linear.weight
    landing.begin()
    old = parameter.data
    parameter.data = old.clone()
    errors["address"] = raised(landing.finish)
    errors["address_at_begin"] = raised(landing.begin)
    parameter.data = old
    attention = model.model.layers[1].self_attn
    attention.w_kc = None
    landing.begin()
    landing.finish()  # its post-load step makes the tensor, which is watched from then on
    landing.begin()
    attention.w_kc = attention.w_kc.clone()
    errors["derived"] = raised(landing.finish)
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if buffer.numel())
    landing.begin()
    old, buffer.data = buffer.data, buffer.data.clone()
    errors["buffer"] = raised(landing.finish)
    buffer.data = old
    landing.begin()
    landing.finish()
    return {
        "errors": errors,
        "moved_buffer": name,
        "silenced": calls,
        "still_silenced": "post_load_weights" in model.__dict__,
    }


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        found = main(sys.argv[1], json.loads(sys.argv[2]), Path(place))
    torch.set_num_threads(1)
    print(json.dumps(found), flush=True)
