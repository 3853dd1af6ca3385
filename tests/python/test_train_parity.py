"""`train` against the oracle: every parameter's gradient, log-probs, loss, and the optimizer's result."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

import objective
import oracle
from comparison import TermSizes, Trained, assert_as_exact_as, assert_equal_gradients, assert_equal_series
from make_model import FAMILIES, VOCABULARY, add_kept_sets, add_series, make_model, make_rollouts, write_records

SEED = 11
# Logits of these models stay below 40 and a row's log-sum-exp adds about 100 terms: 40 x 2^-52 x a few dozen roundings.
LOGPROB_FLOAT64 = 1e-11

# Everything at once: what a single-feature case would miss shows here.
EVERYTHING = {"policy-loss": "vanilla", "clip-ratio-high": 0.28, "kl-loss-coef": 0.1, "entropy-coeff": 0.02, "rollout-is": "token",
              "loss-agg-mode": "seq-mean-token-mean"}
CASES = {
    "defaults": {},
    "clip_higher_and_dual_clip": {"clip-ratio-high": 0.28, "clip-ratio-low": 0.1, "clip-ratio-c": 1.3},
    "no_dual_clip": {"clip-ratio-c": float("inf")},
    "gspo": {"policy-loss": "gspo", "clip-ratio-low": 0.05, "clip-ratio-high": 0.05},
    "gspo_token_mean": {"policy-loss": "gspo", "loss-agg-mode": "token-mean"},
    "cispo": {"policy-loss": "cispo"},
    "sapo": {"policy-loss": "sapo"},
    "gpg": {"policy-loss": "gpg", "adv-estimator": "dr_grpo"},
    "reinforce_with_sequence_weights": {"policy-loss": "reinforce", "rollout-is": "sequence"},
    "rloo_token_sum": {"adv-estimator": "rloo", "loss-agg-mode": "token-sum"},
    "reinforce_plus_plus": {"adv-estimator": "reinforce_plus_plus", "gamma": 0.9, "loss-agg-mode": "seq-mean-token-sum"},
    "reinforce_plus_plus_baseline": {"adv-estimator": "reinforce_plus_plus_baseline", "loss-agg-mode": "seq-mean-token-mean"},
    "dr_grpo": {"adv-estimator": "dr_grpo", "loss-agg-mode": "seq-mean-token-sum-norm"},
    "dr_grpo_with_factor": {"adv-estimator": "dr_grpo", "loss-agg-mode": "seq-mean-token-sum-norm", "loss-scale-factor": 50},
    "token_weights": {"rollout-is": "token", "rollout-is-threshold": 1.2},
    "entropy": {"entropy-coeff": 0.05},
    **{f"kl_{kind}": {"kl-loss-coef": 0.3, "kl-loss-type": kind} for kind in ("k1", "abs", "k2", "low_var_kl", "k1+", "k3+")},
    "everything": EVERYTHING,
}
SCHEDULES = [
    {"schedule": "dense"}, {"schedule": "packed"}, {"schedule": "phased"}, {"schedule": "auto"},
    {"schedule": "phased", "token-budget": 1}, {"schedule": "phased", "token-budget": 9, "trunk-state": "recompute"},
    {"schedule": "phased", "token-budget": 9, "trunk-state": "keep"}, {"schedule": "phased", "share": "prompt"},
]


@pytest.fixture(scope="module")
def prepared(model_of, tmp_path_factory):
    """prepared(family) -> (model directory, float64 oracle model, records with all series, their file)."""
    made = {}

    def find(family):
        if family not in made:
            model = oracle.load_model(model_of(family), torch.float64)
            records = add_kept_sets(make_rollouts(SEED), SEED + 2)
            add_series(records, oracle.score(model, records)[0], SEED + 1)
            path = write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")
            made[family] = (model_of(family), model, records, path)
        return made[family]

    return find


def oracle_step(model, records, options, more=0):
    resolved = objective.resolve(options)
    return oracle.gradients(model, records, objective.advantages(records, resolved), resolved, more)


@pytest.fixture(scope="module")
def float32_draws(prepared):
    """float32_draws(family) -> (float64 gradient, transformers' float32 gradients: two implementations of attention, each with
    and without tokens behind the responses; TermSizes.bias_over_weight)."""
    made = {}

    def find(family):
        if family not in made:
            directory, model, records, _ = prepared(family)
            with TermSizes(model) as terms:
                exact = oracle_step(model, records, EVERYTHING)[2]
            plain, draws = oracle.load_model(directory, torch.float32), []
            for attention in ("eager", "sdpa"):
                plain.set_attn_implementation(attention)
                draws += [oracle_step(plain, records, EVERYTHING, more)[2] for more in (0, 5)]
            made[family] = exact, draws, terms.bias_over_weight()
        return made[family]

    return find


def assert_parity(espalier, prepared, family, folder, options, **plan):
    directory, model, records, path = prepared(family)
    loss, parts, exact, logprobs, entropies = oracle_step(model, records, options)
    run = Trained(espalier, directory, path, folder, **options, **plan)
    assert_equal_gradients(run.gradients, exact, SEED)
    assert all(gradient.dtype == torch.float64 for gradient in run.gradients.values())
    assert_equal_series(run.logprobs, "logprobs", logprobs, LOGPROB_FLOAT64)
    assert_equal_series(run.logprobs, "entropies", entropies, LOGPROB_FLOAT64)
    step, = run.json["steps"]
    assert step["loss"] == pytest.approx(loss, rel=1e-10, abs=1e-12)
    for name, value in parts.items():
        assert step[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name
    norm = float(torch.stack([g.norm() for g in exact.values()]).norm())
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-10)
    return run


@pytest.mark.parametrize("case", CASES)
def test_every_objective_has_the_oracles_gradient(case, espalier, prepared, tmp_path):
    assert_parity(espalier, prepared, "qwen3_tied", tmp_path, CASES[case])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_every_family_has_the_oracles_gradient(family, loss, espalier, prepared, tmp_path):
    assert_parity(espalier, prepared, family, tmp_path, {**EVERYTHING, "policy-loss": loss})


@pytest.mark.parametrize("plan", SCHEDULES, ids=lambda plan: "_".join(str(value) for value in plan.values()))
@pytest.mark.parametrize("family, loss", [("llama3_tied", "vanilla"), ("llama3_tied", "gspo"), ("qwen3_window", "vanilla"), ("mistral", "gspo")])
def test_every_plan_has_the_oracles_gradient(plan, family, loss, espalier, prepared, tmp_path):
    assert_parity(espalier, prepared, family, tmp_path, {**EVERYTHING, "policy-loss": loss}, **plan)


def test_a_model_that_may_have_a_window_runs_without_one(espalier, prepared, tmp_path):
    """Mistral with sliding_window null: the gradient of full attention, which is another one than that of the window."""
    directory, _, records, path = prepared("mistral")
    full = make_model("mistral", tmp_path / "full", sliding_window=None)
    _, _, exact, *_ = oracle_step(oracle.load_model(full, torch.float64), records, {})
    found = Trained(espalier, full, path, tmp_path / "run").gradients
    assert_equal_gradients(found, exact, SEED)
    in_window = Trained(espalier, directory, path, tmp_path / "window").gradients
    name = "model.layers.0.self_attn.q_proj.weight"  # the two models have the same weights
    assert (found[name] - in_window[name]).norm() > 0.1 * found[name].norm()


@pytest.mark.parametrize("family", ["mistral", "qwen2_window", "qwen3_window", "qwen3_moe_window"])
def test_verify_shares_prompts_of_models_with_windows(family, espalier, prepared):
    directory, _, _, path = prepared(family)
    verdict = espalier("verify", "--model", directory, "--rollouts", path, "--dtype", "float64", "--json").json
    assert verdict["verdict"] == "pass"


def test_absent_old_logprobs_mean_a_ratio_of_one(espalier, prepared, model_of, tmp_path):
    _, model, records, _ = prepared("qwen3_tied")
    bare = [{k: v for k, v in r.items() if k != "old_logprobs"} for r in records]
    path = write_records(bare, tmp_path / "bare.jsonl")
    _, _, exact, *_ = oracle_step(model, bare, {})
    assert_equal_gradients(Trained(espalier, model_of("qwen3_tied"), path, tmp_path).gradients, exact, SEED)


def test_given_advantages_are_used_as_they_are(espalier, prepared, model_of, tmp_path):
    _, model, records, _ = prepared("qwen3_tied")
    given = [{**r, "advantage": [0.1 * (t - 3) for t in range(len(r["response_ids"]))] if i % 2 else 0.7} for i, r in enumerate(records)]
    path = write_records(given, tmp_path / "given.jsonl")
    options = {"adv-estimator": "given"}
    _, _, exact, *_ = oracle_step(model, given, options)
    assert_equal_gradients(Trained(espalier, model_of("qwen3_tied"), path, tmp_path, **options).gradients, exact, SEED)


@pytest.mark.rounding
@pytest.mark.parametrize("family", ["llama3_tied", "qwen2_untied", "qwen3_sharded"])
@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_float32_is_as_exact_as_transformers(family, schedule, espalier, prepared, float32_draws, tmp_path):
    """The error against float64 may be twice that of transformers in float32 (comparison.assert_as_exact_as)."""
    directory, _, _, path = prepared(family)
    exact, draws, bias_over_weight = float32_draws(family)
    run = Trained(espalier, directory, path, tmp_path, dtype="float32", schedule=schedule, **EVERYTHING)
    assert all(gradient.dtype == torch.float32 for gradient in run.gradients.values())
    assert_as_exact_as(run.gradients, draws, exact, bias_over_weight)


@pytest.mark.parametrize("settings", [
    {"lr": 1e-3}, {"lr": 1e-3, "mini-batch-size": 6, "epochs": 2, "warmup-steps": 3, "max-grad-norm": 0.5, "betas": "0.8,0.95"},
    {"lr": 1e-3, "weight-decay": 0.3, "decay-matrices-only": True, "max-grad-norm": 0}], ids=["one_step", "mini_batches", "decay"])
def test_weights_after_training_are_those_of_torch_adamw(settings, espalier, prepared, model_of, tmp_path):
    """Adam divides by at least eps = 1e-8, and a float64 gradient of norm about 1 is known to about 1e-15, so a step may
    differ by lr x 1e-15 / 1e-8 for the worst element; steps add up."""
    _, _, records, path = prepared("qwen3_sharded")
    model = oracle.load_model(model_of("qwen3_sharded"), torch.float64)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    keywords = {name.replace("-", "_"): value for name, value in settings.items()}
    if "betas" in keywords:
        keywords["betas"] = tuple(float(b) for b in keywords["betas"].split(","))
    history = oracle.train(model, records, objective.resolve({}), **keywords)
    run = Trained(espalier, model_of("qwen3_sharded"), path, tmp_path, **{"save-dtype": "float64"}, **settings)
    assert [s["step"] for s in run.json["steps"]] == list(range(1, len(history) + 1))
    for step, (loss, norm, _) in zip(run.json["steps"], history):
        assert step["loss"] == pytest.approx(loss, rel=1e-7, abs=1e-9)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-7)
    trained = oracle.load_model(run.out, torch.float64)
    for name, parameter in trained.named_parameters():
        exact = model.get_parameter(name).detach()
        assert (exact - start[name]).abs().max() > 0.1 * settings["lr"], f"{name} did not move: the test would prove nothing"
        worst = float((parameter.detach() - exact).abs().max())
        assert worst <= len(history) * settings["lr"] * 1e-7, f"{name}: off by {worst:.3e}"


@pytest.mark.parametrize("family, pad", [("qwen3_tied", 7), ("llama_untied", -1), ("qwen2_untied", 0), ("qwen3_moe", 7)])
@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_a_look_up_of_the_pad_token_has_no_gradient(family, pad, schedule, espalier, tmp_path):
    """As in nn.Embedding(padding_idx), where -1 is the last token; what a tied head adds to the row stays."""
    directory = make_model(family, tmp_path / "model", pad_token_id=pad)
    row = pad % VOCABULARY
    records = [{**record, "prompt_ids": [*record["prompt_ids"], row]} for record in make_rollouts(SEED)]
    path = write_records(records, tmp_path / "rollouts.jsonl")
    model = oracle.load_model(directory, torch.float64)
    assert model.model.embed_tokens.padding_idx == row
    _, _, exact, *_ = oracle_step(model, records, {})
    run = Trained(espalier, directory, path, tmp_path, schedule=schedule)
    assert_equal_gradients(run.gradients, exact, SEED)
    of_row = run.gradients["model.embed_tokens.weight"][row]
    assert bool(of_row.any()) == (family == "qwen3_tied")
    # The same without a pad token is another gradient: the token is looked up.
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    without = Trained(espalier, directory, path, tmp_path / "without", schedule=schedule).gradients["model.embed_tokens.weight"][row]
    assert not torch.allclose(of_row, without, rtol=1e-3, atol=0)


def test_replay_of_a_recorded_run_follows_the_pad_token(espalier, tmp_path):
    """Three updates by transformers and torch, recorded as a trace: replay ends at their weights, to float64's rounding as in
    test_weights_after_training_are_those_of_torch_adamw."""
    directory, rate = make_model("qwen3_tied", tmp_path / "trace/model", pad_token_id=7), 1e-3
    records = [{**record, "prompt_ids": [*record["prompt_ids"], 7], "step": 1 + int(record["group"][1:]) % 3}
               for record in make_rollouts(SEED)]
    write_records(records, tmp_path / "trace/rollouts.jsonl")
    model = oracle.load_model(directory, torch.float64)
    history = oracle.train(model, records, objective.resolve({}), lr=rate)
    assert len(history) == 3
    (tmp_path / "trace/checkpoints").mkdir()
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "trace/checkpoints/step-000003.safetensors")
    (tmp_path / "trace/trace.json").write_text(json.dumps({
        "model": "model", "rollouts": "rollouts.jsonl", "dtype": "float64", "options": {"lr": rate, "dtype": "float64"},
        "steps": [{"step": i + 1, "loss": loss, "grad_norm": norm} for i, (loss, norm, _) in enumerate(history)],
        "checkpoints": [{"step": 3, "file": "checkpoints/step-000003.safetensors"}]}))
    checkpoint, = espalier("replay", tmp_path / "trace", "--json").json["checkpoints"]
    assert checkpoint["max_abs"] <= 3 * rate * 1e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_untied", "qwen3_sharded", "qwen3_moe"])
def test_the_gradient_has_the_same_bits_on_any_number_of_threads(family, dtype, espalier, model_of, tmp_path):
    """The same plan; prompts long enough for threads to share products, norms and attention."""
    draw, records, found = random.Random(SEED), [], []
    ids = lambda count: [draw.randrange(VOCABULARY) for _ in range(count)]
    for _ in range(2):
        prompt = ids(400)
        records += [{"prompt_ids": prompt, "response_ids": ids(70), "advantage": draw.uniform(-1, 1)} for _ in range(3)]
    path = write_records(records, tmp_path / "in.jsonl")
    for threads in (1, 2, 3):
        out = tmp_path / f"{threads}.safetensors"
        espalier("train", "--model", model_of(family), "--rollouts", path, "--out", tmp_path / f"model-{threads}", "--gradients", out, "--dtype", dtype,
                 "--products", "own", "--schedule", "phased", "--token-budget", 150, "--trunk-state", "keep", "--wave-state", "keep",
                 "--memory-budget", "4GiB", "--threads", threads)
        found.append(out.read_bytes())
    assert found[1] == found[0] and found[2] == found[0]


def test_the_prompt_is_forwarded_once(espalier, model_of, tmp_path):
    """A prompt of P tokens costs P - 1 trunk rows once, and the row of its last token once a wave: here one wave a group."""
    records = [r for r in make_rollouts(SEED) if r["response_ids"]]
    path = write_records(records, tmp_path / "rollouts.jsonl")
    groups = {}
    for record in records:
        groups.setdefault(record["group"], []).append(len(record["prompt_ids"]))
    saved = sum((len(lengths) - 1) * lengths[0] for lengths in groups.values())
    rows = {}
    for schedule in ("dense", "phased"):
        run = Trained(espalier, model_of("qwen3_tied"), path, tmp_path / schedule, schedule=schedule, share="prompt")
        rows[schedule] = run.json["steps"][0]["rows"]
    assert rows["dense"]["physical"] == rows["dense"]["logical"] == rows["phased"]["logical"]
    assert rows["phased"]["physical"] == rows["phased"]["logical"] - saved
    assert rows["phased"]["trunk"] + rows["phased"]["wave"] == rows["phased"]["physical"]


@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_a_trained_model_has_the_oracles_gradient(schedule, espalier, stories, tmp_path):
    lines = (stories / "rollouts.jsonl").read_text().splitlines()[:16]
    records = [json.loads(line) for line in lines]
    for record in records:
        record.setdefault("loss_mask", [1] * len(record["response_ids"]))
    path = write_records(records, tmp_path / "rollouts.jsonl")
    _, _, exact, *_ = oracle_step(oracle.load_model(stories / "hf", torch.float64), records, {"rollout-is": "token"})
    run = Trained(espalier, stories / "hf", path, tmp_path, schedule=schedule, **{"rollout-is": "token"})
    assert_equal_gradients(run.gradients, exact, "of the recorded data")
