"""Rules of NeMo-RL, prime-rl and verl that look at the sampler's log-probs: gradients of `train` against plain autograd on the formulas of
docs/objectives.md, in every plan, also over kept sets. (dppo: test_loss_units.py; verl's own functions: test_verl_names.py.)"""

import functools
import itertools
import math

import pytest
import torch

import oracle
from comparison import FLOAT64_RELATIVE, Trained, relative_errors
from rule_cases import PLANS, case_with

SEED = 67
LOW, HIGH = .8, 1.25


def held(x, low=LOW, high=HIGH):
    return (x.exp() >= low) & (x.exp() <= high)


def mean(x, mask):
    return (x * mask).sum() / mask.sum()


def k3(x):
    return x.exp() - 1 - x


# name: (options, whether the rejected tokens leave the divisor, what is kept of the mask for x = old - roll)
REJECTIONS = {
    "seq-mask-tis": ({"rollout_is": "seq-mask-tis", "rollout_is_floor": .95, "rollout_is_threshold": 1.1}, False,
                     lambda x, mask: held(mean(x, mask), .95, 1.1)),
    "token_k1": ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.1"}, True, lambda x, mask: held(-x, .8, 1.1)),
    "seq_sum_k1": ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_3"}, True, lambda x, mask: held(-(x * mask).sum(), .5, 3)),
    "seq_mean_k3": ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.03"}, True, lambda x, mask: mean(k3(x), mask) <= .03),
    "seq_max_k2,token_k3": ({"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": "0.2,0.05"}, True,
                            lambda x, mask: ((x ** 2 / 2 * mask).max() <= .2) & (k3(x) <= .05)),
    "icepop": ({"policy_loss": "icepop", "icepop_ratio_low": LOW, "icepop_ratio_high": HIGH, "adv_tau": 1.5}, False, None),
}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@pytest.fixture(scope="module")
def case_of(model_of, tmp_path_factory):
    """Returns (model directory, oracle's model, records, their file), with kept sets or without."""
    return functools.cache(lambda kept: case_with(fill, SEED, kept, model_of("qwen3_tied"), tmp_path_factory.mktemp("rules")))


def fill(draw, _, record, logprobs):
    spread = draw.choice([.05, .3])  # some sequences stay whole
    record["advantage"] = [draw.gauss(0, 1) for _ in logprobs]
    record["rollout_logprobs"] = [x + draw.gauss(0, spread) for x in logprobs]
    record["old_logprobs"] = [x + draw.gauss(0, .05) for x in logprobs]


def plain_gradients(model, records, rule, mode):
    """The gradient of the formula, and how many of the tokens with loss it keeps."""
    options, leaves, keep = REJECTIONS[rule]
    model.zero_grad(set_to_none=True)
    terms, divisors, kept = [], [], 0
    for record in records:
        lp = oracle.response_logprobs(model, record)[0]
        old, roll, A, mask = (torch.tensor(record[name], dtype=torch.float64) for name in ("old_logprobs", "rollout_logprobs", "advantage", "loss_mask"))
        if mask.sum() == 0:
            terms.append(lp.sum() * 0), divisors.append(0.)
            continue
        if rule == "icepop":
            inside = held(lp.detach() - roll) * mask
            loss = -1.5 * A * (lp - roll).exp()
        else:
            inside = keep(old - roll, mask) * mask
            ratio = (lp - old).exp()
            loss = torch.maximum(-A * ratio, -A * ratio.clamp(.8, 1.2))
            loss = torch.where(A < 0, torch.minimum(loss, -3 * A), loss) * ((old - roll).exp() if rule == "seq-mask-tis" else 1)
        kept += float(inside.sum())
        terms.append((loss * inside).sum())
        divisors.append(float((inside if leaves else mask).sum()))
    count = len(records)  # sequences without loss are counted, as by verl
    total = {"token-mean": lambda: sum(terms) / math.fsum(divisors), "seq-mean-token-sum": lambda: sum(terms) / count,
             "seq-mean-token-mean": lambda: sum(term / (divisor + 1e-8) for term, divisor in zip(terms, divisors)) / count}[mode]()
    total.backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return oracle.of_files(found, model), kept


@pytest.mark.parametrize("rule, plan", [(rule, plan) for rule in REJECTIONS for plan in range(len(PLANS))])
def test_gradients_are_those_of_the_formula_in_every_plan(rule, plan, espalier, case_of, tmp_path):
    turn = list(REJECTIONS).index(rule) + plan
    directory, model, records, path = case_of(turn % 2 == 1)
    mode = MODES[turn % len(MODES)]
    exact, kept = plain_gradients(model, records, rule, mode)
    assert 0 < kept < sum(sum(record["loss_mask"]) for record in records)
    found = Trained(espalier, directory, path, tmp_path, loss_agg_mode=mode, **REJECTIONS[rule][0], **PLANS[plan])
    errors = relative_errors(found.gradients, exact)
    assert max(errors.values()) <= FLOAT64_RELATIVE, f"seed {SEED}: {max(errors, key=errors.get)} is off by {max(errors.values()):.2e}"


def test_the_rules_differ(case_of):
    """So a run that ignored an option would not pass."""
    _, model, records, _ = case_of(False)
    for one, other in itertools.combinations([plain_gradients(model, records, rule, "token-mean")[0] for rule in REJECTIONS], 2):
        assert max(relative_errors(one, other).values()) > 1e-3
