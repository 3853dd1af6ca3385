"""How far gradients are from transformers' own in float64: every family, every kind of plan, in the program and around transformers.

    tools/python bench/family_errors.py [--families qwen3_next,gpt_oss_moe] [--write]

A number is the largest relative distance of a parameter's gradient (comparison.relative_errors) from a dense step of transformers with
one rollout per call; 1e-10 is allowed. Models are those of tests/python/make_model.py, rollouts a tree of depth 3: two documents
behind one system prompt, two questions behind each document, two answers to each question. A row is a family; of several models of one
family it has the worst. --write puts the table into docs/families.md. Exit status 1: something is further away than that.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]

import torch  # noqa: E402
import transformers  # noqa: E402

import objective  # noqa: E402
import oracle  # noqa: E402
from comparison import FLOAT64_RELATIVE, Trained, relative_errors  # noqa: E402
from hf_models import all_float64, dense_step, gradients, loss_of, shared_step, worst  # noqa: E402
from make_model import FAMILIES, VOCABULARY, make_model, write_records  # noqa: E402
from phased_errors import table, write  # noqa: E402

PHASED, CUT = {"schedule": "phased"}, 12  # rows of a wave: fewer than the system prompt has, which becomes a chain of trunks
PLANS = {
    "dense": {"schedule": "dense"}, "packed": {"schedule": "packed"}, "phased": PHASED, "waves of one row": {**PHASED, "token-budget": 1},
    "chain of trunks": {**PHASED, "token-budget": CUT, "trunk-state": "keep"},
    "recomputed": {**PHASED, "token-budget": CUT, "trunk-state": "recompute", "wave-state": "recompute"},
    "offloaded": {**PHASED, "token-budget": CUT, "trunk-state": "offload", "path-state": "offload"}}
AROUND = {"hf packed": dict(wave_tokens=4096), "hf phased": dict(wave_tokens=30), "hf recomputed": dict(wave_tokens=30, trunk_state="recompute")}


def tree():
    """Rollouts of a tree of depth 3, with rewards."""
    source = random.Random(7)
    tokens = lambda count: [source.randrange(3, VOCABULARY) for _ in range(count)]
    system, records = tokens(26), []
    for document in (tokens(14), tokens(9)):
        for question in (tokens(5), tokens(8)):
            records += [dict(prompt_ids=system + document + question, response_ids=tokens(count), loss_mask=[1] * count, reward=source.uniform(-1, 1))
                        for count in (7, 4)]
    return records


def program(*arguments):
    run = subprocess.run([ROOT / "build/espalier", *map(str, arguments)], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return types.SimpleNamespace(json=json.loads(run.stdout) if "--json" in arguments else None)


def in_the_program(directory, records, folder):
    """{plan: worst distance}"""
    path, resolved = write_records(records, folder / "rollouts.jsonl"), objective.resolve({})
    model = oracle.load_model(directory, torch.float64)
    exact = oracle.gradients(model, records, objective.advantages(records, resolved), resolved)[2]
    return {name: max(relative_errors(Trained(program, directory, path, folder / name.replace(" ", "_"), **plan).gradients, exact).values())
            for name, plan in PLANS.items()}


def around_transformers(directory, records):
    """{plan: worst distance} of espalier.hf, whose loss is that of hf_models."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").train()
    oracle.run_experts_one_by_one(model)
    rollouts = [{name: record[name] for name in ("prompt_ids", "response_ids")} for record in records]
    loss, out = loss_of(rollouts), {}
    with all_float64():
        dense_step(model, rollouts, loss)
        exact = gradients(model)
        for name, how in AROUND.items():
            shared_step(model, rollouts, loss, **how)
            out[name] = worst(gradients(model), exact)[0]
    return out


def names():
    """{architecture: the family's name in docs/families.md}"""
    rows = (ROOT / "docs/families.md").read_text().split("<!-- families -->\n")[1].split("<!-- end -->")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[1]: row[0] for row in cells}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    family_of, found, records = names(), {}, tree()
    for model in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            directory = make_model(model, Path(folder) / "model")
            errors = in_the_program(directory, records, Path(folder)) | around_transformers(directory, records)
        print(model, {name: f"{error:.0e}" for name, error in errors.items()}, flush=True)
        row = found.setdefault(family_of[FAMILIES[model]["kind"] + "ForCausalLM"], dict.fromkeys(errors, 0.0))
        row.update({name: max(row[name], error) for name, error in errors.items()})
    text = table("family", {family: found[family] for family in family_of.values() if family in found}, [*PLANS, *AROUND])
    print("\n" + text)
    if arguments.write:
        write(text, "docs/families.md", "family_errors")
    far = [f"{family}, {plan}" for family, row in found.items() for plan, error in row.items() if not error <= FLOAT64_RELATIVE]
    print("\ntoo far: " + "; ".join(far) if far else "\nall as near as promised")
    return bool(far)


if __name__ == "__main__":
    sys.exit(main())
