"""`espalier merge` against peft's own merge, in float64, and adapters that are damaged or compute something else."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from make_model import FAMILIES

peft = pytest.importorskip("peft")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Of dense models whose files have a matrix for each of LINEAR.
# peft rewrites targets of qwen3_next for its experts, which this model does not have.
DENSE = [family for family in FAMILIES if "moe" not in family and "deepseek" not in family
         and family not in ("phi3", "phi3_long", "glm", "glm4", "starcoder2", "arcee", "youtu", "qwen3_next", "bamba", "granite_hybrid", "nemotron_h", "lfm2")]
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def stored(directory):
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def peft_model(base, dtype=torch.float64, **settings):
    """A peft model of the base with random A and B, and random values in modules that are saved whole."""
    torch.manual_seed(5)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype), peft.LoraConfig(
        task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 12, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    return model


def bound_of(model):
    """Name -> elementwise bound of the rounding of two float64 evaluations of W + s B A."""
    bounds = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight.abs().double(), module.lora_B["default"].weight.abs().double()
            size = module.base_layer.weight.abs().double() + abs(module.scaling["default"]) * (b @ a)
            bounds[name.removeprefix("base_model.model.") + ".weight"] = 2 * (a.shape[0] + 3) * 2.0**-53 * size
    return bounds


def assert_merged_as_by_peft(espalier, base, adapter, out, model, rank=4):
    bounds = bound_of(model)
    result = espalier("merge", adapter, "--model", base, "--out", out, "--save-dtype", "float64", "--json").json
    whole = [name for name in stored(adapter) if "lora_" not in name and "base_layer" not in name]
    assert result["changed"] == len(bounds) + len(whole) and result["rank"] == rank
    ours, theirs = stored(out), model.merge_and_unload().state_dict()
    assert bounds or whole
    before = stored(base)
    for name, values in ours.items():
        if name in bounds:
            assert ((values - theirs[name].double()).abs() <= bounds[name]).all(), name
            assert not torch.equal(values, before[name].double()), f"{name} did not change"
        elif ".experts." not in name:
            assert torch.equal(values, theirs[name].double()), name


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("targets", [*LINEAR, "all-linear", r".*layers\.[02]\..*(q|down)_proj"])
def test_merge_equals_peft(family, targets, espalier, model_of, tmp_path):
    base = model_of(family)
    model = peft_model(base, target_modules=[targets] if targets in LINEAR else targets)
    model.save_pretrained(tmp_path / "adapter")
    assert_merged_as_by_peft(espalier, base, tmp_path / "adapter", tmp_path / "out", model)


@pytest.mark.parametrize("settings", [
    dict(use_rslora=True), dict(r=1), dict(r=9, lora_alpha=2.5), dict(target_modules=["lm_head"]), dict(layers_to_transform=[1]),
    dict(modules_to_save=["lm_head", "input_layernorm"]), dict(modules_to_save=["embed_tokens"]), dict(exclude_modules=["v_proj"]),
    dict(rank_pattern={r"layers\.1\..*": 2, "q_proj": 7}, alpha_pattern={r".*\.2\.self_attn\.v_proj": 5}), dict(alpha_pattern={"q_proj": 1}, use_rslora=True)])
def test_merge_follows_the_settings_of_peft(settings, espalier, model_of, tmp_path):
    base = model_of("llama_untied")
    model = peft_model(base, **{"target_modules": ["q_proj", "v_proj"], **settings})
    model.save_pretrained(tmp_path / "adapter")
    assert_merged_as_by_peft(espalier, base, tmp_path / "adapter", tmp_path / "out", model, settings.get("r", 4))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_sparse"])
def test_merge_of_attention_beside_experts_equals_peft(family, espalier, model_of, tmp_path):
    model = peft_model(model_of(family), target_modules=LINEAR[:4])
    model.save_pretrained(tmp_path / "adapter")
    assert_merged_as_by_peft(espalier, model_of(family), tmp_path / "adapter", tmp_path / "out", model)


@pytest.fixture
def adapter(model_of, tmp_path):
    peft_model(model_of("llama_untied"), torch.float32, target_modules=["q_proj", "v_proj"]).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_every_expert_has_its_own_change(espalier, model_of, adapter, tmp_path):
    base = model_of("qwen3_moe")
    draw = torch.Generator().manual_seed(3)
    pairs = {f"model.layers.1.mlp.experts.{e}.{name}": (torch.randn(4, inner, generator=draw), torch.randn(outer, 4, generator=draw))
             for e in range(8) for name, outer, inner in (("gate_proj", 24, 48), ("up_proj", 24, 48), ("down_proj", 48, 24))}
    save_file({f"base_model.model.{name}.lora_{letter}.weight": half for name, pair in pairs.items() for letter, half in zip("AB", pair)},
              adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": LINEAR[4:]}))
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "out", "--save-dtype", "float64")
    ours = stored(tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).state_dict()
    for name, (a, b) in pairs.items():
        expert, kind = name.split(".")[5:]
        if f"{name}.weight" in plain:
            was = plain[f"{name}.weight"]
        else:
            fused = plain["model.layers.1.mlp.experts." + ("down_proj" if kind == "down_proj" else "gate_up_proj")][int(expert)]
            was = fused if kind == "down_proj" else fused[:24] if kind == "gate_proj" else fused[24:]
        size = was.abs() + 3 * b.abs().double() @ a.abs().double()
        assert ((ours[f"{name}.weight"] - (was + 3 * b.double() @ a.double())).abs() <= 14 * 2.0**-53 * size).all(), name


def test_merged_model_keeps_unchanged_bits_and_loads_in_transformers(espalier, model_of, adapter, tmp_path):
    base = model_of("llama_untied")
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "out")
    before, after = stored(base), stored(tmp_path / "out")
    for name, values in before.items():
        assert after[name].dtype == values.dtype
        assert torch.equal(after[name], values) != name.endswith(("q_proj.weight", "v_proj.weight")), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert loaded.keys() == after.keys() and all(torch.equal(loaded[name], after[name]) for name in after)
    refused = espalier("merge", adapter, "--model", base, "--out", tmp_path / "out", expect=2)
    assert "--overwrite" in refused.stderr
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "out", "--overwrite")


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


def truncated(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


HOSTILE = {
    "dora": (with_config(use_dora=True), 4, "use_dora"),
    "another method": (with_config(peft_type="IA3"), 4, "peft_type"),
    "biases": (with_config(bias="lora_only"), 4, "bias"),
    "ranks by pattern that are not the tensors'": (with_config(rank_pattern={"q_proj": 2}), 3, "shape [2, "),
    "alphas by pattern without a number": (with_config(alpha_pattern={"q_proj": None}), 3, "alpha_pattern"),
    "transposed": (with_config(fan_in_fan_out=True), 4, "fan_in_fan_out"),
    "base changed at the start": (with_config(init_lora_weights="pissa"), 4, "init_lora_weights"),
    "a member of a later peft": (with_config(use_newlora=True), 4, "use_newlora"),
    "rank that is none": (with_config(r=0), 3, ": r"),
    "rank as text": (with_config(r="4"), 3, ": r"),
    "no alpha": (with_config(lora_alpha=None), 3, "lora_alpha"),
    "another rank than the tensors": (with_config(r=3), 3, "shape [3, "),
    "a target without tensors": (with_config(target_modules=["q_proj", "k_proj"]), 3, "k_proj"),
    "half of a pair": (with_tensors(lambda t: t.pop(QUERY.format("B"))), 3, "lora_A alone"),
    "a pair that is gone": (with_tensors(lambda t: [t.pop(QUERY.format(letter)) for letter in "AB"]), 3, "layers.0.self_attn.q_proj"),
    "another shape": (with_tensors(lambda t: t.update({QUERY.format("A"): torch.ones(4, 47)})), 3, "[4, 47]"),
    "a layer too many": (with_tensors(lambda t: t.update({QUERY.format("A").replace("s.0", "s.7"): torch.ones(4, 48)})), 3, "layers.7"),
    "quantised": (with_tensors(lambda t: t.update({QUERY.format("A"): torch.ones(4, 48, dtype=torch.int8)})), 4, "lora_A"),
    "magnitudes": (with_tensors(lambda t: t.update({QUERY.format("magnitude_vector"): torch.ones(4)})), 4, "magnitude"),
    "not a number": (with_tensors(lambda t: t[QUERY.format("A")].view(-1)[-1:].fill_(float("nan"))), 3, QUERY.format("A")),
    "infinite": (with_tensors(lambda t: t[QUERY.format("B")].view(-1)[:1].fill_(float("inf"))), 3, QUERY.format("B")),
    "nothing": (with_tensors(lambda t: t.clear()), 3, "none"),
    "cut off": (truncated, 3, "adapter_model.safetensors"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), 3, "adapter_config.json"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), 3, "adapter_model.safetensors"),
    "broken config": (lambda folder: (folder / "adapter_config.json").write_text("{"), 3, "adapter_config.json"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_other_adapters_are_refused_by_name(case, espalier, model_of, adapter, tmp_path):
    damage, code, told = HOSTILE[case]
    damage(adapter)
    error = espalier("merge", adapter, "--model", model_of("llama_untied"), "--out", tmp_path / "out", expect=code).stderr
    assert told in error and not (tmp_path / "out").exists()


def test_adapter_of_another_model_is_refused(espalier, model_of, adapter, tmp_path):
    error = espalier("merge", adapter, "--model", model_of("qwen3_sharded"), "--out", tmp_path / "out", expect=3).stderr
    assert "Does the adapter belong to this model?" in error


def test_base_model_with_missing_weights_is_refused(espalier, model_of, adapter, tmp_path):
    base = shutil.copytree(model_of("llama_untied"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, base / "model.safetensors")
    assert "model.norm.weight" in espalier("merge", adapter, "--model", base, "--out", tmp_path / "out", expect=3).stderr
