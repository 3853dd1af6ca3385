"""A run that saves after every step, killed again and again: a random rank at a random moment, then continued.

    tools/python bench/kill_ranks.py [--kills 200] [--seed 1]

After a kill the other ranks must end with exit code 7 within --comm-timeout, and what is on disk must be the whole checkpoint of a step
that is not before the last one. One kill of ten comes before anything is saved, often before the ranks have found each other. Layouts
take turns, so that a run goes on under another one. Ends with exit code 1 and what was wrong at the first fault.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from make_model import groups_of_four, make_model, write_records  # noqa: E402

LAYOUTS = [["--dp", "2"], ["--tp", "2"], ["--cp", "2"], ["--pp", "2"], ["--dp", "2", "--shard", "optimizer"], ["--tp", "2", "--dp", "2"]]
TIMEOUT = 10  # seconds
SLACK = 30  # to notice, tell and end, on a busy machine


def start(program, ranks, words):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([str(program), *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             env={**shared, "RANK": str(rank)}) for rank in range(ranks)]


def step_on_disk(out):
    """Of a checkpoint that must be whole: 0 where there is none yet."""
    if not out.exists():
        return 0
    state = json.loads((out / "espalier/state.json").read_text())
    tensors = {**load_file(out / "model.safetensors"), **load_file(out / "espalier/state.safetensors")}
    assert all(numpy.isfinite(values).all() for values in tensors.values()), "numbers that are none"
    return state["step"]


def kill_once(program, words, out, layout, before, chance):
    ranks = max(1, int(numpy.prod([int(n) for axis, n in zip(layout[::2], layout[1::2]) if axis != "--shard"])))
    run = start(program, ranks, [*words, *layout] + (["--resume", out] if before else []))
    try:
        until = time.monotonic() + 120
        patience = chance.uniform(0, 1.5)  # from the moment that something new was saved, or from the start
        early = chance.random() < 0.1
        while not early and read_step(out) <= before and time.monotonic() < until:
            assert all(rank.poll() is None for rank in run), "".join(rank.communicate()[1] for rank in run)
            time.sleep(0.01)
        time.sleep(patience)
        victim = chance.choice(run)
        victim.send_signal(signal.SIGKILL)
        began = time.monotonic()
        limit = TIMEOUT + SLACK
        told = [rank.communicate(timeout=max(0.1, limit + began - time.monotonic()))[1] for rank in run]
    finally:
        for rank in run:
            if rank.poll() is None:
                rank.kill()
    codes = [rank.returncode for rank in run if rank is not victim]
    assert all(code == 7 for code in codes), f"{layout}: exit codes {codes}: {told}"
    said = sum("communication error" in text for text in told)
    return time.monotonic() - began, said


def read_step(out):
    try:
        return json.loads((out / "espalier/state.json").read_text())["step"]
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many, whatever --kills says")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance, began = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_model("qwen3_tied", folder / "model")
        write_records(groups_of_four(12), folder / "rollouts.jsonl")
        out = folder / "out"
        words = ["train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--mini-batch-size", 8, "--lr", 1e-4,
                 "--epochs", 1000000, "--save-freq", 1, "--comm-timeout", TIMEOUT, "--out", out]
        step, kills, longest, repeated = 0, 0, 0.0, 0
        while kills < arguments.kills and time.monotonic() - began < arguments.seconds:
            seconds, said = kill_once(arguments.program, words, out, LAYOUTS[kills % len(LAYOUTS)], step, chance)
            now = step_on_disk(out)
            assert now >= step, f"step {now} on disk, {step} before"
            step, kills, longest, repeated = now, kills + 1, max(longest, seconds), repeated + (said != 1)
            if kills % 20 == 0:
                print(f"{kills} of {arguments.kills} kills, {step} steps saved, {time.monotonic() - began:.0f} s", file=sys.stderr)
        print(f"{kills} kills, {step} steps saved; every checkpoint whole, the others ended with 7, the slowest after {longest:.1f} s; "
              f"not said once: {repeated}")


if __name__ == "__main__":
    main()
