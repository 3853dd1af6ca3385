"""Adapters of every kind of module in every family: heads, routers, experts, shared experts, latents, states, joint modules. Gradients against peft's own model
in float64, files that peft reads and writes, refusals."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import oracle
from comparison import FLOAT64_RELATIVE, relative_errors
from make_model import FAMILIES
from test_lora import PREFIX, case, exact_gradients, gradients_of, load_peft, make_adapter, run, with_config, with_tensors  # noqa: F401
from test_parallel import Ranks

peft = pytest.importorskip("peft")

# Names of linear layers that peft 0.21 takes for those of experts in families that have some: their weights are target_parameters.
TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj"}
# Halves of blocks, and matrices that files stack.
WITHOUT_ADAPTERS = ["granite_hybrid", "granite_hybrid_moe", "granite_moe", "granite_moe_shared", "nemotron_h", "nemotron_h_moe"]
ADAPTED = [family for family in FAMILIES if family not in WITHOUT_ADAPTERS]
UNTIED = [family for family in FAMILIES if not FAMILIES[family]["tied"]]


def every_target(base):
    """target_modules and target_parameters of all modules of the model that the program can adapt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    modules, parameters = ["lm_head"], []
    kind = model.config.model_type
    by_parameter = TAKEN_FOR_EXPERTS if kind.endswith(("moe", "next", "moe_lite")) or kind.startswith(("deepseek", "dots1", "kimi", "solar_open")) else ()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parameters.append(name + ".weight") if name.rpartition(".")[2] in by_parameter else modules.append(name)
        elif type(module).__name__.endswith("Experts"):
            parameters += [name + ".gate_up_proj", name + ".down_proj"]
        elif type(module).__name__.lower().endswith("topkrouter"):
            parameters.append(name + ".weight")
    return dict(target_modules=modules, target_parameters=parameters or None)


@pytest.mark.parametrize("family", WITHOUT_ADAPTERS)
def test_families_without_adapters_are_refused_by_name(family, espalier, case, tmp_path):  # noqa: F811
    base, _, rollouts = case(family)
    refused = espalier("train", "--model", base, "--rollouts", rollouts, "--lora-rank", 4, "--out", tmp_path / "out", expect=4)
    assert "--lora-rank" in refused.stderr and "ForCausalLM" in refused.stderr and not (tmp_path / "out").exists()


def words_of(family):
    """The same as --lora-target."""
    router = {"gpt_oss_moe": "router", "gemma4_moe": "proj"}.get(family, "gate")
    return "all-linear,lm_head" + (f",experts,{router}" if "moe" in family else "")


def assert_gradients(espalier, case, family, adapter, tmp_path, schedules=("dense", "packed", "phased")):  # noqa: F811
    base, records, _ = case(family)
    exact = exact_gradients(load_peft(base, adapter), records)
    assert min(values.abs().max() for values in exact.values()) > 0
    for schedule in schedules:
        found = gradients_of(espalier, case(family), tmp_path, "--adapter", adapter, "--schedule", schedule)
        errors = relative_errors(found, exact)
        assert found.keys() == exact.keys() and max(errors.values()) <= FLOAT64_RELATIVE, (schedule, max(errors, key=errors.get), max(errors.values()))


@pytest.mark.parametrize("family", ADAPTED)
def test_gradients_of_every_module_are_those_of_pefts_model(family, espalier, case, tmp_path):  # noqa: F811
    base, *_ = case(family)
    adapter = make_adapter(base, tmp_path / "adapter", r=3, **every_target(base))
    assert_gradients(espalier, case, family, adapter, tmp_path)


@pytest.mark.parametrize("family, settings", [
    ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ("gpt_oss_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "use_rslora": True}),
    ("mixtral_moe", {"target_modules": ["q_proj"], "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]}),
    ("qwen3_tied", {"target_modules": ["lm_head"]}),
    ("llama_untied", {"target_modules": ["lm_head", "v_proj"]}),
    ("phi3", {"target_modules": ["qkv_proj"]}),
    ("deepseek_v3", {"target_modules": ["kv_a_proj_with_mqa"]}),
    ("qwen3_next", {"target_modules": ["in_proj_ba"]}),
], ids=str)
def test_gradients_of_single_kinds(family, settings, espalier, case, tmp_path):  # noqa: F811
    adapter = make_adapter(case(family)[0], tmp_path / "adapter", r=3, **settings)
    assert_gradients(espalier, case, family, adapter, tmp_path, ("phased",))


@pytest.mark.parametrize("family", ADAPTED)
def test_peft_loads_what_was_trained_and_gives_the_engines_logprobs(family, espalier, case, tmp_path):  # noqa: F811
    base, records, rollouts = case(family)
    run(espalier, case(family), tmp_path, "--lora-rank", 3, "--lora-alpha", 6, "--lora-target", words_of(family), "--lr", 0.05, "--epochs", 2,
        "--out", tmp_path / "out")
    words = ("--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs", "--overwrite", "--out", tmp_path / "scored.jsonl")
    scored = lambda *model: (espalier("score", *model, *words),  # noqa: E731
                             [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()])[1]
    ours = scored("--model", base, "--adapter", tmp_path / "out")
    model = load_peft(base, tmp_path / "out")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == sum(values.numel() for values in load_file(tmp_path / "out/adapter_model.safetensors").values())
    theirs, before = oracle.score(model, records)[0], oracle.score(oracle.load_model(base, torch.float64), records)[0]
    difference = lambda x, y: max(abs(p - q) for a, b in zip(x, y, strict=True) for p, q in zip(a, b, strict=True))  # noqa: E731
    assert difference(ours, theirs) <= 1e-10 and difference(theirs, before) > 1e-3
    if family in UNTIED:
        espalier("merge", tmp_path / "out", "--model", base, "--out", tmp_path / "merged", "--save-dtype", "float64")
        assert difference(scored("--model", tmp_path / "merged"), ours) <= 1e-10


# peft 0.21 gives gate_up_proj of experts twice the rank and alpha where target_modules named gate and up, or were "all-linear".
DOUBLED = ["qwen3_moe", "mixtral_moe", "glm4_moe", "minimax_m2_moe", "qwen3_next_moe", "deepseek_v2_moe", "deepseek_v3_moe"]
# Other ranks with the same factor s; the first expression that matches counts.
ONE_FACTOR = dict(target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"q_proj": 6, r".*\.1\.mlp\.down_proj": 2, "down_proj": 1},
                  alpha_pattern={r"q_proj": 8, r".*\.1\.mlp\.down_proj": 8 / 3, "down_proj": 4 / 3})
# Other factors: by names, of one layer, of a weight among target_parameters.
PATTERNS = {
    "llama_untied": dict(target_modules=["q_proj", "v_proj", "lm_head"], rank_pattern={"q_proj": 5, "lm_head": 1}, alpha_pattern={r"layers\.[02]\..*v_proj": 3}),
    "phi3": dict(target_modules=["qkv_proj", "gate_up_proj"], rank_pattern={"qkv_proj": 6}, alpha_pattern={"gate_up_proj": 2}, use_rslora=True),
    "qwen3_next_moe": dict(target_modules=["in_proj_ba", "in_proj_qkvz", "shared_expert_gate"], target_parameters=["mlp.gate.weight", "mlp.experts.down_proj"],
                           rank_pattern={"in_proj_ba": 2, r"gate\.weight": 5}, alpha_pattern={r".*experts\.down_proj": 1, "gate": 9}),
    "deepseek_v3_moe": dict(target_modules=["q_a_proj", "kv_a_proj_with_mqa", "o_proj"], rank_pattern={"q_a_proj": 7, "o_proj": 1}, use_rslora=True),
}


def sizes_of(family):
    return ONE_FACTOR if family == "qwen3_tied" else dict(target_modules="all-linear")


def filled(values, shape, name, experts):
    """A and B of a smaller rank with zeros up to the rank of the shape; those of experts are one tensor (docs/lora.md)."""
    among = experts if ".mlp.experts." in name else 1
    parts = values.view(among, -1, values.shape[1]) if "lora_A" in name else values.view(values.shape[0], -1, among)
    out = parts.new_zeros(parts.shape[0], shape[0] // among if "lora_A" in name else shape[1] // among, parts.shape[2])
    out[:, :parts.shape[1]] = parts
    return out.view(shape)


def filled_as(tensors, others, base):
    config = json.loads((base / "config.json").read_text())
    experts = next((config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name)), 1)
    return {name: filled(values, others[name].shape, name, experts) for name, values in tensors.items()}


@pytest.mark.parametrize("family", ["qwen3_tied", *DOUBLED])
def test_gradients_of_ranks_by_pattern_are_those_of_pefts_model(family, espalier, case, tmp_path):  # noqa: F811
    """In the shape of the largest rank: those of the zeros that fill smaller ones are exactly 0."""
    base, records, _ = case(family)
    adapter = make_adapter(base, tmp_path / "adapter", r=3, lora_alpha=4, **sizes_of(family))
    assert json.loads((adapter / "adapter_config.json").read_text())["rank_pattern"]
    exact = exact_gradients(load_peft(base, adapter), records)
    for schedule in ("dense", "phased"):
        found = gradients_of(espalier, case(family), tmp_path, "--adapter", adapter, "--schedule", schedule)
        wanted = filled_as(exact, found, base)
        assert found.keys() == exact.keys() and any(wanted[name].shape != exact[name].shape for name in exact)
        errors = relative_errors(found, wanted)
        assert max(errors.values()) <= FLOAT64_RELATIVE, (schedule, max(errors, key=errors.get), max(errors.values()))
        assert all(not found[name][wanted[name] == 0].any() for name in exact if wanted[name].shape != exact[name].shape)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "deepseek_v3_moe"])
def test_peft_loads_a_continued_adapter_of_many_ranks(family, espalier, case, tmp_path):  # noqa: F811
    base, records, rollouts = case(family)
    adapter = make_adapter(base, tmp_path / "adapter", r=3, lora_alpha=4, **sizes_of(family))
    words = ("--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs", "--overwrite", "--out", tmp_path / "scored.jsonl")
    difference = lambda x, y: max(abs(p - q) for a, b in zip(x, y, strict=True) for p, q in zip(a, b, strict=True))  # noqa: E731
    run(espalier, case(family), tmp_path, "--adapter", adapter, "--mini-batch-size", 6, "--lr", 0.01, "--epochs", 2, "--out", tmp_path / "out")
    theirs = []
    for folder in (adapter, tmp_path / "out"):
        espalier("score", "--model", base, "--adapter", folder, *words)
        ours = [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
        theirs.append(oracle.score(load_peft(base, folder), records)[0])
        assert difference(ours, theirs[-1]) <= 1e-10
    assert difference(*theirs) > 1e-3
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out"))
    for name, values in filled_as({name: torch.ones_like(values) for name, values in before.items()}, after, base).items():
        assert not after[name][values == 0].any() and (after[name] != 0).sum() == (values == 1).sum(), name


@pytest.mark.parametrize("family", PATTERNS)
def test_factors_by_pattern_are_merged_as_by_peft_and_refused_elsewhere(family, espalier, case, tmp_path):  # noqa: F811
    base, records, rollouts = case(family)
    adapter = make_adapter(base, tmp_path / "adapter", r=3, lora_alpha=4, **PATTERNS[family])
    error = run(espalier, case(family), tmp_path, "--adapter", adapter, "--out", tmp_path / "out", expect=4).stderr
    assert "alpha_pattern" in error and "merge" in error and not (tmp_path / "out").exists()
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "merged", "--save-dtype", "float64")
    espalier("score", "--model", tmp_path / "merged", "--rollouts", rollouts, "--dtype", "float64", "--as", "logprobs", "--out", tmp_path / "scored.jsonl")
    ours = [json.loads(line)["logprobs"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    theirs = oracle.score(load_peft(base, adapter), records)[0]
    assert max(abs(p - q) for a, b in zip(ours, theirs, strict=True) for p, q in zip(a, b, strict=True)) <= 1e-10


LAYOUTS = {"tp": ("--tp", 2), "ep": ("--dp", 2, "--ep", 2), "pp": ("--pp", 2), "full": ("--dp", 2, "--shard", "full"),
           "tp_ep": ("--tp", 2, "--ep", 2), "optimizer": ("--dp", 2, "--shard", "optimizer")}


@pytest.mark.parametrize("family, layout", [
    *(("deepseek_v3_moe", layout) for layout in LAYOUTS), ("qwen2_moe", "tp"), ("qwen3_moe", "tp"), ("qwen3_moe", "full"), ("gpt_oss_moe", "tp_ep"),
    ("phi3", "tp"), ("phi3", "pp"), ("qwen3_next_moe", "tp"), ("qwen3_5", "tp"), ("bamba", "tp"), ("kimi_linear_moe", "tp"), ("qwen3_tied", "pp")])
def test_ranks_give_the_gradients_of_one_process(family, layout, espalier, program, case, tmp_path):  # noqa: F811
    base, *_ = case(family)
    adapter = make_adapter(base, tmp_path / "adapter", r=3, **every_target(base))
    one = gradients_of(espalier, case(family), tmp_path, "--adapter", adapter)
    run_of_ranks = Ranks(program, 2, ["train", "--model", base, "--rollouts", case(family)[2], "--dtype", "float64", "--adapter", adapter, *LAYOUTS[layout],
                                      "--gradients", tmp_path / "of_ranks.safetensors"])
    assert run_of_ranks.end() == [0, 0], run_of_ranks.stderr
    errors = relative_errors(load_file(tmp_path / "of_ranks.safetensors"), one)
    assert max(errors.values()) <= FLOAT64_RELATIVE, (max(errors, key=errors.get), max(errors.values()))


@pytest.mark.parametrize("family", ["qwen2_moe", "phi3", "deepseek_v3_moe"])
def test_resuming_equals_never_having_stopped(family, espalier, case, tmp_path):  # noqa: F811
    base, _, rollouts = case(family)
    words = ("train", "--rollouts", rollouts, "--dtype", "float32", "--mini-batch-size", 6, "--lr", 1e-3, "--epochs", 2)
    lora = ("--model", base, "--lora-rank", 3, "--lora-target", words_of(family))
    espalier(*words, *lora, "--out", tmp_path / "whole")
    espalier(*words, *lora, "--out", tmp_path / "first", "--steps", 1)
    espalier(*words, "--resume", tmp_path / "first", "--out", tmp_path / "second")
    for file in ("adapter_model.safetensors", "espalier/state.safetensors", "adapter_config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss_moe", "deepseek_v3", "bamba", "kimi_linear_moe"])
def test_verify_and_plan_take_every_module(family, espalier, case):  # noqa: F811
    base, _, rollouts = case(family)
    words = ("--model", base, "--rollouts", rollouts, "--lora-rank", 3)
    report = espalier("verify", *words, "--lora-target", words_of(family), "--dtype", "float64", "--json").json
    assert report["verdict"] == "pass" and report["worst"]["allowed"] <= 1e-10
    every, attention = (espalier("plan", *words, "--lora-target", target, "--json").json for target in (words_of(family), "o_proj"))
    assert every["flops"]["chosen"] > attention["flops"]["chosen"]


def test_sampled_logprobs_are_those_of_scoring(espalier, case, tmp_path):  # noqa: F811
    base, *_ = case("qwen3_moe")
    adapter = make_adapter(base, tmp_path / "adapter", r=3, **every_target(base))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [3, 7, 11, 5]}) + "\n")
    model = ("--model", base, "--adapter", adapter, "--dtype", "float64")
    espalier("generate", *model, "--prompts", tmp_path / "prompts.jsonl", "--n", 4, "--max-response-length", 9, "--out", tmp_path / "sampled.jsonl")
    espalier("score", *model, "--rollouts", tmp_path / "sampled.jsonl", "--as", "logprobs", "--out", tmp_path / "scored.jsonl")
    sampled, scored = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("sampled.jsonl", "scored.jsonl"))
    for a, b in zip(sampled, scored, strict=True):
        assert torch.tensor(a["rollout_logprobs"]).sub(torch.tensor(b["logprobs"])).abs().max() <= 1e-10


GATE_UP = PREFIX + "model.layers.{}.mlp.experts.base_layer.lora_{}.weight"
HOSTILE = {
    "experts of another shape": (with_tensors(lambda t: t.update({GATE_UP.format(0, "A"): torch.ones(23, 48)})), 3, "[23, 48]"),
    "experts without B": (with_tensors(lambda t: t.pop(GATE_UP.format(1, "B"))), 3, "lora_A alone"),
    "a layer without experts": (with_tensors(lambda t: [t.pop(GATE_UP.format(2, letter)) for letter in "AB"]), 3, "layers.2.mlp.experts"),
    "experts that the config lacks": (with_config(target_parameters=[]), 3, "mlp.experts"),
    "another rank of experts": (with_config(rank_pattern={".*gate_up_proj": 6}), 3, "[48, 48]"),
    "a damaged expression": (with_config(rank_pattern={"q_proj(": 6}), 4, "rank_pattern"),
    "half a rank": (with_config(rank_pattern={"q_proj": 1.5}), 3, "rank_pattern"),
    "ranks without names": (with_config(rank_pattern=[6]), 3, "rank_pattern"),
    "an alpha as text": (with_config(alpha_pattern={"q_proj": "6"}), 3, "alpha_pattern"),
    "an expert that is not a number": (with_tensors(lambda t: t[GATE_UP.format(1, "A")].view(-1)[-1:].fill_(float("nan"))), 3, GATE_UP.format(1, "A")),
    "an adapter of the look-up": (with_tensors(lambda t: t.update({PREFIX + "model.embed_tokens.lora_embedding_A": torch.ones(3, 97)})), 4, "lora_embedding_A"),
}


@pytest.mark.parametrize("damage", HOSTILE)
@pytest.mark.parametrize("verb", ["train", "merge"])
def test_other_adapters_are_refused_by_name(verb, damage, espalier, case, tmp_path):  # noqa: F811
    base, _, rollouts = case("qwen3_moe")
    adapter = make_adapter(base, tmp_path / "adapter", r=3, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    change, code, told = HOSTILE[damage]
    change(adapter)
    words = ("--rollouts", rollouts) if verb == "train" else ()
    error = espalier(verb, "--model", base, "--adapter", adapter, *words, "--out", tmp_path / "out", expect=code).stderr
    assert told in error and not (tmp_path / "out").exists()


def test_merge_refuses_the_adapter_of_a_tied_head(espalier, case, tmp_path):  # noqa: F811
    base, *_ = case("qwen3_tied")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    error = espalier("merge", "--adapter", adapter, "--model", base, "--out", tmp_path / "out", expect=4).stderr
    assert "lm_head" in error and "embedding" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["embed_tokens", "experts.3.up_proj", "conv1d"])
def test_targets_that_cannot_have_an_adapter_are_refused(target, espalier, case, tmp_path):  # noqa: F811
    error = run(espalier, case("qwen3_next_moe"), tmp_path, "--lora-rank", 3, "--lora-target", target, "--out", tmp_path / "out", expect=2).stderr
    assert "--lora-target" in error and target in error and not (tmp_path / "out").exists()


def test_shards_of_a_tied_head_with_an_adapter_are_refused(espalier, case, tmp_path):  # noqa: F811
    error = run(espalier, case("qwen3_tied"), tmp_path, "--lora-rank", 3, "--lora-target", "lm_head", "--dp", 2, "--shard", "full", "--out", tmp_path / "out",
                expect=2).stderr
    assert "--shard" in error and not (tmp_path / "out").exists()
