"""Shared prompts in Megatron-Core on CPUs (gloo), beside the unmodified model through the same schedule.

Float64: 1e-10 of a parameter's own gradient, as promised everywhere; usually 1e-15. Float32: at most twice as far from float64 as the unmodified
model is. One launch for each version and number of ranks runs the cases that were selected.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import CASES, DAILY, OLDEST  # noqa: E402
from versions import ABSENT, outputs_of_ranks, pythons  # noqa: E402

FLOAT64 = 1e-10


def cases():
    """(version, ranks, name), the last version with all cases."""
    versions = list(pythons())
    return [(version, ranks, name) for version in versions for ranks, of_ranks in CASES.items() for name in of_ranks
            if version == versions[-1] or name in OLDEST.get(ranks, ())]


def of_every_day(version, ranks, name):
    return name in DAILY.get(ranks, ())


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """results(version, ranks) -> [{name: numbers} of each rank], for all cases of this run."""
    made, wanted = {}, set()
    for item in request.session.items:
        if item.function is test_gradients_are_those_of_the_unmodified_model:
            wanted.add(tuple(item.callspec.params["case"]))
        elif item.function is test_cases_of_every_day:
            wanted.update(case for case in cases() if of_every_day(*case))

    def find(version, ranks):
        if (version, ranks) not in made:
            names = [name for name in CASES[ranks] if (version, ranks, name) in wanted]
            folder = tmp_path_factory.mktemp(f"megatron-{version}-{ranks}")
            statuses, outputs = outputs_of_ranks(pythons()[version], "ranks.py", folder, ranks, names)
            assert not any(statuses), "\n".join(text[-4000:] for text in outputs)
            made[version, ranks] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        return made[version, ranks]

    return find


def judge(name, numbers):
    print(name, numbers)
    assert numbers["tensors"] > 3 and numbers["after"] == 0, "plain calls of an attached model are Megatron's own"
    if "floors" in numbers:
        shared, plain = numbers["floors"]
        assert 0 < shared <= 2 * plain
    else:
        assert numbers["gradient"] <= FLOAT64 and numbers["loss"] <= FLOAT64 and numbers["scores"] <= FLOAT64
    run, without = numbers["rows"]
    assert run < .75 * without if numbers["shared"] else run == without


@pytest.mark.skipif(not pythons(), reason=ABSENT)
def test_cases_of_every_day(results):
    for version, ranks, name in cases():
        if of_every_day(version, ranks, name):
            for numbers in results(version, ranks):
                judge((version, ranks, name), numbers[name])


@pytest.mark.parametrize("case", [case for case in cases() if not of_every_day(*case)], ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_the_unmodified_model(results, case):
    version, ranks, name = case
    found = [numbers[name] for numbers in results(version, ranks)]
    for numbers in found:
        judge(case, numbers)
    assert sum(numbers["scored"] for numbers in found) > 0
