"""Trajectories and branches in the loss: gradients of `train` against plain autograd on the formulas of docs/agents.md, in every plan."""

import itertools
import json
import random

import pytest
import torch

from safetensors.torch import load_file

import oracle
from comparison import FLOAT64_RELATIVE, Trained, flags, relative_errors
from make_model import write_records
from rule_cases import PLANS
from test_parallel import Ranks

SEED = 51
P = [1, 40, 9]
# (trajectory, branch, prompt, response, loss mask): a stem that branches repeat, turns of a trajectory, a branch that has another one's tokens
# in its prompt, and single records.
SHAPES = [
    ("x", None, P, [7, 11, 5], None), ("x", "b", P, [7, 11, 5, 22, 2], None), ("x", "c", P, [7, 11, 5, 30, 31, 2], [1, 1, 1, 0, 1, 1]),
    ("x", "d", P, [7, 33, 2], None), ("y", None, P, [7, 11, 44], None), ("y", None, P + [7, 11, 44, 50], [12, 2], None),
    ("z", "p", P, [20, 21], None), ("z", "q", P + [20, 21], [22, 23, 2], [1, 1, 0]), (None, None, P, [7, 11, 5], None), (None, None, [3, 4], [5, 6, 2], None),
]


def records(model):
    draw = random.Random(SEED)
    out = []
    for trajectory, branch, prompt, response, mask in SHAPES:
        record = {"group": "q", "prompt_ids": prompt, "response_ids": response, "loss_mask": mask or [1] * len(response)}
        record |= {name: value for name, value in (("trajectory", trajectory), ("branch", branch)) if value}
        record["advantage"] = [draw.gauss(0, 1) for _ in response]
        out.append(record)
    for record, logprob in zip(out, oracle.score(model, out)[0]):
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
            record[name] = [x + draw.gauss(0, .1) for x in logprob]
    return out


def shares(records, rule):
    """The weight of each token, from the definition: `tokens` are those up to it, `owners` the records that have it with loss."""
    out = [[float(m) for m in r["loss_mask"]] for r in records]
    paths = [r["prompt_ids"] + r["response_ids"] for r in records]
    for i, record in enumerate(records):
        family = [j for j, r in enumerate(records) if "trajectory" in record and r.get("trajectory") == record["trajectory"]]
        branches = {records[j]["branch"] for j in family if "branch" in records[j]}
        for t in range(len(record["response_ids"])) if len(branches) > 1 and rule != "each" else ():
            if not record["loss_mask"][t]:
                continue
            tokens = record["prompt_ids"] + record["response_ids"][:t + 1]
            through = [j for j in family if paths[j][:len(tokens)] == tokens]
            place = lambda j: len(tokens) - 1 - len(records[j]["prompt_ids"])  # noqa: E731
            owners = [j for j in through if place(j) >= 0 and records[j]["loss_mask"][place(j)]]
            on = {records[j].get("branch") for j in through}
            share = 1 if None in on else len(on) / len(branches)
            out[i][t] = float(owners[0] == i) if rule == "once" else share / len(owners)
    return out


def token_loss(kind, lp, old, roll, A, share):
    if kind == "reinforce":
        return -A * lp
    if kind == "dppo":
        moved, d = lp.detach().exp() - roll.exp(), lp - roll
        valid = torch.where(A > 0, moved <= .2, moved >= -.2)
        return -A * d.exp() * valid + 1e-3 * d ** 2
    mean = ((lp - old) * share).sum() / share.sum().clamp(min=1e-300)
    if kind == "gspo":
        ratio = (lp - lp.detach() + mean.detach()).exp()
        return torch.maximum(-A * ratio, -A * ratio.clamp(.8, 1.2))
    ratio = mean.exp() if kind == "sequence" else (lp - old).exp()
    upper = torch.maximum(-A * ratio, -A * ratio.clamp(.8, 1.2))
    return torch.where(A < 0, torch.minimum(upper, -3 * A), upper)


def plain_gradients(model, records, kind, mode, unit, rule):
    model.zero_grad(set_to_none=True)
    lps = [oracle.response_logprobs(model, r)[0] for r in records]
    weights = [torch.tensor(w, dtype=torch.float64) for w in shares(records, rule)]
    tensor = lambda r, name: torch.tensor(r[name], dtype=torch.float64)  # noqa: E731
    name_of = lambda i: records[i].get("trajectory", i) if unit == "trajectory" else i  # noqa: E731
    sequences = [[i for i in range(len(records)) if name_of(i) == name] for name in dict.fromkeys(map(name_of, range(len(records))))]
    longest, everything = max(len(r["response_ids"]) for r in records), sum(w.sum() for w in weights)
    total = 0
    for members in sequences:
        joined = lambda parts: torch.cat([parts(i) for i in members])  # noqa: E731
        lp, share = joined(lambda i: lps[i]), joined(lambda i: weights[i])
        old, roll, A = (joined(lambda i: tensor(records[i], name)) for name in ("old_logprobs", "rollout_logprobs", "advantage"))
        loss = (token_loss(kind, lp, old, roll, A, share) * share).sum()
        total = total + {"token-sum": loss, "token-mean": loss / everything, "seq-mean-token-sum": loss / len(sequences),
                         "seq-mean-token-sum-norm": loss / len(sequences) / longest,
                         "seq-mean-token-mean": loss / (share.sum() + 1e-8) / len(sequences)}[mode]
    total.backward()
    return oracle.of_files({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, model)


@pytest.fixture(scope="module")
def case(model_of, tmp_path_factory):
    directory = model_of("qwen3_tied")
    model = oracle.load_model(directory, torch.float64)
    made = records(model)
    return directory, model, made, write_records(made, tmp_path_factory.mktemp("units") / "records.jsonl")


MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KINDS = {"vanilla": {}, "gspo": {"policy_loss": "gspo"}, "sequence": {"ratio_level": "sequence"}, "reinforce": {"policy_loss": "reinforce"},
         "dppo": {"policy_loss": "dppo"}}


def turns():
    """Every aggregation x unit x rule, and every pair with losses and plans."""
    for number, (mode, unit, rule) in enumerate(itertools.product(MODES, ("record", "trajectory"), ("once", "average", "each"))):
        kinds = list(KINDS)
        yield kinds[(number + number // 5) % 5], mode, unit, rule, PLANS[(number // 2 + number // 6) % 5]
    for number, (kind, unit) in enumerate(itertools.product(KINDS, ("record", "trajectory"))):
        yield kind, "seq-mean-token-mean", unit, ("once", "average")[number % 2], PLANS[number % 5]


@pytest.mark.parametrize("kind, mode, unit, rule, plan", list(turns()))
def test_gradients_are_those_of_the_formulas_in_every_plan(espalier, case, tmp_path, kind, mode, unit, rule, plan):
    directory, model, made, path = case
    exact = plain_gradients(model, made, kind, mode, unit, rule)
    found = Trained(espalier, directory, path, tmp_path, loss_agg_mode=mode, loss_unit=unit, shared_tokens=rule, **KINDS[kind], **plan)
    assert max(relative_errors(found.gradients, exact).values()) <= FLOAT64_RELATIVE


def test_the_rules_differ(case):
    """So a run that ignored an option would not pass."""
    _, model, made, _ = case
    seen = [plain_gradients(model, made, "gspo", "seq-mean-token-mean", unit, rule)
            for unit in ("record", "trajectory") for rule in ("once", "average", "each")]
    for one, other in itertools.combinations(seen, 2):
        assert max(relative_errors(one, other).values()) > 1e-3


@pytest.mark.parametrize("layout", [("--dp", 2), ("--cp", 2), ("--pp", 2), ("--tp", 2)])
def test_several_processes_have_the_gradients_of_one(espalier, program, case, tmp_path, layout):
    """Log-probs of a sequence come from several ranks: turns of y and branches of x are dealt apart."""
    directory, _, _, path = case
    words = dict(loss_agg_mode="seq-mean-token-mean", loss_unit="trajectory", shared_tokens="average", policy_loss="gspo")
    one = Trained(espalier, directory, path, tmp_path / "one", **words).gradients
    gradients = tmp_path / "gradients.safetensors"
    ranks = Ranks(program, 2, ["train", "--model", directory, "--rollouts", path, "--dtype", "float64", "--gradients", gradients, "--out",
                               tmp_path / "out", *layout, *flags({name.replace("_", "-"): value for name, value in words.items()})])
    assert ranks.end() == [0, 0], ranks.stderr
    assert max(relative_errors(load_file(gradients), one).values()) <= FLOAT64_RELATIVE


def test_branches_train_their_common_tokens_once_and_have_one_vote(espalier, case, tmp_path):
    directory, model, *_ = case
    group = [{"group": "q", "trajectory": "a", "branch": b, "prompt_ids": P, "response_ids": r, "reward": 1.0}
             for b, r in (("b", [7, 11, 5, 22, 2]), ("c", [7, 11, 5, 30, 31, 2]))]
    group.append({"group": "q", "trajectory": "d", "prompt_ids": P, "response_ids": [8, 2], "reward": 0.0})
    path, metrics = write_records(group, tmp_path / "group.jsonl"), tmp_path / "metrics.jsonl"
    run = espalier("train", "--model", directory, "--rollouts", path, "--adv-estimator", "dr_grpo", "--rollout-metrics", metrics, "--json")
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["advantage"] for row in found] == [.5, .5, -.5] and [row["loss_tokens"] for row in found] == [5, 3, 2]
    assert "3 sampled tokens are common to branches" in run.stderr and "--shared-tokens once" in run.stderr
    seen = espalier("inspect", path, "--json").json
    assert seen["repeated_tokens"] == {"branches": 3, "trajectory": 0, "rollouts": 0} and not seen["anomalies"]
    refused = espalier("train", "--model", directory, "--rollouts", path, "--adv-estimator", "reinforce_plus_plus", "--out", tmp_path / "trained", expect=4)
    assert "branches" in refused.stderr and "group.jsonl:1" in refused.stderr


def test_what_would_train_several_times_is_told(espalier, tmp_path):
    """Branches recorded as trajectories, turns that repeat their history with loss, and a later record that continues an earlier one."""
    told = lambda *rows: espalier("inspect", write_records([{"group": "q", "reward": i % 2, **row} for i, row in enumerate(rows)],  # noqa: E731
                                                           tmp_path / "r.jsonl"), "--json").json
    apart = told({"trajectory": "b", "prompt_ids": P, "response_ids": [7, 11, 2]}, {"trajectory": "c", "prompt_ids": P, "response_ids": [7, 11, 3, 2]})
    assert apart["repeated_tokens"]["rollouts"] == 2 and not apart["anomalies"]
    assert "branches of one run" in espalier("inspect", tmp_path / "r.jsonl").stdout
    turns = told({"trajectory": "b", "turn": 0, "prompt_ids": P, "response_ids": [7, 11], "reward": 1},
                 {"trajectory": "b", "turn": 1, "prompt_ids": P, "response_ids": [7, 11, 50, 2], "reward": 1},
                 {"trajectory": "c", "turn": 0, "prompt_ids": P, "response_ids": [8, 2], "reward": 0})
    assert [a["kind"] for a in turns["anomalies"]] == ["repeated_tokens"] and "add branch" in turns["anomalies"][0]["text"]
    grown = told({"prompt_ids": P, "response_ids": [7, 11]}, {"prompt_ids": P, "response_ids": [7, 11, 50, 2], "loss_mask": [1, 1, 0, 1]})
    assert [(a["kind"], a["line"]) for a in grown["anomalies"]] == [("repeated_tokens", 2)] and "continues" in grown["anomalies"][0]["text"]
    masked = told({"prompt_ids": P, "response_ids": [7, 11]}, {"prompt_ids": P, "response_ids": [7, 11, 50, 2], "loss_mask": [0, 0, 0, 1]})
    assert not masked["anomalies"]


def test_turns_with_other_advantages_are_told(espalier, tmp_path):
    def told(*advantages, rewards=(1.0, 1.0, 1.0)):
        rows = [{"group": "q", "trajectory": "a", "turn": turn, "prompt_ids": [1] * (turn + 1), "response_ids": [7, 2], "advantage": advantage, "reward": reward}
                for turn, (advantage, reward) in enumerate(zip(advantages, rewards))]
        rows.append({"group": "q", "trajectory": "b", "turn": 0, "prompt_ids": [1], "response_ids": [8, 2], "advantage": -.7, "reward": 0.0})
        found = espalier("inspect", write_records(rows, tmp_path / "r.jsonl"), "--json").json["anomalies"]
        return [(a["kind"], a["line"]) for a in found]

    assert told(.7, .7, .7) == [] and told(0, 0, 0) == [] and told([.7, .1], [.5, .3], [.2, .1]) == []
    assert told([0, 0], 0, [.7, .7]) == [("zero_advantages", 1), ("zero_advantages", 2)]
    assert told(.7, .5, .7) == [("unequal_advantages", 2)]
    assert told(.7, .5, .7, rewards=(1.0, .5, 1.0)) == []


def test_records_keep_branch_unit_and_rewards_of_tokens(espalier, tmp_path):
    rows = [{"trajectory": 1, "branch": b, "loss_unit": "trajectory", "prompt_ids": [1], "response_ids": [2, 3], "reward": [.5, .25]} for b in ("x", 2)]
    path, out = write_records(rows, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    espalier("convert", path, out)
    assert [{name: r[name] for name in rows[0]} for r in map(json.loads, out.read_text().splitlines())] == rows
    for change, words in (({"loss_unit": "turn"}, ["loss_unit", '"record" or "trajectory"']), ({"trajectory": None}, ["branch", "trajectory"]),
                          ({"reward": [1]}, ["reward", "2 entries"])):
        refused = espalier("inspect", write_records([{**rows[0], **change}], tmp_path / "wrong.jsonl"), expect=3).stderr
        assert all(word in refused for word in words), refused
