"""How far espalier.hf.phased_step's gradients are from the dense step's: every model family, with everything that may stand around it, under
every kind of plan, prompts kept and recomputed.

    tools/python bench/phased_errors.py [--families Llama,Qwen3] [--write]

A number is the largest relative distance of a parameter's gradient (or of the loss), in float64; 1e-10 is allowed. Two columns differ:
compiled is beside the same step uncompiled, and autocast is the distance from float32 over the dense step's own under the same
autocast, of which 2 is allowed. DDP, FSDP2 and FSDP1 are two processes with different prompts beside the mean of both dense
gradients. --write puts the tables into docs/python.md. Exit status 1: something is further away than that.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]

import torch  # noqa: E402
import transformers  # noqa: E402

from hf_combinations import AROUND, PLANS, STATES, errors  # noqa: E402
from hf_models import FAMILIES, dense_step, gradients, loss_of, make, run_ranks, shared_step, worst  # noqa: E402

RANKS = {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp1": "FSDP1"}
ALLOWED = {"compiled": 1e-10, "autocast": 2.0}


def compiled(family):
    model, out = make(family, num_hidden_layers=2), {}
    torch._dynamo.reset()
    wrapped = torch.compile(model, backend="aot_eager")
    for name, (rollouts, wave_tokens) in PLANS.items():
        loss = loss_of(rollouts)
        for state in STATES:
            how = dict(wave_tokens=wave_tokens, trunk_state=state)
            shared_step(model, rollouts, loss, **how)
            wanted = gradients(model)
            shared_step(wrapped, rollouts, loss, **how)
            out[name, state] = worst(gradients(model), wanted)[0]
    return out


def smooth_loss_of(rollouts):
    """Without a clip, whose side a rounding can change."""
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(rollouts), generator=generator)
    return lambda wave: -((wave.logprobs + .1 * wave.entropies) * advantages[wave.rollout]).sum() / 50


def autocast(family):
    model, out = make(family, torch.float32), {}
    distance = lambda a, b: float((sum((a[n] - b[n]).square().sum() for n in b) / sum(g.square().sum() for g in b.values())).sqrt())
    for name, (rollouts, wave_tokens) in PLANS.items():
        loss = smooth_loss_of(rollouts)
        dense_step(model, rollouts, loss)
        exact = gradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            dense_step(model, rollouts, loss)
            dense = distance(gradients(model), exact)
            for state in STATES:
                shared_step(model, rollouts, loss, wave_tokens=wave_tokens, trunk_state=state)
                out[name, state] = distance(gradients(model), exact) / dense
    return out


def two_processes(families):
    """{family: {column: {case: error}}}"""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(Path(folder), families, how="brief")
    return {family: {RANKS[kind]: {case: max(rank[family][kind][case] for rank in ranks) for case in cases}
                     for kind, cases in ranks[0][family].items()} for family in families}


def shown(value):
    return f"{value:.2f}" if value > 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def table(head, rows, columns):
    """`rows`: {name: {column: number}}; a cell without one stays empty."""
    lines = [f"| {head} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + [f"| {name} | {' | '.join(shown(of[c]) if c in of else '' for c in columns)} |" for name, of in rows.items()])


def tables(found):
    """`found`: {family: {column: {case: error}}}. By family, the worst over plans; by plan, the worst over families."""
    columns = list(dict.fromkeys(column for of in found.values() for column in of))
    by_family = {family: {column: max(cases.values()) for column, cases in of.items()} for family, of in found.items()}
    by_plan = {f"{plan}, {state}": {column: max(of[column][plan, state] for of in found.values()) for column in columns
                                   if column not in RANKS.values()} for plan in PLANS for state in STATES}
    return f"{table('family', by_family, columns)}\n\n{table('plan', by_plan, [c for c in columns if c not in RANKS.values()])}"


def write(text, page="docs/python.md", block="phased_errors"):
    document = ROOT / page
    begin, end = f"<!-- {block} -->\n", "<!-- end -->\n"
    before, rest = document.read_text().split(begin)
    document.write_text(f"{before}{begin}{text}\n{end}{rest.split(end, 1)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    families, found = arguments.families.split(","), {}
    for family in families:
        found[family] = {name: errors(around(family)) for name, around in AROUND.items()}
        found[family] |= {kind.__name__: kind(family) for kind in (compiled, autocast)}
        print(family, {name: shown(max(cases.values())) for name, cases in found[family].items()}, flush=True)
    for family, columns in two_processes(families).items():
        found[family] |= columns
    text = tables(found)
    print("\n" + text)
    if arguments.write:
        write(text)
    near = lambda column, cases: all(error <= ALLOWED.get(column, 1e-10) for error in cases.values())
    far = [(family, column) for family, of in found.items() for column, cases in of.items() if not near(column, cases)]
    print("\ntoo far: " + ", ".join(map(" ".join, far)) if far else "\nall as near as promised")
    return bool(far)


if __name__ == "__main__":
    sys.exit(main())
