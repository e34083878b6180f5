"""The processes of a world: what a fork becomes. Coordinator, source rank and engine rank, each around rdt's own classes.

Each takes its owner's commands one after the other in its main thread; a second thread reads them, so that faults can be
armed while a sync runs. An engine rank takes calls of engine clients beside them, in the order of their arrival, as an
actor does.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rdt_core import driver
from rdt_core.coordinator import Coordinator
from rdt_core.errors import MembershipError
from rdt_core.replica import ModuleWorker
from rdt_core.sync import WeightSync

from . import channel, model, mutations
from .clients import ProcessReplica
from .control import SocketControl, serve
from .faults import Setup
from .pausing import Pausing
from .points import Injector, wrap_classes

GROUP = "faults"

_Reply = Callable[[bool, Any], None]


class _Server:
    """What every member has: its owner's socket, an injector, and a queue of calls.

    Args:
        sock: to the owner.
        member: the member's name.
        path: of a Unix socket for engine clients; empty: none.
    """

    def __init__(self, sock: socket.socket, member: str, path: str = "") -> None:
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)
        self._sock = sock
        self._sending = threading.Lock()
        self.injector = Injector(member, lambda number: self.send(("struck", number, "")))
        self.calls: queue.Queue[tuple[str, tuple[Any, ...], _Reply, bool]] = queue.Queue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._command)
        if path:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
            listener.listen(64)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def start(self) -> None:
        """Starts to read."""
        threading.Thread(target=self._read, daemon=True).start()
        self.send(("ready", 0, ""))

    def send(self, message: Any) -> None:
        """Tells the owner."""
        with self._sending:
            self._sock.settimeout(None)
            channel.send(self._sock, message)

    def run(self, handlers: Mapping[str, Callable[..., Any]], around_clients: str = "") -> None:
        """Runs one call after the other, for ever; calls of clients pass points of this name."""
        while True:
            method, args, reply, is_client = self.calls.get()
            try:
                function = handlers[method]
                if is_client and around_clients:
                    function = self.injector.around(f"{around_clients}.{method}", function)
                result = function(*args)
            except Exception as error:
                reply(False, channel.describe(error))
            else:
                reply(True, result)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _command(self, sock: Any) -> None:
        try:
            number, method, args = channel.receive(sock)
        except EOFError:
            self._selector.unregister(sock)  # the owner is gone, and so will this process be
            return
        if method == "arm":
            self.injector.arm(*args)
            self.send(("done", number, (True, None)))
        elif method == "passed":
            self.send(("done", number, (True, self.injector.take_passed())))
        else:
            self.calls.put((method, args, lambda ok, value: self.send(("done", number, (ok, value))), False))

    def _accept(self, listener: Any) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(0.02)  # no handle is left for it
            return
        self._selector.register(connection, selectors.EVENT_READ, self._call)

    def _call(self, connection: Any) -> None:
        try:
            method, args = channel.receive(connection)
        except (EOFError, OSError):
            self._selector.unregister(connection)
            connection.close()
            return

        def reply(ok: bool, value: Any) -> None:
            try:
                channel.send(connection, (ok, value))
            except OSError:
                pass  # who asked waits no longer

        self.calls.put((method, args, reply, True))


def coordinator(sock: socket.socket, *, path: str, world_size: int, stall_s: float, mutation: str) -> None:
    """A coordinator's process."""
    mutations.apply(mutation)
    server = _Server(sock, "coordinator")
    asyncio.run(serve(Coordinator(GROUP, world_size, stall_s), path, server.injector, server.start))


def source(
    sock: socket.socket,
    *,
    rank: int,
    setup: Setup,
    path: str,
    replicas: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
    timeout_s: float,
    grace_s: float,
    mutation: str,
) -> None:
    """A source rank's process.

    Args:
        sock: to the owner.
        rank: of the source rank.
        setup: of the world.
        path: of the coordinator.
        replicas: sockets of the engine ranks, by replica.
        options: of `WeightSync`.
        timeout_s: deadline of every wait.
        grace_s: of the control.
        mutation: see `mutations`.
    """
    mutations.apply(mutation)
    server = _Server(sock, f"source{rank}")
    wrap_classes(server.injector)
    held = model.Source(rank, setup.sources)
    controls: list[SocketControl] = []
    syncs: list[WeightSync] = []
    limits = {"timeout_s": timeout_s, "grace_s": grace_s}
    clients = {name: ProcessReplica(name, paths, server.injector) for name, paths in replicas.items()}
    warned: list[str] = []
    driver.log.warning = lambda text, *args: warned.append(text % args)  # type: ignore[method-assign,assignment]

    def find(limit_s: float | None = None) -> SocketControl:
        if rank == 0:
            server.send(("wanted", 0, ""))  # with Ray, rank 0 creates the coordinator where there is none
        control = SocketControl(
            GROUP, path, server.injector, call_timeout_s=limits["timeout_s"], grace_s=limits["grace_s"]
        )
        control.find(limits["timeout_s"] if limit_s is None else limit_s)
        controls[:] = [control]
        return control

    def start(version: int, **more: Any) -> str:
        held.fill(version)
        sync = WeightSync(
            find(), held, group=GROUP, rank=rank, world_size=setup.sources, mode=setup.mode, kinds=("mapped",),
            timeout_s=limits["timeout_s"], pack_threshold=setup.pack, policy=setup.policy, verify=setup.verify, reopen=find,
            **options, **more,
        )  # fmt: skip
        syncs.append(sync)
        return sync.mode

    def limit(timeout_s: float, grace_s: float) -> None:
        limits.update(timeout_s=timeout_s, grace_s=grace_s)
        for control in controls:
            control.call_timeout_s, control.grace_s = timeout_s, grace_s
        for sync in syncs:
            sync._timeout_s = timeout_s
            sync._driver._info["timeout_s"] = timeout_s

    def publish(version: int) -> dict[str, Any]:
        held.fill(version)
        return timed(lambda: joined().publish(version))

    def joined() -> WeightSync:
        if not syncs:
            raise MembershipError(f"source rank {rank} did not join")
        return syncs[-1]

    def timed(run: Callable[[], Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            report = run()
        except Exception as error:
            name, message = channel.describe(error)
            return {"error": name, "message": message, "seconds": time.monotonic() - began}
        return {"error": "", "report": report, "seconds": time.monotonic() - began}

    def known() -> dict[str, Any]:
        """Replicas that it drives, those among them that connect again first, and what it warned of since it was asked last."""
        driven = joined()._driver
        told, warned[:] = list(warned), []
        return {"attached": set(driven.clients), "doubted": set(driven.doubted), "warned": told}

    server.start()
    server.run(
        {
            "start": lambda version, more: start(version, **more),
            "limit": limit,
            "publish": publish,
            "fill": held.fill,
            "move": held.move,
            "attach": lambda name: timed(lambda: joined().attach(clients[name])),
            "reconnect": lambda name: timed(lambda: joined().reconnect(clients[name])),
            "detach": lambda name: timed(lambda: joined().detach(name)),
            "catch_up": lambda: timed(lambda: joined().catch_up()),
            "attached": lambda: list(joined()._driver.clients),
            "known": known,
            "forget": lambda name: clients[name].forget(),
            "leave": lambda: joined().leave(),
        }
    )


def worker(
    sock: socket.socket,
    *,
    replica: str,
    rank: int,
    world_size: int,
    path: str,
    own: str,
    timeout_s: float,
    grace_s: float,
    mutation: str,
) -> None:
    """An engine rank's process, which listens at `own`."""
    mutations.apply(mutation)
    server = _Server(sock, f"{replica}/{rank}", own)
    wrap_classes(server.injector)
    limits = {"timeout_s": timeout_s, "grace_s": grace_s}
    controls: list[SocketControl] = []

    def find() -> SocketControl:
        control = SocketControl(
            GROUP, path, server.injector, call_timeout_s=limits["timeout_s"], grace_s=limits["grace_s"]
        )
        control.find(limits["timeout_s"])
        controls[:] = [control]
        return control

    made = ModuleWorker(lambda: model.Served(rank, world_size), rank, world_size, model.load, find)
    pausing = Pausing(made)

    def limit(timeout_s: float, grace_s: float) -> None:
        limits.update(timeout_s=timeout_s, grace_s=grace_s)
        for control in controls:
            control.call_timeout_s, control.grace_s = timeout_s, grace_s
        if made.receiver is not None:
            made.receiver.timeout_s = timeout_s

    def serving() -> dict[str, Any]:
        """What this engine rank says that it serves, the digest of what it would serve, and whether it generates."""
        said = {"version": made.version(), "is_paused": pausing.is_paused, "ahead": pausing.ahead}
        try:
            state = made.state()
        except Exception as error:
            return {**said, "digest": "", "refusal": channel.describe(error)}
        return {**said, "digest": model.digest(state), "refusal": None}

    methods = ("pull", "finish", "commit", "version", "close")
    handlers: dict[str, Callable[..., Any]] = {name: getattr(made, name) for name in methods}
    handlers |= {**pausing.handlers(), "limit": limit, "serving": serving}
    server.start()
    server.run(handlers, "worker")
