"""`grpo`, the closed loop: the same bits twice, the same bits after kill -9, a trace that replays, honest endings."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file

# A run of seconds: few short prompts, a warm start that teaches nothing much, several steps a batch.
TINY = ["--prompt-length", 64, "--max-response-length", 4, "--train-batch-size", 3, "--n", 3, "--mini-batch-size", 6, "--epochs", 2,
        "--val-size", 6, "--test-freq", 2, "--save-freq", 1, "--warm-start-steps", 6, "--steps", 16, "--lr", "1e-3",
        "--kl-loss-coef", 0.01, "--entropy-coeff", 0.001, "--rollout-is", "token", "--threads", 2]
TIMES = {"seconds", "tokens_per_second", "mfu", "peak_bytes", "arena_bytes", "predicted", "profile"}


def tiny(*changes):
    """TINY with other values and more options: each option is said once."""
    said = [str(word) for word in changes]
    starts = [at for at, word in enumerate(said) if word.startswith("--")] + [len(said)]
    options = {str(name): [str(value)] for name, value in zip(TINY[::2], TINY[1::2])}
    options |= {said[begin]: said[begin + 1:end] for begin, end in zip(starts, starts[1:])}
    return [word for name, values in options.items() for word in (name, *values)]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(v) for name, v in value.items() if name not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def assert_same_run(found, wanted):
    assert without_times(metrics(found)) == without_times(metrics(wanted))
    for file in ("model/model.safetensors", "checkpoints/step-000016/espalier/state.safetensors", "last_rollouts.jsonl"):
        assert (found / file).read_bytes() == (wanted / file).read_bytes(), file


@pytest.fixture(scope="module")
def finished(espalier, tmp_path_factory):
    """An uninterrupted run with what it printed as JSON."""
    run = tmp_path_factory.mktemp("grpo") / "run"
    return run, espalier("grpo", "--out", run, "--json", *TINY).json


def test_a_run_holds_what_the_contract_says(finished):
    run, told = finished
    lines = metrics(run)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 17)) == [step["step"] for step in told["steps"]]
    for step in steps:
        assert 0 <= step["accuracy"] <= 1 and step["rows"]["physical"] < step["rows"]["logical"] and step["tokens_saved"] > 0
        assert {"generate", "score", "update", "total"} <= step["seconds"].keys() and step["length"]["max"] <= 4
    assert [step["steps_left"] for step in steps] == [3, 2, 1, 0] * 4
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [e["step"] for e in evaluations] == [0, 8, 16] == [e["step"] for e in told["evaluations"]]
    assert sum(line["kind"] == "warm_start" for line in lines) == 6
    assert {line["step"] for line in lines if line["kind"] == "picture"} == {8, 16}
    assert sum(line["kind"] == "sample" for line in lines) >= 3 * len(evaluations)
    assert {p.name for p in run.iterdir() if not p.name.startswith("events.")} == {
        "run.json", "metrics.jsonl", "fresh", "checkpoints", "last_rollouts.jsonl", "model"}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in (0, 4, 8, 12, 16)]
    assert any(p.name.startswith("events.out.tfevents.") for p in run.iterdir())
    for line in (run / "last_rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert len(record["old_logprobs"]) == len(record["ref_logprobs"]) == len(record["response_ids"])


def test_an_updates_predicted_peak_is_without_the_samplers_keys_and_values(espalier, tmp_path):
    """They are gone by then: an evaluation of many more prompts, which holds more of them, predicts the same."""
    def steps(val_size):
        run = tmp_path / str(val_size)
        espalier("grpo", "--out", run, *tiny("--steps", 1, "--warm-start-steps", 1, "--val-size", val_size))
        return [line for line in metrics(run) if line["kind"] == "step"]

    few, many = steps(6), steps(200)
    assert [step["rows"] for step in few] == [step["rows"] for step in many]
    assert few[0]["predicted"]["peak_bytes"] == many[0]["predicted"]["peak_bytes"]


def test_the_model_and_its_words_load_in_transformers(finished):
    run, _ = finished
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    weights = load_file(run / "model/model.safetensors")
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in weights.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    sample = next(line for line in metrics(run) if line["kind"] == "sample")
    ids = tokenizer(sample["prompt"])["input_ids"]
    assert len(ids) == 64 and tokenizer.decode(ids) == sample["prompt"]


def test_the_same_command_gives_the_same_bits(finished, espalier, tmp_path):
    espalier("grpo", "--out", tmp_path / "run", *TINY)
    assert_same_run(tmp_path / "run", finished[0])


def test_killed_at_any_moment_it_ends_in_the_same_bits(finished, program, tmp_path):
    seed = 20261121
    moments, kills, longest = random.Random(seed), 0, 0.0
    for attempt in range(3):
        run = tmp_path / f"run{attempt}"
        began = time.monotonic()
        for moment in [None if attempt == 0 else moments.uniform(0.1, 1.0) for _ in range(6)] + [None]:
            place = "--resume" if (run / "run.json").is_file() else "--out"
            process = subprocess.Popen([str(program), "grpo", place, str(run), "--quiet", *map(str, TINY)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                _, errors = process.communicate(timeout=moment and moment * longest)
                assert process.returncode == 0, f"seed {seed}, after {kills} kills: {errors}"
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
        longest = time.monotonic() - began if attempt == 0 else longest
        assert_same_run(run, finished[0])
    assert kills >= 2, f"seed {seed}: only {kills} kills in runs of {longest:.1f} s"


def test_more_steps_continue_a_finished_run_as_one_run_would_have(finished, espalier, tmp_path):
    longer = tiny("--steps", 24)
    espalier("grpo", "--out", tmp_path / "whole", *longer)
    shutil.copytree(finished[0], tmp_path / "parts")
    espalier("grpo", "--resume", tmp_path / "parts", "--steps", 24, "--threads", 2)
    for file in ("model/model.safetensors", "last_rollouts.jsonl"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_finished_run_is_not_run_again(finished, espalier):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    again = espalier("grpo", "--resume", finished[0], "--threads", 2, "--json").json
    assert again["steps"] == [] and again["accuracy"] == finished[1]["accuracy"]
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_options_that_would_change_the_past_are_refused(finished, espalier):
    error = espalier("grpo", "--resume", finished[0], "--lr", 0.5, "--json", expect=2).json["error"]
    assert error["where"] == "--lr" and error["got"] == "0.5"


def test_a_folder_with_other_content_is_refused(espalier, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    espalier("grpo", "--out", tmp_path, *TINY, expect=2)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("bad", [["--n", "2,4"], ["--task", "copy"], ["--task", "copy", "--prompt-length", 64, "--overlong-buffer-len", 30,
                                 "--max-response-length", 25]], ids=["two_n", "answers_do_not_fit", "buffer_above_limit"])
def test_options_without_a_meaning_are_refused_before_anything_is_written(bad, espalier, tmp_path):
    espalier("grpo", "--out", tmp_path / "run", *tiny(*bad), expect=2)
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_before_its_first_checkpoint_may_start_with_other_options(finished, espalier, tmp_path):
    """A broken reward file ends the run in its first evaluation; the corrected command must not be refused."""
    (tmp_path / "broken.py").write_text("def compute_score(**_): raise RuntimeError('no')")
    espalier("grpo", "--out", tmp_path / "run", "--reward", tmp_path / "broken.py", *tiny("--lr", 0.5), expect=3)
    espalier("grpo", "--out", tmp_path / "run", *TINY)
    assert_same_run(tmp_path / "run", finished[0])


def test_a_recorded_run_replays_to_the_same_weights(espalier, tmp_path):
    espalier("grpo", "--out", tmp_path / "run", "--record", tmp_path / "trace", "--record-every", 8, *TINY)
    replayed = espalier("replay", tmp_path / "trace", "--threads", 2, "--json").json
    assert [c["step"] for c in replayed["checkpoints"]] == [8, 16]
    # The same program plans and runs the same mini-batches; only the memory that is free could make it plan otherwise.
    for checkpoint in replayed["checkpoints"]:
        assert checkpoint["movement_rel_l2"] <= 1e-6
    recorded = load_file(tmp_path / "trace/checkpoints/step-000016.safetensors")
    model = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(recorded[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("sampling", [(), ("--top-p", 0.7)])
def test_the_samplers_log_probs_are_those_of_a_pass_bit_for_bit(sampling, espalier, tmp_path):
    """With --products own the loop takes them as old_logprobs; score gives the same from the weights that sampled them. With top-p they are over
    the kept sets, so the importance weights of the first update are exactly 1."""
    run = tmp_path / "run"
    done = espalier("grpo", "--out", run, "--record", tmp_path / "trace", *tiny("--steps", 4, "--save-freq", 0, "--test-freq", 0), *sampling)
    assert "they are used as old_logprobs, without another pass" in done.stderr
    with gzip.open(tmp_path / "trace/rollouts.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    first = [record for record in records if record["step"] == records[0]["step"]]
    assert first and all(record["old_logprobs"] == record["rollout_logprobs"] for record in first)
    assert all(("kept_ids" in record) == bool(sampling) for record in first)
    for record in first:
        record.pop("old_logprobs")
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(record) + "\n" for record in first))
    espalier("score", "--model", tmp_path / "trace/model", "--rollouts", tmp_path / "first.jsonl", "--out", tmp_path / "scored.jsonl",
             "--threads", 2)
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [record["logprobs"] for record in scored] == [record["rollout_logprobs"] for record in first]


def test_log_probs_get_a_pass_where_training_adds_in_another_order(espalier, tmp_path):
    """ATen's flash attention cuts keys by the plan: the sampler's log-probs are then not those of training."""
    done = espalier("grpo", "--out", tmp_path / "run", "--attention", "flash", "--record", tmp_path / "trace",
                    *tiny("--steps", 4, "--save-freq", 0, "--test-freq", 0))
    assert "old_logprobs need no pass" not in done.stderr
    with gzip.open(tmp_path / "trace/rollouts.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    assert all(record["old_logprobs"] == pytest.approx(record["rollout_logprobs"], abs=1e-4) for record in records)


def test_shared_and_dense_learn_alike(espalier, tmp_path):
    """In float64 the schedules differ by 1e-15 or so: the curves agree far closer than any token choice could hang on."""
    curves = {}
    for schedule in ("dense", "phased"):
        run = tmp_path / schedule
        espalier("grpo", "--out", run, "--dtype", "float64", "--schedule", schedule, *TINY)
        curves[schedule] = [line for line in metrics(run) if line["kind"] in ("step", "evaluation")]
    assert len(curves["dense"]) == len(curves["phased"]) > 16
    for dense, phased in zip(curves["dense"], curves["phased"]):
        for field in ("accuracy", "reward", "length"):
            assert dense[field] == phased[field]
        if dense["kind"] == "step":
            assert phased["loss"] == pytest.approx(dense["loss"], rel=1e-8, abs=1e-10)
            assert phased["rows"]["physical"] < dense["rows"]["physical"] == dense["rows"]["logical"]


@pytest.mark.parametrize("variant", [
    ["--fresh", "moe", "--router-aux-loss-coef", 0.01], ["--task", "arithmetic"], ["--task", "copy", "--max-response-length", 30],
    ["--filter-groups", "--max-num-gen-batches", 3], ["--overlong-buffer-len", 2], ["--policy-loss", "gspo", "--adv-estimator", "rloo"],
    ["--dtype", "bfloat16"], ["--products", "library"]], ids=lambda v: "_".join(map(str, v)).replace("--", ""))
def test_variants_run_and_continue_to_the_same_bits(variant, espalier, tmp_path):
    short = tiny("--steps", 8, *variant)
    espalier("grpo", "--out", tmp_path / "whole", *short)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in ("model", "checkpoints/step-000008"):
        if (tmp_path / "parts" / name).exists():
            shutil.rmtree(tmp_path / "parts" / name)
    espalier("grpo", "--resume", tmp_path / "parts", "--threads", 2)
    assert without_times(metrics(tmp_path / "parts")) == without_times(metrics(tmp_path / "whole"))
    assert (tmp_path / "parts/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()


def test_given_weights_are_not_warm_started(finished, espalier, tmp_path):
    start = finished[0] / "checkpoints/step-000000"
    espalier("grpo", "--model", start, "--out", tmp_path / "run", *TINY)
    assert not [line for line in metrics(tmp_path / "run") if line["kind"] == "warm_start"]
    first, own = (load_file(run / "checkpoints/step-000000/model.safetensors") for run in (tmp_path / "run", finished[0]))
    assert all(torch.equal(first[name], tensor) for name, tensor in own.items())


def test_a_config_without_weights_starts_fresh(finished, espalier, tmp_path):
    espalier("grpo", "--model", finished[0] / "fresh", "--out", tmp_path / "run", *TINY)
    weights = (load_file(run / "model/model.safetensors") for run in (tmp_path / "run", finished[0]))
    first, second = weights
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_a_model_with_too_few_words_is_refused(espalier, model_of, tmp_path):
    error = espalier("grpo", "--model", model_of("llama_untied"), "--out", tmp_path / "run", "--json", *TINY, expect=3).json["error"]
    assert "words of the built-in tasks" in error["expected"] and "none for" in error["got"] and not (tmp_path / "run").exists()


def test_not_learning_is_said_and_ends_with_code_6(finished, espalier):
    outcome = espalier("grpo", "--resume", finished[0], "--threads", 2, "--expect-accuracy", 1, expect=6)
    assert "NOT LEARNED" in outcome.stdout


def test_it_learns(espalier, tmp_path):
    """A warm start to a few right answers, then GRPO alone to clearly more, on held-out problems. Over 128 of them the deviation of
    an accuracy is at most 0.044, so a rise by 0.2 is no accident."""
    told = espalier("grpo", "--out", tmp_path / "run", "--prompt-length", 512, "--max-response-length", 4, "--warm-start-steps", 3000,
                    "--lr", "5e-4", "--train-batch-size", 32, "--n", 16, "--steps", 25, "--test-freq", 0, "--threads", 2, "--json").json
    before, after = (evaluation["accuracy"] for evaluation in told["evaluations"])
    assert before < 0.6 and after > before + 0.2, told["evaluations"]


def test_adapters_learn(espalier, tmp_path):
    """The same with rank 8 on a model that stays as it is. The rise that is asked for is that of test_it_learns."""
    words = ["--prompt-length", 512, "--max-response-length", 4, "--train-batch-size", 32, "--n", 16, "--test-freq", 0, "--threads", 2]
    espalier("grpo", "--out", tmp_path / "base", "--warm-start-steps", 3000, "--lr", "5e-4", "--steps", 1, *words)
    base = tmp_path / "base/model/model.safetensors"
    before_it = base.read_bytes()
    told = espalier("grpo", "--model", base.parent, "--lora-rank", 8, "--out", tmp_path / "run", "--lr", "3e-3", "--steps", 50, "--json", *words).json
    before, after = (evaluation["accuracy"] for evaluation in told["evaluations"])
    assert before < 0.6 and after > before + 0.2, told["evaluations"]
    assert base.read_bytes() == before_it and (tmp_path / "run/model/adapter_model.safetensors").exists()


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("a remark")
    if FAIL and solution_str:
        raise RuntimeError("broken on " + solution_str.split()[0])
    return {"score": 0.5 + (solution_str == ground_truth)}
"""


def test_a_python_reward_is_used(espalier, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD.replace("FAIL", "False"))
    espalier("grpo", "--out", tmp_path / "run", "--reward", tmp_path / "reward.py", *TINY)
    for line in metrics(tmp_path / "run"):
        if line["kind"] in ("step", "evaluation"):
            assert line["reward"] == pytest.approx(0.5 + line["accuracy"])


def test_rewards_that_never_differ_end_a_loop_that_filters_groups(espalier, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1")
    outcome = espalier("grpo", "--out", tmp_path / "run", "--reward", tmp_path / "reward.py", "--filter-groups", "--max-num-gen-batches", 2,
                       "--json", *TINY)
    assert outcome.json["nothing_left"] and outcome.json["steps_done"] == 0 and "no gradient is left, so the loop ends" in outcome.stderr
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_failing_python_reward_is_an_input_error_and_no_hang(espalier, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD.replace("FAIL", "True"))
    began = time.monotonic()
    error = espalier("grpo", "--out", tmp_path / "run", "--reward", tmp_path / "reward.py", "--json", *TINY, expect=3).json["error"]
    assert error["got"].startswith("RuntimeError: broken on") and error["where"].endswith("reward.py:5")
    assert time.monotonic() - began < 60


def test_a_critic_makes_it_ppo(finished, espalier, tmp_path):
    ppo = [*TINY, "--critic", finished[0] / "checkpoints/step-000000", "--adv-estimator", "gae", "--critic-lr", "1e-3"]
    espalier("grpo", "--out", tmp_path / "whole", *ppo)
    assert all("critic" in line for line in metrics(tmp_path / "whole") if line["kind"] == "step")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in (12, 16):
        shutil.rmtree(tmp_path / f"parts/checkpoints/step-{step:06d}")
    espalier("grpo", "--resume", tmp_path / "parts", "--threads", 2)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


# -- interrupts -------------------------------------------------------------------------------------------------------

def interrupted(program, run, words, kind, count, number):
    """Starts `words`, sends `number` once metrics.jsonl has `count` lines of a kind, and gives what was said."""
    process = subprocess.Popen([str(program), "grpo", *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    while process.poll() is None:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if sum(f'"kind":"{kind}"' in line.replace(" ", "") for line in lines) >= count:
            os.killpg(process.pid, number)  # as a terminal does: the process of the rewards gets it too
            break
        time.sleep(0.01)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number, errors
    assert f"continue with: espalier grpo --resume {run}" in errors, errors
    return errors


def test_interrupted_it_says_how_to_continue_and_ends_in_the_same_bits(program, espalier, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                                        "    return float(len(solution_str) % 3)\n")
    words = tiny("--warm-start-steps", 40, "--save-freq", 0, "--reward", tmp_path / "reward.py")
    espalier("grpo", "--out", tmp_path / "whole", *words)
    run = tmp_path / "run"
    errors = interrupted(program, run, ["--out", run, *words], "warm_start", 3, signal.SIGINT)
    assert "in the warm start" in errors and not list((run / "checkpoints").glob("step-*"))
    done = sum(line["kind"] == "warm_start" for line in metrics(run))
    errors = interrupted(program, run, ["--resume", run, "--threads", 2], "step", 1, signal.SIGTERM)
    assert "after step" in errors
    lines = metrics(run)
    assert [line["step"] for line in lines if line["kind"] == "warm_start"] == list(range(1, 41)) and done < 40
    espalier("grpo", "--resume", run, "--threads", 2)
    assert_same_run(run, tmp_path / "whole")
    assert not (run / "checkpoints/warm-start").exists()


def test_a_run_that_exists_starts_anew_only_when_told(finished, espalier, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    for words in (TINY, ["--steps", 24], [*TINY, "--seed", 5], [*TINY, "--dry-run"]):
        told = espalier("grpo", "--out", tmp_path / "run", *words, expect=2).stderr
        assert "--resume" in told and "--overwrite" in told
        assert_same_run(tmp_path / "run", finished[0])
    words = ["grpo", "--out", tmp_path / "run", *TINY, "--seed", 5]
    espalier(*words, "--overwrite")
    assert json.loads((tmp_path / "run/run.json").read_text())["options"]["seed"] == 5
    espalier("grpo", "--resume", tmp_path / "run")
    assert sum(line["kind"] == "step" for line in metrics(tmp_path / "run")) == 16
