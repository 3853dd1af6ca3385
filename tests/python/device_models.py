"""Every family on a device, held against the CPU in float64.

    python device_models.py program PROGRAM --device cuda        families of the program: train and verify
    python device_models.py transformers --device cuda           models of transformers that hf_sweep.json calls exact: espalier.hf

Prints JSON objects, one a line, each with all that was done so far: {"models": {name: {...}}, "wrong": {name: what}, "refused": {name: why}, "left": [name]}. Exit code 6 if something is wrong.

Of the program: the gradient of a phased step on the device against that of a dense step on the CPU, both in float64, and `verify` in
float32 and bfloat16. Of transformers: the gradient of shared steps on the device in float64 against autograd's of dense calls on the same
device, and a step in bfloat16 with verify=True. (CPU and GPU part where a router's scores are all equal, or where a model computes in
float32.) Models are tiny and random; several processes share the device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLOAT64 = 1e-10  # of a gradient's norm (comparison.py)
UNSUPPORTED = "unsupported"


# ---- the program ----

def told(program, *words):
    """(JSON object, None) or (None, error)."""
    done = subprocess.run([program, *map(str, words), "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}
    if "error" in found or not found:
        error = found.get("error", {"kind": f"exit code {done.returncode}", "expected": "", "got": done.stderr[-300:]})
        return None, error
    return found, None


def family(program, device, name, folder, make_model):
    """What is wrong with one family: (row of the table, what is wrong or "", why it was refused or "")."""
    from safetensors.torch import load_file

    import comparison
    folder.mkdir()
    try:
        model = make_model.make_model(name, folder / "model")
    except AttributeError as missing:
        return {}, "", f"not in this transformers: {missing}"
    rollouts = make_model.write_records(make_model.make_rollouts(7), folder / "rollouts.jsonl")
    row = {}
    for file, on, schedule in (("dense", "cpu", "dense"), ("shared", device, "phased")):
        # Waves of few rows: paths, and gradients that wait for more than one wave.
        budget = ("--token-budget", 48) if schedule == "phased" else ()
        _, error = told(program, "train", "--device", on, "--dtype", "float64", "--schedule", schedule, "--model", model, "--rollouts", rollouts,
                        "--out", folder / file, "--gradients", folder / f"{file}.safetensors", *budget)
        if error is not None:
            text = f"{on}: {error['kind']}: expected {error['expected']}, got {error['got']}"
            return row, "" if error["kind"] == UNSUPPORTED else text, text if error["kind"] == UNSUPPORTED else ""
    exact, found = (load_file(folder / f"{file}.safetensors") for file in ("dense", "shared"))
    errors = comparison.relative_errors(found, exact)
    worst = max(errors, key=errors.get)
    row["float64"] = comparison.total_error(found, exact)
    wrong = [] if row["float64"] <= FLOAT64 else [f"float64: off by {row['float64']:.1e}, most in {worst} by {errors[worst]:.1e}"]
    for dtype in ("float32", "bfloat16"):
        verdict, error = told(program, "verify", "--device", device, "--dtype", dtype, "--model", model, "--rollouts", rollouts)
        if error is not None:
            wrong.append(f"{dtype}: {error['kind']}: {error['got']}")
        else:
            row[dtype] = verdict["worst"]["ratio"]
            if verdict["verdict"] != "pass" or verdict["gradient_norm"] == 0:
                wrong.append(f"{dtype}: {verdict['verdict']}, {verdict['worst']}, gradient {verdict['gradient_norm']}")
    return row, "; ".join(wrong), ""


def of_program(program, device, names, processes):
    """Yields what is known of all families, in their order, whenever one is done."""
    import make_model
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        name_of = {pool.submit(family, program, device, name, Path(folder) / name, make_model): name for name in names}
        rows = {}
        for done in as_completed(name_of):
            error = done.exception()  # each family is judged, whatever another one does
            rows[name_of[done]] = done.result() if error is None else ({}, f"{type(error).__name__}: {error}"[:600], "")
            yield {name: rows[name] for name in names if name in rows}


def families():
    import make_model
    return list(make_model.FAMILIES)


# ---- transformers ----

def of_transformers(device, names, seconds):
    """Of one process: yields (name, row, wrong, refused), until the seconds are over."""
    import torch

    import espalier
    import hf_every_model as tiny
    from hf_models import all_float64, dense_step, gradients, loss_of, shared_step
    loss, end = loss_of(tiny.ROLLOUTS, device=device), time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            return
        row, wrong = {}, []
        if name not in tiny.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            yield name, row, "", "not in this transformers"
            continue
        try:
            model = tiny.build(name).to(device)
            with all_float64():
                with torch.device(device):
                    dense_step(model, tiny.ROLLOUTS, loss)
                exact = gradients(model)
                for plan, (wave_tokens, trunk_state) in tiny.PLANS.items():
                    shared_step(model, tiny.ROLLOUTS, loss, wave_tokens=wave_tokens, trunk_state=trunk_state)
                    row[plan] = tiny.distance(gradients(model), exact)
            wrong += [f"{plan}: off by {far:.1e}" for plan, far in row.items() if not far <= tiny.BOUND]
            model = model.to(torch.bfloat16)
            espalier.hf.phased_step(model, tiny.ROLLOUTS, loss, schedule="shared", verify=True)
        except espalier.Unsupported as refusal:
            yield name, row, "", str(refusal)
            continue
        except Exception as error:  # each model is judged, whatever another one does
            wrong.append(f"{type(error).__name__}: {error}"[:600])
        yield name, row, "; ".join(wrong), ""


def exact_names():
    import hf_every_model
    return hf_every_model.table()["exact"]


def in_processes(device, names, processes, seconds):
    parts = [names[i::processes] for i in range(processes)]
    command = [sys.executable, __file__, "transformers", "--device", device, "--one-process", "--seconds", str(seconds), "--only"]
    running = [subprocess.Popen([*command, ",".join(part)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for part in parts if part]
    rows = {}
    for process, part in zip(running, filter(None, parts)):
        printed, errors = process.communicate()
        for line in printed.splitlines():
            if line.startswith("["):
                name, *row = json.loads(line)
                rows[name] = row
        if process.returncode != 0:
            rows[f"of {', '.join(sorted(set(part) - set(rows)))}"] = ({}, f"one ended its process: {errors[-300:]}", "")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("program", "transformers"))
    parser.add_argument("program", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--processes", type=int, default=min(12, max(1, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--seconds", type=float, default=600, help="of transformers: models that are then left do not run")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names, start = list(filter(None, arguments.only.split(","))), time.monotonic()
    if arguments.one_process:
        for found in of_transformers(arguments.device, names, arguments.seconds):
            print(json.dumps(found), flush=True)
        return 0
    of_program_itself = arguments.which == "program"
    names = names or (families() if of_program_itself else exact_names())
    for rows in of_program(arguments.program, arguments.device, names, arguments.processes) if of_program_itself else [
            in_processes(arguments.device, names, arguments.processes, arguments.seconds)]:
        wrong = {name: what for name, (_, what, _) in rows.items() if what}
        refused = {name: why for name, (_, _, why) in rows.items() if why}
        print(json.dumps({"models": {name: row for name, (row, _, _) in rows.items()}, "wrong": wrong, "refused": refused,
                          "left": sorted(set(names) - set(rows)), "seconds": round(time.monotonic() - start, 1)}), flush=True)
    for name, what in wrong.items():
        print(f"{name}: {what}", file=sys.stderr)
    return 6 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
