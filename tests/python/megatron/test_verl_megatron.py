"""verl's real Megatron worker on CPUs (gloo), its own engine beside the shared one: two updates with PPO, KL and entropy, old log-probs before each.

Float64: 1e-10 of a parameter's own gradient. It runs where verl is installed beside Megatron-Core (tools/requirements-verl.txt).
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from versions import environment, pythons, ranks_in  # noqa: E402

FLOAT64 = 1e-10
SHARED = {1: ("one rank", "full recompute", "verify"), 2: ("dp", "tp", "pp", "vpp"), 4: ("tp pp tied",)}
OWN_PATH = ("nothing shared", "an option of FSDP")


@functools.cache
def python():
    """The Python with Megatron-Core that has verl and mbridge, or None."""
    code = "import importlib.util as u; exit(not all(u.find_spec(name) for name in ('verl', 'mbridge', 'megatron')))"
    return next((one for one in reversed(pythons().values()) if subprocess.run([one, "-c", code], env=environment()).returncode == 0), None)


pytestmark = pytest.mark.skipif(python() is None, reason="verl and mbridge are not installed beside Megatron-Core (tools/requirements-verl.txt)")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """results(ranks) -> [{name: numbers} of each rank] of the cases that were selected."""
    made = {}
    wanted = {item.callspec.params["case"] for item in request.session.items if item.module is request.module}

    def find(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"verl-{ranks}")
            names = [name for of_ranks, name in wanted if of_ranks == ranks]
            made[ranks] = ranks_in(python(), "verl_world").written("verl_ranks.py", folder, ranks, names)
        return made[ranks]

    return find


@pytest.mark.parametrize("case", [(ranks, name) for ranks, names in SHARED.items() for name in names], ids=lambda case: case[1])
def test_updates_and_log_probs_are_verl_s_own(results, case):
    ranks, name = case
    found = [rank[name] for rank in results(ranks)]
    for numbers in found:
        print(numbers)
        assert numbers["engine"] == "SharedMegatronEngine" and max(numbers["gradients"]) <= FLOAT64 and numbers["weights"] <= FLOAT64
        assert len(numbers["gradients"]) == 2 and numbers["scores"] <= FLOAT64
        assert numbers["rows"]["run"] < .4 * numbers["rows"]["without_sharing"] and not any("not shared" in note for note in numbers["notes"])
    assert sum(numbers["scored"] for numbers in found) > 0
    plain, shared = next(numbers["losses"] for numbers in found if numbers["losses"][0])
    for a, b in zip(plain, shared):
        assert abs(a["loss"][0] - b["loss"][0]) <= 1e-6 * abs(a["loss"][0]), "verl adds its metrics up in float32"
        assert b["espalier/rows_run"][0] < .4 * b["espalier/rows_without_sharing"][0]
    tables = [note for note in found[0]["notes"] if "the first update" in note]
    assert len(tables) == (name == "verify") and all("pass" in table for table in tables)


@pytest.mark.parametrize("case", [(1, name) for name in OWN_PATH], ids=lambda case: case[1])
def test_verl_s_own_path_runs_to_the_last_bit(results, case):
    numbers = results(1)[0][case[1]]
    assert numbers["same"] and numbers["rows"] == {"run": 0, "without_sharing": 0}
    assert len(numbers["notes"]) == (case[1] == "an option of FSDP")
