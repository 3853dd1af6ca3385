"""Finds the program, makes models once a session, and runs commands. Without torch and transformers nothing here can run, which is one skip with that reason."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "python"), str(ROOT / "tools")]

import rank_processes  # noqa: E402
from tiers import Choice  # noqa: E402

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# Processes of pytest-xdist share the processors already.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else max(1, min(2, os.cpu_count() or 1)))
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def pytest_configure(config):
    # A shell ignores Ctrl-C for what it starts in the background, and so would every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "product: all values together, where others have every two; left to make sweep")
    config.addinivalue_line("markers", "rounding: judges float32 or bfloat16; repeated under every instruction set")


# Files that take longest. Two processes that share the files get these first, so that none of them is left over at the end.
LONGEST = ("test_hf_sweep", "test_trl_configurations", "test_trl_sharded", "test_config_members", "test_generate", "test_parallel", "test_grpo", "test_trl_trainer",
           "test_recorded_trace", "test_hf_families", "test_wheel", "test_hf_wrappers", "test_random_updates", "test_trl_names", "test_trunk_state",
           "test_train_parity", "test_examples", "test_lora_modules", "test_hf_states")


def chosen_items(items, choice):
    """The items that a Choice of tools/tiers.py leaves."""
    cases = {}
    for item in items:
        cases.setdefault((item.path, item.parent.name, getattr(item, "originalname", item.name)), []).append(item)
    kept = set()
    for (path, _, name), several in cases.items():
        names = set(choice.cases(f"{path.name}::{name}", [item.nodeid for item in several], product=several[0].get_closest_marker("product") is not None))
        kept.update(item for item in several if item.nodeid in names)
    return [item for item in items if item in kept]


def processor_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + rank_processes.spent + Copies.spent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The report has the seconds of processors, which other work beside it hardly changes."""
    start = processor_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_seconds", f"{processor_seconds() - start:.3f}"))


def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get("ESPALIER_STOP_AT", "inf")):  # tools/run_tests.py --seconds
        pytest.skip("left out: the seconds of this run were over")


def pytest_collection_modifyitems(config, items):
    try:
        choice = Choice(os.environ.get("ESPALIER_SWEEPS", "all"))
    except ValueError as error:
        raise pytest.UsageError(f"ESPALIER_SWEEPS: {error}") from None
    kept = chosen_items(items, choice)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    # This process keeps the compiled tests, which saves seconds of the next run. What it starts leaves nothing in folders of others.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def program():
    named = os.environ.get("ESPALIER_BINARY")
    path = Path(named or ROOT / "build/espalier")
    if not path.is_file():
        if named:  # whoever names the program wants it tested
            pytest.fail(f"ESPALIER_BINARY names {path}, which does not exist")
        pytest.skip("the program is not built: no build/espalier (make builds it)")
    return path


PATIENCE = 300  # seconds


class Copies:
    """Runs of the program as copies of one process (tests/hostile/cli/program_copies.cpp): the start of torch's library is most of a small run. Only in the
    environment that it was started with."""

    spent = 0.0  # seconds of processors of copies that have ended, which are no children of this process

    def __init__(self, path, folder):
        self.out, self.err = folder / "out", folder / "err"
        self.environment = self.now()
        self.process = subprocess.Popen([str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    @staticmethod
    def now():
        return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

    def run(self, words, cwd=None):
        request = [os.fsencode(word) for word in (cwd or os.getcwd(), self.out, self.err, *words)]
        self.process.stdin.write(b"%d\n" % len(request) + b"".join(b"%d\n%s" % (len(text), text) for text in request))
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
            self.process.stdout.readline()
            raise subprocess.TimeoutExpired(words, PATIENCE)
        status, seconds = self.process.stdout.readline().split()
        Copies.spent += float(seconds)
        return subprocess.CompletedProcess(words, int(status), self.out.read_text(), self.err.read_text())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


class Outcome:
    def __init__(self, done):
        self.status, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.stdout)

    def __repr__(self):
        return f"exit {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@pytest.fixture(scope="session")
def copies(program, tmp_path_factory):
    """None where they are not built, or older than the program."""
    path = program.parent / "espalier_copies"
    if not path.is_file() or path.stat().st_mtime < program.stat().st_mtime:
        yield None
        return
    made = Copies(path, tmp_path_factory.mktemp("copies"))
    yield made
    made.end()


@pytest.fixture
def foreign(monkeypatch):
    """foreign("verl.protocol", "DataProto", **members) -> a class that pickles under that name while the test runs."""

    def define(module, name, bases=(), **members):
        parts = module.split(".")
        for i in range(len(parts)):
            part = ".".join(parts[: i + 1])
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        made = type(name, bases, {"__module__": module, "__qualname__": name, **members})
        monkeypatch.setattr(sys.modules[module], name, made, raising=False)
        return made

    return define


@pytest.fixture(scope="session")
def espalier(program, copies):
    """espalier("train", "--model", ...) -> Outcome; the program must end with `expect` (None: any status)."""

    def run(*arguments, expect=0, **settings):
        command = [str(program), *map(str, arguments)]
        if copies and set(settings) <= {"cwd"} and copies.environment == copies.now():
            outcome = Outcome(copies.run(command[1:], **settings))
        else:
            outcome = Outcome(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **settings))
        assert expect is None or outcome.status == expect, f"{' '.join(command)}\nwanted exit {expect}, got {outcome!r}"
        return outcome

    return run


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """model_of(family) -> directory of a random model of that family, made once."""
    made = {}

    def find(family):
        if family not in made:
            from make_model import make_model
            made[family] = make_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return find


@pytest.fixture(scope="module")
def prepared(request, model_of, tmp_path_factory):
    """A model's directory, the model in float64, records with every series and their file, as trainers have them: no empty response,
    no group of one, one temperature. Drawn by the module's SEED."""
    import oracle
    from make_model import add_series, make_rollouts, write_records
    seed, directory = request.module.SEED, model_of("qwen3_tied")
    model = oracle.load_model(directory, torch.float64)
    records = [{**r, "temperature": 1.0} for r in make_rollouts(seed) if r["response_ids"] and r["group"] != "g1"]
    add_series(records, oracle.score(model, records)[0], seed + 1)
    return directory, model, records, write_records(records, tmp_path_factory.mktemp("prepared") / "rollouts.jsonl")


@pytest.fixture(scope="session")
def stories():
    directory = DATA / "stories260K"
    if not directory.is_dir():
        pytest.skip("../shared/data/stories260K is absent")
    return directory


@pytest.fixture(scope="module")
def server(program, model_of, tmp_path_factory):
    """A server of `espalier serve` in float64 with two tiny models, for clients of the tinker SDK."""
    from serve_process import Server, without_proxies
    without_proxies()
    os.environ["TINKER_API_KEY"] = "tml-local"
    state = tmp_path_factory.mktemp("state") / "state"
    made = Server(program, {"tiny/qwen3": model_of("qwen3_tied"), "tiny/llama": model_of("llama_untied")}, "--dtype", "float64", "--state", state)
    made.state = state
    yield made
    made.end()


@pytest.fixture(scope="module")
def service(server):
    import tinker
    return tinker.ServiceClient(base_url=server.url)
