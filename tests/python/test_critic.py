"""The critic against transformers' token classifiers: values, gradients, training, and the directories it writes."""

import json

import pytest
import torch
import transformers

import objective
import oracle
from comparison import Trained, assert_equal_gradients
from make_model import CRITICS, VOCABULARY, make_model, make_rollouts, write_records

SEED = 31
VALUE_FLOAT64 = 1e-11  # a dot product over 48 terms of size 1 behind three layers; as LOGPROB_FLOAT64
GAE = {"adv-estimator": "gae", "gamma": 0.97, "lam": 0.9}


def load_critic(directory, dtype=torch.float64):
    return oracle.load_model(directory, dtype, transformers.AutoModelForTokenClassification)


@pytest.fixture(scope="module")
def critic_of(tmp_path_factory):
    made = {}

    def find(family):
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(f"critic_{family}"), seed=2, head="ForTokenClassification")
        return made[family]

    return find


def with_values(records, model, spread):
    """The critic's own values plus noise: wide enough, the clip acts."""
    generator = torch.Generator().manual_seed(SEED)
    return [{**record, "values": [v + spread * float(torch.randn((), generator=generator)) for v in own]}
            for record, own in zip(records, oracle.values(model, records), strict=True)]


def of_critic(gradients):
    return {name.removeprefix("critic."): g for name, g in gradients.items() if name.startswith("critic.")}


def of_actor(gradients):
    return {name: g for name, g in gradients.items() if not name.startswith("critic.")}


@pytest.mark.parametrize("family", CRITICS)
def test_scored_values_are_those_of_the_token_classifier(family, espalier, model_of, critic_of, tmp_path):
    records = make_rollouts(SEED)
    path, out = write_records(records, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    espalier("score", "--model", model_of(family), "--critic", critic_of(family), "--values", "--rollouts", path, "--out", out,
             "--dtype", "float64")
    exact = oracle.values(load_critic(critic_of(family)), records)
    for line, wanted in zip(out.read_text().splitlines(), exact, strict=True):
        assert json.loads(line)["values"] == pytest.approx(wanted, abs=VALUE_FLOAT64, rel=0), f"seed {SEED}"


@pytest.mark.parametrize("family", CRITICS)
@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_every_family_has_the_classifiers_gradient(family, schedule, espalier, model_of, critic_of, tmp_path):
    """Recorded values, half of them farther away than the clip: the critic's gradient and the actor's with GAE."""
    critic = load_critic(critic_of(family))
    records = with_values(make_rollouts(SEED), critic, 0.7)
    path = write_records(records, tmp_path / "rollouts.jsonl")
    options = objective.resolve(GAE)
    loss, exact = oracle.value_gradients(critic, records, objective.gae(records, options)[1], options)
    run = Trained(espalier, model_of(family), path, tmp_path, critic=critic_of(family), schedule=schedule, **GAE)
    assert_equal_gradients(of_critic(run.gradients), exact, SEED)
    actor = oracle.load_model(model_of(family), torch.float64)
    _, _, of_policy, *_ = oracle.gradients(actor, records, objective.advantages(records, options), options)
    assert_equal_gradients(of_actor(run.gradients), of_policy, SEED)
    step, = run.json["steps"]
    assert step["critic"]["loss"] == pytest.approx(loss, rel=1e-10)
    norm = float(torch.stack([g.norm() for g in exact.values()]).norm())
    assert step["critic"]["grad_norm"] == pytest.approx(norm, rel=1e-10)
    assert 0 < step["critic"]["clip_fraction"] < 1


def test_without_recorded_values_the_critics_own_are_taken(espalier, model_of, critic_of, tmp_path):
    critic = load_critic(critic_of("qwen3_tied"))
    records = make_rollouts(SEED)
    path = write_records(records, tmp_path / "rollouts.jsonl")
    own, options = with_values(records, critic, 0), objective.resolve(GAE)
    _, exact = oracle.value_gradients(critic, own, objective.gae(own, options)[1], options)
    run = Trained(espalier, model_of("qwen3_tied"), path, tmp_path, critic=critic_of("qwen3_tied"), **GAE)
    assert_equal_gradients(of_critic(run.gradients), exact, SEED)
    assert run.json["steps"][0]["critic"]["clip_fraction"] == 0


def test_recorded_returns_win(espalier, model_of, critic_of, tmp_path):
    critic = load_critic(critic_of("llama_untied"))
    records = with_values(make_rollouts(SEED), critic, 0.7)
    records = [{**r, "returns": [0.3 * t - 1 for t in range(len(r["response_ids"]))]} for r in records]
    path, options = write_records(records, tmp_path / "rollouts.jsonl"), objective.resolve(GAE)
    _, exact = oracle.value_gradients(critic, records, [r["returns"] for r in records], options)
    run = Trained(espalier, model_of("llama_untied"), path, tmp_path, critic=critic_of("llama_untied"), **GAE)
    assert_equal_gradients(of_critic(run.gradients), exact, SEED)


def test_a_trained_critic_has_the_weights_of_torch_adamw(espalier, model_of, critic_of, tmp_path):
    """Two mini-batches, values of before the first: as test_weights_after_training_are_those_of_torch_adamw."""
    rate, family = 1e-3, "qwen3_sharded"
    critic, options = load_critic(critic_of(family)), objective.resolve(GAE)
    records = make_rollouts(SEED)
    path = write_records(records, tmp_path / "rollouts.jsonl")
    records = with_values(records, critic, 0)
    returns = objective.gae(records, options)[1]
    start = {name: p.detach().clone() for name, p in critic.named_parameters()}
    optimizer = torch.optim.AdamW(critic.parameters(), lr=rate, weight_decay=0.01)
    batches = oracle.mini_batches(records, 6)
    for indices in batches:
        oracle.value_gradients(critic, [records[i] for i in indices], [returns[i] for i in indices], options)
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        optimizer.step()
    run = Trained(espalier, model_of(family), path, tmp_path, critic=critic_of(family),
                  **{"critic-lr": rate, "mini-batch-size": 6, "save-dtype": "float64", **GAE})
    assert len(run.json["steps"]) == len(batches) > 1
    trained = load_critic(run.out / "critic")
    for name, parameter in trained.named_parameters():
        exact = critic.get_parameter(name).detach()
        assert (exact - start[name]).abs().max() > 0.1 * rate, f"{name} did not move: the test would prove nothing"
        assert float((parameter.detach() - exact).abs().max()) <= len(batches) * rate * 1e-7, name


def test_values_of_records_with_steps_are_those_before_their_first_update(espalier, model_of, critic_of, tmp_path):
    """Two epochs over two steps: the second epoch clips around, and aims at, what the critic said in the first; also after a
    resumption between them."""
    rate, family, epochs = 1e-3, "qwen3_sharded", 2
    critic, options = load_critic(critic_of(family)), objective.resolve(GAE)
    records = [{**record, "step": int(record["group"] in ("g2", "g3"))} for record in make_rollouts(SEED)]
    path = write_records(records, tmp_path / "rollouts.jsonl")
    optimizer = torch.optim.AdamW(critic.parameters(), lr=rate, weight_decay=0.01)
    known, losses = {}, []
    for _ in range(epochs):
        for step, indices in enumerate(oracle.mini_batches(records, 0)):
            if step not in known:
                own = with_values([records[i] for i in indices], critic, 0)
                known[step] = own, objective.gae(own, options)[1]
            losses.append(oracle.value_gradients(critic, *known[step], options)[0])
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            optimizer.step()
    settings = {"critic-lr": rate, "save-dtype": "float64", "epochs": epochs, **GAE}
    run = Trained(espalier, model_of(family), path, tmp_path, critic=critic_of(family), **settings)
    assert [step["critic"]["loss"] for step in run.json["steps"]] == pytest.approx(losses, rel=1e-7)
    first = Trained(espalier, model_of(family), path, tmp_path / "first", critic=critic_of(family), steps=3, **settings)
    second = Trained(espalier, model_of(family), path, tmp_path / "second", resume=first.out, critic=critic_of(family), **settings)
    assert second.json["steps"][0]["critic"]["loss"] == run.json["steps"][-1]["critic"]["loss"]
    trained = load_critic(run.out / "critic")
    for name, parameter in trained.named_parameters():
        # As in test_a_trained_critic_has_the_weights_of_torch_adamw.
        assert float((parameter.detach() - critic.get_parameter(name).detach()).abs().max()) <= len(losses) * rate * 1e-7, name


@pytest.mark.parametrize("family", CRITICS)
def test_a_language_model_becomes_a_critic_that_transformers_loads(family, espalier, model_of, tmp_path):
    path = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    run = Trained(espalier, model_of(family), path, tmp_path, dtype="float32", critic=model_of(family),
                  **{"critic-lr": 0, "seed": 5, **GAE})
    critic, info = transformers.AutoModelForTokenClassification.from_pretrained(run.out / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert critic.config.num_labels == 1 and critic.dropout.p == 0
    source = oracle.load_model(model_of(family), torch.float32).state_dict()
    for name, weights in critic.model.state_dict().items():
        assert torch.equal(weights, source["model." + name]), name
    assert critic.score.bias.item() == 0
    assert 0.5 * 0.02 < critic.score.weight.std().item() < 2 * 0.02  # 48 numbers of normal(0, 0.02)


def test_a_critic_without_bias_gets_one(espalier, model_of, tmp_path):
    critic = make_model("qwen2_untied", tmp_path / "critic", head="ForTokenClassification", token_classification_bias=False)
    path = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    run = Trained(espalier, model_of("qwen2_untied"), path, tmp_path, critic=critic, **GAE)
    loaded, info = transformers.AutoModelForTokenClassification.from_pretrained(run.out / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.score.bias is not None


def test_bad_inputs_end_with_status_3_and_say_what_is_wrong(espalier, model_of, critic_of, tmp_path):
    path = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    family = "qwen3_tied"
    other = make_model(family, tmp_path / "other", head="ForTokenClassification", vocab_size=VOCABULARY + 1)
    two = make_model(family, tmp_path / "two", head="ForTokenClassification", num_labels=2)
    for arguments, words in (([], ["rollouts.jsonl:", "--adv-estimator gae", "--critic DIR"]),
                             (["--critic", other], ["vocabulary of 97", "vocabulary of 98"]),
                             (["--critic", two], ["one label"]),
                             (["--critic", tmp_path / "nowhere"], ["nowhere"])):
        outcome = espalier("train", "--model", model_of(family), "--rollouts", path, "--out", tmp_path / "out", "--adv-estimator",
                           "gae", *arguments, expect=3)
        for word in words:
            assert word in outcome.stderr, outcome
        assert not (tmp_path / "out").exists()
    espalier("score", "--model", model_of(family), "--rollouts", path, "--out", tmp_path / "scored.jsonl", "--values", expect=2)
    espalier("train", "--model", critic_of(family), "--rollouts", path, "--out", tmp_path / "out", expect=4)


def test_verify_compares_the_critics_step_too(espalier, model_of, critic_of, tmp_path):
    path = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    found = espalier("verify", "--model", model_of("qwen3_tied"), "--critic", critic_of("qwen3_tied"), "--rollouts", path,
                     "--adv-estimator", "gae", "--json").json
    assert found["verdict"] == "pass"
    assert {p["name"] for p in found["parameters"]} >= {"critic.score.weight", "critic.score.bias", "model.norm.weight"}
    assert found["values"]["max"] <= found["values"]["allowed"]
