"""Many pieces out of another GPU's memory: which engine copies them fastest. Run as a program, on one GPU or two.

`python gather_program.py` prints a table and, where `OUT` names a folder, writes `gather.json` into it. Every scenario
runs in a process of its own, because a bad address ends a CUDA context; every variant is checked for equal bytes before
it is timed, and an error becomes a row of the table. Needs torch, numpy, msgspec, psutil and rdt-core on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
GAP = 256  # between pieces, so that nothing merges
SIZES = (1 << 20, 64 << 10, 4 << 20, 256 << 10, 16 << 20)
#: scenario: (devices needed, device of the owner, of the reader, through CUDA IPC)
SCENARIOS = {
    "same": (1, 0, 0, False),
    "ipc-same": (1, 0, 0, True),
    "peer": (2, 0, 1, False),
    "ipc-reader": (2, 0, 1, True),  # opened in the reader's context, as `transport.mapped` does
    "ipc-masked": (2, 0, 0, True),  # likewise, and the reader does not see the owner's device
}


# ---------------------------------------------------------------------- pieces


def pieces(case: str, total: int, cap: int) -> list[tuple[int, int, int, int, int, int]]:
    """(source, destination, source pitch, destination pitch, rows, row bytes) of a case; offsets, all multiples of 8."""
    if case == "qwen":
        from rdt_core.shapes import checkpoint_tensors

        sizes, used = [], 0
        for tensor in checkpoint_tensors("qwen3-30b-a3b"):
            nbytes = 2
            for length in tensor.shape:
                nbytes *= length
            if used + nbytes + GAP > cap:
                break
            sizes.append(nbytes)
            used += nbytes + GAP
        places, at = [], 0
        for nbytes in sizes:
            places.append(at)
            at += -(-(nbytes + GAP) // 256) * 256
        # an engine keeps them in another order than the checkpoint
        order = random.Random(0).sample(range(len(sizes)), len(sizes))
        targets, at = [0] * len(sizes), 0
        for index in order:
            targets[index] = at
            at += -(-(sizes[index] + GAP) // 256) * 256
        return [(place, to, 0, 0, 1, size) for place, to, size in zip(places, targets, sizes, strict=True)]
    if case == "strided":  # column halves of [2048, 768] bfloat16, as one rank of two takes a down projection
        count = total // (2048 * 1536)
        return [(i * 2048 * 1536, i * (2048 * 768 + GAP), 1536, 768, 2048, 768) for i in range(count)]
    size = int(case)
    step = size + GAP
    return [(i * step, i * step, 0, 0, 1, size) for i in range(total // step)]


def extent(table: list[tuple[int, ...]], side: int) -> int:
    return max(row[side] + (row[4] - 1) * row[2 + side] + row[5] for row in table)


def pattern(offset: int, nbytes: int, device: Any) -> Any:
    """The bytes that an owner has at an offset, a multiple of 8."""
    import torch

    numbers = torch.arange(offset // 8, (offset + nbytes) // 8, dtype=torch.int64, device=device)
    numbers *= -7046029254386353131
    numbers ^= numbers >> 29
    return numbers.view(torch.uint8)


def fill(tensor: Any) -> None:
    step = GIB
    for start in range(0, tensor.numel(), step):
        end = min(start + step, tensor.numel())
        tensor[start:end].copy_(pattern(start, end - start, tensor.device))


def wrong(table: list[tuple[int, ...]], destination: Any) -> str:
    """What differs from what was to be copied, in a sample of the pieces; empty if nothing."""
    import torch

    sample = {0, len(table) - 1, *random.Random(1).sample(range(len(table)), min(64, len(table)))}
    for index in sorted(sample):
        source, to, pitch, to_pitch, rows, size = table[index]
        for row in sorted({0, 1, rows // 2, rows - 1} & set(range(rows))):
            start = to + row * to_pitch
            if not torch.equal(
                destination[start : start + size], pattern(source + row * pitch, size, destination.device)
            ):
                return f"piece {index} row {row} differs"
        end = to + (rows - 1) * to_pitch + size
        if int(destination[end : end + GAP].count_nonzero()):
            return f"bytes after piece {index} were written"
    return ""


# ---------------------------------------------------------------------- variants


def views(tensor: Any, table: list[tuple[int, ...]], side: int) -> list[Any]:
    import torch

    result = []
    for row in table:
        start, pitch, rows, size = row[side], row[2 + side], row[4], row[5]
        if rows == 1:
            result.append(tensor[start : start + size].view(torch.int64))
        else:
            words = tensor.view(torch.int64)
            result.append(words.as_strided((rows, size // 8), (pitch // 8, 1), start // 8))
    return result


def claimed(tensor: Any, device: Any) -> Any:
    """The same memory as a tensor that says it lies on `device`."""
    import torch

    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), device, tensor.numel())
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def variants(
    scenario: str, case: str, table: list[tuple[int, ...]], source: Any, destination: Any, address: int
) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """(name, what makes the thing to run), those that may end the context last."""
    import numpy as np
    import torch

    from rdt_core import cudadriver
    from rdt_core.transport import Copies, CopyProgram, gathering

    columns = np.array(table, dtype=np.int64).T
    zero = np.zeros(len(table), dtype=np.int64)
    device = destination.device

    def program(engine: str) -> Callable[[], Callable[[], Any]]:
        copies = Copies(zero, columns[0], columns[2], zero, columns[1], columns[3], columns[4], columns[5])
        return lambda: CopyProgram(copies, {0: source}, [destination], scenario, engine=engine).run  # type: ignore[arg-type]

    def raw(**shape: int) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            if not cudadriver.reachable(address, device.index):
                raise RuntimeError("the driver says that kernels of the reader's device cannot use the address")
            spans = gathering.Spans(
                address + columns[0],
                destination.data_ptr() + columns[1],
                columns[2],
                columns[3],
                columns[4],
                columns[5],
            )
            # the sources are not handed over: nothing may enable peer access here
            return gathering.GatherProgram(spans, device, [], [destination], scenario, **shape).run

        return make

    def foreach(memory: Any) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            left, right = views(destination, table, 1), views(memory(), table, 0)
            return lambda: torch._foreach_copy_(left, right)

        return make

    own_context = scenario in ("ipc-reader", "ipc-masked")
    if case != "strided":
        nbytes = min(source.numel(), destination.numel())
        yield "one copy", lambda: lambda: destination[:nbytes].copy_(source[:nbytes], non_blocking=True)
        yield "foreach", foreach(lambda: source)
    if own_context:
        yield "gather, no peer access asked for", raw()
    else:
        yield "gather", program("gather")
    if case == str(1 << 20) and scenario in ("same", "peer"):
        for block in (16 << 10, 32 << 10, 128 << 10, 512 << 10):
            yield f"gather, block {block >> 10} KiB", raw(block=block)
        for words, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 16)):
            yield f"gather, {words} words, {warps} warps", raw(words=words, warps=warps)
    if device != source.device and case != "strided":
        yield "foreach on memory said to be local", foreach(lambda: claimed(source, device))


def measure(run: Callable[[], Any], device: Any, seconds: float = 2.0) -> dict[str, float]:
    import torch

    times, posts = [], []
    until = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < 10 and time.perf_counter() < until):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        posts.append(time.perf_counter() - started)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        if time.perf_counter() > until + seconds:
            break
    return {
        "ms": statistics.median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "post_ms": statistics.median(posts) * 1e3,
    }


# ---------------------------------------------------------------------- processes


def emit(row: dict[str, Any]) -> None:
    print("ROW " + json.dumps(row), flush=True)


def own(device: int, nbytes: int) -> None:
    """The owner's process: fills memory, writes where it is, waits for its input to end."""
    import torch

    from rdt_core import cudadriver

    torch.cuda.set_device(device)
    tensor = cudadriver.allocate(nbytes, device).tensor()
    fill(tensor)
    torch.cuda.synchronize()
    handle, offset = cudadriver.export(tensor.data_ptr(), device)
    print(json.dumps({"handle": handle.hex(), "offset": offset}), flush=True)
    sys.stdin.read()


def read(scenario: str, cases: list[str], args: argparse.Namespace) -> None:
    """The reader's process: runs all cases of a scenario."""
    import torch

    from rdt_core import cudadriver

    _, owner, reader, ipc = SCENARIOS[scenario]
    tables = {case: pieces(case, args.total, args.cap) for case in cases}
    torch.cuda.set_device(reader)
    device = torch.device("cuda", reader)
    nbytes, room = (-(-max(extent(table, side) for table in tables.values()) // 256) * 256 for side in (0, 1))
    process = None
    try:
        if ipc:
            environment = dict(os.environ)
            # the owner sees every device, whatever the reader sees
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            if "OWNER_VISIBLE_DEVICES" in environment:
                environment["CUDA_VISIBLE_DEVICES"] = environment["OWNER_VISIBLE_DEVICES"]
            process = subprocess.Popen(
                [sys.executable, __file__, "--owner", str(owner), "--bytes", str(nbytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            opened_at = owner if scenario in ("ipc-same",) else reader
            memory = cudadriver.open_exported(bytes.fromhex(found["handle"]), found["offset"], nbytes, opened_at)
            address = memory.address
            emit({"scenario": scenario, "note": f"reachable by the reader's kernels as opened: "
                  f"{cudadriver.reachable(address, reader)}"})  # fmt: skip
            source = memory.tensor()
            emit(
                {"scenario": scenario, "note": f"torch says the memory lies on {source.device}, the reader on {device}"}
            )
        else:
            with torch.cuda.device(owner):
                source = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{owner}")
                fill(source)
                torch.cuda.synchronize()
            address = source.data_ptr()
        destination = torch.empty(room + GAP, dtype=torch.uint8, device=device)
        for case, table in tables.items():
            moved = sum(row[4] * row[5] for row in table)
            for name, make in variants(scenario, case, table, source, destination, address):
                row: dict[str, Any] = {
                    "scenario": scenario, "case": case, "variant": name, "pieces": len(table), "bytes": moved
                }  # fmt: skip
                if time.time() > args.deadline:
                    emit(row | {"error": "out of time"})
                    continue
                try:
                    destination.zero_()
                    # on a stream of its own, as a link's transfers are
                    with torch.cuda.stream(torch.cuda.Stream(device)):
                        torch.cuda.synchronize(device)
                        started = time.perf_counter()
                        run = make()
                        row["make_ms"] = (time.perf_counter() - started) * 1e3
                        run()
                        torch.cuda.synchronize(device)
                        difference = "" if name == "one copy" else wrong(table, destination)
                        if difference:
                            emit(row | {"error": f"WRONG BYTES: {difference}"})
                            continue
                        row |= measure(run, device)
                        del run
                    moved_now = min(source.numel(), destination.numel()) if name == "one copy" else moved
                    row["gb_s"] = moved_now / row["ms"] / 1e6
                    row["us_piece"] = row["ms"] * 1e3 / (1 if name == "one copy" else len(table))
                    emit(row)
                except Exception as error:
                    emit(row | {"error": f"{type(error).__name__}: {str(error)[:300]}"})
                    torch.cuda.synchronize(device)  # raises if the context is gone: the rest would only repeat it
    finally:
        if process is not None:
            process.kill()
            process.wait()


def gpus() -> int:
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=170, help="for everything")
    parser.add_argument("--total", type=int, default=2 * GIB, help="bytes of the cases of equal pieces")
    parser.add_argument("--cap", type=int, default=24 * GIB, help="bytes of the model's case")
    parser.add_argument("--scenarios", default="", help=f"of {', '.join(SCENARIOS)}; default: by the number of GPUs")
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    parser.add_argument("--cases", default="", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.owner is not None:
        own(args.owner, args.bytes)
        return
    if args.scenario:
        read(args.scenario, args.cases.split(","), args)
        return

    end = time.time() + args.seconds
    count = gpus()
    all_cases = [*map(str, SIZES), "qwen", "strided"]
    few = [str(1 << 20), str(64 << 10), "qwen"]
    plan = {"same": all_cases, "ipc-same": few} if count < 2 else {
        "peer": all_cases, "ipc-reader": few[:1], "ipc-masked": few[:1]
    }  # fmt: skip
    if args.scenarios:
        plan = dict.fromkeys(args.scenarios.split(","), all_cases)
    rows: list[dict[str, Any]] = []
    for place, (scenario, cases) in enumerate(plan.items()):
        if SCENARIOS[scenario][0] > count:
            rows.append({"scenario": scenario, "error": f"needs {SCENARIOS[scenario][0]} GPUs, found {count}"})
            continue
        left = end - time.time()
        if left < 15:
            rows.append({"scenario": scenario, "error": "out of time"})
            continue
        # the first scenario is the largest
        share = left if place + 1 == len(plan) else left * (0.55 if place == 0 else 0.5)
        rows += run_scenario(scenario, cases, args, share)
    show(rows, count)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gather.json").write_text(json.dumps({"gpus": count, "rows": rows}, indent=1))


def run_scenario(scenario: str, cases: list[str], args: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    environment = dict(os.environ)
    if scenario == "ipc-masked":
        if "CUDA_VISIBLE_DEVICES" in environment:
            environment["OWNER_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"]
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    command = [
        sys.executable, __file__, "--scenario", scenario, "--cases", ",".join(cases),
        "--deadline", str(time.time() + seconds - 8), "--total", str(args.total), "--cap", str(args.cap),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    killer = threading.Timer(seconds, os.killpg, (process.pid, 9))
    killer.start()
    errors: list[str] = []
    assert process.stderr is not None
    assert process.stdout is not None
    drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    drain.start()
    rows = []
    for line in process.stdout:
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
            print(line[4:].strip()[:300], flush=True)
    code = process.wait()
    killer.cancel()
    drain.join(5)
    if code:
        tail = "".join(errors)[-600:]
        rows.append({"scenario": scenario, "error": f"the process ended with {code}: {tail}"})
        print(rows[-1], flush=True)
    return rows


def show(rows: list[dict[str, Any]], count: int) -> None:
    print(f"\n{count} GPUs; median of up to 10, all bytes of the pieces over host time from posting to landed")
    print(f"{'scenario':11} {'case':>9} {'pieces':>7} {'variant':36} {'GB/s':>8} {'us/piece':>9} {'ms':>9} {'post ms':>8}"
          f" {'make ms':>8}")  # fmt: skip
    for row in rows:
        case = row.get("case", "")
        label = f"{int(case) >> 10} KiB" if case.isdigit() else case
        head = f"{row['scenario']:11} {label:>9} {row.get('pieces', ''):>7} {row.get('variant', ''):36} "
        if "ms" in row:
            print(f"{head}{row['gb_s']:8.1f} {row['us_piece']:9.2f} {row['ms']:9.2f} {row['post_ms']:8.2f}"
                  f" {row['make_ms']:8.1f}")  # fmt: skip
        else:
            print(f"{head}{row.get('note') or row.get('error')}")


if __name__ == "__main__":
    main()
