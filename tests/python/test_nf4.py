"""--weights nf4: frozen matrices in 4 bits have the bits of a run on the numbers that their codes stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import nf4_reference
from make_model import make_model, make_rollouts, write_records
from quantised_files import refused_with_changed_tensors
from test_memory import MEBI, files, of_process
from test_parallel import Ranks

SEED = 43
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32, num_key_value_heads=2)
ADAPTER = ("--lora-rank", 4, "--products", "own")
QUERY, EXPERT = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


def drawn(family, folder, **more):
    sizes = dict(SIZES, moe_intermediate_size=64) if "moe" in family else SIZES
    return make_model(family, folder / "drawn", **sizes, **more)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directories")
    return nf4_reference.store(drawn("llama_untied", folder), folder)


def outcome(espalier, model, rollouts, folder, *words):
    folder.mkdir()
    espalier("train", "--model", model, "--rollouts", rollouts, "--threads", 2, "--mini-batch-size", 6, "--lr", 1e-3, *words,
             "--out", folder / "out", "--gradients", folder / "gradients.safetensors", "--logprobs", folder / "logprobs.jsonl")
    return folder


def assert_equal_runs(found, wanted, more=()):
    for file in ("gradients.safetensors", "logprobs.jsonl", "out/adapter_model.safetensors", *more):
        assert (found / file).read_bytes() == (wanted / file).read_bytes(), file
    assert any(values.any() for values in load_file(wanted / "gradients.safetensors").values())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_a_run_has_the_bits_of_one_on_the_dequantised_matrices(nested, dtype, rollouts, espalier, tmp_path):
    nf4, plain = nf4_reference.store(drawn("qwen3_tied", tmp_path), tmp_path, nested)
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *ADAPTER, "--dtype", dtype)
    for weights in ("nf4", "source"):
        assert_equal_runs(outcome(espalier, nf4, rollouts, tmp_path / f"run_{weights}", *ADAPTER, "--dtype", dtype, "--weights", weights), wanted)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_matrices_quantised_from_other_dtypes(stored, rollouts, espalier, tmp_path):
    nf4, plain = nf4_reference.store(drawn("llama_untied", tmp_path), tmp_path, dtype=stored)
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *ADAPTER)
    assert_equal_runs(outcome(espalier, nf4, rollouts, tmp_path / "nf4_run", *ADAPTER, "--weights", "nf4"), wanted)


@pytest.mark.parametrize("family, targets", [("llama_untied", ()), ("qwen3_moe", ("--lora-target", "q_proj,k_proj,v_proj,o_proj"))])
def test_weights_that_are_quantised_as_they_are_read(family, targets, rollouts, espalier, tmp_path):
    """A layer's experts too, which are matrices of their own here."""
    _, plain = nf4_reference.store(drawn(family, tmp_path), tmp_path)
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *ADAPTER, *targets)
    assert_equal_runs(outcome(espalier, tmp_path / "source", rollouts, tmp_path / "run", *ADAPTER, *targets, "--weights", "nf4"), wanted)


def test_a_module_that_the_config_leaves_out_stays_as_it_is(rollouts, espalier, tmp_path):
    """Keys and values are one product: where k_proj is left out, v_proj is held as its numbers."""
    chosen = lambda name, tensor: nf4_reference.is_quantised(name, tensor) and "layers.0" not in name and "k_proj" not in name
    nf4, plain = nf4_reference.store(drawn("llama_untied", tmp_path), tmp_path, chosen=chosen, skipped=["lm_head", "model.layers.0", "k_proj"])
    wanted = outcome(espalier, plain, rollouts, tmp_path / "wanted", *ADAPTER)
    assert_equal_runs(outcome(espalier, nf4, rollouts, tmp_path / "run", *ADAPTER, "--weights", "nf4"), wanted)


@pytest.mark.rounding
def test_the_librarys_products_take_the_same_numbers(directories, rollouts, espalier, tmp_path):
    runs = [outcome(espalier, model, rollouts, tmp_path / model.name, "--lora-rank", 4, "--products", "library", "--dtype", "float64", "--weights", weights)
            for model, weights in zip(directories, ("nf4", "source"))]
    found, wanted = (load_file(run / "gradients.safetensors") for run in runs)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def test_the_reference_quantises_as_bitsandbytes_does():
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    weight = torch.randn(96, 640, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    for nested in (True, False):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        theirs = {"": codes, **state.as_dict(packed=True)}
        ours = nf4_reference.quantise(weight, nested)
        assert ours.keys() == theirs.keys() and torch.equal(ours[""], codes)
        assert torch.equal(nf4_reference.dequantise(theirs), functional.dequantize_4bit(codes, state))
        if nested:
            assert torch.equal(ours["nested_quant_map"], theirs["nested_quant_map"])
            # The mean is a float32 sum there: its error moves a scaled absmax by a few units in the last place, and beyond a middle at most to the next code.
            assert (ours["absmax"].int() - theirs["absmax"].int()).abs().max() <= 1


@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--dp", 2), ("--cp", 2)], ids=["tp", "pp", "dp", "cp"])
def test_ranks_have_the_bits_of_ranks_on_the_dequantised_matrices(layout, directories, rollouts, program, tmp_path):
    written = []
    for model, weights in zip(directories, ("nf4", "source")):
        written.append(tmp_path / model.name)
        run = Ranks(program, 2, ["train", "--model", model, "--rollouts", rollouts, *ADAPTER, "--weights", weights, *layout, "--gradients", written[-1]])
        assert run.end() == [0, 0], run.stderr
    assert written[0].read_bytes() == written[1].read_bytes()


def test_ranks_that_divide_experts(rollouts, program, tmp_path):
    nf4, plain = nf4_reference.store(drawn("qwen3_moe", tmp_path), tmp_path)
    written = []
    for model, weights in ((nf4, "nf4"), (plain, "source")):
        written.append(tmp_path / f"gradients_{model.name}")
        run = Ranks(program, 2, ["train", "--model", model, "--rollouts", rollouts, *ADAPTER, "--lora-target", "q_proj,v_proj", "--weights", weights,
                                 "--dp", 2, "--ep", 2, "--gradients", written[-1]])
        assert run.end() == [0, 0], run.stderr
    assert written[0].read_bytes() == written[1].read_bytes()


def test_scores_and_samples_with_and_without_an_adapter(directories, rollouts, espalier, tmp_path):
    nf4, plain = directories
    adapter = outcome(espalier, nf4, rollouts, tmp_path / "run", *ADAPTER, "--weights", "nf4") / "out"
    prompts = write_records([{"prompt_ids": record["prompt_ids"]} for record in make_rollouts(SEED)[:4]], tmp_path / "prompts.jsonl")
    for words in ((), ("--adapter", adapter)):
        for verb, more in (("score", ("--rollouts", rollouts)), ("generate", ("--prompts", prompts, "--n", 2, "--max-response-length", 8))):
            written = []
            for model, weights in ((nf4, "nf4"), (plain, "source")):
                written.append(tmp_path / f"{verb}_{weights}_{len(words)}.jsonl")
                espalier(verb, "--model", model, *words, *more, "--weights", weights, "--out", written[-1])
            assert written[0].read_bytes() == written[1].read_bytes(), (verb, words)


def test_a_critic_with_an_adapter(rollouts, espalier, tmp_path):
    runs = []
    for name, weights in (("nf4", "nf4"), ("plain", "source")):
        if not runs:
            nf4_reference.store(drawn("llama_untied", tmp_path), tmp_path)
        runs.append(outcome(espalier, tmp_path / name, rollouts, tmp_path / f"run_{name}", *ADAPTER, "--critic", tmp_path / name, "--adv-estimator", "gae",
                            "--weights", weights))
    assert_equal_runs(*runs, ["out/critic/adapter_model.safetensors"])


def test_a_run_continues_bitwise_and_not_with_other_weights(directories, rollouts, espalier, tmp_path):
    whole = outcome(espalier, directories[0], rollouts, tmp_path / "whole", *ADAPTER, "--weights", "nf4", "--epochs", 2)
    first = outcome(espalier, directories[0], rollouts, tmp_path / "first", *ADAPTER, "--weights", "nf4")
    espalier("train", "--resume", first / "out", "--rollouts", rollouts, "--epochs", 2, "--out", tmp_path / "second")
    assert (tmp_path / "second/adapter_model.safetensors").read_bytes() == (whole / "out/adapter_model.safetensors").read_bytes()
    told = espalier("train", "--resume", first / "out", "--weights", "source", "--rollouts", rollouts, "--epochs", 2, "--out", tmp_path / "third", expect=3).stderr
    assert "weights=nf4" in told


@pytest.mark.parametrize("stored", ["nf4", "source"])
def test_a_trace_runs_again_bitwise(stored, directories, rollouts, espalier, tmp_path):
    """That of a model in NF4 holds the numbers that the codes stand for."""
    model = directories[0].parent / stored
    espalier("train", "--model", model, "--rollouts", rollouts, *ADAPTER, "--weights", "nf4", "--mini-batch-size", 6, "--lr", 1e-3, "--record", tmp_path / "trace")
    found = json.loads(espalier("replay", tmp_path / "trace", "--json").stdout)
    assert found["checkpoints"] and all(checkpoint["max_abs"] == 0 for checkpoint in found["checkpoints"]), found["checkpoints"]


def test_merged_weights_are_those_of_the_dequantised_model(directories, rollouts, espalier, tmp_path):
    nf4, plain = directories
    adapter = outcome(espalier, nf4, rollouts, tmp_path / "run", *ADAPTER, "--weights", "nf4") / "out"
    for model in directories:
        espalier("merge", "--adapter", adapter, "--model", model, "--out", tmp_path / model.name)
    found, wanted = (load_file(tmp_path / model.name / "model.safetensors") for model in directories)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "nf4/config.json").read_text())


def test_verify_says_which_numbers_it_compares(directories, rollouts, espalier):
    words = ("verify", "--model", directories[0], "--rollouts", rollouts, "--lora-rank", 4, "--weights", "nf4", "--threads", 2)
    told = espalier(*words).stdout
    assert "21 frozen matrices are held as NF4: every run, the one in float64 too, uses the numbers that their codes stand for" in told
    assert json.loads(espalier(*words, "--json").stdout)["nf4_matrices"] == 21


LLAMA_3_8B = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                  num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
                  dtype="bfloat16")


def test_an_update_of_eight_billion_parameters_is_planned_within_9_gib(espalier, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    prompt = [i % 1000 for i in range(1024)]
    records = [{"prompt_ids": prompt, "response_ids": [(i * 7 + n) % 1000 for i in range(128)], "group": "q", "reward": n % 2} for n in range(8)]
    rollouts = write_records(records, tmp_path / "rollouts.jsonl")
    words = ("plan", "--model", tmp_path, "--rollouts", rollouts, "--lora-rank", 16, "--json")
    planned = json.loads(espalier(*words, "--weights", "nf4", "--memory-budget", "9GiB").stdout)
    assert 4.1 / 8 < planned["nf4_bytes"] / (32 * 218103808) < 4.2 / 8  # bytes of a number
    assert planned["mapped_bytes_at_most"] == 2 * 2 * 128256 * 4096  # embedding and head
    planned = json.loads(espalier(*words, "--memory-budget", "9GiB", expect=5).stdout)
    assert planned["mapped_bytes_at_most"] == 2 * (32 * 218103808 + 2 * 128256 * 4096)


@pytest.mark.parametrize("products", ["own", "library"])
def test_a_process_holds_what_its_plan_says(products, program, tmp_path):
    """Most of the model's bytes in bfloat16 are its matrices: held in more than 4 bits they would be seen."""
    words = files(tmp_path, 4096, dict(prompt=96, response=16, n=4), hidden_size=1024, num_hidden_layers=8, num_attention_heads=16,
                  num_key_value_heads=8, intermediate_size=4096)
    tensors = load_file(tmp_path / "model/model.safetensors")
    save_file({name: values.bfloat16() for name, values in tensors.items()}, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    held = sum(values.numel() for name, values in tensors.items() if nf4_reference.is_quantised(name, values))
    del tensors
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run = [*words, "--lora-rank", 4, "--products", products, "--logprobs", tmp_path / "logprobs"]
    sizes = []
    for weights in ("nf4", "source"):
        found = Ranks(program, 1, [*run, "--weights", weights], OMP_NUM_THREADS="2")
        assert found.end() == [0], found.stderr
        process, planned = of_process(json.loads(found.stdout[0]))
        assert 0.95 * planned < process < 1.05 * planned, (weights, process / MEBI, planned / MEBI)
        sizes.append(planned)
    assert sizes[1] - sizes[0] == pytest.approx(held * (2 - 4.2 / 8), rel=0.02)


def test_what_nf4_cannot_hold_is_refused_by_name(directories, rollouts, espalier, tmp_path):
    def told(*words, expect, model=directories[0]):
        return espalier("train", "--model", model, "--rollouts", rollouts, "--weights", "nf4", *words, "--logprobs", tmp_path / "logprobs",
                        expect=expect).stderr

    assert "--lora-rank" in told(expect=2)
    assert "--lora-rank" in told("--train", "norms", expect=2)
    assert "--shard full" in told("--lora-rank", 4, "--shard", "full", expect=4)
    on_gpu = ("plan", "--model", directories[0], "--rollouts", rollouts, "--lora-rank", 4, "--weights", "nf4", "--device", "cuda")
    assert "--device cpu" in espalier(*on_gpu, expect=4).stderr
    odd = make_model("llama_untied", tmp_path / "odd", **{**SIZES, "intermediate_size": 80})
    assert "down_proj" in told("--lora-rank", 4, model=odd, expect=4)


def state_of(tensors, name=QUERY):
    return json.loads(bytes(tensors[name + ".quant_state.bitsandbytes__nf4"].tolist()))


def with_state(**more):
    def change(tensors):
        state = state_of(tensors) | more
        tensors[QUERY + ".quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return change


def renamed(old, new):
    return lambda tensors: tensors.update({QUERY + new: tensors.pop(QUERY + old)})


def set_to(end, value):
    return lambda tensors: tensors.update({QUERY + end: value(tensors[QUERY + end])})


HOSTILE = {
    "no absmax": (lambda tensors: tensors.pop(QUERY + ".absmax"), 3, ".absmax"),
    "no state": (lambda tensors: tensors.pop(QUERY + ".quant_state.bitsandbytes__nf4"), 3, ".absmax"),
    "no map": (lambda tensors: tensors.pop(QUERY + ".quant_map"), 3, ".quant_map"),
    "no nested map": (lambda tensors: tensors.pop(QUERY + ".nested_quant_map"), 3, ".nested_quant_map"),
    "no nested absmax": (lambda tensors: tensors.pop(QUERY + ".nested_absmax"), 3, ".nested_absmax"),
    "another map": (set_to(".quant_map", lambda t: t.flip(0).contiguous()), 3, ".quant_map"),
    "half of the codes": (set_to("", lambda t: t[: len(t) // 2].contiguous()), 3, QUERY),
    "half of the absmax": (set_to(".absmax", lambda t: t[: len(t) // 2].contiguous()), 3, ".absmax"),
    "absmax in float32": (set_to(".absmax", lambda t: t.float()), 3, ".absmax"),
    "infinite absmax": (set_to(".nested_absmax", lambda t: t * torch.inf), 3, ".nested_absmax"),
    "codes in another type": (set_to("", lambda t: t.to(torch.int8)), 3, QUERY),
    "blocks of 128": (with_state(blocksize=128), 4, "blocksize 128"),
    "nested blocks of 64": (with_state(nested_blocksize=64), 4, "nested_blocksize 64"),
    "another shape": (with_state(shape=[64, 128]), 3, QUERY),
    "another matrix's shape": (with_state(shape=[256, 64]), 3, QUERY),
    "a shape of text": (with_state(shape="128 by 128"), 3, ".quant_state"),
    "a negative shape": (with_state(shape=[-128, -128]), 3, ".quant_state"),
    "an odd dtype": (with_state(dtype="int8"), 3, ".quant_state"),
    "an offset of text": (with_state(nested_offset="1"), 3, ".quant_state"),
    "fp4": (renamed(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), 4, "bitsandbytes__fp4"),
    "a state that is no JSON": (set_to(".quant_state.bitsandbytes__nf4", lambda t: t[:-3].contiguous()), 3, ".quant_state"),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_damaged_matrices_are_refused_by_name(damage, directories, rollouts, espalier, tmp_path):
    refused_with_changed_tensors(espalier, directories[0], *HOSTILE[damage], "nf4", QUERY, rollouts, tmp_path)


@pytest.mark.parametrize("change, status, word", [
    (dict(bnb_4bit_use_double_quant=False), 3, "bnb_4bit_use_double_quant"),
    (dict(bnb_4bit_quant_type="fp4"), 4, "fp4"),
    (dict(load_in_4bit=False, load_in_8bit=True), 4, "8 bits"),
    (dict(bnb_4bit_quant_storage="bfloat16"), 4, "bnb_4bit_quant_storage"),
    (dict(llm_int8_skip_modules="lm_head"), 3, "llm_int8_skip_modules")])
def test_configs_that_do_not_fit_are_refused_by_name(change, status, word, directories, rollouts, espalier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((directories[0] / "config.json").read_text())
    config["quantization_config"] |= change
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").symlink_to(directories[0] / "model.safetensors")
    assert word in espalier("train", "--model", model, "--rollouts", rollouts, "--lora-rank", 4, "--weights", "nf4", "--logprobs", tmp_path / "logprobs",
                            expect=status).stderr


def test_a_matrix_that_the_files_do_not_quantise_is_refused(rollouts, espalier, tmp_path):
    nf4, _ = nf4_reference.store(drawn("llama_untied", tmp_path), tmp_path, chosen=lambda name, t: nf4_reference.is_quantised(name, t) and name != QUERY)
    words = ("train", "--model", nf4, "--rollouts", rollouts, "--lora-rank", 4, "--logprobs", tmp_path / "logprobs")
    told = espalier(*words, "--weights", "nf4", expect=4).stderr
    assert QUERY in told and "llm_int8_skip_modules" in told
    espalier(*words)
