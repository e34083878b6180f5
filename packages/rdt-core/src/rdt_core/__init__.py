"""rdt moves a model's weights from the ranks that train it to the ranks that serve it, over Ray Direct Transport and NIXL.

A trainer joins a group with a `WeightSource` and publishes versions; engines are attached through clients of their
adapters (`rdt_vllm`, `rdt_sglang`). Everything else lives in the modules of this package; the command is `rdt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actoroptions import engine_options as engine_options
    from .actoroptions import make_actor as make_actor
    from .actoroptions import server_options as server_options
    from .actoroptions import trainer_options as trainer_options
    from .adapter import SyncAdapter as SyncAdapter
    from .cluster import place as place
    from .cluster import release as release
    from .engines import ConnectInfo as ConnectInfo
    from .engines import EngineClient as EngineClient
    from .errors import RdtError as RdtError
    from .metrics import RayMetrics as RayMetrics
    from .outcomes import JsonLines as JsonLines
    from .outcomes import SyncOutcome as SyncOutcome
    from .outcomes import print_table as print_table
    from .outcomes import read_outcomes as read_outcomes
    from .perfetto import write_trace as write_trace
    from .placement import EngineShape as EngineShape
    from .placement import Placement as Placement
    from .replica import ModuleReplica as ModuleReplica
    from .replica import ModuleWorker as ModuleWorker
    from .sources import CheckpointSource as CheckpointSource
    from .sources import IterableSource as IterableSource
    from .sources import ModuleSource as ModuleSource
    from .sources import Shard as Shard
    from .sources import WeightSource as WeightSource
    from .sync import WeightSync as WeightSync
    from .wire import SyncReport as SyncReport
    from .wire import TensorMeta as TensorMeta

_HOMES = {
    "CheckpointSource": "sources",
    "ConnectInfo": "engines",
    "EngineClient": "engines",
    "EngineShape": "placement",
    "IterableSource": "sources",
    "JsonLines": "outcomes",
    "ModuleReplica": "replica",
    "ModuleSource": "sources",
    "ModuleWorker": "replica",
    "Placement": "placement",
    "RayMetrics": "metrics",
    "RdtError": "errors",
    "Shard": "sources",
    "SyncAdapter": "adapter",
    "SyncOutcome": "outcomes",
    "SyncReport": "wire",
    "TensorMeta": "wire",
    "WeightSource": "sources",
    "WeightSync": "sync",
    "engine_options": "actoroptions",
    "make_actor": "actoroptions",
    "place": "cluster",
    "print_table": "outcomes",
    "read_outcomes": "outcomes",
    "release": "cluster",
    "server_options": "actoroptions",
    "trainer_options": "actoroptions",
    "write_trace": "perfetto",
}

__all__ = [
    "CheckpointSource",
    "ConnectInfo",
    "EngineClient",
    "EngineShape",
    "IterableSource",
    "JsonLines",
    "ModuleReplica",
    "ModuleSource",
    "ModuleWorker",
    "Placement",
    "RayMetrics",
    "RdtError",
    "Shard",
    "SyncAdapter",
    "SyncOutcome",
    "SyncReport",
    "TensorMeta",
    "WeightSource",
    "WeightSync",
    "engine_options",
    "make_actor",
    "place",
    "print_table",
    "read_outcomes",
    "release",
    "server_options",
    "trainer_options",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    # late, so that importing one room does not import torch and Ray
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
