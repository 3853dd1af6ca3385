"""Does a killed run leave anything of what it offloaded? Kills `espalier train --trunk-state offload` at random moments.

    python bench/spill_kills.py [--program build/espalier] [--kills 100]

Each run is killed (SIGKILL) at a random moment after it opened its file; then --spill-dir must be empty and --out absent. At the end a
run that is left alone must clear away the lock of the killed ones and give the gradient of one that keeps everything, bit for bit. Prints
what was found; exit code 1 if anything stayed.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT
from memory_sweep import SHAPE, TINY, write_model, write_rollouts


def command(program, folder, state, out, *more):
    return [str(word) for word in (program, "train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--out", folder / out,
                                   "--gradients", folder / f"{out}.safetensors", "--schedule", "phased", "--token-budget", 512, "--threads", 1,
                                   "--trunk-state", state, "--wave-state", "keep", "--spill-dir", folder / "spill", "--quiet", *more)]


def spills(process, folder):
    links = f"/proc/{process.pid}/fd"
    try:
        return any(os.path.realpath(os.path.join(links, name)).startswith(str(folder)) for name in os.listdir(links))
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    draw, left, storing = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory(prefix="espalier-kills-") as name:
        folder = Path(name)
        spill = folder / "spill"
        spill.mkdir()
        write_model(folder / "model", dict(SHAPE, **TINY))
        write_rollouts(folder / "rollouts.jsonl", TINY["vocab_size"], 4000, 40, 4)
        endless = command(options.program, folder, "offload", "out", "--epochs", 100000)
        for kill in range(options.kills):
            run = subprocess.Popen(endless, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until = time.monotonic() + 120
            while not spills(run, spill) and run.poll() is None and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.3))
            if run.poll() is not None:
                raise SystemExit(f"the run ended by itself with {run.returncode}")
            storing += spills(run, spill)
            run.send_signal(signal.SIGKILL)
            run.wait()
            stayed = [path.name for path in [*spill.iterdir(), *folder.glob("out*")]]
            left += bool(stayed)
            if stayed:
                print(f"kill {kill}: {stayed}", flush=True)
        for state, out in (("offload", "out"), ("keep", "keep")):
            subprocess.run(command(options.program, folder, state, out), check=True, capture_output=True)
        same = (folder / "out.safetensors").read_bytes() == (folder / "keep.safetensors").read_bytes()
        left += bool([*spill.iterdir(), *folder.glob(".out*")])
    print(f"{options.kills} kills, {storing} with the file open: {left} left something; the run after them "
          f"{'gives the bits of keep' if same else 'DIFFERS from keep'}")
    raise SystemExit(1 if left or not same else 0)


if __name__ == "__main__":
    main()
