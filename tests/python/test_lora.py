"""LoRA in the program: gradients against peft's own model in float64, adapters that peft reads and writes, resumed runs, refusals."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import objective
import oracle
from comparison import FLOAT64_RELATIVE, relative_errors
from make_model import FAMILIES, add_series, make_rollouts, write_records

peft = pytest.importorskip("peft")

SEED = 11
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model."


def without_adapter_name(tensors):
    return {name.replace(".default.", ".").replace("modules_to_save.", ""): values for name, values in tensors.items()}


def make_adapter(base, folder, dtype=torch.float32, kind=transformers.AutoModelForCausalLM, task="CAUSAL_LM", **settings):
    """A peft adapter of the base with random A and B, and a random head where the task has one."""
    torch.manual_seed(SEED)
    model = peft.get_peft_model(kind.from_pretrained(base, dtype=dtype), peft.LoraConfig(
        task_type=task, **{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


class OneLabel:
    """A classifier of the kind with one label, of a language model's directory too."""

    def __init__(self, kind):
        self.kind = kind

    def from_pretrained(self, *words, **more):
        return self.kind.from_pretrained(*words, num_labels=1, **more)


def load_peft(base, adapter, kind=transformers.AutoModelForCausalLM):
    """peft's model in float64, the oracle's below it, with adapters that train."""
    model = peft.PeftModel.from_pretrained(oracle.load_model(base, torch.float64, kind), adapter, is_trainable=True, autocast_adapter_dtype=False).double()
    for module in model.modules():  # modules_to_save are copies
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = oracle.norm64.__get__(module)
    return model


@pytest.fixture(scope="module")
def case(model_of, tmp_path_factory):
    """case(family) -> (model directory, records, file of the records)."""
    made = {}

    def find(family):
        if family not in made:
            base = model_of(family)
            records = [{**r, "temperature": 1.0} for r in make_rollouts(SEED) if r["response_ids"]]
            add_series(records, oracle.score(oracle.load_model(base, torch.float64), records)[0], SEED + 1)
            made[family] = base, records, write_records(records, tmp_path_factory.mktemp("lora") / "rollouts.jsonl")
        return made[family]

    return find


def exact_gradients(model, records):
    found = oracle.gradients(model, records, objective.advantages(records, objective.resolve({})), objective.resolve({}))[2]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return without_adapter_name({name: values for name, values in found.items() if name in trained})


def run(espalier, case, tmp_path, *more, expect=0):
    base, _, rollouts = case
    return espalier("train", "--model", base, "--rollouts", rollouts, "--dtype", "float64", "--threads", 2, *more, "--json", expect=expect)


def gradients_of(espalier, case, tmp_path, *more):
    run(espalier, case, tmp_path, "--gradients", tmp_path / "gradients.safetensors", "--overwrite", *more)
    return load_file(tmp_path / "gradients.safetensors")


# test_lora_modules.py has all modules of all families
@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if row["kind"] in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral")])
def test_gradients_are_those_of_pefts_model(family, espalier, case, tmp_path):
    base, records, _ = case(family)
    # peft's "all-linear" also changes routers and experts, which have no adapters here
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=TARGETS[:4] if "moe" in family else TARGETS)
    exact = exact_gradients(load_peft(base, adapter), records)
    for schedule in ("dense", "packed", "phased"):
        found = gradients_of(espalier, case(family), tmp_path, "--adapter", adapter, "--schedule", schedule)
        errors = relative_errors(found, exact)
        assert max(errors.values()) <= FLOAT64_RELATIVE, (schedule, max(errors, key=errors.get), max(errors.values()))


@pytest.mark.parametrize("settings", [
    *({"target_modules": [target]} for target in TARGETS),
    {"target_modules": ["v_proj", "up_proj"], "use_rslora": True},
    {"target_modules": r"model\.layers\.[12]\.self_attn\.(q|k)_proj"},
    {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "lm_head"]},
], ids=str)
def test_gradients_of_every_target(settings, espalier, case, tmp_path):
    base, records, _ = case("qwen3_sharded")
    adapter = make_adapter(base, tmp_path / "adapter", **settings)
    exact = exact_gradients(load_peft(base, adapter), records)
    found = gradients_of(espalier, case("qwen3_sharded"), tmp_path, "--adapter", adapter)
    errors = relative_errors(found, exact)
    assert max(errors.values()) <= FLOAT64_RELATIVE, (max(errors, key=errors.get), max(errors.values()))


@pytest.mark.parametrize("settings", [(), ("--lora-target", "q_proj,down_proj", "--use-rslora"),
                                      ("--lora-target", r"model[.]layers[.]1[.].*", "--train", "norms"),
                                      ("--lora-target", "q_proj", "--train", "embeddings")], ids=str)
def test_peft_loads_the_written_adapter_and_gives_the_engines_logprobs(settings, espalier, case, tmp_path):
    base, records, rollouts = case("qwen3_tied")
    run(espalier, case("qwen3_tied"), tmp_path, "--lora-rank", 4, "--lora-alpha", 8, *settings, "--lr", 0.05, "--epochs", 3, "--out", tmp_path / "out")
    assert not list((tmp_path / "out").glob("model*.safetensors"))
    espalier("score", "--model", base, "--adapter", tmp_path / "out", "--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs",
             "--out", tmp_path / "scored.jsonl")
    ours = [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    model = load_peft(base, tmp_path / "out")
    theirs, before = oracle.score(model, records)[0], oracle.score(oracle.load_model(base, torch.float64), records)[0]
    moved = 0
    for a, b, c in zip(ours, theirs, before, strict=True):
        assert torch.tensor(a, dtype=torch.float64).sub(torch.tensor(b, dtype=torch.float64)).abs().max() <= 1e-10
        moved = max(moved, *(abs(x - y) for x, y in zip(b, c)))
    assert moved > 1e-3


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_head_of_a_tied_model_is_the_embedding_or_refused(tied, saved, espalier, case, tmp_path):
    base, records, rollouts = case("qwen3_tied")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=[saved], ensure_weight_tying=tied)
    done = espalier("score", "--model", base, "--adapter", adapter, "--rollouts", rollouts, "--dtype", "float64", "--out", tmp_path / "scored.jsonl",
                    expect=0 if tied else 4)
    if not tied:
        assert f"{saved}.weight" in done.stderr and "ensure_weight_tying" in done.stderr
        return
    ours = [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    theirs = oracle.score(load_peft(base, adapter), records)[0]
    assert max(abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b)) <= 1e-10


def test_without_the_adapter_the_weights_are_the_reference(espalier, case, tmp_path):
    base, records, rollouts = case("qwen3_tied")
    run(espalier, case("qwen3_tied"), tmp_path, "--lora-rank", 4, "--lr", 0.05, "--out", tmp_path / "out")
    for adapter in ((), ("--adapter", tmp_path / "out")):
        espalier("score", "--model", base, *adapter, "--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs", "--out", tmp_path / "scored.jsonl",
                 "--overwrite")
        ours = [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
        plain = oracle.score(oracle.load_model(base, torch.float64), records)[0]
        difference = max(abs(x - y) for a, b in zip(ours, plain) for x, y in zip(a, b))
        assert (difference <= 1e-10) == (not adapter)


def test_merged_model_scores_as_the_adapter(espalier, case, tmp_path):
    base, _, rollouts = case("llama_untied")
    adapter = make_adapter(base, tmp_path / "adapter")
    espalier("merge", "--adapter", adapter, "--model", base, "--out", tmp_path / "merged", "--save-dtype", "float64")
    series = []
    for name, words in {"a": ("--model", base, "--adapter", adapter), "b": ("--model", tmp_path / "merged")}.items():
        espalier("score", *words, "--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs", "--out", tmp_path / f"{name}.jsonl")
        series.append([json.loads(line)["logprobs"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()])
    assert max(abs(x - y) for a, b in zip(*series) for x, y in zip(a, b)) <= 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_never_having_stopped(dtype, espalier, case, tmp_path):
    base, _, rollouts = case("qwen3_tied")
    words = ("train", "--rollouts", rollouts, "--dtype", dtype, "--mini-batch-size", 6, "--lr", 1e-3, "--epochs", 2)
    lora = ("--lora-rank", 4, "--lora-target", "q_proj,v_proj,up_proj")
    espalier(*words, "--model", base, *lora, "--out", tmp_path / "whole")
    espalier(*words, "--model", base, *lora, "--out", tmp_path / "first", "--steps", 1)
    espalier(*words, "--resume", tmp_path / "first", "--out", tmp_path / "second")
    for file in ("adapter_model.safetensors", "espalier/state.safetensors", "adapter_config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_start_values_are_pefts(espalier, case, tmp_path):
    base, *_ = case("llama_untied")
    run(espalier, case("llama_untied"), tmp_path, "--lora-rank", 8, "--lr", 0, "--weight-decay", 0, "--out", tmp_path / "out")
    for name, values in load_file(tmp_path / "out/adapter_model.safetensors").items():
        if name.endswith("lora_B.weight"):
            assert not values.any(), name
        else:
            bound = values.shape[1] ** -0.5  # kaiming_uniform with a = sqrt(5)
            assert values.abs().max() <= bound and values.abs().max() > 0.9 * bound and values.std() > 0.5 * bound, name


def test_written_config_is_pefts(espalier, case, tmp_path):
    run(espalier, case("llama_untied"), tmp_path, "--lora-rank", 4, "--lora-alpha", 6, "--use-rslora", "--out", tmp_path / "out")
    config = peft.LoraConfig.from_pretrained(tmp_path / "out")
    assert (config.r, config.lora_alpha, config.use_rslora, sorted(config.target_modules)) == (4, 6, True, sorted(TARGETS))
    assert config.modules_to_save is None and config.task_type == "CAUSAL_LM"


def with_config(**members):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **members}))
    return change


def with_tensors(change):
    def rewrite(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
    return rewrite


QUERY = PREFIX + "model.layers.0.self_attn.q_proj.lora_{}.weight"
HOSTILE = {
    "dropout": (with_config(lora_dropout=0.1), 4, "lora_dropout"),
    "dora": (with_config(use_dora=True), 4, "use_dora"),
    "another shape": (with_tensors(lambda t: t.update({QUERY.format("A"): torch.ones(4, 47)})), 3, "[4, 47]"),
    "half of a pair": (with_tensors(lambda t: t.pop(QUERY.format("B"))), 3, "lora_A alone"),
    "not a number": (with_tensors(lambda t: t[QUERY.format("B")].view(-1)[-1:].fill_(float("nan"))), 3, QUERY.format("B")),
    "a missing pair": (with_tensors(lambda t: [t.pop(QUERY.format(letter)) for letter in "AB"]), 3, "layers.0.self_attn.q_proj"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), 3, "adapter_config.json"),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_other_adapters_are_refused_by_name(damage, espalier, case, tmp_path):
    base, *_ = case("llama_untied")
    adapter = make_adapter(base, tmp_path / "adapter")
    change, code, told = HOSTILE[damage]
    change(adapter)
    error = run(espalier, case("llama_untied"), tmp_path, "--adapter", adapter, "--out", tmp_path / "out", expect=code).stderr
    assert told in error and not (tmp_path / "out").exists()


def test_the_adapter_of_another_model_is_refused(espalier, case, tmp_path):
    adapter = make_adapter(case("llama_untied")[0], tmp_path / "adapter")
    error = run(espalier, case("qwen3_sharded"), tmp_path, "--adapter", adapter, "--out", tmp_path / "out", expect=3).stderr
    assert "Does the adapter belong to this model?" in error


@pytest.mark.parametrize("words, code, told", [
    (("--lora-rank", 4, "--lora-dropout", 0.1), 4, "--lora-dropout"),
    (("--lora-rank", 4, "--lora-target", "nothing_proj"), 2, "--lora-target"),
    (("--lora-rank", 4, "--lora-target", "embed_tokens"), 2, "embed_tokens"),
    (("--lora-rank", 4, "--lora-target", "lm_head", "--train", "head"), 2, "has an adapter"),
    (("--lora-rank", 4, "--lora-target", "q_proj(,"), 2, "--lora-target"),
    (("--lora-rank", 49), 2, "at most"),
    (("--lora-rank", 4, "--train", "attention"), 2, "has an adapter"),
], ids=str)
def test_refusals_name_the_option(words, code, told, espalier, case, tmp_path):
    error = run(espalier, case("llama_untied"), tmp_path, *words, "--out", tmp_path / "out", expect=code).stderr
    assert told in error and not (tmp_path / "out").exists()


def test_single_experts_are_refused_as_targets(espalier, case, tmp_path):
    error = run(espalier, case("qwen3_moe"), tmp_path, "--lora-rank", 4, "--lora-target", r".*experts[.]3[.]up_proj", "--out", tmp_path / "out", expect=2).stderr
    assert "experts.gate_up_proj" in error


def test_verify_judges_adapters(espalier, case):
    for family in ("qwen3_tied", "qwen3_moe"):
        base, _, rollouts = case(family)
        report = espalier("verify", "--model", base, "--rollouts", rollouts, "--dtype", "float64", "--lora-rank", 4, "--json").json
        assert report["verdict"] == "pass" and report["worst"]["allowed"] <= 1e-10
        assert len(report["parameters"]) == 2 * 3 * (7 if family == "qwen3_tied" else 4)  # A and B of each target of three layers


def test_a_plan_holds_no_masters_of_held_weights(espalier, case):
    base, _, rollouts = case("qwen3_tied")
    plans = [espalier("plan", "--model", base, "--rollouts", rollouts, *words, "--json").json for words in ((), ("--lora-rank", 4))]
    assert plans[1]["flops"]["chosen"] < plans[0]["flops"]["chosen"]
    full, adapted = (max(plan["predicted"]["chosen"]["peak_bytes"].values()) for plan in plans)
    assert adapted < full


@pytest.mark.parametrize("train", [(), ("--train", "norms")], ids=["adapters_alone", "norms_beside"])
@pytest.mark.parametrize("source", ["fresh", "given"])
@pytest.mark.parametrize("dtype, products", [("float64", "auto"), ("bfloat16", "auto"), ("bfloat16", "own"), ("bfloat16", "library")])
def test_a_recorded_run_is_replayed_to_the_same_bits(dtype, products, source, train, espalier, case, tmp_path):
    base, _, rollouts = case("qwen3_tied")
    adapter = ("--lora-rank", 4, "--lora-alpha", 8) if source == "fresh" else ("--adapter", make_adapter(base, tmp_path / "adapter"))
    espalier("train", "--model", base, "--rollouts", rollouts, "--dtype", dtype, "--products", products, *adapter, *train,
             "--mini-batch-size", 6, "--lr", 1e-3, "--epochs", 2, "--record", tmp_path / "trace", "--record-every", 2)
    assert (tmp_path / "trace/adapter/adapter_config.json").is_file()
    # The trace needs nothing beside it, and its model has the bits of the one that was given.
    stored, given = load_file(tmp_path / "trace/model/model.safetensors"), load_file(base / "model.safetensors")
    assert stored.keys() == given.keys() and all(torch.equal(values, given[name]) for name, values in stored.items())
    report = espalier("replay", tmp_path / "trace", "--json").json
    assert len(report["steps"]) > 2 and report["checkpoints"]
    for step in report["steps"]:
        assert step["loss"] == step["recorded_loss"] and step["grad_norm"] == step["recorded_grad_norm"] and step["grad_norm"] > 0
    assert all(checkpoint["max_abs"] == 0 for checkpoint in report["checkpoints"])
    if dtype == "float64":
        dense = espalier("replay", tmp_path / "trace", "--schedule", "dense", "--json").json
        assert max(checkpoint["movement_rel_l2"] for checkpoint in dense["checkpoints"]) <= 1e-6
        assert all(step["loss"] == pytest.approx(step["recorded_loss"], rel=1e-9, abs=1e-12) for step in dense["steps"])


def test_replay_of_rollouts_and_bench_take_adapters(espalier, case, tmp_path):
    base, _, rollouts = case("qwen3_tied")
    adapter = make_adapter(base, tmp_path / "adapter")
    report = espalier("replay", rollouts, "--model", base, "--adapter", adapter, "--dtype", "float64", "--json").json
    trained = run(espalier, case("qwen3_tied"), tmp_path, "--adapter", adapter, "--out", tmp_path / "out").json
    assert report["steps"][0]["grad_norm"] == pytest.approx(trained["steps"][0]["grad_norm"], rel=1e-10)
    timed = espalier("bench", "--model", base, "--rollouts", rollouts, "--lora-rank", 4, "--json").json
    assert timed["cells"]
