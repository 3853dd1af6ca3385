"""`bench`: what it says beside its seconds, and the machine's profile that it keeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import grid  # noqa: E402
import targets  # noqa: E402


def cells(espalier, model, cache, *words, repetitions=1):
    outcome = espalier("bench", "--model", model, "--splits", "24/8", "--n", 3, "--repetitions", repetitions, *words, "--json",
                       env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    return outcome.json["cells"], outcome.stderr


def rates(path):
    return [entry["flops_per_second"] for entry in json.loads(path.read_text())["matrix"]]


def test_every_run_stands_beside_the_rate_of_products_about_then(espalier, model_of, tmp_path):
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path, repetitions=2)
    for schedule, runs in cell["runs"].items():
        assert len(runs) == len(cell["schedules"]["product_flops_per_second"][schedule]) == 2
        assert min(cell["schedules"]["product_flops_per_second"][schedule]) > 0
    assert cell["profile_flops_per_second"] > 0 and cell["fitted_steps"] == 0


def test_auto_says_whose_plan_it_runs(espalier, model_of, tmp_path):
    """Everything fits one wave: packed. Under a budget of a few rows nothing but trunks and waves of auto's own choosing may be left,
    and what is named then has the same rows."""
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path)
    assert cell["same_plan"] == cell["chosen"] == "packed"
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path, "--token-budget", 12)
    same, rows = cell["same_plan"], cell["schedules"]["rows"]
    assert same is None or rows[same] == rows["auto"]
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path, "--share", "off")
    assert cell["same_plan"] == "dense"


def test_a_schedule_that_is_named_is_timed_against_dense_alone(espalier, model_of, tmp_path):
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path, "--schedule", "phased")
    assert cell["seconds"]["packed"] is None and cell["runs"]["packed"] is None and cell["schedules"]["rows"]["packed"] is None
    assert cell["seconds"]["auto"] == cell["seconds"]["phased"] > 0 and cell["chosen"] == "phased" and cell["gradient_error"] < 1e-5
    assert cell["speedup"] == cell["seconds"]["dense"] / cell["seconds"]["phased"] and cell["schedules"]["rows"]["phased"] < cell["schedules"]["rows"]["dense"]
    (cell,), _ = cells(espalier, model_of("qwen3_tied"), tmp_path, "--schedule", "dense")
    assert cell["seconds"]["auto"] == cell["seconds"]["dense"] and cell["seconds"]["phased"] is None


def test_a_profile_taken_on_a_busy_machine_is_measured_again(espalier, model_of, tmp_path):
    """Rates a hundredth of those found before: products run faster now than the profile says, whatever else the machine does."""
    cells(espalier, model_of("qwen3_tied"), tmp_path)
    path, = (tmp_path / "espalier").glob("machine-*")  # beside it lies the rate of the disk
    first, profile = rates(path), json.loads(path.read_text())
    for entry in profile["matrix"]:
        entry["flops_per_second"] /= 100
    path.write_text(json.dumps(profile))
    _, stderr = cells(espalier, model_of("qwen3_tied"), tmp_path)
    assert "measuring it again" in stderr
    assert rates(path)[-1] > 10 * first[-1] / 100


def test_a_row_above_its_ceiling_is_told_with_the_schedule_that_was_slow():
    def row(prefix, dense):
        return {"prefix": prefix, "suffix": 10, "n": 2, "ceiling": 1.4, "seconds": {"dense": dense, "auto": 1.0, "phased": 1.0},
                "schedules": {"flops": {"dense": 1.4, "auto": 1.0, "phased": 1.0}}}

    assert grid.beyond_ceiling([row(10, 1.4), row(20, 1.5), row(30, 1.3)]) == []
    told = " ".join(grid.beyond_ceiling([row(10, 1.4), row(20, 1.4), row(30, 2.8)]))
    assert told.startswith("The row 30/10, N = 2, is above 1.2") and "dense 0.50, auto 1.00, phased 1.00" in told


def test_the_page_keeps_what_was_written_by_hand():
    page = (ROOT / "docs/performance.md").read_text()
    kept = grid.by_hand(page)
    assert (kept[0], kept[-2:]) == (grid.BY_HAND, [grid.END, ""]) and "### Recurrent layers" in kept
    assert "\n".join(kept) in page and grid.by_hand("# Performance") == []


def test_a_target_s_summary_counts_its_cases():
    def row(name, measured, rounds, met):
        return {"name": name, "target": "?", "bound": ">= 0.9", "measured": measured, "rounds": rounds, "met": met}

    lines = targets.summary([row("flops", 0.8, 5, False), row("flops", 1.5, 5, True), row("flops", 1, 2, True), row("gone", 2, 5, True)])
    assert lines[2:] == ["| FLOP rate of a step over that of a matrix product | >= 0.9 | 0.8 .. 1.5 | 1 of 3, 1 with too few rounds |",
                         "| ? | >= 0.9 | 2 | 1 of 1 |"]


def test_equal_bits_finds_none_that_differ(program):
    """Of a few rollouts: generate, every schedule, layouts and instruction sets. The page says what it found in a million tokens."""
    done = subprocess.run([sys.executable, ROOT / "bench/equal_bits.py", "--tokens", "4096", "--dtypes", "float32", "--build", Path(program).parent],
                          capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| float32")]
    assert done.returncode == 0 and len(lines) >= 12, done.stdout + done.stderr
    assert all(line.split("|")[4].strip() == "0" for line in lines)
