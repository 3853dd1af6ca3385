"""`--objective reward` against plain autograd on transformers' sequence classifiers and against TRL's own loss code."""

import collections
import json
import random
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file

import oracle
from comparison import assert_equal_gradients, flags
from make_model import CRITICS, VOCABULARY, make_model
from test_parallel import Ranks

SEED = 11
SCHEDULES = [{"schedule": "dense"}, {"schedule": "packed"}, {"schedule": "phased"}, {"schedule": "auto"},
             {"schedule": "phased", "token-budget": 1}, {"schedule": "phased", "token-budget": 7, "trunk-state": "recompute"},
             {"schedule": "phased", "token-budget": 5, "trunk-state": "offload"}, {"schedule": "packed", "token-budget": 5}]
CENTERED = {"center-rewards-coefficient": 0.03}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ids(draw, count):
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


def make_pairs(margins=False):
    """Three prompts, the first with two pairs, answers of different lengths that begin alike."""
    draw = random.Random(SEED)
    prompts, pairs = [ids(draw, 12), ids(draw, 9), ids(draw, 5)], []
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        begin = ids(draw, 3)
        pairs.append({"prompt_ids": prompt, "chosen_ids": begin + ids(draw, draw.randrange(1, 6)), "rejected_ids": begin + ids(draw, draw.randrange(1, 9))})
        if margins and len(pairs) != 2:
            pairs[-1]["margin"] = draw.uniform(-0.5, 2)
    return pairs


def make_lists():
    """Five answers with different scores; four with two equal ones, one of which is the beginning of another; three equal."""
    draw = random.Random(SEED + 1)
    lists = []
    for scores in ([0.5, -1, 3, 2, 0], [1, 0, 1, 0.5], [2, 2, 2]):
        begin = ids(draw, 2)
        answers = [begin + ids(draw, draw.randrange(1, 6)) for _ in scores]
        answers[1] = answers[0] + ids(draw, 2)
        lists.append({"prompt_ids": ids(draw, 8), "answers": [{"response_ids": a, "score": s} for a, s in zip(answers, scores)]})
    return lists


def answers_of(record):
    """[(tokens, rank)] of a pair or list."""
    if "answers" in record:
        return [(record["prompt_ids"] + answer["response_ids"], answer["score"]) for answer in record["answers"]]
    return [(record["prompt_ids"] + record[side], rank) for side, rank in (("chosen_ids", 1), ("rejected_ids", 0))]


def rewards_of(model, record):
    return torch.stack([model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, 0] for tokens, _ in answers_of(record)])


def set_loss(rewards, ranks, margin, center):
    """-log of the probability that each answer is drawn from those that are not above it, and the centring."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, rank in enumerate(ranks):
        lower = [j for j, other in enumerate(ranks) if other < rank]
        if lower:
            logits = torch.cat([rewards[i:i + 1] - margin, rewards[lower]])
            loss = loss - torch.log_softmax(logits, 0)[0]
    pairs = [(rewards[i] + rewards[j]) ** 2 for i in range(len(ranks)) for j in range(i)]
    return loss + center * torch.stack(pairs).mean()


def exact_step(model, records, center=0.0):
    model.zero_grad(set_to_none=True)
    rewards = [rewards_of(model, record) for record in records]
    losses = [set_loss(r, [rank for _, rank in answers_of(record)], record.get("margin", 0.0), center) for r, record in zip(rewards, records)]
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return loss.item(), [r.detach() for r in rewards], oracle.of_files(gradients, model)


class Run:
    def __init__(self, espalier, model, records, folder, dtype="float64", **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, gradients = folder / "out", folder / "gradients.safetensors"
        options = {"objective": "reward", "dtype": dtype, "threads": 2, **options}
        self.json = espalier("train", "--model", model, "--rollouts", records, "--out", self.out, "--gradients", gradients, "--json",
                             *flags({name.replace("_", "-"): value for name, value in options.items()})).json
        self.step, self.gradients = self.json["steps"][0], load_file(gradients)


def load(directory):
    return oracle.load_model(directory, torch.float64, transformers.AutoModelForSequenceClassification)


@pytest.fixture(scope="module")
def reward_model_of(tmp_path_factory):
    made = {}

    def find(family):
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(f"reward_{family}"), seed=4, head="ForSequenceClassification")
        return made[family]

    return find


@pytest.mark.parametrize("family", ["llama3_tied", "qwen3_moe"])
@pytest.mark.parametrize("plan", SCHEDULES, ids=lambda plan: "_".join(map(str, plan.values())))
@pytest.mark.parametrize("kind", ["pairs", "lists"])
def test_every_plan_has_the_gradient_of_autograd(kind, plan, family, espalier, reward_model_of, tmp_path):
    records = make_pairs(margins=True) if kind == "pairs" else make_lists()
    run = Run(espalier, reward_model_of(family), write(tmp_path / "records.jsonl", records), tmp_path, **plan, **CENTERED)
    loss, rewards, gradients = exact_step(load(reward_model_of(family)), records, 0.03)
    assert run.step["loss"] == pytest.approx(loss, rel=1e-10)
    assert run.step["mean_reward"] == pytest.approx(torch.cat(rewards).mean().item(), rel=1e-9)
    assert_equal_gradients(run.gradients, gradients, SEED)
    if "token-budget" in plan:
        assert run.step["waves"] > len(records)  # no set is in one wave


@pytest.mark.parametrize("family", CRITICS)
def test_every_family_has_the_gradient_of_its_sequence_classifier(family, espalier, reward_model_of, tmp_path):
    records = make_pairs()
    run = Run(espalier, reward_model_of(family), write(tmp_path / "records.jsonl", records), tmp_path)
    loss, _, gradients = exact_step(load(reward_model_of(family)), records)
    assert run.step["loss"] == pytest.approx(loss, rel=1e-10)
    assert_equal_gradients(run.gradients, gradients, SEED)


@pytest.mark.parametrize("margins", [False, True])
@pytest.mark.parametrize("center", [None, 0.03])
def test_loss_and_metrics_are_those_of_trls_code_on_the_same_scores(margins, center, espalier, reward_model_of, tmp_path):
    trl = pytest.importorskip("trl")
    records = make_pairs(margins)
    options = {} if center is None else {"center_rewards_coefficient": center}
    run = Run(espalier, reward_model_of("llama3_tied"), write(tmp_path / "records.jsonl", records), tmp_path, **options)
    _, rewards, _ = exact_step(load(reward_model_of("llama3_tied")), records)
    logits = torch.cat([torch.stack([r[0] for r in rewards]), torch.stack([r[1] for r in rewards])])[:, None]
    trainer = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True), args=types.SimpleNamespace(center_rewards_coefficient=center),
        accelerator=types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x), _total_train_tokens=0, _tp_size=1,
        _metrics={"train": collections.defaultdict(list)})
    inputs = {"attention_mask": torch.ones(1)}
    if margins:
        inputs["margin"] = torch.tensor([record.get("margin", 0.0) for record in records], dtype=torch.float64)
    loss = trl.RewardTrainer.compute_loss(trainer, lambda **_: types.SimpleNamespace(logits=logits), inputs)
    assert run.step["loss"] == pytest.approx(loss.item(), rel=1e-10)
    for name in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        # TRL's accuracy is a mean in float32
        assert run.step[name] == pytest.approx(trainer._metrics["train"][name][0], rel=1e-6 if name == "accuracy" else 1e-9), name


@pytest.mark.parametrize("make", [make_pairs, make_lists])
def test_rows_run_are_the_unique_rows(make, espalier, reward_model_of, tmp_path):
    records = make()
    step = Run(espalier, reward_model_of("llama3_tied"), write(tmp_path / "records.jsonl", records), tmp_path, schedule="phased").step
    # every answer ends with one row that carries its score to the loss
    ended = [tokens + [0] for record in records for tokens, _ in answers_of(record)]
    assert step["rows"]["physical"] == len({tuple(tokens[:depth]) for tokens in ended for depth in range(1, len(tokens) + 1)})
    assert step["rows"]["logical"] == sum(map(len, ended))


def test_a_language_model_gets_a_head_that_is_saved_as_transformers_has_it(espalier, model_of, tmp_path):
    records, lists = make_pairs(), write(tmp_path / "lists.jsonl", make_lists())
    path = write(tmp_path / "records.jsonl", records)
    run = Run(espalier, model_of("llama3_tied"), path, tmp_path / "a", save_dtype="float64", lr=1e-3, seed=3)
    config = json.loads((run.out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and len(config["id2label"]) == 1
    assert set(load_file(run.out / "model.safetensors")) & {"lm_head.weight", "score.weight", "score.bias"} == {"score.weight"}
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(run.out, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert 0.5 < model.score.weight.std() / model.config.initializer_range < 2  # one step of 1e-3 beside 0.02
    # the next run starts from the saved head, and gives its scores to every answer
    out = tmp_path / "scored.jsonl"
    for given, rows in ((path, records), (lists, make_lists())):
        espalier("score", "--model", run.out, "--rollouts", given, "--out", out, "--dtype", "float64", "--overwrite")
        scored = [json.loads(line) for line in out.read_text().splitlines()]
        exact = torch.cat([rewards_of(load(run.out), record) for record in rows])
        assert [line["prompt_ids"] + line["response_ids"] for line in scored] == [tokens for row in rows for tokens, _ in answers_of(row)]
        assert [line["reward"] for line in scored] == pytest.approx(exact.tolist(), rel=1e-9)


def test_scores_of_rollouts_keep_their_records(espalier, reward_model_of, tmp_path):
    record = {"prompt_ids": [5, 6, 7], "response_ids": [8, 9], "loss_mask": [0, 1], "group": "g", "id": 7}
    out = tmp_path / "scored.jsonl"
    espalier("score", "--model", reward_model_of("llama3_tied"), "--rollouts", write(tmp_path / "in.jsonl", [record]), "--out", out)
    scored = json.loads(out.read_text())
    assert {**scored, "reward": 0} == {**record, "reward": 0}
    for option in (["--entropies"], ["--as", "old_logprobs"]):
        outcome = espalier("score", "--model", reward_model_of("llama3_tied"), "--rollouts", tmp_path / "in.jsonl", "--out", out, "--overwrite", *option, expect=2)
        assert option[0] in outcome.stderr


def test_a_reward_model_learns_to_rank(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_lists())
    steps = Run(espalier, model_of("llama3_tied"), path, tmp_path, dtype="float32", epochs=12, lr=3e-3).json["steps"]
    assert steps[-1]["accuracy"] == 1 and steps[-1]["loss"] < steps[0]["loss"]


def test_it_continues_bit_for_bit(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_pairs(margins=True))
    settings = {"mini_batch_size": 4, "epochs": 2}
    whole = Run(espalier, model_of("llama3_tied"), path, tmp_path / "whole", **settings)
    part = Run(espalier, model_of("llama3_tied"), path, tmp_path / "part", steps=2, **settings)
    espalier("train", "--resume", part.out, "--rollouts", path, "--out", tmp_path / "rest", "--threads", 2, "--steps", 0)
    assert (tmp_path / "rest/model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("layout", [["--dp", 2], ["--dp", 2, "--shard", "full"], ["--dp", 2, "--shard", "optimizer"], ["--cp", 2], ["--tp", 2], ["--pp", 2]],
                         ids=lambda words: "_".join(map(str, words)))
def test_ranks_have_the_gradient_of_autograd(layout, program, reward_model_of, tmp_path):
    records = make_pairs(margins=True) + make_lists()
    path, gradients = write(tmp_path / "records.jsonl", records), tmp_path / "gradients.safetensors"
    run = Ranks(program, 2, ["train", "--objective", "reward", "--model", reward_model_of("llama_untied"), "--rollouts", path, "--dtype", "float64",
                             "--threads", 1, "--gradients", gradients, "--out", tmp_path / "out", "--json", *layout])
    assert run.end() == [0, 0], run.stderr
    step = json.loads(run.stdout[0])["steps"][0]
    loss, _, exact = exact_step(load(reward_model_of("llama_untied")), records)
    assert step["loss"] == pytest.approx(loss, rel=1e-10)
    assert_equal_gradients(load_file(gradients), exact, SEED)


@pytest.mark.parametrize("make", [make_pairs, make_lists])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_verify_and_plan_take_sets(make, dtype, espalier, reward_model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make())
    words = ["--model", reward_model_of("qwen3_moe"), "--rollouts", path, "--objective", "reward", "--dtype", dtype, "--json"]
    verdict = espalier("verify", *words, *flags(CENTERED)).json
    assert verdict["verdict"] == "pass" and verdict["gradient_norm"] > 0 and verdict["logprob"]["other_bits"] == 0
    planned = espalier("plan", *words).json
    run = Run(espalier, reward_model_of("qwen3_moe"), path, tmp_path, dtype=dtype)
    assert planned["rows"] == run.step["rows"]
    assert espalier("train", *words, "--dry-run", "--out", tmp_path / "none").json["steps"] == 1


@pytest.mark.parametrize("record, expected", [
    ({"prompt_ids": [5], "response_ids": [6]}, "or answers"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}]}, "at least two answers"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"response_ids": [7]}]}, "answers[1].score"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"response_ids": [], "score": 2}]}, "answers[1].response_ids"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"score": 2}]}, "answers[1].response_ids"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": "x"}, {"response_ids": [7], "score": 2}]}, "answers[0].score"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "rank": 1}, {"response_ids": [7], "score": 2}]}, "answers[0].rank"),
    ({"prompt_ids": [5], "answers": {"response_ids": [6]}}, "answers"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"response_ids": [999999], "score": 2}]}, "answers[1].response_ids[0]"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"response_ids": [7], "score": 2}], "chosen_ids": [6], "rejected_ids": [7]}, "chosen_ids"),
    ({"prompt_ids": [5], "answers": [{"response_ids": [6], "score": 1}, {"response_ids": [7], "score": 2}], "reward": 1}, "reward"),
    ({"prompt_ids": [5], "response_ids": [6], "margin": 1}, "chosen_ids")])
def test_damaged_records_are_refused_by_line(record, expected, espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", [record])
    outcome = espalier("train", "--model", model_of("llama3_tied"), "--rollouts", path, "--out", tmp_path / "out", "--objective", "reward", expect=3)
    assert "records.jsonl:1" in outcome.stderr and expected in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_lists_are_for_reward_models_alone(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_lists())
    outcome = espalier("train", "--model", model_of("llama3_tied"), "--rollouts", path, "--out", tmp_path / "out", "--objective", "dpo", expect=3)
    assert "--objective reward" in outcome.stderr


@pytest.mark.parametrize("options, expected", [
    (["--logprobs", "x"], "--logprobs"), (["--ref-model", "x"], "--ref-model"),
    (["--record", "trace"], "--record"), (["--kl-loss-coef", 0.1], "--kl-loss-coef"), (["--policy-loss", "gspo"], "--policy-loss"),
    (["--router-aux-loss-coef", 0.1], "--router-aux-loss-coef"), (["--critic", "x"], "--critic")])
def test_options_without_a_meaning_are_refused(options, expected, espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_pairs())
    outcome = espalier("train", "--objective", "reward", "--model", model_of("qwen3_moe"), "--rollouts", path, "--out", tmp_path / "out", *options, expect=None)
    assert outcome.status in (2, 3) and expected in outcome.stderr


def test_centring_belongs_to_reward_models(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_pairs())
    outcome = espalier("train", "--objective", "dpo", "--model", model_of("llama3_tied"), "--rollouts", path, "--out", tmp_path / "out", *flags(CENTERED), expect=2)
    assert "--objective reward" in outcome.stderr


def test_inspect_says_what_sharing_saves_in_a_set(espalier, tmp_path):
    records = make_pairs() + make_lists()
    path = write(tmp_path / "records.jsonl", records)
    told = espalier("inspect", "--json", path).json
    sets, shares = told["sets"], []
    for record in records:
        rows = [tokens for tokens, _ in answers_of(record)]
        unique = {tuple(tokens[:depth]) for tokens in rows for depth in range(1, len(tokens) + 1)}
        shares.append(1 - len(unique) / sum(map(len, rows)))
    assert (sets["pairs"], sets["lists"], sets["answers"]["min"], sets["answers"]["max"]) == (4, 3, 2, 5)
    assert sets["saved_share"]["min"] == pytest.approx(min(shares)) and sets["saved_share"]["max"] == pytest.approx(max(shares))
    assert told["saved_share"] > 0 and not [a for a in told["anomalies"] if a["kind"] == "nothing_to_learn"]
    page = espalier("inspect", path).stdout
    assert "4 pairs, 3 lists of scored answers" in page and "shared in a set" in page
    assert "sets" not in espalier("inspect", "--json", write(tmp_path / "one.jsonl", [{"prompt_ids": [5], "response_ids": [6], "reward": 1}])).json
