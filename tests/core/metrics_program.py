"""Publishes three versions, the last without success, and reads what Ray's Prometheus endpoint says about them.

Prints one JSON object: metrics by name, each a list of labels and value; milliseconds that an observer took, at best.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request

import ray
import torch

from rdt_core import ModuleReplica, ModuleSource, ModuleWorker, WeightSync
from rdt_core.errors import RdtError
from rdt_core.metrics import METRICS, RayMetrics
from rdt_core.outcomes import SyncOutcome

DEADLINE_S = 120.0
LINE = re.compile(r"ray_(?P<name>rdt_\w+)\{(?P<labels>.*)\} (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def build() -> torch.nn.Module:
    return torch.nn.Linear(64, 64)


def read(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for match in filter(None, map(LINE.fullmatch, text.splitlines())):
        labels = dict(LABEL.findall(match["labels"]))
        tags = {
            name: value
            for name, value in labels.items()
            if name in {"le", *sum((one[1] for one in METRICS.values()), ())}
        }
        found.setdefault(match["name"], []).append((tags, float(match["value"])))
    return found


def is_complete(found: dict[str, list[tuple[dict[str, str], float]]]) -> bool:
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in found}
    syncs = sum(value for _, value in found.get("rdt_syncs_total", ()))
    return METRICS.keys() <= names and syncs == 3


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        namespace="rdt",
        log_to_driver=False,
        object_store_memory=256 << 20,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    took: list[float] = []
    metrics = RayMetrics()

    def timed(outcome: SyncOutcome) -> None:
        began = time.perf_counter()
        metrics(outcome)
        took.append(time.perf_counter() - began)

    sync = WeightSync.join(
        "policy", source=ModuleSource(build()), rank=0, world_size=1, timeout_s=60, observers=[timed]
    )
    worker = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote(build)
    sync.attach(ModuleReplica([worker], name="a"))
    sync.publish(1)
    sync.publish(2)
    ray.kill(worker)
    try:
        sync.publish(3)
    except RdtError:
        pass
    else:
        raise SystemExit("a publish to an engine that is dead did not fail")
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            found = read(url)
        except OSError:  # the agent is still starting
            found = {}
        if is_complete(found) or time.monotonic() >= deadline:
            break
        time.sleep(0.5)  # nothing tells when the agent has exported
    sync.leave()
    ray.shutdown()
    print(json.dumps({"metrics": found, "best_ms": 1e3 * min(took)}))


if __name__ == "__main__":
    main()
