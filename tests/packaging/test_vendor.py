"""`ci/vendor`: a copy under another name works where the original cannot be imported, and what changed in it is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rdt_testbed.warm import Warm

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NAME = "my_fork.weights"
VERSION = (ROOT / "VERSION").read_text().strip()

# run first in a process in which the copy has to do without the original
BLOCK = """
import sys
class Block:
    names = {"rdt_core", "rdt_megatron", "rdt_sglang", "rdt_vllm"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
"""

# every module of the adapters that needs no framework, a plan by the command, and a client by the path that a string holds
USE = """
import contextlib, importlib, io, json, pkgutil
originals = set(Block.names)
Block.names |= {"megatron", "sglang", "vllm"}  # not the question here, and slow
count = 0
for package in ("rdt_megatron", "rdt_sglang", "rdt_vllm"):
    root = importlib.import_module(f"my_fork.weights.{package}")
    assert root.__file__.startswith(sys.argv[1]), root.__file__
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if not {"vllm", "sglang", "megatron"} & set(str(error.name).split(".")):
                raise
        count += 1
from my_fork.weights.rdt_core import cli, verifycommand
def shown(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.app(arguments, standalone_mode=False)
    return out.getvalue()
plan = json.loads(shown("plan", "--model", "smollm2-135m", "--trainer", "fsdp:ranks=2", "--layers", "2", "--json"))
client = verifycommand.client_of("vllm", "http://localhost:1", {})
bad = [name for name in sys.modules if name.partition(".")[0] in originals]
version = shown("--version").splitlines()[0]
print(json.dumps({"count": count, "plan": plan, "version": version, "bad": bad, "client": type(client).__module__}))
"""


def vendor(*arguments: str | Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command of a checkout, in this process."""
    loader = importlib.machinery.SourceFileLoader("ci_vendor", str(root / "ci" / "vendor"))
    spec = importlib.util.spec_from_loader("ci_vendor", loader)
    module = importlib.util.module_from_spec(spec)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setitem(sys.modules, "ci_vendor", module)
        patch.setattr(sys, "argv", ["ci/vendor", *map(str, arguments)])
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
        try:
            status = module.main()
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of its own that holds a copy of every package."""
    folder = tmp_path_factory.mktemp("fork")
    source = folder / "src"
    (source / "my_fork").mkdir(parents=True)
    (source / "my_fork" / "__init__.py").write_text('"""A training framework."""\n')
    packages = [part for name in ("megatron", "sglang", "vllm") for part in ("--package", f"rdt-{name}")]
    done = vendor(source, "--as", NAME, *packages)
    assert done.returncode == 0, done.stderr
    points = (source / "my_fork" / "weights" / "rdt-entry-points.toml").read_text()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling>=1.27"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "my-fork"\nversion = "3.0"\n{points}'
        '[tool.hatch.build.targets.wheel]\npackages = ["src/my_fork"]\n'
    )
    return folder


@pytest.fixture(scope="module")
def installed(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where that project is installed, alone."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", str(folder), str(fork)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_copy_plans_where_the_original_cannot_be_imported(installed: Path) -> None:
    command = [sys.executable, "-c", BLOCK + USE, str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bad"] == []
    assert found["version"] == f"rdt {VERSION} (vendored)"
    assert found["client"] == f"{NAME}.rdt_vllm.clients"
    assert found["count"] > 30
    assert found["plan"]


VLLM = """
from importlib.metadata import entry_points
(point,) = [one for one in entry_points(group="vllm.general_plugins") if one.value.startswith("my_fork.")]
point.load()()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
assert Factory._registry["rdt"]().__module__ == "my_fork.weights.rdt_vllm.engine"
"""

SGLANG = """
from importlib.metadata import entry_points
(point,) = [one for one in entry_points(group="sglang.srt.plugins") if one.value.startswith("my_fork.")]
import sglang.srt.entrypoints.engine, sglang.srt.ray.engine
point.load()()
assert sglang.srt.ray.engine.SchedulerActor.__ray_metadata__.modified_class.__module__ == "my_fork.weights.rdt_sglang.actor"
"""


@pytest.mark.engine
@pytest.mark.parametrize(("engine", "code"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_a_plugin_registers_under_the_new_name(
    installed: Path, engine: str, code: str, request: pytest.FixtureRequest
) -> None:
    warm: Warm | None = request.getfixturevalue(f"warm_{engine}")
    command = [warm.python if warm else sys.executable, "-c", BLOCK + code, str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


# --- what happens to a copy, with a small checkout of its own


CODE = '''"""Uses `rdt_core.a`."""

from rdt_core.a import value
import rdt_core.a as a

PATHS = ("rdt_core.a:value", f"rdt_core.{a.__name__} {{}} rdt_core", "packages/rdt_core/a.py", "not_rdt_core", "rdt-core")
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with two small packages."""
    root = tmp_path / "checkout"
    (root / "ci").mkdir(parents=True)
    shutil.copy(ROOT / "ci" / "vendor", root / "ci")
    (root / "VERSION").write_text("1.2.3\n")
    (root / "LICENSE").write_text("As you like.\n")
    for package, files in {
        "rdt-core": {"__init__": "", "distributions": 'VENDORED = ""\n', "a": "value = 1\n"},
        "rdt-vllm": {"__init__": "", "b": CODE},
    }.items():
        module = root / "packages" / package / "src" / package.replace("-", "_")
        module.mkdir(parents=True)
        for name, text in files.items():
            (module / f"{name}.py").write_text(text)
        (module.parents[1] / "pyproject.toml").write_text(f'[project]\nname = "{package}"\ndependencies = []\n')
    return root


@pytest.fixture
def copy(checkout: Path, tmp_path: Path) -> Path:
    """The folder of a copy of it."""
    done = vendor(tmp_path / "fork", "--as", "host.rdt", "--package", "rdt-vllm", root=checkout)
    assert done.returncode == 0, done.stderr
    return tmp_path / "fork" / "host" / "rdt"


def test_names_and_only_names_are_replaced(copy: Path) -> None:
    text = (copy / "rdt_vllm" / "b.py").read_text()
    assert text == (
        CODE.replace("from rdt_core", "from host.rdt.rdt_core")
        .replace("import rdt_core", "import host.rdt.rdt_core")
        .replace('"rdt_core', '"host.rdt.rdt_core')
        .replace("} rdt_core", "} host.rdt.rdt_core")
        .replace("`rdt_core", "`host.rdt.rdt_core")
    )
    assert (copy / "rdt_core" / "distributions.py").read_text() == 'VENDORED = "1.2.3"\n'
    assert (copy / "rdt_core" / "a.py").read_text() == "value = 1\n"
    assert (copy / "__init__.py").exists()
    assert (copy.parent / "__init__.py").exists()
    assert (copy / "LICENSE").read_text() == "As you like.\n"
    lock = json.loads((copy / "rdt-vendored.json").read_text())
    assert (lock["rdt"], lock["as"], lock["packages"]) == ("1.2.3", "host.rdt", ["rdt-core", "rdt-vllm"])
    assert len(lock["files"]) == 7


@pytest.mark.parametrize("line", ["import rdt_core", "import rdt_core.a", "rdt_core = 3", "x = 3\nx.rdt_core()"])
def test_a_name_that_cannot_be_replaced_is_refused(checkout: Path, tmp_path: Path, line: str) -> None:
    (checkout / "packages" / "rdt-core" / "src" / "rdt_core" / "a.py").write_text(f"{line}\n")
    done = vendor(tmp_path / "fork", "--as", "host", root=checkout)
    assert done.returncode == 1
    assert f"rdt_core/a.py:{line.count(chr(10)) + 1}: `{line.splitlines()[-1]}` uses rdt_core as a name" in done.stderr
    assert not (tmp_path / "fork").exists()


def test_a_copy_as_it_was_made_passes(checkout: Path, copy: Path) -> None:
    done = vendor(copy.parents[1], "--check", root=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("7 files as copied from rdt 1.2.3")
    assert "from this checkout" not in done.stdout


def test_a_copy_can_be_checked_without_the_checkout(checkout: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "tools" / "ci").mkdir(parents=True)
    shutil.copy(checkout / "ci" / "vendor", tmp_path / "tools" / "ci")
    assert vendor(copy.parents[1], "--check", root=tmp_path / "tools").returncode == 0
    (copy / "rdt_core" / "a.py").write_text("value = 2\n")
    assert vendor(copy.parents[1], "--check", root=tmp_path / "tools").returncode == 1


def test_local_changes_are_named(checkout: Path, copy: Path) -> None:
    (copy / "rdt_core" / "a.py").write_text("value = 2\n")
    (copy / "rdt_core" / "distributions.py").unlink()
    (copy / "rdt_vllm" / "mine.py").write_text("")
    (copy / "own.py").write_text("")  # beside the packages is the host's own
    done = vendor(copy.parents[1], "--check", root=checkout)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"changed: {copy}/rdt_core/a.py",
        f"missing: {copy}/rdt_core/distributions.py",
        f"added: {copy}/rdt_vllm/mine.py",
    ]
    assert "3 files are not as copied from rdt 1.2.3" in done.stderr
    assert "changed, missing: --sync --force makes them anew" in done.stderr
    assert "added: remove them" in done.stderr


def test_a_file_that_was_added_stays_and_the_way_out_is_said(checkout: Path, copy: Path) -> None:
    mine = copy / "rdt_vllm" / "mine.py"
    mine.write_text("")
    for arguments in (("--sync",), ("--sync", "--force"), ("--as", "host.rdt", "--force")):
        done = vendor(copy.parents[1], *arguments, root=checkout)
        assert done.returncode == 0, done.stderr
        assert f"added: {mine}\n" in done.stdout
        assert "remove them, or move them out" in done.stdout
    done = vendor(copy.parents[1], "--check", root=checkout)
    assert (done.returncode, done.stdout) == (1, f"added: {mine}\n")
    assert done.stderr.startswith("ci/vendor: 1 file is not as copied from rdt 1.2.3; the way out:\nadded: remove them")
    assert "--force" not in done.stderr
    mine.rename(copy / "mine.py")
    assert vendor(copy.parents[1], "--check", root=checkout).returncode == 0
    assert "added:" not in vendor(copy.parents[1], "--sync", root=checkout).stdout


def test_one_file_is_one_file(checkout: Path, copy: Path) -> None:
    (checkout / "packages" / "rdt-core" / "src" / "rdt_core" / "a.py").write_text("value = 2\n")
    assert "1 file differs from this checkout" in vendor(copy.parents[1], "--check", root=checkout).stdout
    assert ": 1 file written or removed" in vendor(copy.parents[1], "--sync", root=checkout).stdout


def test_sync_takes_over_what_changed_here(checkout: Path, copy: Path) -> None:
    core = checkout / "packages" / "rdt-core" / "src" / "rdt_core"
    (core / "a.py").unlink()
    (core / "c.py").write_text('NAME = "rdt_core.c"\n')
    (checkout / "VERSION").write_text("1.3.0\n")
    stale = vendor(copy.parents[1], "--check", root=checkout)
    assert stale.returncode == 0
    assert "3 files differ from this checkout" in stale.stdout
    done = vendor(copy.parents[1], "--sync", root=checkout)
    assert done.returncode == 0, done.stderr
    assert not (copy / "rdt_core" / "a.py").exists()
    assert (copy / "rdt_core" / "c.py").read_text() == 'NAME = "host.rdt.rdt_core.c"\n'
    assert (copy / "rdt_core" / "distributions.py").read_text() == 'VENDORED = "1.3.0"\n'
    assert "from rdt 1.3.0" in vendor(copy.parents[1], "--check", root=checkout).stdout


@pytest.mark.parametrize("what", ["changed", "removed here", "added there"])
def test_sync_never_overwrites_local_changes_unless_forced(checkout: Path, copy: Path, what: str) -> None:
    here, there = checkout / "packages" / "rdt-core" / "src" / "rdt_core", copy / "rdt_core"
    name = "c.py" if what == "added there" else "a.py"
    (there / name).write_text("value = 'mine'\n")
    if what == "removed here":
        (here / name).unlink()
    else:
        (here / name).write_text("value = 2\n")
    done = vendor(copy.parents[1], "--sync", root=checkout)
    assert done.returncode == 1
    assert "overwrite them with --force" in done.stderr
    assert f"rdt_core/{name}" in done.stderr
    assert (there / name).read_text() == "value = 'mine'\n"
    done = vendor(copy.parents[1], "--sync", "--force", root=checkout)
    assert done.returncode == 0, done.stderr
    assert not (there / name).exists() if what == "removed here" else (there / name).read_text() == "value = 2\n"
    assert vendor(copy.parents[1], "--check", root=checkout).returncode == 0


def test_a_local_change_of_what_stayed_the_same_here_stops_a_sync(checkout: Path, copy: Path) -> None:
    (copy / "rdt_core" / "a.py").write_text("value = 'mine'\n")
    done = vendor(copy.parents[1], "--sync", root=checkout)
    assert done.returncode == 1
    assert "changed: rdt_core/a.py" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "wrong"),
    [
        (("--sync",), 1, "one copy is expected below"),
        (("--check", "--as", "host"), 1, "no copy was made there"),
        (("--as", "not-a-name"), 1, "is no dotted module name"),
        (("--as", "class.rdt"), 1, "is no dotted module name"),
        ((), 2, "the first copy needs --as NAME"),
        (("--check", "--force", "--as", "host"), 2, "--check changes nothing"),
    ],
)
def test_commands_that_cannot_work(
    checkout: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, wrong: str
) -> None:
    done = vendor(tmp_path / "fork", *arguments, root=checkout)
    assert done.returncode == status
    assert wrong in done.stderr
    assert not (tmp_path / "fork").exists()


def test_what_is_in_the_way_is_named(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "fork" / "host" / "rdt_core" / "a.py"
    other.parent.mkdir(parents=True)
    other.write_text("value = 0\n")
    done = vendor(tmp_path / "fork", "--as", "host", root=checkout)
    assert done.returncode == 1
    assert "in the way: rdt_core/a.py" in done.stderr
    assert other.read_text() == "value = 0\n"


@pytest.mark.parametrize("absolute", [False, True])
def test_a_lock_that_names_a_file_outside_the_copy_removes_nothing(
    checkout: Path, copy: Path, tmp_path: Path, absolute: bool
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("mine")
    lock = json.loads((copy / "rdt-vendored.json").read_text())
    name = str(other) if absolute else "../../../other.txt"
    assert (copy / name).samefile(other)
    lock["files"][name] = {"source": "", "copy": hashlib.sha256(b"mine").hexdigest()}
    (copy / "rdt-vendored.json").write_text(json.dumps(lock))
    for arguments in (("--sync",), ("--sync", "--force"), ("--check",), ("--as", "host.rdt")):
        done = vendor(copy.parents[1], *arguments, root=checkout)
        assert done.returncode == 1
        assert "lies outside the copy" in done.stderr
    assert other.read_text() == "mine"


def test_a_lock_that_is_cut_or_of_another_form_is_refused(checkout: Path, copy: Path) -> None:
    path = copy / "rdt-vendored.json"
    whole = path.read_text()
    lock = json.loads(whole)
    wrong = [whole[:100], "[]", "{}", *(json.dumps({**lock, key: 3}) for key in lock)]
    wrong += [json.dumps({**lock, "files": {"LICENSE": {}}}), json.dumps({**lock, "packages": ["other"]})]
    wrong += [json.dumps({**lock, "as": "host.class"})]
    for text in wrong:
        path.write_text(text)
        for arguments in (("--check",), ("--sync",), ("--sync", "--as", "host.rdt")):
            done = vendor(copy.parents[1], *arguments, root=checkout)
            assert done.returncode == 1
            assert str(path) in done.stderr
            assert "from the commit that made the copy" in done.stderr
    path.unlink()
    done = vendor(copy.parents[1], "--as", "host.rdt", "--force", root=checkout)
    assert done.returncode == 0, done.stderr
