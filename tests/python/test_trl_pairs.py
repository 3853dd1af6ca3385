"""TRL's names two by two: `train` against the gradient of the installed GRPOTrainer's own loss, in float64.

Every case draws a value for each of TRL's names or leaves it out, so that over the cases every two names meet at every two of their
values. A pair that TRL's loss does not have, or that records cannot tell, is refused by name: REFUSED, all of it.
"""

import itertools
import random

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import oracle  # noqa: E402
from comparison import assert_equal_gradients, flags  # noqa: E402
from make_model import write_records  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_trl_names import CASES, trl_gradients  # noqa: E402

SEED = 33
ABSENT = None


def number(low, high):
    return lambda draw: round(draw.uniform(low, high), 3)


# The values of a name; a function draws one.
VALUES = {
    "loss_type": [ABSENT, "grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
    "vllm_importance_sampling_mode": [ABSENT, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "importance_sampling_level": [ABSENT, "token", "sequence"],
    "scale_rewards": [ABSENT, "group", "batch", "none"],
    "epsilon": [ABSENT, number(.05, .35)], "epsilon_high": [ABSENT, number(.1, .5), number(1.1, 5)], "delta": [ABSENT, number(1.01, 1.8)],
    "beta": [ABSENT, number(.05, .5)], "use_bias_correction_kl": [ABSENT, True, False],
    "sapo_temperature_pos": [ABSENT, number(.5, 2)], "sapo_temperature_neg": [ABSENT, number(.5, 2)],
    "vespo_k_pos": [ABSENT, number(.5, 3)], "vespo_lambda_pos": [ABSENT, number(.5, 3)],
    "vespo_k_neg": [ABSENT, number(.5, 3)], "vespo_lambda_neg": [ABSENT, number(.5, 3)],
    "max_completion_length": [ABSENT, lambda draw: draw.randint(14, 99)],
    "num_items_in_batch": [ABSENT, lambda draw: draw.randint(20, 300)],
    "gradient_accumulation_steps": [ABSENT, 1, 2], "steps_per_generation": [ABSENT, 1, 3],
    "entropy_coef": [ABSENT, number(.01, .2)], "off_policy_mask_threshold": [ABSENT, number(0, .3)],
    "vllm_importance_sampling_correction": [ABSENT, True, False],
    "vllm_importance_sampling_clip_max": [ABSENT, number(1.05, 3)], "vllm_importance_sampling_clip_min": [ABSENT, number(.4, .95)],
    "advantage": [ABSENT, "of each token"],  # no name of TRL's, but its loss takes both forms
}
REFUSED = [{"loss_type": kind, "delta": 1.5} for kind in ("cispo", "sapo", "vespo")] + [
    {"loss_type": "vespo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"},  # TRL's trainer refuses these two as well
    {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
    {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, {"entropy_coef": .1, "gradient_accumulation_steps": 2}]


def refused(first, second):
    """Whether two settings, (name, index of its value), may not meet."""
    given = {name: VALUES[name][index] for name, index in (first, second)}
    return any(all(name in given and given[name] is not ABSENT and (callable(given[name]) or given[name] == value) for name, value in pair.items())
               for pair in REFUSED)


def vespo_needs_its_mode(case):
    """With a weight named and no mode TRL's mode is one of the sequence, which vespo does not take."""
    weights = [name for name in case if name.startswith("vllm_") and name != "vllm_importance_sampling_mode" and case[name]]
    return VALUES["loss_type"][case.get("loss_type", 0)] == "vespo" and bool(weights) and not case.get("vllm_importance_sampling_mode")


def covering(draw):
    """Cases {name: index of its value} in which every two settings meet that may."""
    settings = [(name, index) for name, values in VALUES.items() for index in range(len(values))]
    open_pairs = {frozenset(pair) for pair in itertools.combinations(settings, 2) if pair[0][0] != pair[1][0] and not refused(*pair)}
    while open_pairs:
        case = dict(min(open_pairs, key=lambda pair: (sorted(pair), draw.random())))
        names = [name for name in VALUES if name not in case]
        draw.shuffle(names)
        for name in names:
            def gain(index):
                if any(refused((name, index), other) for other in case.items()) or vespo_needs_its_mode({**case, name: index}):
                    return -1, 0
                return sum(frozenset([(name, index), other]) in open_pairs for other in case.items()), draw.random()
            case[name] = max(range(len(VALUES[name])), key=gain)
        met = {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
        assert met & open_pairs, f"no case has {case}"
        open_pairs -= met
        yield case


def drawn(case, draw):
    values = {name: VALUES[name][index] for name, index in case.items()}
    return {name: value(draw) if callable(value) else value for name, value in values.items() if value is not ABSENT}


@pytest.fixture(scope="module")
def files(prepared, tmp_path_factory):
    """(model's directory, the model, {whether advantages are of each token: (records, file)}, log-probs with their graph)."""
    directory, model, records, _ = prepared
    draw, folder = random.Random(SEED), tmp_path_factory.mktemp("pairs")
    records = records[:len(records) // 2 * 2]
    assert min(sum(r["group"] == other["group"] for r in records) for other in records) > 1
    by_token = [{**r, "advantage": [round(draw.gauss(0, 1), 3) for _ in r["response_ids"]]} for r in records]
    pairs = [oracle.response_logprobs(model.train(), record) for record in records]
    model.eval()
    return directory, model, {False: (records, write_records(records, folder / "rewards.jsonl")),
                              True: (by_token, write_records(by_token, folder / "advantages.jsonl"))}, pairs


def arguments(directory, path, names):
    return ("train", "--model", directory, "--rollouts", path, "--dtype", "float64", *flags({n.replace("_", "-"): v for n, v in names.items()}))


def spelt(names):
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in names.items()}


def test_every_two_names_have_the_trainers_gradient(espalier, files, tmp_path):
    directory, model, batches, pairs = files
    draw = random.Random(SEED)
    for number, case in enumerate(covering(draw)):
        names = drawn(case, draw)
        records, path = batches["advantage" in names]
        names.pop("advantage", None)
        exact = trl_gradients(model, records, names, tmp_path / "trl", pairs)
        espalier(*arguments(directory, path, spelt(names)), "--gradients", tmp_path / "g.safetensors")
        try:
            assert_equal_gradients(load_file(tmp_path / "g.safetensors"), exact, SEED)
        except AssertionError as difference:
            raise AssertionError(f"case {number}, {names}: {difference}") from None
    assert number > 40


def test_every_name_is_drawn():
    """A name that train takes with TRL's meaning takes part above."""
    named = {name for names in CASES.values() for name in names}
    assert named - set(VALUES) == set()


@pytest.mark.parametrize("names", REFUSED, ids=lambda names: " ".join(map(str, names.values())))
def test_what_cannot_be_had_is_refused_by_name(names, espalier, files, tmp_path):
    directory, _, batches, _ = files
    ran = espalier(*arguments(directory, batches[False][1], names), "--gradients", tmp_path / "g", expect=None)
    assert ran.status in (2, 4) and not (tmp_path / "g").exists(), ran
    assert any("--" + name in ran.stderr.replace("-", "_").replace("__", "--") for name in names) or "--rollout-is" in ran.stderr, ran
