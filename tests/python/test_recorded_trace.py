"""Twenty recorded GRPO updates of a plain dense PyTorch loop, run again by `train` from the same weights and rollouts.

Measured is the movement since the start, |ours - theirs| / |theirs|, against how far the recording itself (float32) lies
from the same loop in float64. A float64 run must find exactly that distance. A float32 run is another draw of the same
rounding errors and may be twice as far from the recording.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from comparison import flags
from conftest import DATA

TRACE = DATA / "trace_grpo20"
LAST = 20
# The recording's own distances are known to the digits that float32 checkpoints leave: at most two in a hundred.
SAME_DISTANCE = 0.02

pytestmark = pytest.mark.skipif(not TRACE.is_dir(), reason="../shared/data/trace_grpo20 is absent")


@pytest.fixture(scope="module")
def recorded():
    return json.loads((TRACE / "trace.json").read_text())


def float64_run_of_the_recorder():
    runs = json.loads((TRACE / "noise_floor.json").read_text())["runs"]
    run, = [r for r in runs if r["run"].startswith("float64")]
    last, = [c for c in run["checkpoints"] if c["step"] == LAST]
    return last


def option_flags(options):
    """The options of the recording under their own names: lists as comma lists, switches only where on."""
    words = {name: ",".join(map(str, value)) if isinstance(value, list) else value
             for name, value in options.items() if value is not False}
    return flags(words)


def movement_distance(found, theirs, start):
    """|ours - theirs| / |theirs - start| over all parameters, in float64."""
    stored = [name for name in theirs if name in found]
    assert len(stored) >= len(start) - 1 and all(name in theirs for name in found), "parameters differ"
    difference = sum(float((found[n].double() - theirs[n].double()).square().sum()) for n in stored)
    movement = sum(float((theirs[n].double() - start[n].double()).square().sum()) for n in stored)
    return (difference / movement) ** 0.5


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.rounding)])
@pytest.mark.parametrize("schedule", ["phased", "dense"])
def test_twenty_updates_end_where_the_recording_ended(dtype, schedule, recorded, espalier, tmp_path):
    run = espalier("train", "--model", TRACE / recorded["model"], "--rollouts", TRACE / recorded["rollouts"], "--out", tmp_path / "out",
                   "--dtype", dtype, "--save-dtype", dtype, "--schedule", schedule, "--threads", 2, "--json",
                   *option_flags(recorded["options"])).json
    assert [s["step"] for s in run["steps"]] == list(range(1, LAST + 1))

    floor = float64_run_of_the_recorder()
    start, theirs = load_file(TRACE / "model/model.safetensors"), load_file(TRACE / "checkpoints/step-000020.safetensors")
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in found.values())
    distance = movement_distance(found, theirs, start)
    loss = max(abs(s["loss"] - t["loss"]) for s, t in zip(run["steps"], recorded["steps"], strict=True))
    norm = max(abs(s["grad_norm"] / t["grad_norm"] - 1) for s, t in zip(run["steps"], recorded["steps"], strict=True))
    wanted = {"movement_rel_l2": distance, "max_abs_loss_diff_so_far": loss, "max_rel_grad_norm_diff_so_far": norm}
    for name, value in wanted.items():
        if dtype == "float64":
            assert value == pytest.approx(floor[name], rel=SAME_DISTANCE), name
        else:
            assert value <= 2 * floor[name], name
