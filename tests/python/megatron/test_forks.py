"""Launches of ranks (forks.py): one that hangs or fails ends all ranks with what they started, and the message says where."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from versions import Ranks, of_cases  # noqa: E402

PROGRAM = """
import json, os, subprocess, sys, time
folder, rank, world, what = sys.argv[1:]
print(f"rank {rank}, case {what}", flush=True)
if what == "slow" and rank == "1":
    child = subprocess.Popen(["sleep", "100"])
    open(f"{folder}/child", "w").write(str(child.pid))
    child.wait()
if what == "broken":
    if rank == "1":
        raise ValueError("nothing to run")
    time.sleep(100)
json.dump([rank, world, what, os.getppid()], open(f"{folder}/{rank}.json", "w"))
"""


@pytest.fixture
def ranks(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = Ranks(sys.executable)
    yield lambda what, **how: ranks.written(tmp_path / "program.py", tmp_path, 2, [what], **how)
    ranks.end()


def ended(stat):
    """True if the process of a file /proc/PID/stat has ended."""
    try:
        return stat.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ranks_write_what_they_found(ranks):
    (*zero, parent), (*one, other) = ranks("quick")
    assert (zero, one) == (["0", "2", "quick"], ["1", "2", "quick"]) and parent == other


def test_a_launch_that_hangs_is_killed_with_its_case_named(ranks, tmp_path):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1: killed: it still ran after 4 seconds(.|\n)*rank 1, case slow"):
        ranks("slow", limit=4)
    assert time.monotonic() - start < 60
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    while not ended(child) and time.monotonic() - start < 60:
        time.sleep(.05)
    assert ended(child), "processes that a rank started end, too"
    assert ranks("quick")[0][0] == "0", "the next launch runs"


def test_a_rank_that_fails_ends_the_others(ranks):
    with pytest.raises(AssertionError, match=r"rank 0: killed(.|\n)*rank 1: exit 1(.|\n)*ValueError: nothing to run"):
        ranks("broken", patience=.5)


class Launches:
    """In place of Ranks: each of `failing` ends its launch; rank 0 has finished such a case."""

    def __init__(self, failing):
        self.failing, self.made = failing, []

    def run(self, program, ranks, limit):
        codes = []
        for folder, rank, _, *names in ranks:
            ends = next((at for at, name in enumerate(names) if name in self.failing), len(names))
            (folder / f"{rank}.json").write_text(json.dumps({name: rank for name in names[:ends + (rank == 0)]}))
            codes.append(int(ends < len(names)))
            self.made.append(names)
        if any(codes) and len(ranks) > 1:
            codes = [code or None for code in codes]
        return codes, [f"rank {rank} of {' '.join(names)}" for _, rank, _, *names in ranks], 0.


@pytest.mark.parametrize("world,names", [(2, ["pp", "pp_latent", "tp", "tp_sp", "cp"]), (1, ["dense", "tied", "experts", "mamba", "lora"])])
def test_a_case_that_fails_leaves_the_others_their_results(tmp_path, world, names):
    launches = Launches([names[1], names[3]] if world > 1 else [])
    found = of_cases(launches, tmp_path, world, names)
    assert found.keys() == set(names)
    for name in names:
        if name in launches.failing:
            assert "rank 0 of" in found[name] and "rank 1 of" in found[name] and name in found[name]
        else:
            assert found[name] == list(range(world))
    assert len(launches.made) == (6 if world > 1 else 2)
