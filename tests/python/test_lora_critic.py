"""Critics with adapters: gradients, values and files as peft's token classifiers have them, resumed runs, the closed loop."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import objective
import oracle
import test_lora
from comparison import Trained, assert_equal_gradients
from make_model import make_model, make_rollouts, write_records
from test_critic import GAE, VALUE_FLOAT64, of_actor, of_critic, with_values
from test_grpo import metrics, tiny, without_times
from test_lora import PREFIX, TARGETS, OneLabel, load_peft, with_config, with_tensors, without_adapter_name

peft = pytest.importorskip("peft")

SEED = 33


CLASSIFIER = OneLabel(transformers.AutoModelForTokenClassification)


def make_adapter(base, folder, **settings):
    return test_lora.make_adapter(base, folder, kind=CLASSIFIER, task="TOKEN_CLS", **{"target_modules": TARGETS, **settings})


def exact_gradients(model, records, returns, options):
    model.zero_grad(set_to_none=True)
    loss = objective.value_loss(records, [oracle.response_values(model, record) for record in records], returns, options)
    loss.backward()
    return without_adapter_name({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})


@pytest.fixture(scope="module")
def critic_of(tmp_path_factory):
    made = {}

    def find(family):
        if family not in made:
            made[family] = make_model(family, tmp_path_factory.mktemp(f"critic_{family}"), seed=2, head="ForTokenClassification")
        return made[family]

    return find


def rollouts_of(tmp_path, critic=None):
    records = make_rollouts(SEED)
    if critic is not None:
        records = with_values(records, critic, 0.7)
    return records, write_records(records, tmp_path / "rollouts.jsonl")


@pytest.mark.parametrize("family, settings", [
    ("qwen3_tied", {}),
    ("llama_untied", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "modules_to_save": ["input_layernorm"]}),
    ("qwen3_moe", {"target_modules": TARGETS[:4], "r": 3}),
], ids=["qwen3_tied", "llama_untied", "qwen3_moe"])
@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_gradients_are_those_of_pefts_token_classifier(family, settings, schedule, espalier, model_of, critic_of, tmp_path):
    """The critic continues from peft's adapter, of another rank than the actor's fresh one."""
    adapter = make_adapter(critic_of(family), tmp_path / "adapter", **settings)
    critic = load_peft(critic_of(family), adapter, CLASSIFIER)
    records, path = rollouts_of(tmp_path, critic)
    options = objective.resolve(GAE)
    exact = exact_gradients(critic, records, objective.gae(records, options)[1], options)
    words = {"lora-rank": 2, "lora-target": "q_proj"}
    run = Trained(espalier, model_of(family), path, tmp_path, critic=adapter, schedule=schedule, **words, **GAE)
    assert_equal_gradients(of_critic(run.gradients), exact, SEED)
    assert all(name.startswith(PREFIX) and "q_proj.lora_" in name for name in of_actor(run.gradients))


def test_an_actor_that_trains_whole_takes_a_critic_with_an_adapter(espalier, model_of, critic_of, tmp_path):
    adapter = make_adapter(critic_of("qwen3_tied"), tmp_path / "adapter")
    critic = load_peft(critic_of("qwen3_tied"), adapter, CLASSIFIER)
    records, path = rollouts_of(tmp_path, critic)
    options = objective.resolve(GAE)
    run = Trained(espalier, model_of("qwen3_tied"), path, tmp_path, critic=adapter, **GAE)
    assert_equal_gradients(of_critic(run.gradients), exact_gradients(critic, records, objective.gae(records, options)[1], options), SEED)
    assert (run.out / "model.safetensors").is_file() and (run.out / "critic/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("train", [(), ("--train", "norms")], ids=["adapters_alone", "norms_beside"])
def test_peft_loads_the_written_critic_and_has_its_values(train, espalier, model_of, tmp_path):
    """Actor and critic begin from one language model, each with an adapter of its own."""
    base = model_of("qwen3_tied")
    records, path = rollouts_of(tmp_path)
    words = ("--lora-rank", 4, "--lora-target", "q_proj,v_proj,up_proj", "--dtype", "float64", *train)
    espalier("train", "--model", base, "--critic", base, "--rollouts", path, *words, "--adv-estimator", "gae", "--critic-lr", 0.05, "--lr", 0.05,
             "--mini-batch-size", 6, "--out", tmp_path / "out")
    folder = tmp_path / "out/critic"
    config = peft.LoraConfig.from_pretrained(folder)
    assert config.task_type == "TOKEN_CLS" and config.r == 4 and "score" in config.modules_to_save
    assert not list(folder.glob("model*.safetensors"))
    critic, actor = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "out"))
    name = PREFIX + "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(critic[name], actor[name]) and all(values.any() for values in critic.values())
    espalier("score", "--model", base, "--critic", folder, "--values", "--rollouts", path, "--dtype", "float64", "--out", tmp_path / "scored.jsonl")
    exact = oracle.values(load_peft(base, folder, CLASSIFIER), records)
    for line, wanted in zip((tmp_path / "scored.jsonl").read_text().splitlines(), exact, strict=True):
        assert json.loads(line)["values"] == pytest.approx(wanted, abs=VALUE_FLOAT64, rel=0)


@pytest.mark.parametrize("head", ["ForCausalLM", "ForTokenClassification"])
def test_a_merged_critic_has_the_values_of_its_adapter(head, espalier, model_of, critic_of, tmp_path):
    base = {"ForCausalLM": model_of, "ForTokenClassification": critic_of}[head]("qwen3_tied")
    adapter = make_adapter(base, tmp_path / "adapter")
    records, path = rollouts_of(tmp_path)
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "merged", "--save-dtype", "float64")
    assert json.loads((tmp_path / "merged/config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]
    exact = oracle.values(load_peft(base, adapter, CLASSIFIER), records)
    for critic in (tmp_path / "merged", adapter):
        espalier("score", "--model", model_of("qwen3_tied"), "--critic", critic, "--values", "--rollouts", path, "--dtype", "float64", "--out",
                 tmp_path / "scored.jsonl", "--overwrite")
        for line, wanted in zip((tmp_path / "scored.jsonl").read_text().splitlines(), exact, strict=True):
            assert json.loads(line)["values"] == pytest.approx(wanted, abs=VALUE_FLOAT64, rel=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("again", [(), ("--critic",)], ids=["base_of_its_config", "base_named"])
def test_resuming_equals_never_having_stopped(dtype, again, espalier, model_of, critic_of, tmp_path):
    base, critic = model_of("qwen3_tied"), critic_of("qwen3_tied")
    _, path = rollouts_of(tmp_path)
    words = ("train", "--rollouts", path, "--dtype", dtype, "--mini-batch-size", 6, "--critic-lr", 1e-3, "--lr", 1e-3, "--epochs", 2,
             "--adv-estimator", "gae")
    start = ("--model", base, "--critic", critic, "--lora-rank", 4, "--lora-target", "q_proj,v_proj,up_proj")
    espalier(*words, *start, "--out", tmp_path / "whole")
    espalier(*words, *start, "--out", tmp_path / "first", "--steps", 1)
    espalier(*words, "--resume", tmp_path / "first", *again, *(critic for _ in again), "--out", tmp_path / "second")
    for folder in ("", "critic/"):
        for file in ("adapter_model.safetensors", "espalier/state.safetensors", "adapter_config.json"):
            assert (tmp_path / "whole" / folder / file).read_bytes() == (tmp_path / "second" / folder / file).read_bytes(), folder + file


def test_the_closed_loop_with_an_adapted_critic_continues_to_the_same_bits(espalier, tmp_path):
    espalier("grpo", "--out", tmp_path / "base", *tiny("--steps", 1, "--test-freq", 0, "--epochs", 1))
    base = tmp_path / "base/model"
    words = ("--model", base, "--critic", base, "--adv-estimator", "gae", "--lora-rank", 4, "--lr", "1e-2", "--critic-lr", "1e-2", "--steps", 8)
    espalier("grpo", "--out", tmp_path / "whole", *tiny(*words))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in ("model", "checkpoints/step-000008"):
        shutil.rmtree(tmp_path / "parts" / name)
    espalier("grpo", "--resume", tmp_path / "parts", "--threads", 2)
    assert without_times(metrics(tmp_path / "parts")) == without_times(metrics(tmp_path / "whole"))
    for folder in ("", "critic/"):
        first, second = (tmp_path / run / "checkpoints/step-000008" / folder / "adapter_model.safetensors" for run in ("whole", "parts"))
        assert first.read_bytes() == second.read_bytes(), folder


def test_verify_judges_the_critics_adapter(espalier, model_of, critic_of, tmp_path):
    _, path = rollouts_of(tmp_path)
    for dtype in ("float64", "float32"):
        report = espalier("verify", "--model", model_of("qwen3_tied"), "--critic", critic_of("qwen3_tied"), "--rollouts", path, "--dtype", dtype,
                          "--adv-estimator", "gae", "--lora-rank", 4, "--json").json
        assert report["verdict"] == "pass"
        names = [p["name"] for p in report["parameters"] if p["name"].startswith("critic.")]
        assert len(names) == 2 * 3 * 7 + 2  # A and B of each target of three layers; the head and its bias


def test_a_plan_holds_no_masters_of_the_critics_held_weights(espalier, model_of, critic_of, tmp_path):
    _, path = rollouts_of(tmp_path)
    plans = [espalier("plan", "--model", model_of("qwen3_tied"), "--critic", critic_of("qwen3_tied"), "--rollouts", path, *words, "--json").json
             for words in ((), ("--lora-rank", 4))]
    full, adapted = (max(plan["critic"]["predicted"]["chosen"]["peak_bytes"].values()) for plan in plans)
    assert adapted < full


@pytest.mark.parametrize("damage, code, told", [
    (with_config(lora_dropout=0.1), 4, "lora_dropout"),
    (with_config(base_model_name_or_path="/nowhere"), 3, "base_model_name_or_path"),
    (with_tensors(lambda t: t.update({PREFIX + "score.weight": torch.ones(2, 48)})), 3, "[2, 48]"),
    (with_tensors(lambda t: t.pop(PREFIX + "model.layers.0.self_attn.q_proj.lora_B.weight")), 3, "lora_A alone"),
], ids=["dropout", "no_base", "another_head", "half_a_pair"])
def test_damaged_critics_are_refused_by_name(damage, code, told, espalier, model_of, critic_of, tmp_path):
    adapter = make_adapter(critic_of("qwen3_tied"), tmp_path / "adapter")
    damage(adapter)
    _, path = rollouts_of(tmp_path)
    error = espalier("train", "--model", model_of("qwen3_tied"), "--critic", adapter, "--lora-rank", 4, "--rollouts", path, "--out", tmp_path / "out",
                     "--adv-estimator", "gae", expect=code).stderr
    assert told in error and not (tmp_path / "out").exists()
