"""Gradients do not depend on where a step runs and on whose attention kernels: ATen's FlashAttention on processors, and the host code of
a GPU over emulated kernels, opened by the program as it opens the library of a real one."""

import json
import os
import subprocess

import pytest
from safetensors.torch import load_file

from make_model import FAMILIES, make_rollouts, write_records
from test_parallel import torchrun
from text_model import byte_level_tokenizer, make_text_model

SEED = 47


def words_of(model_of, folder, family, *options, schedule=("phased", "--token-budget", "24")):
    rollouts = write_records(make_rollouts(SEED), folder / "rollouts.jsonl")
    return [str(word) for word in ("train", "--model", model_of(family), "--rollouts", rollouts, "--dtype", "float64", "--schedule", *schedule,
                                   "--out", folder / "out", "--overwrite",
                                   "--gradients", folder / "gradients.safetensors", *options)]


def gradients(espalier, model_of, folder, family, *options, **schedule):
    espalier(*words_of(model_of, folder, family, *options, **schedule))
    return load_file(folder / "gradients.safetensors")


@pytest.mark.parametrize("options", [("--attention", "flash"), ("--device", "emulate")], ids=" ".join)
def test_gradients_are_those_of_own_kernels_on_processors(options, espalier, program, model_of, tmp_path):
    if "emulate" in options and not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    want = gradients(espalier, model_of, tmp_path, "qwen3_tied")
    got = gradients(espalier, model_of, tmp_path, "qwen3_tied", *options)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-10 * value.norm(), name


@pytest.mark.parametrize("degrees", [("--tp", 2), ("--pp", 2)], ids=lambda degrees: degrees[0])
def test_processes_with_a_device_each_give_the_gradients_of_one(degrees, espalier, program, model_of, tmp_path):
    """What NCCL carries between GPUs, the processes' own group carries between emulated ones, as work of their streams."""
    if not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    want = gradients(espalier, model_of, tmp_path, "qwen3_tied")
    words = words_of(model_of, tmp_path, "qwen3_tied", "--device", "emulate", *degrees)
    done = subprocess.run(torchrun(2, [program, *words]), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    got = load_file(tmp_path / "gradients.safetensors")
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-10 * value.norm(), name


def test_a_continued_run_notes_that_nccl_sums_in_another_order(espalier, program, model_of, tmp_path):
    """Each checkpoint has the settings of NCCL; runs of one process, and on processors, have none."""
    if not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    words = words_of(model_of, tmp_path, "qwen3_tied", "--device", "emulate", "--tp", 2, "--steps", 1)
    words = words[:words.index("--gradients")] + words[words.index("--gradients") + 2:]
    resumed = [program, "train", "--resume", tmp_path / "out", "--out", tmp_path / "out", "--rollouts", tmp_path / "rollouts.jsonl",
               "--device", "emulate", "--tp", "2", "--epochs"]
    said = {}
    for algorithm, command in (("Ring", [program, *words]), ("Ring", [*resumed, "2"]), ("Tree", [*resumed, "3"])):
        done = subprocess.run(torchrun(2, command), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "NCCL_ALGO": algorithm})
        assert done.returncode == 0, done.stderr
        said[algorithm] = done.stderr
    assert json.loads((tmp_path / "out/espalier/state.json").read_text())["nccl"] == {"NCCL_ALGO": "Tree"}
    assert "NCCL_ALGO (Ring before, Tree now)" in said["Tree"]
    assert "NCCL_ALGO" not in said["Ring"]
    espalier(*words_of(model_of, tmp_path, "qwen3_tied"))
    assert "nccl" not in json.loads((tmp_path / "out/espalier/state.json").read_text())


def test_a_run_continues_on_a_device(espalier, program, tmp_path):
    if not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two and three")))
    reward.write_text("def compute_score(solution_str, **_):\n    return float(len(solution_str))\n")
    model = make_text_model(tmp_path / "model", byte_level_tokenizer(["one two three four"], 300))
    espalier("grpo", "--device", "emulate", "--model", model, "--prompts", prompts, "--reward", reward,
             "--out", tmp_path / "run", "--steps", 1, "--max-response-length", 4, "--train-batch-size", 2, "--n", 2)
    espalier("grpo", "--device", "emulate", "--resume", tmp_path / "run", "--steps", 2)
    assert max(json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


RECURRENT = {
    "kimi_linear_moe": ("KimiLinear", dict(moe_intermediate_size=8, layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=5)),
    "lfm2": ("Lfm2", dict(layer_types=["conv", "full_attention"]))}


@pytest.mark.parametrize("family", RECURRENT)
def test_states_run_in_every_verb_of_a_device(espalier, program, tmp_path, family):
    """Decays of channels, short convolutions: gradients and scores on the device against those of a dense step on a processor; `verify`, `generate` and a closed loop."""
    if not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    kind, own = RECURRENT[family]
    config = FAMILIES[family]["config"] | dict(
        hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False) | own
    model = make_text_model(tmp_path / "model", byte_level_tokenizer(["one two three four"], 264), kind=kind, initializer_range=0.3, **config)

    def on(device, verb, *words, **settings):
        return espalier(verb, "--device", device, "--model", model, *words, **settings)

    want = gradients(espalier, lambda _: model, tmp_path, "", schedule=("dense",))
    got = gradients(espalier, lambda _: model, tmp_path, "", "--device", "emulate")
    assert want.keys() == got.keys() and min(value.abs().max() for value in want.values()) > 0
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-10 * value.norm(), name
    rollouts = tmp_path / "rollouts.jsonl"
    found = on("emulate", "verify", "--dtype", "bfloat16", "--rollouts", rollouts, "--json").json
    assert found["verdict"] == "pass" and found["gradient_norm"] > 0

    def scores(device):
        on(device, "score", "--dtype", "float64", "--rollouts", rollouts, "--out", tmp_path / f"{device}.jsonl")
        return [row["logprobs"] for row in map(json.loads, (tmp_path / f"{device}.jsonl").read_text().splitlines())]

    for expected, scored in zip(scores("cpu"), scores("emulate"), strict=True):
        assert scored == pytest.approx(expected, rel=0, abs=1e-10)
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two and three")))
    reward.write_text("def compute_score(solution_str, **_):\n    return float(len(solution_str))\n")
    sampling = ("--prompts", prompts, "--n", 2, "--max-response-length", 4)

    def responses(device):
        on(device, "generate", *sampling, "--dtype", "float64", "--temperature", 0, "--out", tmp_path / f"{device}_responses.jsonl")
        return [row["response_ids"] for row in map(json.loads, (tmp_path / f"{device}_responses.jsonl").read_text().splitlines())]

    assert responses("emulate") == responses("cpu")
    on("emulate", "grpo", *sampling, "--reward", reward, "--out", tmp_path / "run", "--steps", 1, "--train-batch-size", 2)


def test_a_missing_library_of_the_device_is_named(espalier, program, model_of, tmp_path):
    if (program.parent / "libespalier_emulated.so").exists():
        espalier("selftest", "--device", "emulate", "--attention", "hopper", "--only", "join_sinks")
        for attention, missing in (("flash", "no flash on processors"), ("cudnn", "no cudnn on processors")):
            assert missing in espalier("selftest", "--device", "emulate", "--attention", attention, expect=8).stderr
    else:
        assert "libespalier_emulated.so" in espalier("selftest", "--device", "emulate", expect=8).stderr


@pytest.mark.parametrize("attention", ["cudnn", "hopper"])
def test_kernels_for_gpus_are_for_gpus(espalier, attention):
    refused = espalier("selftest", "--attention", attention, expect=2).stderr
    assert "--device cuda" in refused and "use --attention own or flash" in refused


def test_selftest_checks_and_times_every_operation_and_plans_are_made_of_its_rates(espalier, model_of, tmp_path):
    found = espalier("selftest", "--json").json
    assert found["verdict"] == "pass" and all(check["pass"] and check["same_bits"] for check in found["checks"])
    assert {"attention", "linear", "logit_sums", "logit_gradients", "adamw"} <= {rate["operation"] for rate in found["rates"]}
    for rate in found["rates"]:
        assert rate["seconds"] > 0 and (rate["bytes_per_second"] or 0) + (rate["flops_per_second"] or 0) > 0, rate
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(found["profile"]))
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    planned = espalier("plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--machine", machine, "--dtype", found["profile"]["dtype"])
    assert found["profile"]["name"] in planned.stdout
