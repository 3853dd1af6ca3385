"""Checkpoints in FP8: a run has the bits of one on the numbers that codes and scales stand for, read into the run's dtype or held in 8 bits."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fp8_reference
import objective
import oracle
from comparison import FLOAT64_RELATIVE, relative_errors
from make_model import make_model, make_rollouts, write_records
from quantised_files import refused_with_changed_tensors
from test_lora import exact_gradients, load_peft, make_adapter
from test_memory import MEBI, files, of_process
from test_nf4 import ADAPTER, LLAMA_3_8B, assert_equal_runs, outcome
from test_parallel import Ranks

SEED = 44
# No side but the vocabulary is a whole number of blocks of 128.
SIZES = dict(hidden_size=160, intermediate_size=320, num_attention_heads=4, head_dim=40, num_key_value_heads=2)
QUERY = "model.layers.1.self_attn.q_proj.weight"


def drawn(family, folder, **more):
    return make_model(family, folder / "drawn", **{**SIZES, **(dict(moe_intermediate_size=72) if "moe" in family else {}), **more})


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directories")
    return fp8_reference.store(drawn("llama_untied", folder), folder)


def compressed(strategy, **weights):
    """quantization_config of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp[.]gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights}}}}


# How files store scales: settings of fp8_reference.store.
FORMS = {
    "deepseek_v3": {},
    "qwen3": dict(scale_dtype=torch.bfloat16),
    "deepseek_v3_1": dict(power_of_two=True),
    "exponents": dict(power_of_two=True, scale_dtype=torch.float8_e8m0fnu),
    "exponents_as_bytes": dict(power_of_two=True, reshape=lambda scales: (scales.log2() + 127).to(torch.uint8)),
    "small_blocks": dict(blocks=(48, 32)),
    "mistral": dict(blocks=(None, None), scale_dtype=torch.bfloat16, reshape=lambda scales: scales.reshape(())),
    "one_scale_a_row": dict(blocks=(1, None), ending="_scale", quantisation=compressed("channel"), scale_dtype=torch.bfloat16),
    "one_scale_a_matrix": dict(blocks=(None, None), ending="_scale", quantisation=compressed("tensor"), reshape=lambda scales: scales.reshape(1)),
    "compressed_blocks": dict(ending="_scale", quantisation=compressed("block", block_structure=[128, 128])),
}


@pytest.mark.parametrize("form, dtype", [(form, "float32") for form in FORMS] + [("deepseek_v3", "float64"), ("qwen3", "bfloat16"), ("one_scale_a_row", "bfloat16")])
def test_a_run_has_the_bits_of_one_on_the_numbers(form, dtype, rollouts, espalier, tmp_path):
    fp8, plain = fp8_reference.store(drawn("qwen3_tied", tmp_path), tmp_path, **FORMS[form])
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *ADAPTER, "--dtype", dtype)
    for weights in ("fp8", "source"):
        assert_equal_runs(outcome(espalier, fp8, rollouts, tmp_path / f"run_{weights}", *ADAPTER, "--dtype", dtype, "--weights", weights), wanted)


# Fused matrices, whose parts begin inside a block; experts with a router and a shared expert; latent attention; a recurrent layer.
@pytest.mark.parametrize("family", ["phi3", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_families_with_parts_of_matrices(family, rollouts, espalier, tmp_path):
    model = make_model(family, tmp_path / "drawn")
    if not (model / "model.safetensors").exists():
        tensors = {name: values for file in model.glob("*.safetensors") for name, values in load_file(file).items()}
        for file in [*model.glob("*.safetensors"), model / "model.safetensors.index.json"]:
            file.unlink()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    chosen = lambda name, tensor: fp8_reference.is_linear(name, tensor) and ".linear_attn." not in name
    fp8, plain = fp8_reference.store(model, tmp_path, blocks=(24, 40), skipped=["lm_head", "in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj"], chosen=chosen)
    words = (*ADAPTER, "--lora-target", "o_proj")
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *words)
    for weights in ("fp8", "source"):
        assert_equal_runs(outcome(espalier, fp8, rollouts, tmp_path / f"run_{weights}", *words, "--weights", weights), wanted)


def test_modules_that_the_config_leaves_out_stay_as_they_are(rollouts, espalier, tmp_path):
    """By the end of a name, by its beginning, and by an expression, as transformers reads them."""
    left_out = ["lm_head", "k_proj", "model.layers.0", r"model\.layers\..*\.mlp\.down_proj"]
    chosen = lambda name, t: fp8_reference.is_linear(name, t) and "layers.0." not in name and "k_proj" not in name and "down_proj" not in name
    for member in ("modules_to_not_convert", "ignored_layers"):
        folder = tmp_path / member
        folder.mkdir()
        quantisation = fp8_reference.FP8_CONFIG | {"weight_block_size": [128, 128], member: left_out}
        fp8, plain = fp8_reference.store(drawn("llama_untied", folder), folder, chosen=chosen, quantisation=quantisation)
        wanted = outcome(espalier, plain, rollouts, folder / "wanted", *ADAPTER)
        assert_equal_runs(outcome(espalier, fp8, rollouts, folder / "run", *ADAPTER, "--weights", "fp8"), wanted)


def dequantised(directory, dtype):
    """transformers' own reading of the checkpoint."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_weights_and_gradients_are_those_of_transformers(family, rollouts, espalier, tmp_path):
    """Sizes are whole blocks: transformers reads no others."""
    model = make_model(family, tmp_path / "drawn", hidden_size=256, intermediate_size=384, num_attention_heads=4, head_dim=64, num_key_value_heads=2,
                       **(dict(moe_intermediate_size=128) if family == "qwen3_moe" else {}))
    fp8, _ = fp8_reference.store(model, tmp_path, skipped=["lm_head", "mlp.gate"])
    theirs, config = tmp_path / "theirs", json.loads((fp8 / "config.json").read_text())
    theirs.mkdir()
    del config["quantization_config"]
    (theirs / "config.json").write_text(json.dumps(config))
    read = dequantised(fp8, torch.float64)
    state = oracle.of_files(read.state_dict(), read)
    save_file({name: values for name, values in state.items() if name != "lm_head.weight" or family != "qwen3_tied"}, theirs / "model.safetensors",
              metadata={"format": "pt"})
    records = [{**r, "temperature": 1.0} for r in make_rollouts(SEED) if r["response_ids"]]
    file = write_records(records, tmp_path / "records.jsonl")
    espalier("train", "--model", fp8, "--rollouts", file, "--dtype", "float64", "--threads", 2, "--gradients", tmp_path / "full")
    resolved = objective.resolve({})
    exact = oracle.gradients(oracle.load_model(theirs, torch.float64), records, objective.advantages(records, resolved), resolved)[2]
    errors = relative_errors(load_file(tmp_path / "full"), exact)
    assert max(errors.values()) <= FLOAT64_RELATIVE, max(errors.items(), key=lambda item: item[1])

    adapter = make_adapter(theirs, tmp_path / "adapter", target_modules=["q_proj", "v_proj", "o_proj"])
    exact = exact_gradients(load_peft(theirs, adapter), records)
    for weights in ("fp8", "source"):
        espalier("train", "--model", fp8, "--rollouts", file, "--dtype", "float64", "--threads", 2, "--adapter", adapter, "--weights", weights,
                 "--gradients", tmp_path / f"of_{weights}")
        errors = relative_errors(load_file(tmp_path / f"of_{weights}"), exact)
        assert max(errors.values()) <= FLOAT64_RELATIVE, (weights, max(errors.items(), key=lambda item: item[1]))


@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--dp", 2), ("--cp", 2), ("--dp", 2, "--shard", "optimizer")],
                         ids=["tp", "pp", "dp", "cp", "sharded"])
def test_ranks_have_the_bits_of_ranks_on_the_numbers(layout, directories, rollouts, program, tmp_path):
    """Ranks of tp cut inside of blocks: after 80 of 160 rows and columns."""
    written = []
    for model, weights in (*zip(directories, ("fp8", "source")), (directories[0], "source")):
        written.append(tmp_path / f"{model.name}_{weights}")
        run = Ranks(program, 2, ["train", "--model", model, "--rollouts", rollouts, *ADAPTER, "--weights", weights, *layout, "--gradients", written[-1]])
        assert run.end() == [0, 0], run.stderr
    assert len({file.read_bytes() for file in written}) == 1


@pytest.mark.parametrize("layout", [("--tp", 2), ("--tp", 2, "--ep", 2), ("--dp", 2, "--ep", 2)], ids=["tp", "tp_ep", "dp_ep"])
def test_ranks_that_divide_experts(layout, rollouts, program, tmp_path):
    """An expert's 73 columns leave a rank of tp 36 and a padded one."""
    fp8, plain = fp8_reference.store(drawn("qwen3_moe", tmp_path, moe_intermediate_size=73), tmp_path, blocks=(32, 16), skipped=["lm_head", "mlp.gate"])
    written = []
    for model, weights in ((fp8, "fp8"), (plain, "source")):
        written.append(tmp_path / f"gradients_{model.name}")
        run = Ranks(program, 2, ["train", "--model", model, "--rollouts", rollouts, *ADAPTER, "--lora-target", "q_proj,v_proj", "--weights", weights,
                                 *layout, "--gradients", written[-1]])
        assert run.end() == [0, 0], run.stderr
    assert written[0].read_bytes() == written[1].read_bytes()


def test_weights_that_train_are_written_in_bfloat16(directories, rollouts, espalier, tmp_path):
    """Also those that did not change, and without quantization_config."""
    fp8, plain = directories
    for model in directories:
        espalier("train", "--model", model, "--rollouts", rollouts, "--train", "norms", "--save-dtype", "source" if model is fp8 else "bfloat16",
                 "--threads", 2, "--out", tmp_path / model.name)
    found, wanted = (load_file(tmp_path / model.name / "model.safetensors") for model in directories)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {values.dtype for values in found.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8")


def test_layers_of_further_tokens_are_written_in_bfloat16(rollouts, espalier, tmp_path):
    fp8, plain = fp8_reference.store(drawn("glm4_moe", tmp_path), tmp_path)
    further = torch.randn(48, 96, generator=torch.Generator().manual_seed(SEED))
    codes, scales = fp8_reference.quantise(further, (128, 128))
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.9.eh_proj.weight"
    save_file(tensors | {name: codes, name + "_scale_inv": scales}, fp8 / "model.safetensors", metadata={"format": "pt"})
    espalier("train", "--model", fp8, "--rollouts", rollouts, "--train", "norms", "--out", tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found[name], fp8_reference.dequantise(codes, scales, (128, 128)).bfloat16()) and name + "_scale_inv" not in found


def test_merged_weights_are_those_of_the_numbers(directories, rollouts, espalier, tmp_path):
    adapter = outcome(espalier, directories[0], rollouts, tmp_path / "run", *ADAPTER, "--weights", "fp8") / "out"
    for model in directories:
        espalier("merge", "--adapter", adapter, "--model", model, "--out", tmp_path / model.name)
    found, wanted = (load_file(tmp_path / model.name / "model.safetensors") for model in directories)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "fp8/config.json").read_text())


def test_scores_samples_and_the_doctor(directories, rollouts, espalier, tmp_path):
    prompts = write_records([{"prompt_ids": record["prompt_ids"]} for record in make_rollouts(SEED)[:4]], tmp_path / "prompts.jsonl")
    for verb, more in (("score", ("--rollouts", rollouts)), ("generate", ("--prompts", prompts, "--n", 2, "--max-response-length", 8))):
        written = []
        for model, weights in (*zip(directories, ("fp8", "source")), (directories[0], "source")):
            written.append(tmp_path / f"{verb}_{model.name}_{weights}.jsonl")
            espalier(verb, "--model", model, *more, "--weights", weights, "--out", written[-1])
        assert len({file.read_bytes() for file in written}) == 1, verb
    dump = tmp_path / "dump.jsonl"
    espalier("score", "--model", directories[0], "--rollouts", rollouts, "--as", "old_logprobs", "--out", dump)
    told = json.loads(espalier("doctor", dump, "--model", directories[0], "--weights", "fp8", "--json", expect=6).stdout)
    assert told["replayed"]["tokens"] > 0 and {finding["kind"] for finding in told["findings"]} == {"trained_n_times"}  # equal rows, no other log-probs


def test_a_run_continues_bitwise_and_not_with_other_weights(directories, rollouts, espalier, tmp_path):
    whole = outcome(espalier, directories[0], rollouts, tmp_path / "whole", *ADAPTER, "--weights", "fp8", "--epochs", 2)
    first = outcome(espalier, directories[0], rollouts, tmp_path / "first", *ADAPTER, "--weights", "fp8")
    espalier("train", "--resume", first / "out", "--rollouts", rollouts, "--epochs", 2, "--out", tmp_path / "second")
    assert (tmp_path / "second/adapter_model.safetensors").read_bytes() == (whole / "out/adapter_model.safetensors").read_bytes()
    told = espalier("train", "--resume", first / "out", "--weights", "source", "--rollouts", rollouts, "--epochs", 2, "--out", tmp_path / "third", expect=3).stderr
    assert "weights=fp8" in told


def test_a_trace_runs_again_bitwise(directories, rollouts, espalier, tmp_path):
    espalier("train", "--model", directories[0], "--rollouts", rollouts, *ADAPTER, "--weights", "fp8", "--mini-batch-size", 6, "--lr", 1e-3,
             "--record", tmp_path / "trace")
    found = json.loads(espalier("replay", tmp_path / "trace", "--json").stdout)
    assert found["checkpoints"] and all(checkpoint["max_abs"] == 0 for checkpoint in found["checkpoints"]), found["checkpoints"]


def test_nf4_of_a_model_in_fp8_is_nf4_of_the_saved_model(directories, rollouts, espalier, tmp_path):
    model = make_model("llama_untied", tmp_path / "drawn", hidden_size=128, intermediate_size=192, num_attention_heads=4, head_dim=32, num_key_value_heads=2)
    fp8, plain = fp8_reference.store(model, tmp_path, plain_dtype=torch.bfloat16)
    runs = [outcome(espalier, model, rollouts, tmp_path / f"run_{model.name}", *ADAPTER, "--weights", "nf4") for model in (fp8, plain)]
    assert_equal_runs(*runs)


def test_verify_and_plan_say_what_is_held(directories, rollouts, espalier, tmp_path):
    words = ("--model", directories[0], "--rollouts", rollouts, "--lora-rank", 4, "--weights", "fp8")
    assert "21 frozen matrices are held as FP8: every run, the one in float64 too" in espalier("verify", *words, "--threads", 2).stdout
    assert "Frozen matrices in FP8: " in espalier("plan", *words).stdout
    assert "Frozen matrices in FP8: " in espalier("train", *words, "--dry-run", "--logprobs", tmp_path / "logprobs").stdout


def test_an_update_of_eight_billion_parameters_is_planned_in_a_byte_a_number(espalier, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"quantization_config": fp8_reference.FP8_CONFIG | {"weight_block_size": [128, 128]}}))
    prompt = [i % 1000 for i in range(1024)]
    records = [{"prompt_ids": prompt, "response_ids": [(i * 7 + n) % 1000 for i in range(128)], "group": "q", "reward": n % 2} for n in range(8)]
    rollouts = write_records(records, tmp_path / "rollouts.jsonl")
    words = ("plan", "--model", tmp_path, "--rollouts", rollouts, "--lora-rank", 16, "--json")
    planned = json.loads(espalier(*words, "--weights", "fp8", "--memory-budget", "12GiB").stdout)
    assert 8.2 / 8 < planned["fp8_bytes"] / (32 * 218103808) < 8.4 / 8  # a scale for 128 columns of every row, and a header
    assert planned["mapped_bytes_at_most"] == 2 * 2 * 128256 * 4096  # embedding and head
    # Read into float32 none of the file's bytes can be used where they lie.
    assert "mapped_bytes_at_most" not in json.loads(espalier(*words, "--memory-budget", "12GiB", expect=5).stdout)


@pytest.mark.parametrize("products", ["own", "library"])
def test_a_process_holds_what_its_plan_says(products, program, tmp_path):
    words = files(tmp_path, 4096, dict(prompt=96, response=16, n=4), hidden_size=1024, num_hidden_layers=6, num_attention_heads=16,
                  num_key_value_heads=8, intermediate_size=4096)
    fp8, plain = fp8_reference.store(tmp_path / "model", tmp_path / "stored", plain_dtype=torch.bfloat16)
    run = [fp8 if word == tmp_path / "model" else word for word in words] + ["--lora-rank", 4, "--products", products, "--logprobs", tmp_path / "logprobs"]
    sizes = []
    for weights in ("fp8", "source"):
        found = Ranks(program, 1, [*run, "--weights", weights], OMP_NUM_THREADS="2")
        assert found.end() == [0], found.stderr
        process, planned = of_process(json.loads(found.stdout[0]))
        assert 0.95 * planned < process < 1.05 * planned, (weights, process / MEBI, planned / MEBI)
        sizes.append(planned)
    held = sum(values.numel() for name, values in load_file(fp8 / "model.safetensors").items() if values.dtype == torch.float8_e4m3fn)
    assert sizes[1] - sizes[0] > 2.5 * held  # float32 against 8 bits


def test_what_fp8_cannot_hold_is_refused_by_name(directories, rollouts, espalier, tmp_path):
    def told(*words, expect, model=directories[0]):
        return espalier("train", "--model", model, "--rollouts", rollouts, "--weights", "fp8", *words, "--logprobs", tmp_path / "logprobs", expect=expect).stderr

    assert "--lora-rank" in told(expect=2)
    assert "--shard full" in told("--lora-rank", 4, "--shard", "full", expect=4)
    assert "--weights fp8" in told("--lora-rank", 4, model=directories[1], expect=4)
    on_gpu = ("plan", "--model", directories[0], "--rollouts", rollouts, "--lora-rank", 4, "--weights", "fp8", "--device", "cuda")
    assert "--device cpu" in espalier(*on_gpu, expect=4).stderr


def changed(member, value):
    """A tensor beside the query's codes, or the codes."""
    return lambda tensors: tensors.update({QUERY + member: value(tensors[QUERY + member])})


def poisoned(scales):
    scales = scales.clone()
    scales[-1, -1] = torch.nan
    return scales


HOSTILE = {
    "no scale": (lambda tensors: tensors.pop(QUERY + "_scale_inv"), 3, "_scale_inv"),
    "two scales": (lambda tensors: tensors.update({QUERY + "_scale": tensors[QUERY + "_scale_inv"].clone()}), 3, "_scale_inv"),
    "a scale too few": (changed("_scale_inv", lambda t: t[:1].contiguous()), 3, "[2, 2]"),
    "turned scales": (changed("_scale_inv", lambda t: t.reshape(4, 1).contiguous()), 3, "[2, 2]"),
    "a scale of NaN": (changed("_scale_inv", poisoned), 3, "NaN at number 3"),
    "an exponent of NaN": (changed("_scale_inv", lambda t: torch.full(t.shape, 255, dtype=torch.uint8)), 3, "NaN at number 0"),
    "infinite scales": (changed("_scale_inv", lambda t: t * torch.inf), 3, "infinite"),
    "scales of integers": (changed("_scale_inv", lambda t: t.to(torch.int32)), 4, "I32"),
    "a code of NaN": (changed("", lambda t: t.view(torch.uint8).fill_(127).view(torch.float8_e4m3fn)), 3, "NaN at row 0, column 0"),
    "e5m2": (changed("", lambda t: t.float().to(torch.float8_e5m2)), 4, "e5m2"),
    "another shape": (changed("", lambda t: t[:80].contiguous()), 3, "[2, 2]"),
    "bytes": (changed("", lambda t: t.view(torch.uint8)), 3, "_scale_inv"),
    "no matrix": (lambda tensors: tensors.pop(QUERY), 3, "_scale_inv"),
    "three dimensions": (changed("", lambda t: t[None].contiguous()), 4, "[1, 160, 160]"),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_damaged_matrices_are_refused_by_name(damage, directories, rollouts, espalier, tmp_path):
    refused_with_changed_tensors(espalier, directories[0], *HOSTILE[damage], "fp8", QUERY, rollouts, tmp_path)


def test_a_truncated_file_is_refused(directories, rollouts, espalier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((directories[0] / "config.json").read_text())
    (model / "model.safetensors").write_bytes((directories[0] / "model.safetensors").read_bytes()[:-1])
    told = espalier("train", "--model", model, "--rollouts", rollouts, "--lora-rank", 4, "--weights", "fp8", "--out", tmp_path / "out", expect=3).stderr
    assert "truncated" in told


@pytest.mark.parametrize("change, status, word", [
    (dict(weight_block_size=[128]), 3, "weight_block_size"),
    (dict(weight_block_size=[0, 128]), 3, "weight_block_size"),
    (dict(weight_block_size=[64, 64]), 3, "_scale_inv"),
    (dict(weight_block_size=None), 3, "one number, or one for each of"),
    (dict(fmt="e5m2"), 4, "fmt"),
    (dict(expert_dtype="fp4"), 4, "expert_dtype"),
    (dict(modules_to_convert=["model.embed_tokens"]), 4, "modules_to_convert"),
    (dict(modules_to_not_convert="lm_head"), 3, "modules_to_not_convert"),
    (dict(modules_to_not_convert=["lm_head", "(["]), 3, "(["),
    (dict(modules_to_not_convert=["lm_head", "q_proj"]), 0, ""),
    (compressed("group"), 4, "strategy"),
    (compressed("channel", num_bits=4), 4, "num_bits"),
    (compressed("channel", type="int"), 4, "type"),
    (dict(quant_method="compressed-tensors", config_groups=None), 3, "config_groups")])
def test_configs_that_do_not_fit_are_refused_by_name(change, status, word, directories, rollouts, espalier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((directories[0] / "config.json").read_text())
    config["quantization_config"] |= change
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").symlink_to(directories[0] / "model.safetensors")
    assert word in espalier("train", "--model", model, "--rollouts", rollouts, "--lora-rank", 4, "--weights", "fp8", "--logprobs", tmp_path / "logprobs",
                            expect=status).stderr


def test_files_that_contradict_the_config_are_refused(directories, rollouts, espalier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((directories[0] / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").symlink_to(directories[0] / "model.safetensors")
    words = ("train", "--rollouts", rollouts, "--lora-rank", 4, "--logprobs", tmp_path / "logprobs")
    assert "quantization_config" in espalier(*words, "--model", model, expect=3).stderr
    fp8, _ = fp8_reference.store(drawn("llama_untied", tmp_path), tmp_path, chosen=lambda name, t: fp8_reference.is_linear(name, t) and name != QUERY)
    told = espalier(*words, "--model", fp8, "--weights", "fp8", expect=4).stderr
    assert QUERY in told and "modules_to_not_convert" in told
    espalier(*words, "--model", fp8)
