"""What may import what: packages, rooms and the pure code, read from the source without running it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGES = Path(__file__).parents[2] / "packages"
CORE = PACKAGES / "rdt-core" / "src" / "rdt_core"
MODULES = sorted(PACKAGES.glob("*/src/*/**/*.py"))
ENGINES = {"sglang", "vllm"}
TRAINERS = {"megatron"}
# top-level names that a package may import anywhere in it, besides the standard library
ALLOWED = {
    "rdt_core": {
        "checkpoint_engine",
        "matplotlib",
        "msgspec",
        "numpy",
        "packaging",
        "psutil",
        "pynvml",
        "ray",
        "rich",
        "torch",
        "triton",
        "transformers",
        "typer",
        "zmq",
    },
    "rdt_megatron": {"megatron", "packaging", "rdt_core", "torch"},
    "rdt_sglang": {"msgspec", "numpy", "packaging", "ray", "rdt_core", "sglang", "torch", "zmq"},
    "rdt_vllm": {"msgspec", "numpy", "packaging", "ray", "rdt_core", "torch", "vllm"},
}
PURE = ("declared", "geometry", "gpus", "layout", "linking", "placement", "planning", "routing", "tracing")
# reached for its plain data types (`transport.base`); its modules are checked where they run
IMPURE = {"transport"}
# Data flows down this list: none of a line's rooms may reach a room of a later line, through any number of imports.
ORDER = (
    ("errors", "logline"),
    ("wire", "distributions"),
    ("versions", "geometry", "layout", "gpus", "placement", "notation", "timeline", "settings"),
    ("declared", "commandline", "trainers", "manifests"),
    ("tracing", "routing", "sources", "memory"),
    ("landing", "planning", "precision", "transport"),
    ("linking", "digests"),
    ("verifying",),
    ("synccalls",),
    ("coordinator",),
    ("control", "engines", "report", "cluster", "localcluster"),
    ("rendezvous", "contents", "rates", "outcomes"),
    ("publisher", "connector", "driver", "metrics", "perfetto"),
    ("receiver", "membership", "checking"),
    ("attaching",),
    ("sync",),
    ("adapter", "testing"),
    ("demo",),
    ("soak", "doctor"),
    ("cli",),
)


def imports_of(path: Path, *, runtime_only: bool = False) -> Iterator[tuple[int, str, str | None]]:
    """Yields (dots, module, name) for each import of a file; name is None for `import module`."""
    tree = ast.parse(path.read_text(), str(path))
    typing_only: set[ast.AST] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                typing_only.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, node.module or "", alias.name


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGES).parts[2]


def label(path: Path) -> str:
    return str(path.relative_to(PACKAGES))


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_stay_inside_the_package_and_its_dependencies(path: Path) -> None:
    package = package_of(path)
    roots = {module.split(".")[0] for dots, module, _ in imports_of(path) if not dots}
    assert package not in roots, "a package imports itself relatively, so that it can be vendored under another name"
    foreign = roots - set(sys.stdlib_module_names) - ALLOWED[package]
    assert not foreign, f"{label(path)} imports {sorted(foreign)}, which {package} does not depend on"


def test_sides_do_not_know_each_other() -> None:
    assert not ALLOWED["rdt_core"] & (ENGINES | TRAINERS)
    assert not ALLOWED["rdt_megatron"] & ENGINES
    for package, engine in {"rdt_vllm": "vllm", "rdt_sglang": "sglang"}.items():
        assert ALLOWED[package] & (ENGINES | TRAINERS) == {engine}


@functools.cache
def room_graph() -> dict[str, set[str]]:
    """Returns, for each room of the core (a module or a folder), the rooms that it imports when it runs."""
    graph: dict[str, set[str]] = {}
    for path in CORE.rglob("*.py"):
        parts = path.relative_to(CORE).parts
        if parts == ("__init__.py",):
            continue
        targets = graph.setdefault(parts[0].removesuffix(".py"), set())
        for dots, module, name in imports_of(path, runtime_only=True):
            if dots == len(parts):
                targets.add((module or name or "").split(".")[0])
    for room, targets in graph.items():
        targets &= graph.keys()
        targets.discard(room)
    return graph


def reach(graph: dict[str, set[str]], room: str) -> set[str]:
    seen: set[str] = set()
    todo = [room]
    while todo:
        for target in graph[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


@pytest.mark.parametrize("room", sorted(room_graph()))
def test_no_room_imports_itself_through_others(room: str) -> None:
    assert room not in reach(room_graph(), room)


@pytest.mark.parametrize(("level", "room"), [(level, room) for level, rooms in enumerate(ORDER) for room in rooms])
def test_data_flows_one_way_through_the_rooms(level: int, room: str) -> None:
    above = {other for rooms in ORDER[level:] for other in rooms} - {room}
    assert not reach(room_graph(), room) & above


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_know_no_ray_no_engine_and_no_process_group(room: str) -> None:
    for reached in {room, *reach(room_graph(), room)} - IMPURE:
        for dots, module, name in imports_of(CORE / f"{reached}.py"):
            full = module if name is None else f"{module}.{name}"
            assert dots or module.split(".")[0] not in {"ray", "nixl", *ENGINES, *TRAINERS}, f"{reached} imports {full}"
            assert not full.startswith("torch.distributed"), f"{reached} imports {full}"
