"""Adapters of experts in vLLM's forms, against peft's own merge in float64, and against vLLM's own loader where vllm is installed.

The rules of vLLM 0.33 (lora/lora_model.py, lora/model_manager.py, lora/lora_weights.py), in our words: a tensor's name is that of its module
behind base_model.model., a model with one matrix for each expert wants gate, up and down of all experts of a layer, and a model with experts in one
tensor wants both pairs, A [E r, in] with an expert's rows together and B [out, r E] with an expert's columns E apart.
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

peft = pytest.importorskip("peft")
import espalier  # noqa: E402
from espalier.vllm_adapter import convert  # noqa: E402
from test_hf_routes import build  # noqa: E402

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NAMES = {"Qwen3Moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "Glm4Moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
         "Mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
RANK = 4


def made(family, folder, parameters=BOTH, dtype=torch.float64, **more):
    """(the base model's folder, the adapter's, {parameter: the change of its weight that peft's merge makes})."""
    model = build(family).to(dtype)
    model.save_pretrained(folder / "base")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters, **more)
    adapted = peft.get_peft_model(model, config).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * .3)
    adapted.save_pretrained(folder / "adapter")
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    (folder / "adapter/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(folder / "base")}))
    merged = adapted.merge_and_unload()
    return folder / "base", folder / "adapter", {name: p.detach() - weights[name] for name, p in merged.named_parameters()}


def product(tensors, module, scale=6 / RANK):
    return scale * tensors[f"base_model.model.{module}.lora_B.weight"] @ tensors[f"base_model.model.{module}.lora_A.weight"]


def close(found, wanted):
    return found.shape == wanted.shape and float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
def test_each_expert_has_its_own_pairs(family, parameters, tmp_path):
    base, adapter, change = made(family, tmp_path, parameters)
    assert convert(adapter, tmp_path / "out")["experts"] == "each"
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    block, gate, up, down = NAMES[family]
    seen = 0
    for name, wanted in change.items():
        if not name.endswith("experts.gate_up_proj"):
            continue
        layer = name.split(".mlp.")[0]
        for expert in range(len(wanted)):
            stem = f"{layer}.{block}.experts.{expert}"
            assert close(torch.cat([product(tensors, f"{stem}.{gate}"), product(tensors, f"{stem}.{up}")]), wanted[expert])
            assert close(product(tensors, f"{stem}.{down}"), change[f"{layer}.mlp.experts.down_proj"][expert])
            seen += 6
    others = [name for name in tensors if ".experts." not in name]
    assert seen > 0 and len(tensors) == seen + len(others)
    assert all(torch.equal(tensors[name], load_file(adapter / "adapter_model.safetensors")[name]) for name in others) and others
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, 6) and {gate, up, down, "q_proj"} == set(config["target_modules"])
    assert "target_parameters" not in config and all(name.startswith(str(base)) for name in [config["base_model_name_or_path"]])


@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("experts", [None, "each"])
def test_experts_in_one_tensor_stay_together(experts, parameters, tmp_path):
    """gpt-oss: rows of gate and up in turn; its weights stand the other way round, [E, in, out]."""
    _, adapter, change = made("GptOss", tmp_path, parameters)
    assert convert(adapter, tmp_path / "out", experts=experts)["experts"] == (experts or "together")
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    for name, wanted in change.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        module, parameter = name.rsplit(".", 1)
        for expert in range(len(wanted)):
            if experts == "each":
                of = lambda projection: product(tensors, f"{module}.{expert}.{projection}")
                found = of("down_proj") if parameter == "down_proj" else torch.stack([of("gate_proj"), of("up_proj")], 1).flatten(0, 1)
            else:
                inner = ".base_layer" if parameter == "gate_up_proj" else ""
                a, b = (tensors[f"base_model.model.{module}{inner}.lora_{side}.weight"] for side in "AB")
                found = 6 / RANK * b.reshape(len(b), RANK, -1)[:, :, expert] @ a.reshape(len(wanted), RANK, -1)[expert]
            assert close(found, wanted[expert].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_keep_their_bits(dtype, tmp_path):
    _, adapter, _ = made("Qwen3Moe", tmp_path, dtype=dtype)
    convert(adapter, tmp_path / "out")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out"))
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    a = before["base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"]
    assert torch.equal(a[RANK:2 * RANK], after["base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"])


def test_what_is_wrong_is_named(tmp_path):
    base, adapter, _ = made("Qwen3Moe", tmp_path)
    command = lambda *words: subprocess.run([sys.executable, "-m", "espalier.vllm_adapter", *map(str, words)], capture_output=True, text=True,
                                            env={"PYTHONPATH": str(ROOT / "python"), "PATH": "/usr/bin"})
    assert command(adapter, tmp_path / "out").returncode == 0
    for words, code, named in (((adapter, tmp_path / "out"), 2, "does not exist yet"), ((base, tmp_path / "b"), 3, "adapter_config.json"),
                               ((adapter, tmp_path / "c", "--model", tmp_path), 3, "--model"), ((tmp_path / "none", tmp_path / "d"), 3, "none")):
        done = command(*words)
        assert done.returncode == code and named in done.stderr and "Traceback" not in done.stderr, done.stderr
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"mlp.experts.gate_up_proj": 8}}))
    with pytest.raises(espalier.Unsupported, match="rank_pattern"):
        convert(adapter, tmp_path / "e")
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(espalier.Error, match="rank 3"):
        convert(adapter, tmp_path / "f")
    data = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(espalier.Error, match="damaged"):
        convert(adapter, tmp_path / "g")
    assert not any((tmp_path / name).exists() for name in "bcdefg")


@pytest.mark.parametrize("family", NAMES)
def test_vllm_s_own_loader_reads_them(family, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vllm is not installed")
    try:
        from vllm.lora import lora_model
        from vllm.lora.lora_weights import PackedLoRALayerWeights
        from vllm.lora.peft_helper import PEFTHelper
    except ImportError as missing:
        pytest.skip(f"vllm cannot be imported here: {missing}")
    monkeypatch.setattr(lora_model, "PIN_MEMORY", False, raising=False)  # memory of a GPU's driver, which may not be here
    _, adapter, change = made(family, tmp_path)
    convert(adapter, tmp_path / "out")
    block, *names = NAMES[family]
    gate, up, down = names
    experts = len(next(wanted for name, wanted in change.items() if name.endswith("experts.down_proj")))
    expected = {"q_proj", "experts", *(f"experts.{expert}.{name}" for expert in range(experts) for name in names)}
    helper = PEFTHelper.from_local_dir(str(tmp_path / "out"), None)
    assert helper._validate_features() == []
    loaded = lora_model.LoRAModel.from_local_checkpoint(str(tmp_path / "out"), expected, helper, device="cpu", dtype=torch.float64)
    for name, wanted in change.items():
        if not name.endswith("experts.gate_up_proj"):
            continue
        layer = name.split(".mlp.")[0]
        parts = [loaded.get_lora(f"{layer}.{block}.experts.{expert}.{one}") for expert in range(experts) for one in (gate, down, up)]
        packed = PackedLoRALayerWeights.pack_moe(parts, f"{layer}.{block}.experts")
        of = lambda i: packed.scaling[i] * packed.lora_b[i] @ packed.lora_a[i]
        assert close(torch.cat([of(0), of(2)], 1), wanted) and close(of(1), change[f"{layer}.mlp.experts.down_proj"])
