"""Exit codes, messages, JSON purity, and what a failed run leaves behind."""

import json
import re
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from make_model import make_rollouts, write_records

SEED = 41


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def train(espalier, model, rollouts, folder, *extra, **keywords):
    return espalier("train", "--model", model, "--rollouts", rollouts, "--out", folder / "out", *extra, **keywords)


def assert_refused(outcome, folder, *words):
    """The message names what it must, nothing is written, and no stack trace or internal error shows."""
    for word in words:
        assert word in outcome.stderr, f"{word!r} is not in: {outcome!r}"
    assert not (folder / "out").exists(), "a failed run left something at --out"
    leftovers = [p.name for p in folder.iterdir() if p.name.startswith(("out", ".out"))]
    assert not leftovers, leftovers
    for trace in ("terminate called", "Exception raised from", "backtrace", "#0 "):
        assert trace not in outcome.stderr


# -- help and JSON ----------------------------------------------------------------------------------------------------

def test_help_of_the_program_names_every_verb(espalier):
    text = espalier("--help").stdout
    for verb in ("inspect", "convert", "plan", "train", "score", "verify", "bench"):
        assert verb in text


@pytest.mark.parametrize("verb", ["inspect", "convert", "plan", "train", "score", "verify", "bench", "merge"])
def test_every_verb_has_help_with_defaults(verb, espalier):
    text = espalier(verb, "--help-all").stdout
    assert "--threads" in text and "--json" in text and "--config" in text
    assert "--config" in espalier(verb, "--help").stdout


def test_json_is_the_only_thing_on_stdout(espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--json")
    summary = outcome.json
    for field in ("espalier", "verb", "device", "dtype", "threads", "options", "seconds", "peak_bytes", "steps"):
        assert field in summary, field
    assert summary["verb"] == "train" and summary["dtype"] == "float32"
    step = summary["steps"][0]
    for field in ("step", "loss", "pg_loss", "kl_loss", "entropy", "clip_fraction", "grad_norm", "lr", "schedule", "rows",
                  "trunk_forwards", "seconds", "peak_bytes", "predicted"):
        assert field in step, field
    assert {"total", "plan", "trunk_forward", "waves", "trunk_backward", "optimizer"} <= set(step["seconds"])
    assert {"A", "B", "C"} <= set(step["peak_bytes"])


def test_inspect_and_plan_print_one_json_object(espalier, model_of, rollouts):
    found = espalier("inspect", rollouts, "--json").json
    assert found["rollouts"] == len(make_rollouts(SEED)) and found["groups"] == 4
    assert found["tokens"]["physical"] < found["tokens"]["logical"]
    planned = espalier("plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--json").json
    assert planned["trees"] and planned["flops"]["phased"] < planned["flops"]["dense"]


def test_plan_finds_the_frontier_without_rollouts(espalier, model_of, rollouts, tmp_path):
    config = tmp_path / "config.json"  # all that it needs of a model
    config.write_text(json.dumps({**json.loads((Path(model_of("qwen3_tied")) / "config.json").read_text()), "max_position_embeddings": 1 << 17}))
    words = ["plan", "--model", config, "--frontier", "--n", "2,4", "--max-response-length", 100, "--memory-budget", "160MiB"]
    cells = {(cell["n"], cell["way"]): cell for cell in espalier(*words, "--json").json["frontier"]["cells"]}
    assert len(cells) == 10 and all(cell["prompt"] > 0 for cell in cells.values())
    assert cells[4, "dense"]["prompt"] == cells[2, "dense"]["prompt"] > cells[4, "packed"]["prompt"]
    assert cells[2, "phased, offload"]["factor"] > 1.8 > cells[2, "dense"]["factor"] == 1
    picture = tmp_path / "frontier.svg"
    table = espalier(*words, "--out", picture).stdout
    assert "phased, recompute" in table and "N = 4" in table and str(picture) in table
    assert picture.read_text().startswith("<svg") and picture.read_text().rstrip().endswith("</svg>")
    assert "--frontier" in espalier(*words, "--rollouts", rollouts, expect=2).stderr
    assert "--frontier" in espalier("plan", "--model", model_of("qwen3_tied"), expect=2).stderr
    assert "--frontier" in espalier("plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--out", picture, expect=2).stderr


def test_the_frontier_honours_degrees_and_refuses_what_it_cannot(espalier, model_of, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads((Path(model_of("qwen3_tied")) / "config.json").read_text()), "max_position_embeddings": 1 << 17}))
    words = ["plan", "--model", config, "--frontier", "--n", "4", "--max-response-length", 100, "--memory-budget", "150MiB"]

    def prompts(*extra):
        return {cell["way"]: cell["prompt"] for cell in espalier(*words, "--json", *extra).json["frontier"]["cells"]}

    alone, divided = prompts(), prompts("--tp", 2)
    assert all(divided[way] > 1.2 * alone[way] for way in ("dense", "packed", "phased, keep")), (alone, divided)
    assert prompts("--dp", 2, "--shard", "full")["dense"] > 0
    for extra, option in ((["--layout", "auto", "--ranks", 4], "--layout"), (["--ranks", 4], "--ranks"), (["--shard", "full"], "--shard")):
        assert option in espalier(*words, *extra, expect=2).stderr


def test_a_plan_of_ranks_is_made_and_shown_once(espalier, model_of, rollouts):
    words = ["plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--machine", "h100", "--dtype", "bfloat16"]
    for option, extra in (("--ranks", ["--ranks", 4]), ("--layout", ["--layout", "auto"])):
        assert option in espalier(*words, *extra, expect=2).stderr
    for layout in (["--dp", 2, "--shard", "full"], ["--tp", 2, "--dp", 2], ["--layout", "auto", "--ranks", 4]):
        planned, text = espalier(*words, *layout, "--json").json, espalier(*words, *layout).stdout
        chosen = planned["predicted"]["chosen"]
        assert chosen["peak_bytes"] == planned["layout"]["ranks"]["peak_bytes"] and chosen["seconds"] == planned["layout"]["seconds"]
        assert planned["rows"]["physical"] < planned["rows"]["logical"] and planned["fits"] == planned["layout"]["fits"]
        assert text.lstrip().startswith("Layout ") and text.count("Layout ") == 1


def test_every_verb_names_the_same_least_budget_and_it_is_enough(espalier, model_of, rollouts, tmp_path):
    words = ["--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--threads", 1, "--mini-batch-size", 4]

    def least(verb, budget, *extra):
        said = espalier(verb, *words, "--memory-budget", budget, *extra, expect=5)
        return int(re.search(r"Raise --memory-budget to [^(]*\((\d+) bytes\)", said.stdout + said.stderr).group(1))

    out = ["--out", tmp_path / "out"]
    found = {least("plan", "1MiB"), least("plan", "125MiB"), least("train", "1MiB", *out), least("train", "125MiB", *out)}
    assert len(found) == 1, found
    enough = found.pop()
    assert espalier("plan", *words, "--memory-budget", f"{enough}B", "--json").json["fits"]
    espalier("train", *words, *out, "--memory-budget", f"{enough}B")


def test_bfloat16_is_advised_only_where_it_helps(espalier, model_of, rollouts):
    """Weights, gradients and state are 16 bytes a parameter in float32 and 18 in bfloat16; activations are half."""
    words = ["plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--memory-budget", "1MiB", "--threads", 1]
    needed = {dtype: espalier(*words, "--dtype", dtype, "--json", expect=5).json["missing_bytes"] for dtype in ("float64", "float32", "bfloat16")}
    for dtype in ("float64", "float32"):
        advised = "--dtype bfloat16" in espalier(*words, "--dtype", dtype, expect=5).stdout
        assert advised == (needed["bfloat16"] < needed[dtype]), (dtype, needed)


def test_plan_counts_what_the_options_of_a_step_add(espalier, model_of, rollouts):
    def planned(*extra):
        return espalier("plan", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--json", *extra).json

    plain, sequence = planned(), planned("--policy-loss", "gspo")
    assert sequence["flops"]["dense"] > plain["flops"]["dense"], "the head runs again in the backward"
    critic = planned("--critic", model_of("qwen3_tied"))
    held = {name: plan["predicted"]["dense"]["peak_bytes"]["B"] for name, plan in (("plain", plain), ("critic", critic))}
    assert held["critic"] > held["plain"], "the critic stands beside the actor"
    assert critic["critic"]["trees"] and critic["critic"]["flops"]["dense"] < plain["flops"]["dense"], "one number a row"


def test_an_error_is_one_json_object_too(espalier, model_of, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), tmp_path / "absent.jsonl", tmp_path, "--json", expect=3)
    assert {"kind", "where", "expected", "got", "remedy"} <= set(outcome.json["error"])
    assert "absent.jsonl" in outcome.stderr, "who reads a log of stderr sees it, too"


def test_quiet_runs_say_nothing_on_stderr(espalier, model_of, rollouts, tmp_path):
    assert train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--quiet").stderr == ""


@pytest.mark.parametrize("given, count", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")])
def test_threads_spin_briefly_while_they_wait_unless_told_otherwise(given, count, espalier):
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    outcome = espalier("--version", env={**environment, **given, "OMP_DISPLAY_ENV": "verbose"})
    assert f"GOMP_SPINCOUNT = '{count}'" in outcome.stderr


def test_verify_says_that_a_gradient_is_zero_and_passes(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [3, 4, 5], "response_ids": [6, 7 + i], "reward": 1.0} for i in range(4)]
    for dtype in ("float64", "float32"):
        outcome = espalier("verify", "--model", model_of("qwen3_tied"), "--rollouts", write_records(records, tmp_path / "same.jsonl"),
                           "--dtype", dtype)
        assert "exactly zero" in outcome.stdout and "PASS" in outcome.stdout


# -- 2: wrong usage ---------------------------------------------------------------------------------------------------

def test_an_instruction_set_that_the_processor_lacks_is_wrong_usage(espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, expect=2,
                    env={**os.environ, "ESPALIER_INSTRUCTION_SET": "sse9"})
    assert "ESPALIER_INSTRUCTION_SET" in outcome.stderr and "sse9" in outcome.stderr and "baseline" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_verb_is_wrong_usage(espalier):
    assert "trian" in espalier("trian", expect=2).stderr


@pytest.mark.parametrize("extra, word", [
    (["--polici-loss", "gspo"], "polici-loss"), (["--lr", "abc"], "lr"), (["--lr", "-1"], "lr"), (["--lr", "nan"], "lr"),
    (["--policy-loss", "ppo3"], "policy-loss"), (["--clip-ratio-c", "0.5"], "clip-ratio-c"), (["--betas", "0.9"], "betas"),
    (["--betas", "0.9,1.5"], "betas"), (["--memory-budget", "12 parsecs"], "memory-budget"), (["--token-budget", "-3"], "token-budget"),
    (["--policy-loss", "sapo", "--loss-agg-mode", "token-mean"], "sapo")])
def test_a_wrong_option_is_named(extra, word, espalier, model_of, rollouts, tmp_path):
    assert_refused(train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, *extra, expect=2), tmp_path, word)


def test_a_missing_option_is_named(espalier, model_of, rollouts):
    assert "--rollouts" in espalier("train", "--model", model_of("qwen3_tied"), "--out", "x", expect=2).stderr
    assert "--model" in espalier("train", "--rollouts", rollouts, "--out", "x", expect=2).stderr


def test_the_command_line_wins_over_the_configuration_file(espalier, model_of, rollouts, tmp_path):
    (tmp_path / "run.toml").write_text("lr = 0.5\nclip-ratio-high = 0.28\n")
    summary = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--config", tmp_path / "run.toml", "--lr", 0.25, "--json").json
    assert summary["options"]["lr"] == 0.25
    assert summary["options"].get("clip-ratio-high", summary["options"].get("clip_ratio_high")) == 0.28


def test_an_unknown_name_in_the_configuration_file_is_wrong_usage(espalier, model_of, rollouts, tmp_path):
    (tmp_path / "run.toml").write_text("learning-rat = 0.5\n")
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--config", tmp_path / "run.toml", expect=2)
    assert_refused(outcome, tmp_path, "run.toml:1: learning-rat")


def test_an_absent_configuration_file_is_bad_input(espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--config", tmp_path / "absent.toml", expect=3)
    assert_refused(outcome, tmp_path, "absent.toml")


# -- 3: bad input -----------------------------------------------------------------------------------------------------

def broken(record_index, change):
    records = make_rollouts(SEED)
    change(records[record_index])
    return "".join(json.dumps(r) + "\n" for r in records)


def set_field(name, value):
    return lambda record: record.__setitem__(name, value)


BAD_ROLLOUTS = {
    "not_json": ("\n".join(line[1:] if i == 2 else line for i, line in enumerate(broken(0, lambda r: None).split("\n"))), ":3"),
    "token_out_of_vocabulary": (broken(4, set_field("prompt_ids", [5, 97])), ":5"),
    "negative_token": (broken(4, set_field("response_ids", [-1])), ":5"),
    "huge_token": (broken(4, set_field("prompt_ids", [2 ** 40])), ":5"),
    "fractional_token": (broken(4, set_field("prompt_ids", [1.5])), ":5"),
    "empty_prompt": (broken(0, set_field("prompt_ids", [])), ":1"),
    "wrong_mask_length": (broken(3, set_field("loss_mask", [1] * 99)), ":4"),
    "mask_of_two": (broken(3, lambda r: r.__setitem__("loss_mask", [2] * max(1, len(r["response_ids"])))), ":4"),
    "reward_is_nan": (broken(5, set_field("reward", float("nan"))), ":6"),
    "reward_is_text": (broken(5, set_field("reward", "good")), ":6"),
    "wrong_series_length": (broken(5, set_field("old_logprobs", [-1.0] * 77)), ":6"),
    "temperature_of_zero": (broken(5, set_field("temperature", 0)), ":6"),
    "no_prompt_field": (broken(1, lambda r: r.pop("prompt_ids")), ":2"),
    "an_array": (broken(0, lambda r: None) + "[1, 2]\n", ":"),
    "deep_nesting": (broken(0, set_field("meta", None)).replace("null", "[" * 3000 + "]" * 3000, 1), ":1"),
    "empty_file": ("", "rollouts"),
}


@pytest.mark.parametrize("case", BAD_ROLLOUTS)
def test_a_bad_rollout_file_is_refused_with_its_line(case, espalier, model_of, tmp_path):
    text, where = BAD_ROLLOUTS[case]
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    assert_refused(train(espalier, model_of("qwen3_tied"), path, tmp_path, expect=3), tmp_path, where)


@pytest.mark.parametrize("extra, series", [
    (["--kl-loss-coef", "0.1"], "ref_logprobs"), (["--rollout-is", "token"], "rollout_logprobs")])
def test_an_option_that_needs_a_missing_series_names_both(extra, series, espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, *extra, expect=3)
    assert_refused(outcome, tmp_path, series, extra[0].lstrip("-"), "rollouts.jsonl:")


def copied(model_of, folder):
    target = folder / "model"
    shutil.copytree(model_of("qwen3_tied"), target)
    return target


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def absurd_header(model):
    path = model / "model.safetensors"
    path.write_bytes((2 ** 62).to_bytes(8, "little") + path.read_bytes()[8:])


def flip_header(model):
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9] ^= 0x20
    path.write_bytes(data)


def change_config(name, value):
    def change(model):
        config = json.loads((model / "config.json").read_text())
        config[name] = value
        (model / "config.json").write_text(json.dumps(config))
    return change


BAD_MODELS = {
    "no_config": lambda model: (model / "config.json").unlink(), "no_weights": lambda model: (model / "model.safetensors").unlink(),
    "truncated_weights": truncate, "absurd_header": absurd_header, "flipped_bit_in_the_header": flip_header,
    "config_is_not_json": lambda model: (model / "config.json").write_text("{"),
    "shape_differs_from_config": change_config("intermediate_size", 96),
    "heads_do_not_divide": change_config("num_key_value_heads", 3),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_directory_is_refused(case, espalier, model_of, rollouts, tmp_path):
    model = copied(model_of, tmp_path)
    BAD_MODELS[case](model)
    assert_refused(train(espalier, model, rollouts, tmp_path, expect=3), tmp_path, "model")


def test_an_existing_output_survives_a_failed_run(espalier, model_of, rollouts, tmp_path):
    train(espalier, model_of("qwen3_tied"), rollouts, tmp_path)
    before = {p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    (tmp_path / "bad.jsonl").write_text("{}\n")
    train(espalier, model_of("qwen3_tied"), tmp_path / "bad.jsonl", tmp_path, "--overwrite", expect=3)
    after = {p.relative_to(tmp_path): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert before == after


# -- 4, 5, 8 ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, value, word", [
    ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel"), ("attention_dropout", 0.1, "dropout"),
    ("hidden_act", "relu2", "relu2")])
def test_what_is_not_supported_is_named(name, value, word, espalier, model_of, rollouts, tmp_path):
    model = copied(model_of, tmp_path)
    change_config(name, value)(model)
    assert_refused(train(espalier, model, rollouts, tmp_path, expect=4), tmp_path, word)


def test_a_budget_that_cannot_hold_the_weights_is_refused(espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--memory-budget", "10KiB", expect=5)
    assert_refused(outcome, tmp_path, "memory-budget")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU's driver: the device may be there")
def test_a_device_that_is_absent_is_refused(espalier, model_of, rollouts, tmp_path):
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--device", "cuda", expect=8)
    assert_refused(outcome, tmp_path, "cuda")


def test_verify_passes_and_says_so(espalier, model_of, rollouts):
    summary = espalier("verify", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--dtype", "float64", "--json").json
    assert summary["verdict"] == "pass" and summary["parameters"]
    assert max(parameter["error"] for parameter in summary["parameters"]) <= 1e-10


def test_inspect_reports_anomalies(espalier, tmp_path):
    records = make_rollouts(SEED)
    found = espalier("inspect", write_records(records, tmp_path / "rollouts.jsonl"), "--json").json
    text = json.dumps(found["anomalies"])
    assert "empty" in text and "mask" in text


def test_convert_keeps_every_record(espalier, tmp_path):
    records = make_rollouts(SEED)
    path, out = write_records(records, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    espalier("convert", path, out)
    for before, after in zip(records, map(json.loads, out.read_text().splitlines()), strict=True):
        assert after["prompt_ids"] == before["prompt_ids"] and after["response_ids"] == before["response_ids"]
        assert after.get("reward") == before["reward"] and after.get("group") == before["group"]
        assert after.get("loss_mask", [1] * len(before["response_ids"])) == before["loss_mask"]


def test_convert_does_not_overwrite_its_input(espalier, tmp_path):
    path = write_records(make_rollouts(SEED), tmp_path / "in.jsonl")
    before = path.read_bytes()
    (tmp_path / "same.jsonl").symlink_to(path)
    for out in (path, tmp_path / "same.jsonl"):
        assert "a file other than" in espalier("convert", path, out, expect=2).stderr
    assert path.read_bytes() == before


# -- numbers that mean nothing ----------------------------------------------------------------------------------------

def with_nan(model):
    """Every weight becomes NaN: the header of a safetensors file is kept, its data are 0xFF bytes."""
    path = model / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header] + b"\xff" * (len(data) - header))


@pytest.mark.parametrize("verb", ["train", "score", "bench", "verify"])
def test_weights_that_are_no_numbers_are_bad_input(verb, espalier, model_of, rollouts, tmp_path):
    model = copied(model_of, tmp_path)
    with_nan(model)
    out = ["--out", tmp_path / "out"] if verb in ("train", "score") else []
    assert_refused(espalier(verb, "--model", model, "--rollouts", rollouts, *out, expect=3), tmp_path, "finite")


@pytest.mark.parametrize("positions, said", [(8, True), (4096, False)])
def test_rollouts_beyond_the_positions_of_the_model_are_told(positions, said, espalier, model_of, rollouts, tmp_path):
    model = copied(model_of, tmp_path)
    change_config("max_position_embeddings", positions)(model)
    assert ("max_position_embeddings" in train(espalier, model, rollouts, tmp_path).stderr) == said


@pytest.mark.parametrize("shift, said", [(0.0, False), (-5.0, True)])
def test_old_logprobs_of_another_model_are_told_before_they_do_harm(shift, said, espalier, model_of, rollouts, tmp_path):
    model = model_of("qwen3_tied")
    espalier("score", "--model", model, "--rollouts", rollouts, "--out", tmp_path / "scored.jsonl", "--as", "old_logprobs")
    records = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    for record in records:
        sign = 1 if record["reward"] > 0.5 else -1  # ratios leave the range on the side that the advantage clips
        record["old_logprobs"] = [value + sign * shift for value in record["old_logprobs"]]
    outcome = train(espalier, model, write_records(records, tmp_path / "moved.jsonl"), tmp_path)
    assert ("old_logprobs are not those of this model" in outcome.stderr) == said


def test_a_step_without_anything_to_learn_from_is_told(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [3, 4 + group], "response_ids": [6, 7 + i], "reward": 1.0 if group else i}
               for group in range(2) for i in range(2)]
    rollouts = write_records(records, tmp_path / "half.jsonl")
    outcome = train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--mini-batch-size", 2)
    steps = [line for line in outcome.stdout.splitlines() if line.startswith("step ")]
    assert ["nothing to learn from" in step for step in steps] == [False, True], outcome.stdout
    assert "1 of 2 steps had nothing to learn from" in outcome.stderr
    assert "tokens computed" in steps[0]


def test_what_became_of_the_mini_batch_size_is_told(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [3, 4 + group], "response_ids": [6, 7 + i], "reward": i} for group in range(4) for i in range(3)]
    rollouts = write_records(records, tmp_path / "threes.jsonl")
    for verb, extra in (("train", ["--out", tmp_path / "out"]), ("plan", [])):
        said = espalier(verb, "--model", model_of("qwen3_tied"), "--rollouts", rollouts, *extra, "--mini-batch-size", 5).stderr
        assert "mini-batches hold 3 rollouts (4 in all)" in said


def test_a_dry_run_checks_all_and_writes_nothing(espalier, model_of, rollouts, tmp_path):
    model = copied(model_of, tmp_path)
    (model / "model.safetensors").unlink()  # weights are not read
    outcome = train(espalier, model, rollouts, tmp_path, "--dry-run")
    assert "At most about" in outcome.stdout and "dry run" in outcome.stdout and not (tmp_path / "out").exists()
    assert train(espalier, model, rollouts, tmp_path, "--dry-run", "--json").json["plan"]["trees"]
    for extra, code, word in ((["--kl-loss-coef", 0.1], 3, "ref_logprobs"), (["--memory-budget", "1MiB"], 5, "--memory-budget")):
        outcome = train(espalier, model, rollouts, tmp_path, "--dry-run", *extra, expect=code)
        assert word in outcome.stderr + outcome.stdout
    for verb in ("score", "verify"):
        out = ["--out", tmp_path / "out"] if verb == "score" else []
        assert "nothing was run" in espalier(verb, "--model", model, "--rollouts", rollouts, *out, "--dry-run").stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words, expected", [
    (["tr"], {"train"}), (["train", "--sch"], {"--schedule"}), (["train", "--schedule", "p"], {"packed", "phased"}),
    (["inspect", "--lr"], set()), (["train", "--lr", ""], set()), (["completion", "z"], {"zsh"}), (["train", "--dry"], {"--dry-run"})])
def test_bash_completes_verbs_options_and_values(words, expected, espalier, tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(espalier("completion", "bash").stdout)
    asked = f'source {script}; COMP_WORDS=(espalier "$@"); COMP_CWORD=$#; _espalier; printf "%s\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", asked, "bash", *words], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert set(found.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_completion(shell, espalier, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(espalier("completion", shell).stdout)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True)


# -- a continued run --------------------------------------------------------------------------------------------------

def test_a_continued_run_keeps_its_options_unless_told_otherwise(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [3, 4 + group], "response_ids": [6, 7 + i], "reward": i} for group in range(6) for i in range(2)]
    rollouts = write_records(records, tmp_path / "pairs.jsonl")
    train(espalier, model_of("qwen3_tied"), rollouts, tmp_path, "--mini-batch-size", 4, "--lr", 0.001, "--epochs", 2, "--steps", 1)
    rest = ["train", "--resume", tmp_path / "out", "--rollouts", rollouts, "--out", tmp_path / "rest", "--overwrite", "--json"]
    outcome = espalier(*rest)
    options = outcome.json["options"]
    assert (options["lr"], options["mini_batch_size"], options["epochs"], options["steps"]) == (0.001, 4, 2, 0)
    assert "--lr 0.001" in outcome.stderr and outcome.json["steps"][0]["step"] == 2
    options = espalier(*rest, "--lr", 1e-6).json["options"]  # a default that is said is said
    assert (options["lr"], options["mini_batch_size"]) == (1e-6, 4)
    assert "--mini-batch-size" in espalier(*rest, "--mini-batch-size", 2, expect=2).stderr


def test_a_copy_says_what_the_program_says(program, espalier, copies, tmp_path):
    """Most runs of these tests are copies of one process (tests/hostile/cli/program_copies.cpp)."""
    if copies is None:
        pytest.skip("espalier_copies is not built, or older than the program")
    for words in ([], ["--version"], ["train", "--help"], ["inspect", "absent.jsonl"], ["train", "--lr", "x"]):
        ran = subprocess.run([str(program), *words], capture_output=True, text=True, cwd=tmp_path)
        copy = espalier(*words, cwd=tmp_path, expect=None)
        assert (copy.status, copy.stdout, copy.stderr) == (ran.returncode, ran.stdout, ran.stderr)
