"""Weights that are held stay in bfloat16 in float32 runs: the bits of copies in float32, half of their memory, and the plan says so."""

import json
import os
import struct
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from comparison import total_error
from make_model import make_model, make_rollouts, write_records
from test_lora import TARGETS
from test_memory import MEBI, files, of_process
from test_parallel import Ranks

SEED = 41


def stored_twice(family, folder, **more):
    """The same numbers in files of bfloat16 and of float32."""
    model = make_model(family, folder / "drawn", **more)
    loaded = transformers.AutoModelForCausalLM if not more else getattr(transformers, "AutoModel" + more["head"])
    narrow = loaded.from_pretrained(model, dtype=torch.bfloat16)
    narrow.save_pretrained(folder / "narrow")
    narrow.float().save_pretrained(folder / "wide")
    for name in ("narrow", "wide"):
        assert json.loads((folder / name / "config.json").read_text())["dtype"] == {"narrow": "bfloat16", "wide": "float32"}[name]
    return folder / "narrow", folder / "wide"


def outcome(espalier, model, rollouts, folder, *words):
    folder.mkdir()
    espalier("train", "--model", model, "--rollouts", rollouts, "--threads", 2, "--mini-batch-size", 6, "--lr", 1e-3, *words,
             "--out", folder / "out", "--gradients", folder / "gradients.safetensors", "--logprobs", folder / "logprobs.jsonl")
    return folder


CASES = [("llama_untied", ()), ("qwen3_tied", ()), ("qwen3_moe", ("--lora-target", ",".join(TARGETS[:4]))), ("gpt_oss_moe", ("--lora-target", "q_proj,v_proj"))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, targets", CASES, ids=[family for family, _ in CASES])
def test_a_run_has_the_bits_of_one_with_copies(family, targets, dtype, espalier, tmp_path):
    """Where files are mapped, too: those in float32 are not."""
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    words = ("--lora-rank", 4, *targets, "--products", "own", "--dtype", dtype)
    narrow, wide = (outcome(espalier, model, rollouts, tmp_path / f"run_{model.name}", *words) for model in stored_twice(family, tmp_path))
    for file in ("gradients.safetensors", "logprobs.jsonl", "out/adapter_model.safetensors"):
        assert (narrow / file).read_bytes() == (wide / file).read_bytes(), file
    assert any(values.any() for values in load_file(narrow / "gradients.safetensors").values())


@pytest.mark.rounding
@pytest.mark.parametrize("family, targets", CASES, ids=[family for family, _ in CASES])
def test_the_librarys_products_are_as_exact_as_with_float32_copies(family, targets, espalier, tmp_path):
    """Its bits depend on where in memory a matrix begins."""
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    models = stored_twice(family, tmp_path)
    words = ("--lora-rank", 4, *targets, "--products", "library", "--steps", 1)
    narrow, wide = (outcome(espalier, model, rollouts, tmp_path / f"run_{model.name}", *words) for model in models)
    exact = load_file(outcome(espalier, models[1], rollouts, tmp_path / "exact", *words, "--dtype", "float64") / "gradients.safetensors")
    errors = [total_error(load_file(run / "gradients.safetensors"), exact) for run in (narrow, wide)]
    assert errors[0] <= 2 * errors[1], errors


def test_parts_that_train_beside_narrow_ones_and_a_critic(espalier, tmp_path):
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    actors = stored_twice("qwen3_tied", tmp_path)
    (tmp_path / "critic").mkdir()
    critics = stored_twice("qwen3_tied", tmp_path / "critic", head="ForTokenClassification", seed=2)
    runs = [outcome(espalier, actor, rollouts, tmp_path / f"run_{actor.name}", "--critic", critic, "--adv-estimator", "gae", "--train", "norms,mlp",
                    "--save-dtype", "float32") for actor, critic in zip(actors, critics)]
    for file in ("gradients.safetensors", "logprobs.jsonl", "out/model.safetensors", "out/critic/model.safetensors"):
        assert (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes(), file


def test_sampling_and_scores_with_an_adapter_have_the_same_bits(espalier, tmp_path):
    narrow, wide = stored_twice("llama_untied", tmp_path)
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    adapter = outcome(espalier, narrow, rollouts, tmp_path / "run", "--lora-rank", 4) / "out"
    prompts = write_records([{"prompt_ids": record["prompt_ids"]} for record in make_rollouts(SEED)[:4]], tmp_path / "prompts.jsonl")
    for verb, words, file in (("score", ("--rollouts", rollouts), "scored"), ("generate", ("--prompts", prompts, "--n", 2, "--max-response-length", 8), "sampled")):
        written = []
        for model in (narrow, wide):
            written.append(tmp_path / f"{file}_{model.name}.jsonl")
            espalier(verb, "--model", model, "--adapter", adapter, *words, "--out", written[-1])
        assert written[0].read_bytes() == written[1].read_bytes(), verb


def test_files_of_two_dtypes_are_held_in_float32(espalier, tmp_path):
    """config.json says bfloat16, and one matrix is not: its digits are not lost."""
    narrow, wide = stored_twice("llama_untied", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    precise = load_file(wide / "model.safetensors")[name] + torch.rand(48, 80, generator=torch.Generator().manual_seed(SEED)) / 1000
    for folder in (narrow, wide):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: precise}, folder / "model.safetensors", metadata={"format": "pt"})
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    runs = [outcome(espalier, model, rollouts, tmp_path / f"run_{model.name}", "--lora-rank", 4) for model in (narrow, wide)]
    assert (runs[0] / "gradients.safetensors").read_bytes() == (runs[1] / "gradients.safetensors").read_bytes()


@pytest.mark.parametrize("products", ["own", "library"])
def test_a_process_holds_what_its_plan_says(products, program, tmp_path):
    """Two thirds of the model's bytes are its matrices in bfloat16: copies of them would be seen."""
    words = files(tmp_path, 32768, dict(prompt=96, response=16, n=4), hidden_size=1024, num_hidden_layers=4, num_attention_heads=16,
                  num_key_value_heads=8, intermediate_size=4096)
    tensors = load_file(tmp_path / "model/model.safetensors")
    save_file({name: values.bfloat16() for name, values in tensors.items()}, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    held = sum(values.numel() for values in tensors.values() if values.ndim == 2)
    del tensors
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    found = Ranks(program, 1, [*words, "--lora-rank", 4, "--products", products, "--logprobs", tmp_path / "logprobs"], OMP_NUM_THREADS="2")
    assert found.end() == [0], found.stderr
    process, planned = of_process(json.loads(found.stdout[0]))
    assert 0.95 * planned < process < 1.05 * planned, (process / MEBI, planned / MEBI)
    if products == "own":
        assert process < 4 * held  # what copies would take alone


@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--dp", 2, "--shard", "full")], ids=["tp", "pp", "shard_full"])
def test_ranks_have_the_bits_of_ranks_with_float32_copies(layout, program, tmp_path):
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    written = []
    for model in stored_twice("llama_untied", tmp_path):
        written.append(tmp_path / f"gradients_{model.name}")
        run = Ranks(program, 2, ["train", "--model", model, "--rollouts", rollouts, "--lora-rank", 4, "--products", "own", *layout, "--gradients", written[-1]])
        assert run.end() == [0, 0], run.stderr
    assert written[0].read_bytes() == written[1].read_bytes()


def with_header_of(path, more, out):
    """The same tensors behind a header that is so many bytes longer."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    out.write_bytes(struct.pack("<Q", size + more) + content[8:8 + size] + b" " * more + content[8 + size:])


@pytest.mark.parametrize("more", [1, 2])
def test_matrices_that_begin_anywhere_have_the_same_bits(more, espalier, tmp_path):
    """Numbers at odd addresses are copied."""
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    narrow, _ = stored_twice("llama_untied", tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.json").write_text((narrow / "config.json").read_text())
    with_header_of(narrow / "model.safetensors", more, moved / "model.safetensors")
    runs = [outcome(espalier, model, rollouts, tmp_path / f"run_{model.name}", "--lora-rank", 4, "--products", "own") for model in (narrow, moved)]
    assert (runs[0] / "gradients.safetensors").read_bytes() == (runs[1] / "gradients.safetensors").read_bytes()


def most_of(process, *members):
    """The largest values of members of /proc/PID/status while the process runs, in bytes."""
    most = dict.fromkeys(members, 0)
    while process.poll() is None:
        try:
            lines = open(f"/proc/{process.pid}/status").read().splitlines()
        except OSError:
            break
        for line in lines:
            name, _, value = line.partition(":")
            if name in most:
                most[name] = max(most[name], int(value.split()[0]) * 1024)
        time.sleep(0.005)
    return [most[name] for name in members]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_matrices_are_pages_of_the_file(dtype, program, tmp_path):
    """Keys and values are copied: the file has other matrices between them."""
    words = files(tmp_path, 8192, dict(prompt=96, response=16, n=4), hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
                  intermediate_size=4096)
    tensors = {name: values.bfloat16() for name, values in load_file(tmp_path / "model/model.safetensors").items()}
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    mapped = 2 * sum(values.numel() for name, values in tensors.items() if values.ndim == 2 and not name.endswith(("k_proj.weight", "v_proj.weight")))
    del tensors
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run = Ranks(program, 1, [*words, "--lora-rank", 4, "--dtype", dtype, "--products", "own", "--logprobs", tmp_path / "logprobs"], OMP_NUM_THREADS="2")
    of_files, anonymous = most_of(run.processes[0], "RssFile", "RssAnon")
    assert run.end() == [0], run.stderr
    process, planned = of_process(json.loads(run.stdout[0]))
    assert 0.95 * planned < process < 1.05 * planned, (process / MEBI, planned / MEBI)
    assert of_files >= mapped and anonymous <= process - mapped


def test_a_file_that_changes_during_the_run_is_named_in_a_note(program, tmp_path):
    rollouts = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    narrow, _ = stored_twice("llama_untied", tmp_path)
    out, file = tmp_path / "out", narrow / "model.safetensors"
    words = ["train", "--model", narrow, "--rollouts", rollouts, "--lora-rank", 4, "--epochs", 400, "--save-freq", 100, "--out", out]
    for touched in (False, True):
        run = Ranks(program, 1, [*words, "--overwrite"])
        while touched and run.processes[0].poll() is None and not out.exists():
            time.sleep(0.005)
        if touched:
            os.utime(file)
        assert run.end() == [0], run.stderr
        assert (f"{file} changed during the run" in run.stderr[0]) == touched
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()
