"""Finds the program, makes models once a session, and runs commands. Without torch and transformers nothing here can run, which is one skip with that reason."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "python")]

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
    config.addinivalue_line("markers", "rounding: judges float32 or bfloat16; repeated under every instruction set")


# Files that take longest. Two processes that share the files get these first, so that none of them is left over at the end.
LONGEST = ("test_parallel", "test_grpo", "test_trl_trainer", "test_recorded_trace", "test_hf_families", "test_wheel", "test_hf_wrappers",
           "test_random_updates", "test_trl_names", "test_trunk_state", "test_train_parity", "test_examples")


def pytest_collection_modifyitems(items):
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


class Outcome:
    def __init__(self, done):
        self.status, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.stdout)

    def __repr__(self):
        return f"exit {self.status}\n--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


@pytest.fixture(scope="session")
def espalier(program):
    """espalier("train", "--model", ...) -> Outcome; the program must end with `expect` (None: any status)."""

    def run(*arguments, expect=0, **settings):
        command = [str(program), *map(str, arguments)]
        outcome = Outcome(subprocess.run(command, capture_output=True, text=True, timeout=300, **settings))
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
