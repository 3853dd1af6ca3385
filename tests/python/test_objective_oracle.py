"""The oracle's own foundations, by hand-computed numbers: a wrong oracle would make the parity tests worthless."""

import math

import pytest
import torch

import objective
import oracle
from make_model import FAMILIES, make_rollouts


def records_of(rewards, group="a", length=2):
    return [{"group": group, "prompt_ids": [1], "response_ids": [2] * length, "loss_mask": [1] * length, "reward": r} for r in rewards]


def test_grpo_advantage_is_the_standardised_reward():
    found = objective.advantages(records_of([0.0, 1.0, 2.0]), objective.resolve({}))
    assert found[2] == pytest.approx([1 / (1 + 1e-6)] * 2, rel=1e-15)
    assert found[1] == [0.0, 0.0]


def test_a_group_of_one_has_mean_zero_and_deviation_one():
    assert objective.advantages(records_of([3.0]), objective.resolve({}))[0][0] == pytest.approx(3 / (1 + 1e-6), rel=1e-15)
    assert objective.advantages(records_of([3.0]), objective.resolve({"adv-estimator": "rloo"}))[0][0] == 3.0


def test_rloo_subtracts_the_mean_of_the_others():
    found = objective.advantages(records_of([0.0, 1.0, 5.0]), objective.resolve({"adv-estimator": "rloo"}))
    assert found[0][0] == pytest.approx(0 - 3.0, rel=1e-15)


def test_reinforce_plus_plus_discounts_over_loss_tokens_only():
    record = records_of([1.0], length=3)
    record[0]["loss_mask"] = [1, 0, 1]
    found = objective.advantages(record, objective.resolve({"adv-estimator": "reinforce_plus_plus", "gamma": 0.5}))
    # returns 0.5 and 1 at the loss tokens: mean 0.75, variance 0.125
    assert found[0][2] == pytest.approx(0.25 / math.sqrt(0.125 + 1e-8), rel=1e-14)


def test_the_reward_stands_at_the_last_loss_token():
    record = records_of([1.0], length=3)
    record[0]["loss_mask"] = [1, 1, 0]
    assert objective.discounted(record[0], 0.5) == [0.5, 1.0, 0.0]


def test_whitening_equal_numbers_gives_zeros():
    found = objective.advantages(records_of([147.0743517333712], length=12), objective.resolve({"adv-estimator": "reinforce_plus_plus"}))
    assert found == [[0.0] * 12]


def test_a_recorded_advantage_wins_and_its_reward_still_counts():
    records = records_of([1.0, 3.0])
    records[0]["advantage"] = [0.25, -4.0]
    assert objective.advantages(records, objective.resolve({"adv-estimator": "dr_grpo"})) == [[0.25, -4.0], [1.0, 1.0]]


def test_a_group_lies_inside_its_step():
    records = [{**record, "step": step} for record, step in zip(records_of([1.0, 3.0, 7.0]), (4, 4, 0))]
    assert objective.advantages(records, objective.resolve({"adv-estimator": "dr_grpo"})) == [[-1.0] * 2, [1.0] * 2, [7.0] * 2]


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.5, 1.0, -1.2, 0.0), (0.5, 1.0, -0.5, -0.5), (0.5, -1.0, 0.8, 0.0), (1.5, -1.0, 1.5, 1.5), (4.0, -1.0, 3.0, 0.0)])
def test_vanilla_clips_on_the_right_side(ratio, advantage, value, slope):
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = objective.policy_loss(logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64),
                                 torch.ones(1), objective.resolve({}))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(value, rel=1e-14)
    assert float(logprob.grad) == pytest.approx(slope, abs=1e-14)


def test_aggregations_of_two_rollouts():
    series, masks = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    value = lambda mode: float(objective.aggregate(series, masks, [2, 1], objective.resolve({"loss-agg-mode": mode})))
    assert value("token-sum") == 6 and value("token-mean") == 2 and value("seq-mean-token-sum") == 3
    assert value("seq-mean-token-sum-norm") == 1.5
    assert value("seq-mean-token-mean") == pytest.approx(2.25, rel=1e-7)


def test_straight_through_kl_has_the_value_of_k1_and_the_slope_of_k2():
    logprob = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    value = objective.kl_penalty(logprob, torch.zeros(1, dtype=torch.float64), "k1+")
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(0.3) and float(logprob.grad) == pytest.approx(0.3)


def largest_difference(ours, theirs):
    return max(abs(a - b) for xs, ys in zip(ours, theirs) for a, b in zip(xs, ys))


def shift_of_one_rounding(directory, records, exact):
    """The largest change of a log-prob, in float64, when every weight moves by at most float32's rounding, 2^-24 of itself: the largest
    of three draws."""
    shifts = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        model = oracle.load_model(directory, torch.float64)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + (2 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1) * 2**-24)
        shifts.append(largest_difference(oracle.score(model, records)[0], exact))
    return max(shifts)


@pytest.mark.rounding
@pytest.mark.parametrize("family", FAMILIES)
def test_the_float64_model_is_the_one_transformers_ships(family, model_of):
    """float32 log-probs of the unchanged model lie within float32's reach of the float64 ones. A rounding of every weight moves them by
    a shift that the model itself tells (a state that is carried over rows amplifies more than attention does). float32 rounds each
    number on its way between two weights, too: the product, its sum, and a norm's, a rotation's or a gate's dozen operations, 16
    roundings of the same size in all."""
    records, directory = make_rollouts(7), model_of(family)
    exact, _ = oracle.score(oracle.load_model(directory, torch.float64), records)
    plain, _ = oracle.score(oracle.load_model(directory, torch.float32), records)
    assert 0 < largest_difference(plain, exact) < 16 * shift_of_one_rounding(directory, records, exact) < 1e-3


def test_mini_batches_keep_groups_whole_and_follow_first_appearance():
    records = [{"group": g, "prompt_ids": [1]} for g in "abacbc"]
    assert oracle.mini_batches(records, 4) == [[0, 1, 2, 4], [3, 5]]
    assert oracle.mini_batches(records, 0) == [[0, 1, 2, 3, 4, 5]]
