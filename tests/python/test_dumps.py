"""The program on dumps of other systems: it reads what the Python package reads, and `replay` runs their updates again."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import oracle
from dumps import make_samples, slime_sample, slime_train, trl_batch, verl_tensors
from espalier import records as package
from make_model import make_rollouts, write_records

SEED = 47
# Two float64 forwards of the same model, ours and ours or ours and transformers': as in test_train_parity.py.
LOGPROB_FLOAT64 = 1e-11


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def spelt_out(record):
    """Without the writer's abbreviations: a mask of ones, one number for equal advantages, empty series."""
    count = len(record["response_ids"])
    out = {"loss_mask": [1] * count, **record}
    if isinstance(out.get("advantage"), float):
        out["advantage"] = [out["advantage"]] * count
    return {name: value for name, value in out.items() if value != []}


def with_temperature_one(records):
    return [{k: v for k, v in record.items() if k != "temperature"} for record in records]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder, samples = tmp_path_factory.mktemp("dumps"), make_samples()
    torch.save(trl_batch(samples), folder / "trl_step_2.pt")
    torch.save(verl_tensors(samples), folder / "verl.pt", _use_new_zipfile_serialization=False)
    (folder / "verl.pkl").write_bytes(pickle.dumps({name: t.numpy() for name, t in verl_tensors(samples).items()}))
    (folder / "slime").mkdir()
    torch.save({"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(samples)]}, folder / "slime/rollout_4.pt")
    torch.save(slime_train(samples, range(7)), folder / "slime/train_4_0.pt")
    return folder


@pytest.mark.parametrize("name, format", [("trl_step_2.pt", "TRL batch"), ("verl.pt", "verl DataProto"), ("verl.pkl", "verl DataProto"),
                                          ("slime/rollout_4.pt", "slime debug dump"), ("slime", "slime debug dump")])
def test_the_program_reads_what_the_package_reads(name, format, dumps, espalier, tmp_path):
    out = tmp_path / "out.jsonl"
    assert espalier("convert", dumps / name, out, "--json").json["format"] == format
    wanted = list(package.read(dumps / name))
    assert [spelt_out(r) for r in lines(out)] == [spelt_out(r) for r in wanted]
    assert espalier("inspect", dumps / name, "--json").json["rollouts"] == len(wanted)


def test_a_batch_of_another_system_trains_like_its_neutral_records(dumps, espalier, model_of, tmp_path):
    espalier("convert", dumps / "trl_step_2.pt", tmp_path / "neutral.jsonl")
    losses = [espalier("train", "--model", model_of("qwen2_untied"), "--rollouts", path, "--gradients", tmp_path / "g.safetensors",
                       "--dtype", "float64", "--json").json["steps"][0]["loss"]
              for path in (dumps / "trl_step_2.pt", tmp_path / "neutral.jsonl")]
    assert losses[0] == losses[1]


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_refusals_keep_their_place_and_exit_code(espalier, tmp_path):
    mark, evil, text = tmp_path / "mark", tmp_path / "evil.pkl", tmp_path / "text.pt"
    evil.write_bytes(pickle.dumps({"samples": [Touch(mark)]}))
    torch.save({"prompt": ["a"], "completion": ["b"]}, text)
    for verb in ("inspect", "convert"):
        for path, code, words in ((evil, 3, "posix.system"), (text, 4, "text only"), (tmp_path / "none.pt", 3, "No such file")):
            run = espalier(verb, path, *([tmp_path / "out.jsonl"] if verb == "convert" else []), "--json", expect=code)
            assert words in run.json["error"]["got"] and str(path) in run.json["error"]["where"]
    assert not mark.exists() and not (tmp_path / "out.jsonl").exists()


def test_a_missing_python_is_named(dumps, espalier):
    run = espalier("inspect", dumps / "verl.pkl", expect=4, env={**os.environ, "ESPALIER_PYTHON": "/absent/python3"})
    assert "/absent/python3" in run.stderr and "ESPALIER_PYTHON" in run.stderr


# ---- replay ---------------------------------------------------------------------------------------------------------

STEPS = 3
OPTIONS = ("--dtype", "float64", "--lr", 1e-3, "--kl-loss-coef", 0, "--clip-ratio-high", 0.28, "--threads", 2)


def gradients_of(espalier, model, rollouts, out, *options):
    espalier("train", "--model", model, "--rollouts", rollouts, "--gradients", out, "--dtype", "float64", "--steps", 1, *options)
    return load_file(out)


def test_the_divisor_of_a_dump_and_a_temperature_for_it(espalier, model_of, tmp_path):
    """Half of TRL's generation batch: its tokens are divided by half of the whole's, at the temperature of the command line."""
    samples, model = make_samples(), model_of("qwen2_untied")
    torch.save({**trl_batch(samples), "num_items_in_batch": torch.tensor(91)}, tmp_path / "slice.pt")
    dapo = ("--loss-type", "dapo", "--temperature", 0.7)
    found = gradients_of(espalier, model, tmp_path / "slice.pt", tmp_path / "a", *dapo, "--steps-per-generation", 2)
    spelt = [{**{k: v for k, v in r.items() if k != "num_items_in_batch"}, "temperature": 0.7} for r in package.read(tmp_path / "slice.pt")]
    spelt = write_records(spelt, tmp_path / "spelt.jsonl")
    wanted = gradients_of(espalier, model, spelt, tmp_path / "b", "--loss-type", "dapo", "--num-items-in-batch", 45.5, "--temperature", 3)
    assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)
    other = gradients_of(espalier, model, spelt, tmp_path / "c", "--loss-type", "dapo")
    assert not all(np.allclose(other[name], wanted[name]) for name in wanted)
    own = gradients_of(espalier, model, tmp_path / "slice.pt", tmp_path / "c", *dapo, "--token-divisor-scale", 0)
    assert all(np.array_equal(own[name], other[name]) for name in other)
    unsaid = espalier("train", "--model", model, "--rollouts", tmp_path / "slice.pt", "--gradients", tmp_path / "d", *dapo, expect=3).stderr
    assert "num_items_in_batch" in unsaid and "--steps-per-generation" in unsaid and "--gradient-accumulation-steps" in unsaid
    refused = espalier("train", "--model", model, "--rollouts", tmp_path / "slice.pt", "--temperature", 0, "--gradients", tmp_path / "d",
                       expect=2).stderr
    assert "--temperature" in refused and "above 0" in refused


def test_dumps_of_two_micro_batches_are_one_window(espalier, model_of, tmp_path):
    """Each file names the tokens of the whole window: two of them divide by it once, however many files there are."""
    samples, model = make_samples(), model_of("qwen2_untied")
    tokens = sum(sum(s["loss_mask"]) for s in samples)
    torch.save(trl_batch(samples), tmp_path / "whole.pt")
    (tmp_path / "parts").mkdir()
    for index, part in enumerate((samples[:3], samples[3:])):
        torch.save({**trl_batch(part), "num_items_in_batch": torch.tensor(tokens)}, tmp_path / f"parts/{index}.pt")
    whole = gradients_of(espalier, model, tmp_path / "whole.pt", tmp_path / "a", "--loss-type", "dapo")
    for words in ((), ("--gradient-accumulation-steps", 2)):
        parts = gradients_of(espalier, model, tmp_path / "parts", tmp_path / "b", "--loss-type", "dapo", *words)
        assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    refused = espalier("train", "--model", model, "--rollouts", tmp_path / "parts", "--gradients", tmp_path / "c", "--loss-type", "bnpo",
                       "--gradient-accumulation-steps", 2, expect=4).stderr
    assert "--gradient_accumulation_steps" in refused and "bnpo" in refused and "micro-batch" in refused


def nemo_line(record, width):
    """A sample as NeMo-RL's train_data_step{N}.jsonl has it: padded, log-probs at their tokens, in lists of one."""
    prompt, response = record["prompt_ids"], record["response_ids"]
    pad = [0] * (width - len(prompt) - len(response))

    def series(values):
        return [[0.0] * len(prompt) + values + [0.0] * len(pad)]

    return {"token_ids": [prompt + response + pad], "input_lengths": [len(prompt) + len(response)],
            "token_loss_mask": [[0] * len(prompt) + record["loss_mask"] + pad], "sample_loss_mask": [1],
            "advantages": series(record["advantage"]), "prev_logprobs": series(record["old_logprobs"]),
            "generation_logprobs": series(record["old_logprobs"]), "rewards": [record["reward"]], "content": ["text"]}


@pytest.fixture(scope="module")
def recorded(espalier, model_of, tmp_path_factory):
    """A run of three updates, each on rollouts of its own with the log-probs of the policy before it."""
    folder, model = tmp_path_factory.mktemp("recorded"), model_of("llama_untied")
    steps, before = [], model
    for step in range(1, STEPS + 1):
        batch = [r for r in with_temperature_one(make_rollouts(SEED + step)) if r["response_ids"] and r["loss_mask"][0]]
        for i, record in enumerate(batch):
            record["advantage"] = [round(math.sin(i + t), 3) for t in range(len(record["response_ids"]))]
        write_records(batch, folder / "in.jsonl")
        scored, after = folder / f"scored{step}.jsonl", folder / f"after{step}"
        espalier("score", "--model", before, "--rollouts", folder / "in.jsonl", "--out", scored, "--as", "old_logprobs", "--dtype", "float64")
        start = ("--model", model) if step == 1 else ("--resume", before)
        run = espalier("train", *start, "--rollouts", scored, "--out", after, "--save-dtype", "float64", "--json", *OPTIONS).json
        batch = [spelt_out(record) for record in lines(scored)]
        width = max(len(r["prompt_ids"]) + len(r["response_ids"]) for r in batch) + 2
        (folder / "nemo").mkdir(exist_ok=True)
        (folder / f"nemo/train_data_step{step + 7}.jsonl").write_text("".join(json.dumps(nemo_line(r, width)) + "\n" for r in batch))
        steps.append(run["steps"][0])
        before = after
    return folder, model, steps


@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_replay_of_nemo_rl_train_data_finds_its_log_probs_at_every_step(schedule, recorded, espalier):
    folder, model, wanted = recorded
    run = espalier("replay", folder / "nemo", "--model", model, *OPTIONS, "--schedule", schedule, "--json").json
    assert [s["step"] for s in run["steps"]] == [8, 9, 10] and run["checkpoints"] == []
    for step, theirs in zip(run["steps"], wanted, strict=True):
        assert step["logprobs"]["tokens"] > 20
        assert step["logprobs"]["max_abs"] <= LOGPROB_FLOAT64 and step["logprobs"]["kl"] <= LOGPROB_FLOAT64**2
        assert step["loss"] == pytest.approx(theirs["loss"], abs=1e-10) and step["recorded_loss"] is None
        assert step["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)


def test_replay_with_another_learning_rate_leaves_the_recorded_policy(recorded, espalier):
    folder, model, _ = recorded
    options = [2e-3 if word == 1e-3 else word for word in OPTIONS]
    run = espalier("replay", folder / "nemo", "--model", model, *options, "--steps", 2, "--json").json
    first, second = (s["logprobs"] for s in run["steps"])
    assert first["max_abs"] <= LOGPROB_FLOAT64 and second["max_abs"] > 1e-4
    assert second["max_abs"] >= second["mean_abs"] > 0 and second["kl"] > 0


def test_replay_measures_the_distance_to_the_recorded_log_probs(espalier, model_of, tmp_path):
    batch = [r for r in with_temperature_one(make_rollouts(SEED)) if any(r["loss_mask"])]
    logprobs, _ = oracle.score(oracle.load_model(model_of("qwen3_tied"), torch.float64), batch)
    distances = []
    for i, (record, own) in enumerate(zip(batch, logprobs, strict=True)):
        shifts = [0.25 * math.cos(i + t) for t in range(len(own))]
        record["old_logprobs"] = [float(value) - shift for value, shift in zip(own, shifts)]
        distances += [shift for shift, counts in zip(shifts, record["loss_mask"]) if counts]
    path = write_records(batch, tmp_path / "rollouts.jsonl")
    step, = espalier("replay", path, "--model", model_of("qwen3_tied"), "--dtype", "float64", "--json").json["steps"]
    d = np.array(distances)
    wanted = {"tokens": len(d), "max_abs": np.abs(d).max(), "mean_abs": np.abs(d).mean(), "kl": (np.exp(d) - 1 - d).mean()}
    assert step["logprobs"] == pytest.approx(wanted, abs=LOGPROB_FLOAT64), f"seed {SEED}"


def test_replay_of_dumps_without_log_probs_says_so(dumps, espalier, model_of):
    run = espalier("replay", dumps / "slime/rollout_4.pt", "--model", model_of("qwen2_untied"), "--adv-estimator", "rloo")
    assert "no old_logprobs" in run.stdout
    step, = espalier("replay", dumps / "slime", "--model", model_of("qwen2_untied"), "--json").json["steps"]
    assert step["step"] == 4 and step["logprobs"]["tokens"] == sum(sum(s["loss_mask"]) for s in make_samples())


def test_replay_refuses_what_it_cannot_do(dumps, espalier, model_of, tmp_path):
    assert "--model" in espalier("replay", dumps / "verl.pkl", expect=2).stderr
    rollouts = write_records(make_rollouts(SEED), tmp_path / "in.jsonl")
    espalier("train", "--model", model_of("qwen2_untied"), "--rollouts", rollouts, "--record", tmp_path / "trace", "--steps", 1)
    run = espalier("replay", tmp_path / "trace", "--lr", 0.5, expect=2)
    assert "--lr" in run.stderr and "trace.json" in run.stderr
    assert espalier("replay", tmp_path / "trace", "--json").json["checkpoints"][-1]["max_abs"] == 0
