"""Kept sets of rollouts around a transformers model: log-probs, entropies and gradients against plain autograd, in float64."""

import random

import numpy as np
import pytest
import torch

import espalier
import espalier.hf
import hf_models
from espalier.rows import kept
from espalier.rows.head import TokenStatistics
from hf_models import all_float64, batch, gradients, make, worst

ALLOWED = 1e-10  # relative to a parameter's gradient: some 300 rows of sums over 64 columns with roundings of 1e-16
VOCABULARY = hf_models.COMMON["vocab_size"]


def with_sets(rollouts, seed=3):
    """The rollouts with sets of most tokens. Where siblings part, two have equal sets, the others sets of their own."""
    rng, out = random.Random(seed), []
    for index, record in enumerate(rollouts):
        sets = []
        for t, token in enumerate(record["response_ids"]):
            if t == 0 and index < 2:
                ids = {rollouts[0]["response_ids"][0], rollouts[1]["response_ids"][0], 5, 60}
            else:
                ids = {token, *(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 3, 40])))}
            sets.append(None if rng.random() < .2 else rng.sample(sorted(ids), len(ids)))
        out.append({**record, "kept_ids": sets})
    return out


ROLLOUTS = with_sets(batch(groups=((53, (17, 5, 12, 9)), (21, (7, 3))), stem=2))


def plain(model, rollouts):
    """[(log-probs, entropies)] of each rollout run alone, with the logits outside a set at -infinity."""
    out = []
    for record in rollouts:
        prompt, response = record["prompt_ids"], record["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
        logps, entropies = [], []
        for row, token, ids in zip(logits, response, record.get("kept_ids") or [None] * len(response)):
            ids = list(range(VOCABULARY)) if ids is None else ids
            logp = torch.log_softmax(row[ids], -1)
            logps.append(logp[ids.index(token)])
            entropies.append(-(logp.exp() * logp).sum())
        out.append((torch.stack(logps), torch.stack(entropies)))
    return out


def loss_of(rollout, logprobs, entropies):
    return -(.3 + .1 * rollout) * (logprobs + .1 * logprobs**2).sum() - .05 * entropies.sum()


def loss(wave):
    return sum(loss_of(i, wave.logprobs[wave.rollout == i], wave.entropies[wave.rollout == i]) for i in wave.rollouts)


@pytest.mark.parametrize("schedule,trunk_state", [("shared", "keep"), ("shared", "recompute"), ("dense", "keep")])
@pytest.mark.parametrize("wave_tokens", [4096, 24])
def test_gradients_are_over_the_kept_sets_in_every_plan(wave_tokens, schedule, trunk_state):
    with all_float64():
        model = make("Qwen3")
        wanted_loss = sum(loss_of(i, *values) for i, values in enumerate(plain(model, ROLLOUTS)))
        wanted_loss.backward()
        wanted = gradients(model)
        result = espalier.hf.phased_step(model, ROLLOUTS, loss, wave_tokens=wave_tokens, schedule=schedule, trunk_state=trunk_state)
    assert worst(gradients(model), wanted)[0] <= ALLOWED
    assert result.loss == pytest.approx(float(wanted_loss.detach()), abs=1e-10)


def test_scores_are_over_the_kept_sets_where_a_record_has_some():
    mixed = [record if i % 2 else {k: v for k, v in record.items() if k != "kept_ids"} for i, record in enumerate(ROLLOUTS)]
    with all_float64(), torch.no_grad():
        model = make("Llama")
        found = espalier.hf.score(model, mixed, entropies=True)
        for i, (logprobs, entropies) in enumerate(plain(model, mixed)):
            assert torch.allclose(found.logprobs[i], logprobs, rtol=0, atol=1e-11)
            assert torch.allclose(found.entropies[i], entropies, rtol=0, atol=1e-11)


def test_verify_compares_steps_over_kept_sets():
    with all_float64():
        model = make("Llama")
        result = espalier.hf.phased_step(model, ROLLOUTS, loss, schedule="shared", verify=True)
    assert result.verified


def test_groups_of_sets_give_what_one_group_gives(monkeypatch):
    torch.manual_seed(2)
    logits = torch.randn(7, 50, dtype=torch.float64, requires_grad=True)
    output = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 6])
    sets = [np.array(one) for one in ([], [3, 9, 17], [8], [1, 2, 3, 4, 5, 40], [1, 49], [], [0, 30, 31], list(range(50)), [6, 7])]
    target = torch.tensor([4, 9, 8, 40, 1, 2, 0, 33, 7])
    found = []
    for most in (1 << 20, 6, 1):
        monkeypatch.setattr(kept, "_LOGITS", most)
        groups = kept.EdgeSets(sets, "cpu")
        values = TokenStatistics.apply(logits, output, target, .7, True, groups)
        grad, = torch.autograd.grad(sum(((i + 1) * value.cos()).sum() for i, value in enumerate(values)), logits)
        found.append((len(groups.groups), *values, grad))
    assert [count for count, *_ in found][0] == 1 and found[2][0] == 7
    for other in found[1:]:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found[0][1:], other[1:]))
    assert not found[0][-1][1].nonzero().flatten().tolist()  # a set of one token has nothing to learn
    assert found[0][-1][6].nonzero().flatten().tolist() == [6, 7]
    rows = torch.log_softmax(logits[5] / .7, 0)
    assert found[0][1][7].item() == pytest.approx(rows[33].item(), abs=1e-14)  # a set of everything


@pytest.mark.parametrize("kept_ids,expected", [
    ([[5, 6]], "2 entries, one per response token"), ([[5, 6], [8]], "the sampled token 7 among the kept ids"),
    ([[], [7]], "the sampled token 5 among the kept ids"), ([[5, 97], [7]], "ids below the vocabulary's 97"),
    ("text", "a list with the kept ids"), ([[5, -1], [7]], "")])
def test_sets_of_other_tokens_are_refused_by_rollout_and_token(kept_ids, expected):
    record = {"prompt_ids": [1, 2], "response_ids": [5, 7], "kept_ids": kept_ids}
    with pytest.raises(espalier.Error) as error:
        espalier.hf.logprobs(make("Llama"), [record])
    assert error.value.exit_code == 3 and "rollouts[0]['kept_ids']" in error.value.where and expected in str(error.value)


def test_a_masked_token_outside_its_set_has_none():
    record = {"prompt_ids": [1, 2], "response_ids": [5, 7, 9], "kept_ids": [[5, 6], [8], []], "loss_mask": [1, 0, 0]}
    with torch.no_grad():
        model = make("Llama")
        whole = espalier.hf.logprobs(model, [{**record, "kept_ids": None}])[0]
        found = espalier.hf.logprobs(model, [record])[0]
    assert found[0] > whole[0] and torch.equal(found[1:], whole[1:])
