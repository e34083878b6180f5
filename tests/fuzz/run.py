"""Runs one fuzz target under a coverage-guided fuzzer: `python tests/fuzz/run.py TARGET --seconds 300`.

Needs `atheris` (`pip install atheris`, no part of the locked environment). An input that breaks the target is written to
`tests/fuzz/corpus/TARGET/`, where `test_targets.py` replays it. Interesting inputs are kept in `--scratch` between runs.
An allocation far beyond the inputs' size fails at once: the process may take 1 GiB more than it has at its start.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("target", help="name of a function in targets.py")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--scratch", type=Path, help="folder of inputs kept between runs; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        parser.error("atheris is not installed here: pip install atheris")
    sys.path.insert(0, str(HERE.parent))
    with atheris.instrument_imports(include=["rdt_core"]):
        from fuzz.targets import TARGETS
    if options.target not in TARGETS:
        parser.error(f"no target {options.target!r}; there are: {', '.join(TARGETS)}")
    corpus = HERE / "corpus" / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="rdt-fuzz-"))
    scratch.mkdir(parents=True, exist_ok=True)
    target = TARGETS[options.target]
    limits = ["-max_len=400", "-len_control=20", "-timeout=20", f"-max_total_time={options.seconds}"]
    places = [str(scratch), str(corpus), f"-artifact_prefix={corpus}/"]
    arguments = [sys.argv[0], *places, *limits, f"-seed={options.seed}", "-use_value_profile=1", "-print_final_stats=1"]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    atheris.Setup(arguments, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
