"""The choice between shared and dense, from the plan's predictions for this model and these rollouts, and the cost of calls from Python.

In a small model the rows cost less than the calls. A plan's prediction includes an overhead for every call of a layer (rollouts.py);
attention over shared rows adds calls of a kernel (attention.py), forward and backward.
"""

from espalier.hf import dense

SECONDS_PER_CALL = 250e-6  # forward and backward of one call in one layer; 100e-6 to 240e-6 was measured on small models


def schedule(asked, plan, rollouts, layers, wave_tokens, kernels):
    """Returns "dense", "packed" (no trunk) or "phased". `kernels`: the module that runs attention (espalier.rows.attention.kernels_for)."""
    shared = "phased" if any(item.trunk for item in plan.items) else "packed"
    if asked != "auto":
        return "dense" if asked == "dense" else shared
    return "dense" if dense_is_faster(plan, rollouts, layers, wave_tokens, kernels) else shared


def dense_is_faster(plan, rollouts, layers, wave_tokens, kernels):
    if rollouts.lengths.max() > wave_tokens:
        return False
    predicted, depths, calls = plan.json["predicted"], [], 0
    for item in plan.items:
        depths.append(depths[item.parent] + 1 if item.parent >= 0 else 0)
        calls += kernels.count(item.runs, depths[-1])
    batches = dense.batches_of(rollouts.lengths, wave_tokens)
    padded = sum(len(batch) * int(rollouts.lengths[batch].max()) for batch in batches) / int(rollouts.lengths.sum())
    shared = predicted["chosen"]["seconds"] + layers * calls * SECONDS_PER_CALL
    return padded * predicted["dense"]["seconds"] < shared
