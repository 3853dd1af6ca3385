"""What may stand around a model, times the ways in which a step is cut: how far phased_step's gradients are from the dense step's.

`errors(model)` is the measure of test_hf_families.py and test_hf_wrappers.py, and of bench/phased_errors.py, which runs every
combination.
"""

import random

from hf_models import adapted, all_float64, batch, checkpointed, dense_step, gradients, loss_of, make, shared_step, worst

STATES = ("keep", "recompute")


def walks(seed, n=14):
    """Rollouts that leave each other anywhere, in prompts and in responses; some are beginnings of others."""
    draw = random.Random(seed)
    out = [[draw.randrange(3, 97) for _ in range(40)]]
    for _ in range(n):
        stem = draw.choice(out)
        out.append(stem[:draw.randrange(1, len(stem) + 1)] + [draw.randrange(3, 97) for _ in range(draw.randrange(0, 12))])
    cut = [draw.randrange(1, len(walk) + 1) for walk in out]
    return [dict(prompt_ids=walk[:at], response_ids=walk[at:]) for walk, at in zip(out, cut)]


GROUP = batch(groups=((53, (17, 5, 12)),), stem=0)
PLANS = {  # (rollouts, wave_tokens)
    "one prompt, one wave": (GROUP, 4096),
    "one prompt, several waves": (GROUP, 16),
    "several prompts": (batch(groups=((53, (17, 5, 0, 12)), (21, (7, 1)), (30, (4, 4, 4))), stem=0), 30),
    "responses with a common beginning": (batch(), 16),
    "trees of any depth": (walks(0), 12),
}


def frozen_but_for_its_head(family):
    model = make(family, tie_word_embeddings=False)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


AROUND = {
    "as it is": make,
    "tied": lambda family: make(family, tie_word_embeddings=True),
    "head alone trained": frozen_but_for_its_head,
    "checkpointing": lambda family: checkpointed(make(family)),
    "LoRA": adapted,
    "LoRA, checkpointing": lambda family: checkpointed(adapted(family)),
}


def errors(model, plans=PLANS):
    """{(plan, trunk state): largest relative distance of a parameter's gradient, or of the loss}, in float64."""
    out = {}
    with all_float64():
        for name, (rollouts, wave_tokens) in plans.items():
            loss = loss_of(rollouts)
            wanted_loss = dense_step(model, rollouts, loss)
            wanted = gradients(model)
            for state in STATES:
                result = shared_step(model, rollouts, loss, wave_tokens=wave_tokens, trunk_state=state)
                assert result.rows < result.rows_without_sharing == sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rollouts)
                out[name, state] = max(worst(gradients(model), wanted)[0], abs(result.loss - wanted_loss) / abs(wanted_loss))
    return out
