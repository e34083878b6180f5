"""Memory that was registered with NIXL keeps its address for ever: a later group in the same process gets other memory."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.integration

NBYTES = 3 << 20


class Process:
    def register_and_drop(self) -> int:
        import gc

        from rdt_core.memory import Arena
        from rdt_core.transport.prepared import Registry

        arena = Arena(NBYTES)
        address = arena.tensor.data_ptr()
        registry = Registry()
        registry.add(arena.tensor, "an arena")
        assert registry.covers(arena.tensor)
        del arena, registry
        gc.collect()
        return address

    def later(self, count: int) -> list[int]:
        from rdt_core.memory import Arena

        self.arenas = [Arena(NBYTES) for _ in range(count)]
        return [arena.tensor.data_ptr() for arena in self.arenas]


def test_registered_memory_is_never_handed_out_again(ray_cluster):
    import ray

    process = ray.remote(Process).options(num_cpus=0, enable_tensor_transport=True).remote()
    try:
        registered = [ray.get(process.register_and_drop.remote()) for _ in range(3)]
        later = ray.get(process.later.remote(16))
        assert len(set(registered)) == len(registered)
        assert not set(registered) & set(later)
    finally:
        ray.kill(process)
