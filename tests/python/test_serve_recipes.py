"""Recipes of tinker-cookbook as they are, against `espalier serve`, offline on a tiny model.

Replaced are only what would download (datasets), the renderer (a tiny model has no entry in the cookbook's table) and rewards (a random model earns none,
so that all advantages would be 0)."""

import asyncio
import json
import os

import pytest

pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
cookbook = pytest.importorskip("tinker_cookbook", reason="the cookbook is not installed (pip install tinker-cookbook)")
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import tinker  # noqa: E402
from serve_client import ready, takes  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402
from text_model import byte_level_tokenizer, make_text_model  # noqa: E402

QUESTIONS = [f"A shop has {n} apples and sells {n // 3} of them. How many are left?" for n in range(6, 38)]
ROWS = [{"question": q, "answer": f"{n} - {n // 3} = {n - n // 3}\n#### {n - n // 3}"} for n, q in zip(range(6, 38), QUESTIONS)]
SMALL = dict(learning_rate=1e-2, lora_rank=8, max_tokens=6)


def load_dataset(path, name=None, split=None, **_):
    rows = ROWS if "gsm8k" in path else [{"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]} for r in ROWS]
    whole = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:6])}
    return whole[split] if split else datasets.DatasetDict(whole)


def vowels(text):
    return sum(c in "aeiou" for c in text) / 10 + len(text) % 3 / 3


@pytest.fixture(scope="module")
def recipes(program, tmp_path_factory):
    """(address, name of the model) of a server."""
    without_proxies()
    os.environ["TINKER_API_KEY"], os.environ["HF_HUB_OFFLINE"] = "tml-local", "1"
    folder = tmp_path_factory.mktemp("recipes")
    model = make_text_model(folder / "model", byte_level_tokenizer([r["question"] + r["answer"] for r in ROWS], 400))
    server = Server(program, {str(model): model}, "--state", folder / "state", "--dtype", "float64")
    os.environ["TINKER_BASE_URL"] = server.url
    yield server.url, str(model)
    server.end()
    os.environ.pop("TINKER_BASE_URL")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    from tinker_cookbook import model_info
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(model_info, "get_recommended_renderer_name", lambda name: "role_colon")


def loss_of(settings, loss):
    """The loss as an argument of a recipe's settings. Cookbooks before 0.6 have importance_sampling alone."""
    if takes(settings, "loss_fn"):
        return {"loss_fn": loss}
    if loss != "importance_sampling":
        pytest.skip("this cookbook's recipe has one loss")
    return {}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def series(folder, name):
    return [line[name] for line in metrics(folder) if name in line]


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(recipes, tmp_path, monkeypatch, loss):
    from tinker_cookbook.recipes import rl_loop
    url, model = recipes
    monkeypatch.setattr(rl_loop, "get_reward", lambda response, answer: vowels(response))
    config = dict(base_url=url, log_path=str(tmp_path), model_name=model, batch_size=2, group_size=4, save_every=1, **loss_of(rl_loop.Config, loss), **SMALL)
    rl_loop.main(rl_loop.Config(max_steps=2, **config))
    saved = tmp_path / "checkpoints.jsonl"
    saved.write_text(saved.read_text().splitlines(keepends=True)[0])  # as if it had ended after the first of two steps
    rl_loop.main(rl_loop.Config(max_steps=3, **config))
    assert series(tmp_path, "progress/batch") == [0, 1, 1, 2] and len(series(tmp_path, "reward/total")) == 4


def test_rl_loop_s_default_loss_is_refused_by_name(recipes, tmp_path, monkeypatch):
    from tinker_cookbook.recipes import rl_loop
    url, model = recipes
    loss_of(rl_loop.Config, "stable_reinforce")
    monkeypatch.setattr(rl_loop, "get_reward", lambda response, answer: vowels(response))
    with pytest.raises(Exception, match="stable_reinforce"):
        rl_loop.main(rl_loop.Config(base_url=url, log_path=str(tmp_path), model_name=model, batch_size=1, group_size=2, max_tokens=4, max_steps=1))


def test_sl_loop(recipes, tmp_path):
    from tinker_cookbook.recipes import sl_loop
    url, model = recipes
    sl_loop.main(sl_loop.Config(base_url=url, log_path=str(tmp_path), model_name=model, batch_size=4, learning_rate=2e-2, max_length=400, lora_rank=8, save_every=2, max_steps=4))
    losses = series(tmp_path, "train_mean_nll")
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["synchronous", "penalty", "asynchronous", "streaming"])
def test_rl_train(recipes, tmp_path, monkeypatch, mode):
    from tinker_cookbook.recipes import rl_basic
    from tinker_cookbook.recipes.math_rl import math_env
    from tinker_cookbook.rl import train
    url, model = recipes
    monkeypatch.setattr(math_env, "load_dataset", load_dataset, raising=False)
    monkeypatch.setattr(math_env.MathEnv, "check_answer", lambda self, text: len(text) % 3 / 3)
    monkeypatch.setattr(math_env.MathEnv, "check_format", lambda self, text: True)
    builder = math_env.Gsm8kDatasetBuilder(batch_size=2, group_size=4, renderer_name="role_colon", model_name_for_tokenizer=model)
    more = {"synchronous": dict(num_substeps=2),
            "penalty": dict(compute_post_kl=True, kl_penalty_coef=0.1, kl_reference_config=train.KLReferenceConfig(base_model=model)),
            "asynchronous": dict(async_config=train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=2, **({"loss_fn": "ppo"} if takes(train.AsyncConfig, "loss_fn") else {}))),
            "streaming": dict(stream_minibatch_config=train.StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2))}[mode]
    config = rl_basic.build_config_blueprint(model).apply({**dict(model_name=model, renderer_name="role_colon", dataset_builder=builder, max_steps=2, eval_every=0,
                                                                  save_every=2, base_url=url, log_path=str(tmp_path)), **SMALL, **more}).make()
    asyncio.run(train.main(config))
    differences = [series(tmp_path, name) for name in ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")]
    assert differences[0] and differences[1]
    if mode in ("penalty", "streaming"):  # all on policy: sampler and trainer have the same bits
        assert differences == [[0.0] * len(differences[0])] * 2


def test_preferences(recipes, tmp_path):
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
    url, model = recipes
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"label": "A", "comparison": {
        "prompt_conversation": [{"role": "user", "content": x["question"]}], "completion_A": [{"role": "assistant", "content": x["answer"]}],
        "completion_B": [{"role": "assistant", "content": y["answer"]}]}}) + "\n" for x, y in zip(ROWS, ROWS[1:])))
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=model, renderer_name="role_colon", max_length=500, batch_size=3)
    train_dpo.main(train_dpo.Config(
        recipe_name="recipe_preference_dpo", log_path=str(tmp_path / "log"), model_name=model, renderer_name="role_colon", evaluator_builders=[], learning_rate=1e-3, dpo_beta=0.1,
        dataset_builder=DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=str(pairs))), base_url=url, max_steps=2, lora_rank=8))
    losses = series(tmp_path / "log", "dpo_loss")
    assert len(losses) == 2 and losses[0] == pytest.approx(np.log(2), abs=1e-6)  # the policy is its own reference


def test_distillation_on_policy(recipes, tmp_path, monkeypatch):
    import tinker_cookbook.distillation.datasets as sources
    from tinker_cookbook.distillation import train_on_policy
    url, model = recipes
    for name in ("load_deepmath_prompts", "load_tulu3_prompts"):
        if hasattr(sources, name):
            monkeypatch.setattr(sources, name, lambda *_, **__: QUESTIONS)
    builder = sources.PromptOnlyDatasetBuilder(dataset_name="deepmath", groups_per_batch=2, group_size=2, model_name_for_tokenizer=model, renderer_name="role_colon")
    config = train_on_policy.Config(recipe_name="recipe_distillation_on_policy", model_name=model, renderer_name="role_colon", kl_penalty_coef=1.0, log_path=str(tmp_path),
                                    base_url=url, max_steps=2, eval_every=0, save_every=0, dataset_configs=[sources.DistillationDatasetConfig(
                                        dataset_builder=builder, teacher_config=sources.TeacherConfig(base_model=model), groups_per_batch=2)], **SMALL)
    asyncio.run(train_on_policy.main(config))
    assert series(tmp_path, "teacher_kl")[0] == 0.0  # the student begins as its teacher


def test_distillation_off_policy(recipes):
    """The recipe's own calls: a teacher's likeliest tokens of each position, then cross entropy with so many targets a row."""
    from tinker_cookbook.distillation import train_off_policy
    url, model = recipes
    service = tinker.ServiceClient(base_url=url)
    student, teacher = ready(service.create_lora_training_client(base_model=model, rank=8)), ready(service.create_sampling_client(base_model=model))
    texts = [student.get_tokenizer().encode(r["question"])[:60] for r in ROWS[:4]]
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(t[:-1]), loss_fn_inputs={"target_tokens": np.array(t[1:], np.int64), "weights": np.ones(len(t) - 1, np.float32)})
            for t in texts]
    likely = asyncio.run(train_off_policy._collect_topk_batch([teacher] * len(data), data, 5))
    losses = []
    for _ in range(4):
        gradient, step = student.forward_backward(likely, "cross_entropy"), student.optim_step(tinker.AdamParams(learning_rate=1e-2))
        losses.append(gradient.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < losses[0]
