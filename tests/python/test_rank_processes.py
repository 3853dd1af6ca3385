"""A rank that fails, or that waits for ever, fails the test, with what each printed."""

import pytest

from rank_processes import run_ranks, written_by_ranks

PROGRAM = """
import json, os, sys, time
from pathlib import Path
folder, rank, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
print("rank", rank, "begins", flush=True)
if what == "wait" and rank == "1":
    time.sleep(1000)
assert what != "fail" or rank == "0", "rank 1 is wrong"
(folder / f"{rank}.json").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"], "name": __name__}))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_what_they_write_comes_back(program, tmp_path):
    assert written_by_ranks(program, tmp_path, 2, ["write"], 60) == [{"threads": "1", "name": "__main__"}] * 2


@pytest.mark.parametrize("what,patience,said", [("fail", 60, "rank 1, exit 1:\nrank 1 begins\n.*rank 1 is wrong"), ("wait", 5, "rank 1, exit None:\nrank 1 begins")])
def test_one_that_does_not_end_well_is_told(what, patience, said, program, tmp_path):
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        run_ranks(tmp_path, program, [[tmp_path, rank, what] for rank in range(2)], patience)
