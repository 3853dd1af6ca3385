"""Losses that couple rollouts: phased_step with `sets` against the loss of the whole batch, dense, in float64."""

import pytest
import torch

import espalier
import espalier.hf
import hf_models
from hf_models import all_float64, batch, gradients, make, worst

ALLOWED = 1e-10  # relative to a parameter's gradient: some 300 rows of sums over 64 columns with roundings of 1e-16
ROLLOUTS = batch(groups=((53, (17, 5, 12, 9)), (21, (7, 3))), stem=0)
PAIRS = [[0, 1], [3, 2], [4, 5]]
EVERYTHING = [[0, 1, 2, 3, 4, 5]]


def sums_of(wave, kind):
    return {i: getattr(wave, kind)[wave.rollout == i].sum() for i in wave.rollouts}


def preference(wave):
    """A DPO-like loss of each whole pair, and an entropy of its first answer."""
    logps, entropies = sums_of(wave, "logprobs"), sums_of(wave, "entropies")
    out = 0
    for a, b in PAIRS:
        assert (a in logps) == (b in logps), "a pair was cut"
        if a in logps:
            out = out - torch.nn.functional.logsigmoid(.1 * (logps[a] - logps[b])) - .01 * entropies[a] * logps[b]
    return out


def listwise(wave):
    """One softmax over all rollouts."""
    logps = sums_of(wave, "logprobs")
    assert sorted(logps) == EVERYTHING[0]
    return -torch.log_softmax(.1 * torch.stack([logps[i] for i in sorted(logps)]), 0)[2]


def mixed(wave):
    """A pair, and others that each have their own term."""
    logps = sums_of(wave, "logprobs")
    own = sum((i + 1) * logps[i] for i in logps if i > 1) / 20
    return own - torch.nn.functional.logsigmoid(logps[0] - logps[1]) if 0 in logps else own + 0 * wave.logprobs.sum()


CASES = {"pairs": (preference, PAIRS), "list": (listwise, EVERYTHING), "one pair": (mixed, [[1, 0]])}


def dense(model, loss):
    """Every rollout alone, and then the loss of all their log-probs."""
    rollout, position, logprobs, entropies = [], [], [], []
    for i, record in enumerate(ROLLOUTS):
        prompt, response = record["prompt_ids"], record["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
        logp = torch.log_softmax(logits, -1)
        logprobs.append(logp.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
        rollout.append(torch.full((len(response),), i))
        position.append(torch.arange(len(response)))
    value = loss(hf_models.PlainWave(list(range(len(ROLLOUTS))), *map(torch.cat, (rollout, position, logprobs, entropies))))
    value.backward()
    return float(value.detach())


@pytest.mark.parametrize("schedule", ["shared", "dense"])
@pytest.mark.parametrize("wave_tokens", [4096, 80, 24])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(case, wave_tokens, schedule):
    loss, sets = CASES[case]
    with all_float64():
        model = make("Qwen3")
        wanted_loss = dense(model, loss)
        wanted = gradients(model)
        result = espalier.hf.phased_step(model, ROLLOUTS, loss, sets=sets, wave_tokens=wave_tokens, schedule=schedule)
    assert worst(gradients(model), wanted)[0] <= ALLOWED
    assert result.loss == pytest.approx(wanted_loss, abs=1e-10)
    if wave_tokens == 4096 and schedule == "shared":
        assert result.rows < result.rows_without_sharing / 2  # one pass
    if wave_tokens == 24 and schedule == "dense":
        assert result.rows > result.rows_without_sharing  # some sets took two


def test_the_first_step_is_verified_with_whole_sets():
    model = make("Llama", dtype=torch.float32)
    result = hf_models.shared_step(model, ROLLOUTS, preference, sets=PAIRS, wave_tokens=24, verify=True)
    assert result.verification.verdict == "pass"


@pytest.mark.parametrize("sets", [[[0, 9]], [[0, 1], [1, 2]], [[0, "a"]], [3], [[-1, 0]]])
def test_sets_that_are_none_are_refused(sets):
    with pytest.raises(espalier.Error, match="sets"):
        espalier.hf.phased_step(make("Llama"), ROLLOUTS, preference, sets=sets)


def test_without_sets_a_loss_sees_what_a_wave_holds():
    with pytest.raises(AssertionError, match="a pair was cut"):
        hf_models.shared_step(make("Llama"), ROLLOUTS, preference, wave_tokens=24)


@pytest.mark.parametrize("field, value, words", [("branch", "b", "shared_tokens"), ("loss_unit", "trajectory", "sets")])
def test_rollouts_whose_records_share_tokens_or_sequences_are_refused(field, value, words):
    model = make("Llama")
    rollouts = [dict(rollout) for rollout in ROLLOUTS]
    rollouts[2][field] = value
    with pytest.raises(espalier.Unsupported, match=rf"rollouts\[2\]\['{field}'\].*{words}"):
        espalier.hf.phased_step(model, rollouts, mixed)
