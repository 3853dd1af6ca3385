"""Shared prompts in Megatron-Core on CPUs (gloo), beside the unmodified model through the same schedule.

Float64: 1e-10 of a parameter's own gradient, as promised everywhere; usually 1e-15. Float32: at most twice as far from float64 as the unmodified
model is. One launch for each version and number of ranks runs the cases that were selected.
"""

import sys
from pathlib import Path

import pytest
import rank_processes

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import CASES, DAILY, FAULTS, OLDEST, SINCE_0_17  # noqa: E402
from versions import ABSENT, has, of_cases, pythons, ranks_in  # noqa: E402

FLOAT64 = 1e-10
IMPORTED = ("cpu", "recurrent_kernels", "models", "steps")  # before forks, in this order


def cases():
    """(version, ranks, name), the last version with all cases."""
    versions = list(pythons())
    return [(version, ranks, name) for version in versions for ranks, of_ranks in CASES.items() for name in of_ranks
            if not name.startswith(("fault_", "another_order", "refused_", "verify")) and (version == versions[-1] or name in OLDEST.get(ranks, ()))]


def lacking(version, ranks, name):
    """The reason why a version cannot run a case, or ""."""
    if "M" in CASES[ranks][name].get("pattern", "") and not has(version, "einops"):
        return "einops is not installed beside Megatron-Core: tools/setup.sh tests installs it (tools/requirements-megatron.txt)"
    old = [int(part) for part in version.split(".")[:2]] < [0, 17]
    return f"Megatron-Core {version}: {SINCE_0_17[name]}" if old and name in SINCE_0_17 else ""


def skip_where_lacking(version, ranks, name):
    reason = lacking(version, ranks, name)
    if reason:
        pytest.skip(reason)


def of_every_day(version, ranks, name):
    return name in DAILY.get(ranks, ())


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """results(version, ranks, name) -> the numbers of each rank, for a case of this run."""
    made, wanted = {}, set()
    for item in request.session.items:
        if item.function is test_gradients_are_those_of_the_unmodified_model:
            wanted.add(tuple(item.callspec.params["case"]))
        elif item.function is test_cases_of_every_day:
            wanted.update(case for case in cases() if of_every_day(*case))
        elif item.function is test_deliberate_faults_are_noticed:
            wanted.add((list(pythons())[-1], FAULTS[item.callspec.params["fault"]][0], f"fault_{item.callspec.params['fault']}"))
        elif item.function is test_verify_compares_new_regimes_and_stops_all_ranks:
            wanted.add((list(pythons())[-1], *item.callspec.params["case"]))
        elif item.function is test_layouts_that_cannot_be_shared_are_refused_by_name:
            wanted.add((list(pythons())[-1], 2, item.callspec.params["name"]))
        elif item.function is test_ranks_of_a_replica_must_have_the_same_rollouts:
            wanted.add((list(pythons())[-1], 2, "another_order"))

    def find(version, ranks, name):
        if (version, ranks) not in made:
            names = [name for name in CASES[ranks] if (version, ranks, name) in wanted and not lacking(version, ranks, name)]
            made[version, ranks] = of_cases(ranks_in(pythons()[version], *IMPORTED), tmp_path_factory.mktemp(f"megatron-{version}-{ranks}"), ranks, names)
        found = made[version, ranks][name]
        assert not isinstance(found, str), found
        rank_processes.spent += sum(numbers.pop("seconds", 0.) for numbers in found)
        return found

    return find


def judge(name, numbers):
    print(name, numbers)
    assert numbers["tensors"] > 3 and numbers.get("after", 0) == 0, "plain calls of an attached model are Megatron's own"
    assert numbers.get("unshared", 0) == 0, "a step that is not shared is the trainer's own to the last bit"
    if "floors" in numbers:
        shared, plain = numbers["floors"]
        assert 0 < shared <= 2 * plain
    else:
        assert numbers["gradient"] <= max(FLOAT64, numbers.get("tolerance", 0)) and numbers["loss"] <= FLOAT64 and numbers["scores"] <= FLOAT64
    assert numbers.get("loads", True), "expert biases move by these counts"
    assert numbers.get("logged", 0) <= 1e-5, "Megatron keeps these sums in float32"
    run, without = numbers["rows"]
    assert run < .75 * without if numbers["shared"] else run == without


@pytest.fixture
def of_this_day(results):
    """[(case, its numbers)] of the cases of every day. They run before the test, whose seconds are few, so that every share has it (tools/tiers.py)."""
    return [(case, results(*case)) for case in cases() if of_every_day(*case)]


@pytest.mark.skipif(not pythons(), reason=ABSENT)
def test_cases_of_every_day(of_this_day):
    for case, found in of_this_day:
        for numbers in found:
            judge(case, numbers)


@pytest.mark.parametrize("case", [case for case in cases() if not of_every_day(*case)], ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_the_unmodified_model(results, case):
    version, ranks, name = case
    skip_where_lacking(*case)
    found = results(*case)
    for numbers in found:
        judge(case, numbers)
    assert sum(numbers["scored"] for numbers in found) > 0 or "ddp" in CASES[ranks][name]


@pytest.mark.skipif(not pythons(), reason=ABSENT)
@pytest.mark.parametrize("fault", FAULTS)
def test_deliberate_faults_are_noticed(results, fault):
    ranks, _ = FAULTS[fault]
    skip_where_lacking(list(pythons())[-1], ranks, f"fault_{fault}")
    assert max(numbers["gradient"] for numbers in results(list(pythons())[-1], ranks, f"fault_{fault}")) > 1e-3


@pytest.mark.skipif(not pythons(), reason=ABSENT)
@pytest.mark.parametrize("case", [(ranks, name) for ranks in CASES for name in CASES[ranks] if name.startswith("verify")], ids=lambda case: case[1])
def test_verify_compares_new_regimes_and_stops_all_ranks(results, case):
    """Float32. The third step's fault is on the last rank alone; gradients of the step that failed are not left behind."""
    ranks, name = case
    skip_where_lacking(list(pythons())[-1], ranks, name)
    for numbers in results(list(pythons())[-1], ranks, name):
        print(numbers)
        assert numbers["tables"] == ["pass", None, "pass"] and numbers["verified"] == [True] * 3 and 1e-9 < numbers["floor"] < 1e-3
        assert numbers["same"] and numbers["restored"] and numbers["error"][0] == "verification"
    if name == "verify_distributed_overlap":  # data parallel ranks compare their own gradients
        assert [rank["error"][1] == "another rank" for rank in results(list(pythons())[-1], ranks, name)] == [True, False]


@pytest.mark.skipif(not pythons(), reason=ABSENT)
def test_ranks_of_a_replica_must_have_the_same_rollouts(results):
    """Otherwise they would wait for each other, or compute something else."""
    assert [rank["error"] for rank in results(list(pythons())[-1], 2, "another_order")] == [["rollouts", 3]] * 2


@pytest.mark.skipif(not pythons(), reason=ABSENT)
@pytest.mark.parametrize("name", [name for name in CASES[2] if name.startswith("refused_")])
def test_layouts_that_cannot_be_shared_are_refused_by_name(results, name):
    for numbers in results(list(pythons())[-1], 2, name):
        assert numbers["error"] == [CASES[2][name]["refused"], "unsupported", 4]
        assert numbers["named"] or name == "refused_mrope_cp", "the remedy there is another number of ranks"


@pytest.mark.parametrize("version", list(pythons()))
def test_settings_that_cannot_be_shared_are_refused_by_name(tmp_path, version):
    found, = ranks_in(pythons()[version], *IMPORTED).written("alone.py", tmp_path, 1, [])
    for name, error in found["fields"].items():
        assert error and error["where"] == f"config.{name}" and name in error["remedy"] and error["kind"] == "unsupported" and error["exit_code"] == 4, name
    assert found["usual"] == [None, None] and found["evaluated"] is None
    for error in [*found["routers"], *found["modules"].values()]:
        assert error and error["kind"] == "unsupported", found
    assert found["arguments"] == dict(no_rollouts=3, no_prompt=3, large_id=3, no_loss=2, no_rows=2, no_scalar=2, images=4, no_experts=3)
    assert found["splits"]
    for (of_one, one), (of_many, many), (counted, _) in found["waits"]:
        assert one == 1 < many and of_one == of_many, "the host waits for a wave"
        assert counted == of_many + many, "a wait is counted"
