"""Run by test_routes.py in a process of its own: stock SGLang servers behind a URL, fed by two FSDP2 trainer actors.

Its argument is JSON: `ray` (schedulers as actors, else plain processes), `tp`, `launcher` (rdt's, else SGLang's own), and
`python`, which runs the trainers. Prints one JSON object on its last line. The oracle is the trainer's model in transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import serving_trainers as serving
from serving_trainers import GREEDY, PROMPTS, TOKENS, Trainers, logprob_error, raised, soon

from rdt_testbed import models, warm
from rdt_testbed.cluster import local_cluster, workers_environment

KIND: models.Kind = "llama-tied"
KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
NAMESPACE = "engines"
LONG = 160


def fail() -> None:
    time.sleep(1.0)  # the readers have some of the bytes by then
    raise RuntimeError("the trainer ran into something")


class Run:
    def __init__(self, settings: dict[str, Any], folder: Path, address: str) -> None:
        from rdt_sglang.hosting import _free_port

        self.settings, self.folder, self.address = settings, folder, address
        self.results: dict[str, Any] = {"errors": {}, "syncs": []}
        self.version = 0
        self.port = _free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        if not settings.get("launcher"):
            self.trainers = Trainers(folder, KIND, settings.get("python", sys.executable))

    def command(self) -> list[str]:
        given = [
            "--model-path", str(self.folder / "start"), "--host", "127.0.0.1", "--port", str(self.port),
            "--tp-size", str(self.settings["tp"]), "--admin-api-key", KEY, "--skip-server-warmup",
        ]  # fmt: skip
        for name, value in serving.ENGINE.items():
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        if self.settings.get("launcher"):
            where = ["--ray-address", self.address, "--ray-namespace", NAMESPACE]
            return [warm.python(), "-m", "rdt_sglang.launch_server", *where, "--", *given]
        return [warm.python(), "-m", "sglang.launch_server", *given, *(["--use-ray"] if self.settings["ray"] else [])]

    def all(self) -> dict[str, Any]:
        environment = {**os.environ, "TMPDIR": str(self.folder)}  # SGLang leaves its sockets
        environment.pop("RAY_ADDRESS", None)
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": workers_environment()})
        if self.settings["ray"] and not self.settings.get("launcher"):
            environment["RAY_ADDRESS"] = self.address
        log = self.folder / "server.log"
        with log.open("w") as out:
            server = subprocess.Popen(self.command(), env=environment, stdout=out, stderr=out)
        try:
            self.wait(server)
            if self.settings.get("launcher"):
                self.found()
            else:
                self.checks()
        except BaseException:
            sys.stderr.write(log.read_text()[-8000:])
            raise
        finally:
            self.end(server)
        self.results["errors"]["gone"] = raised(lambda: self.client().health(deadline=soon()))
        return self.results

    def client(self, **options: Any) -> Any:
        from rdt_sglang import SglangHttpEngine

        return SglangHttpEngine(self.url, **{"name": "http", "headers": HEADERS, **options})

    def wait(self, server: subprocess.Popen[bytes]) -> None:
        from rdt_core.errors import RdtError

        began, until = time.monotonic(), time.monotonic() + 420
        while True:
            try:
                self.generate(2)
                break
            except RdtError:
                if server.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.5)
        self.results["start_s"] = time.monotonic() - began

    def checks(self) -> None:

        results, errors = self.results, self.results["errors"]
        client = self.client()
        results["before"] = client.version(deadline=soon())
        results["actors"] = self.web().get("rdt/actors", deadline=soon())
        client.health(deadline=soon())
        self.trainers.all("join", "group", {})
        self.trainers.first("attach", client)
        self.sync(client, 11)
        self.sync(client, 12)
        results["retract"] = self.in_flight(21)
        results["refused"] = self.refused()
        self.trainers.first("detach", "http")
        freezing = self.client(name="freezing", pause="in_place", cache="keep")
        self.trainers.first("attach", freezing)
        results["in_place"] = self.in_flight(22)
        self.trainers.first("detach", "freezing")

        from rdt_sglang.discover import find_actors

        errors["found"] = raised(lambda: find_actors(self.url, headers=HEADERS))
        errors["namespace"] = raised(lambda: find_actors(self.url, headers=HEADERS, namespace="elsewhere"))
        if self.settings["ray"]:
            from rdt_sglang import SglangRayEngine

            handles = find_actors(self.url, headers=HEADERS)
            direct = SglangRayEngine(handles, name="direct", control=self.url, headers=HEADERS)
            self.trainers.first("attach", direct)
            self.sync(direct, 31)
            self.trainers.first("detach", "direct")
        # a sync that fails leaves the replica paused and the version as it was; the next one heals it
        healed = self.client(name="healed")
        self.trainers.first("attach", healed)
        healed.pause(deadline=soon())
        healed.begin(900, deadline=soon())
        errors["pull"] = raised(lambda: healed.pull(900, deadline=soon(12)))
        errors["abort"] = raised(lambda: healed.abort(900, "enough", deadline=soon()))
        results["unchanged"] = healed.version(deadline=soon()) == self.version
        self.sync(healed, 41)
        results["verified"] = [self.verify(seed) for seed in (41, 42)]
        self.trainers.all("leave")
        self.torn()
        results["imported"] = self.trainers.imported("sglang")

    def verify(self, seed: int) -> dict[str, Any]:
        """`rdt verify` of the server and the checkpoint of a step: exit status and the state of each tensor."""
        folder = self.folder / f"step{seed}"
        models.save(self.trainers.model(seed), folder)
        command = ["-m", "rdt_core.cli", "verify", "--checkpoint", str(folder), "--sglang", self.url, "--json"]
        done = subprocess.run(
            [warm.python(), *command, "--address", self.address, "--token", KEY],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        states = {one["name"]: one["state"] for one in json.loads(done.stdout)["tensors"]} if done.stdout else {}
        return {"status": done.returncode, "states": states, "told": done.stderr[-2000:]}

    def torn(self) -> None:
        """A sync that fails half-way, a request right after it, and the sync that heals."""
        self.trainers.all("join", "torn", {"mode": "bucket", "bucket_bytes": 65536, "timeout_s": 30})
        client = self.client(name="torn")
        self.trainers.first("attach", client)
        self.sync(client, 51)
        self.trainers.all("set", 52)
        ranks = self.trainers.ranks
        refs = [
            ranks[0].publish.remote(self.version + 1),
            ranks[1].publish_until.remote(self.version + 1, 2, fail),
        ]  # fmt: skip
        self.results["torn"] = [raised(lambda ref=ref: ray.get(ref, timeout=100)) for ref in refs]
        self.results["torn_request"] = raised(lambda: self.generate(2))
        self.results["torn_version"] = client.version(deadline=soon())
        self.version += 1
        self.sync(client, 53)
        self.trainers.all("leave")

    def found(self) -> None:
        """The actors of a server that was started with a namespace."""
        import ray

        from rdt_sglang.discover import engines_among, find_actors

        named = ray.util.list_named_actors(all_namespaces=True)
        self.results["engines"] = len(engines_among([one["name"] for one in named if one["namespace"] == NAMESPACE]))
        self.results["handles"] = len(find_actors(self.url, headers=HEADERS, namespace=NAMESPACE))
        self.results["by_name"] = raised(lambda: self.by_name(NAMESPACE))
        self.results["elsewhere"] = raised(lambda: self.by_name("elsewhere"))

    def by_name(self, namespace: str) -> None:
        """As for a server that has no route to say which they are."""
        from rdt_sglang.discover import _by_name

        assert len(_by_name(self.web(), namespace, soon())) == self.settings["tp"]

    def refused(self) -> dict[str, str]:
        """What the routes and clients refuse, each with its reason."""
        from rdt_core.web import Web
        from rdt_sglang.protocol import WEIGHTS_ROUTE

        web = self.web()

        def post(**body: Any) -> Any:
            return raised(lambda: web.post(WEIGHTS_ROUTE, body, deadline=soon()))

        return {
            "key": raised(lambda: self.client(headers={}).health(deadline=soon())),
            "actors_key": raised(lambda: Web(self.url).get("rdt/actors", deadline=soon())),
            "call": post(call="shutdown", arguments={}, timeout_s=1),
            "arguments": post(call="begin", arguments={"version": "7", "timeout_s": 1}, timeout_s=1),
            "body": post(call="status"),
            "timeout": post(call="status", arguments={}, timeout_s=-1),
            "large": post(call="abort", arguments={"version": 7, "reason": "x" * (2 << 20)}, timeout_s=1),
            "begin": raised(lambda: self.client().begin(1, deadline=soon(4))),  # nothing is paused
        }

    def web(self) -> Any:
        from rdt_core.web import Web

        return Web(self.url, HEADERS)

    def generate(self, tokens: int, prompt: list[int] = PROMPTS[0]) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens}, "return_logprob": True}
        return self.web().post("generate", body, deadline=soon())

    def error(self, answer: dict[str, Any], prompt: list[int], seed: int, start: int = 0) -> float:
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return logprob_error(self.trainers.model(seed), prompt, answer["output_ids"], logprobs, start)

    def sync(self, client: Any, seed: int) -> None:
        self.version += 1
        began = time.monotonic()
        report = self.trainers.publish(self.version, seed)
        seconds = time.monotonic() - began
        answers = [self.generate(TOKENS, prompt) for prompt in PROMPTS]
        self.results["syncs"].append(
            {
                "version": self.version, "said": client.version(deadline=soon()), "readers": len(report.readers),
                "bytes": report.bytes, "seconds": seconds, "phases": report.phases,
                "stamped": sorted({answer["meta_info"]["weight_version"] for answer in answers}),
                "error": max(self.error(answer, prompt, seed) for answer, prompt in zip(answers, PROMPTS, strict=True)),
            }
        )  # fmt: skip

    def in_flight(self, seed: int) -> dict[str, Any]:
        """A request that is being generated when a sync comes gets every token; the server answers others meanwhile."""
        for _ in range(10):
            answers: list[dict[str, Any]] = []
            request = threading.Thread(target=lambda into=answers: into.append(self.generate(LONG)))
            request.start()
            self.version += 1
            self.trainers.publish(self.version, seed)
            request.join(60)
            spans = answers[0]["meta_info"]["weight_versions"]
            if len(spans) == 2:
                start = spans[1]["start"]
                return {
                    "tokens": len(answers[0]["output_ids"]), "switch": start,
                    "versions": [span["version"] for span in spans], "published": self.version,
                    "error": self.error(answers[0], PROMPTS[0], seed, start),
                }  # fmt: skip
            seed += 100
        return {}

    def end(self, server: subprocess.Popen[bytes]) -> None:
        """SGLang takes its time to end by itself; what matters here is that nothing stays."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        shared = set()
        for process in family:
            with contextlib.suppress(psutil.Error):
                shared |= {one.path for one in process.memory_maps() if one.path.startswith("/dev/shm/sgl")}
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        for path in shared:
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as place,
        local_cluster(cpus=4, gpus=given["tp"] if given["ray"] else 0) as cluster,
    ):
        models.save(models.build(KIND, seed=0, max_position_embeddings=512), Path(place) / "start")
        found = Run(given, Path(place), cluster.address).all()
    print(json.dumps(found), flush=True)
