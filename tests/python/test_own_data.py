"""One's own prompts as text: the model's tokenizer and chat template, rewards of decoded text, `generate` -> `train`, `grpo`."""

import csv
import json
import math
import os
import re
import subprocess
import sys

import pytest
import transformers

from conftest import DATA, ROOT
from text_model import END, byte_level_tokenizer, make_text_model, read_lines, word_tokenizer, write_lines

TEXTS = ["What is 2 + 3?", "The capital of France is", "na\u00efve caf\u00e9 \U0001F600 \u4f60\u597d", "a\tb\n  c", "<|im_end|> in the middle"]
TIMES = {"seconds", "peak_bytes", "arena_bytes", "predicted", "tokens_per_second", "mfu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-level model of 300 tokens with a chat template."""
    texts = ["What is the capital of France?", "You are helpful.", "one two three four five six seven"] * 3
    return make_text_model(tmp_path_factory.mktemp("text") / "model", byte_level_tokenizer(texts, 300))


@pytest.fixture(scope="module")
def hugging_face(model):
    return transformers.AutoTokenizer.from_pretrained(model)


@pytest.fixture
def reward(tmp_path):
    def write(source):
        path = tmp_path / "reward.py"
        path.write_text(source)
        return path
    return write


LENGTH = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str))\n"


def generate(espalier, model, prompts, folder, expect=0, how=None, **settings):
    path, out = write_lines(prompts, folder / "prompts.jsonl"), folder / "rollouts.jsonl"
    out.unlink(missing_ok=True)
    done = espalier("generate", "--model", model, "--prompts", path, "--out", out, "--json",
                    *options_of({"max-response-length": 12, "n": 2, **settings}), expect=expect, **(how or {}))
    return (read_lines(out), done.json) if done.status == 0 else done.json["error"]


def chat(*contents):
    return [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * len(contents), contents)]


# ---- tokens and text ------------------------------------------------------------------------------------------------


def test_prompts_and_responses_are_transformers_tokens_and_text(espalier, model, hugging_face, tmp_path):
    chats = [chat("Hi"), [{"role": "system", "content": " S "}, *chat("a", "b", "c")]]
    prompts = [{"prompt": text, "id": index} for index, text in enumerate([*TEXTS, *chats])]
    records, _ = generate(espalier, model, prompts, tmp_path)
    for index, prompt in enumerate(prompts):
        text = prompt["prompt"]
        is_text = isinstance(text, str)
        wanted = hugging_face(text)["input_ids"] if is_text else \
            hugging_face.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        for record in records[2 * index:2 * index + 2]:
            assert record["id"] == index and record["prompt_ids"] == wanted
            assert record["prompt"] == (text if is_text else
                                        hugging_face.apply_chat_template(text, add_generation_prompt=True, tokenize=False))
            assert record.get("messages") == (None if is_text else text)
            assert record["response"] == hugging_face.decode(record["response_ids"], skip_special_tokens=True)
    assert any("\ufffd" in record["response"] for record in records), "a random model speaks in broken bytes"


def test_text_prompts_get_the_special_tokens_of_the_tokenizer(espalier, tmp_path):
    tokenizer = byte_level_tokenizer(TEXTS, 280)
    from tokenizers.processors import TemplateProcessing
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.enable_truncation(4)  # of a former use: transformers lifts it, too
    model = make_text_model(tmp_path / "model", tokenizer)
    hugging_face = transformers.AutoTokenizer.from_pretrained(model)
    records, _ = generate(espalier, model, [{"prompt": TEXTS[0]}, {"prompt": chat("Hi")}], tmp_path)
    assert records[0]["prompt_ids"] == hugging_face(TEXTS[0])["input_ids"] and records[0]["prompt_ids"][0] == 0
    assert records[2]["prompt_ids"] == hugging_face.apply_chat_template(chat("Hi"), add_generation_prompt=True, return_dict=False)


def test_responses_end_with_the_eos_of_the_tokenizer(espalier, tmp_path):
    """config.json names none; the eos token is special by tokenizer_config.json alone, so rewards do not see it."""
    model = make_text_model(tmp_path / "model", word_tokenizer("a b c d".split()))
    records, _ = generate(espalier, model, [{"prompt": "a b"}], tmp_path, **{"n": 40, "max-response-length": 30})
    ended = [record for record in records if record["finish_reason"] == "stop"]
    assert ended and all(record["response_ids"][-1] == 0 and END not in record["response"] for record in ended)
    assert all(0 not in record["response_ids"][:-1] for record in records)


def test_ids_beside_text_are_taken_and_both_are_carried(espalier, model, tmp_path):
    records, _ = generate(espalier, model, [{"prompt": "shown", "prompt_ids": [5, 6]}, {"prompt_ids": [70, 71]}], tmp_path)
    assert records[0]["prompt_ids"] == [5, 6] and records[0]["prompt"] == "shown"
    assert records[2]["prompt_ids"] == [70, 71] and isinstance(records[2]["prompt"], str)


# ---- rewards --------------------------------------------------------------------------------------------------------


def test_rewards_see_the_decoded_text_and_what_the_prompt_carries(espalier, model, reward, tmp_path):
    told = tmp_path / "told.jsonl"
    file = reward(f"""
import json, os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("chatter on stdout")
    os.system("echo from a child")
    with open({str(told)!r}, "a") as out:
        out.write(json.dumps([data_source, solution_str, ground_truth, extra_info]) + "\\n")
    return {{"score": len(solution_str) / 8, "acc": solution_str == ground_truth, "words": solution_str.split()[:1]}}
""")
    prompts = [{"prompt": chat("Hi"), "data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "42"},
                "extra_info": {"index": 7, "split": "train"}, "ability": "math"},
               {"prompt": TEXTS[2], "ground_truth": ["a", 1]}]
    records, summary = generate(espalier, model, prompts, tmp_path, reward=file)
    for record, (source, text, truth, info) in zip(records, read_lines(told), strict=True):
        assert text == record["response"] and record["reward"] == len(text) / 8
        assert record["reward_extra_info"] == {"acc": False, "words": text.split()[:1]}
        assert info["prompt"] == record["prompt"] and info["tokens"] == len(record["response_ids"])
        assert info["ended"] == (record["finish_reason"] == "stop")
        if record["prompt"] == TEXTS[2]:
            assert source is None and truth == ["a", 1]
        else:
            assert source == "mine" and truth == "42" and info["index"] == 7
    assert summary["reward"] == pytest.approx(sum(record["reward"] for record in records) / len(records))


@pytest.mark.parametrize("source, where, got", [
    ("def compute_score(:\n", ":1", "SyntaxError"),
    ("import not_there_at_all\n", ":1", "ModuleNotFoundError: No module named 'not_there_at_all'"),
    ("def score(x):\n    return 1\n", "", "score"),
    ("def compute_score(**_):\n    return {}['x']\n", ":2", "KeyError: 'x'"),
    ("def compute_score(**_):\n    return 'high'\n", "", "str: 'high'"),
    ("import time\ndef compute_score(**_):\n    time.sleep(60)\n", "", "none within 1 seconds"),
    ("import os\ndef compute_score(**_):\n    os.abort()\n", "", "signal 6"),
], ids=["syntax", "import", "missing", "exception", "no_number", "time_out", "death"])
def test_what_is_wrong_with_a_reward_is_told_apart(source, where, got, espalier, model, reward, tmp_path):
    file = reward(source)
    error = generate(espalier, model, [{"prompt": "x"}], tmp_path, expect=3, **{"reward": file, "reward-timeout": 1})
    assert error["where"] == f"{file}{where}" and got in error["got"], error
    out, sampled = tmp_path / "rollouts.jsonl", "compute_score(**" in source
    assert out.exists() == sampled, "what goes wrong with the first response costs none; what goes wrong before stops before"
    if sampled:
        assert error["remedy"].endswith(f"the responses are kept in {out}, without rewards")
        records = read_lines(out)
        assert len(records) == 2 and all(r["response_ids"] and "reward" not in r for r in records)


@pytest.mark.parametrize("prompt, got", [
    ({"prompt": [{"role": "pirate", "content": "x"}]}, "TemplateError: no role pirate"),
    ({"prompt": [{"content": "x"}]}, '{"content": "x"}'),
    ({"prompt": ""}, "an empty text"),
    ({"ground_truth": "x"}, "neither"),
], ids=["template", "message", "empty", "none"])
def test_bad_prompts_are_told_with_their_line(prompt, got, espalier, model, tmp_path):
    error = generate(espalier, model, [{"prompt": "fine"}, prompt], tmp_path, expect=3)
    assert error["where"] == f"{tmp_path / 'prompts.jsonl'}:2: prompt" and error["got"] == got, error


SURROGATE = '"\\ud83d and no more"'


@pytest.mark.parametrize("line, field", [
    ('{"prompt": %s}', "prompt"),
    ('{"prompt": [{"role": "user", "content": %s}]}', "prompt"),
    ('{"prompt_ids": [3, 4], "prompt": %s}', "prompt"),
    ('{"prompt": "fine", "ground_truth": %s}', "ground_truth"),
    ('{"prompt": "fine", "extra_info": {"of": [%s]}}', "extra_info")])
def test_a_lone_surrogate_is_told_with_its_line_and_field(line, field, espalier, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "whole: \\ud83d\\ude00"}\n' + line % SURROGATE + "\n")
    error = espalier("generate", "--model", model, "--prompts", path, "--out", tmp_path / "o.jsonl", "--max-response-length", 2, "--json",
                     expect=3).json["error"]
    assert error["where"] == f"{path}:2: {field}" and "lone surrogate" in error["got"] and "escape" in error["remedy"]


@pytest.mark.parametrize("source", ["import {0}\ndef compute_score(**_):\n    return 1\n", "def compute_score(**_):\n    import {0}.linalg\n    return 1\n"])
def test_a_package_that_a_reward_file_misses_is_named_with_how_to_get_it(source, espalier, model, reward, tmp_path):
    file = reward(source.format("numpy_of_nobody"))
    error = generate(espalier, model, [{"prompt": "x"}], tmp_path, expect=3, reward=file)
    assert error["where"] == f"{file}:{1 if source.startswith('import') else 2}" and "numpy_of_nobody" in error["got"]
    assert "-m pip install numpy_of_nobody, or set ESPALIER_PYTHON" in error["remedy"]


def test_rollouts_given_as_prompts_are_called_rollouts(espalier, model, tmp_path):
    error = generate(espalier, model, [{"prompt_ids": [3], "response_ids": [4]}], tmp_path, expect=3)
    assert error["where"] == f"{tmp_path / 'prompts.jsonl'}:1: response_ids" and "--rollouts" in error["remedy"]


def test_prompts_given_as_rollouts_are_called_prompts(espalier, model, tmp_path):
    path = write_lines([{"prompt": "x", "ground_truth": "y"}], tmp_path / "prompts.jsonl")
    error = espalier("train", "--model", model, "--rollouts", path, "--out", tmp_path / "o", "--json", expect=3).json["error"]
    assert error["where"].startswith(f"{path}:1") and "generate --prompts" in error["remedy"]


def test_a_name_on_the_hub_is_no_directory(espalier, tmp_path):
    path = write_lines([{"prompt_ids": [3], "response_ids": [4], "reward": 1}], tmp_path / "rollouts.jsonl")
    for verb in ("plan", "verify", "train", "score"):
        out = ["--out", tmp_path / "out"] if verb in ("train", "score") else []
        error = espalier(verb, "--model", "Qwen/Qwen3-0.6B", "--rollouts", path, *out, "--json", expect=3).json["error"]
        assert "Qwen/Qwen3-0.6B" in error["where"] and "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in error["remedy"]
    error = espalier("plan", "--model", "models/absent/here", "--rollouts", path, "--json", expect=3).json["error"]
    assert "Hub" not in error["remedy"]


def test_a_family_that_only_transformers_runs_is_sent_to_espalier_hf(espalier, tmp_path):
    path = write_lines([{"prompt_ids": [3], "response_ids": [4], "reward": 1}], tmp_path / "rollouts.jsonl")
    for name, served in (("Lfm2MoeForCausalLM", True), ("T5ForConditionalGeneration", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "vocab_size": 9}))
        error = espalier("plan", "--model", tmp_path, "--rollouts", path, "--json", expect=4).json["error"]
        assert ("espalier.hf" in error["remedy"]) == served, error


# ---- dumps of text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [
    lambda p, r: {"prompt": p, "completion": r}, lambda p, r: {"input": p, "output": r}, lambda p, r: {"question": p, "answer": r},
    lambda p, r: {"prompt": chat(p), "response": r}, lambda p, r: {"prompt": chat(p), "completion": [{"role": "assistant", "content": r}]},
    lambda p, r: {"messages": chat(p, r)}], ids=["trl", "verl", "question", "chat", "chats", "messages"])
def test_a_dump_of_text_is_tokenized_again_only_when_told(made, espalier, model, hugging_face, tmp_path):
    texts = [("What is 2 + 3?", "five"), ("na\u00efve \U0001F600", "")]
    dump = write_lines([{**made(p, r), "score": 0.5, "step": 3, "id": i, "gts": "5"} for i, (p, r) in enumerate(texts)], tmp_path / "dump.jsonl")
    refused = espalier("convert", dump, tmp_path / "out.jsonl", "--json", expect=4).json["error"]
    assert "--retokenize" in refused["remedy"] and not (tmp_path / "out.jsonl").exists()
    done = espalier("convert", dump, tmp_path / "out.jsonl", "--retokenize", "--model", model, "--json")
    for unknown in ("sampled tokens", "log-probs", "temperature", "cut off"):
        assert any(unknown in note for note in done.json["notes"]), done.json["notes"]
    for record, (prompt, response), index in zip(read_lines(tmp_path / "out.jsonl"), texts, range(2)):
        is_chat = not isinstance(list(made(prompt, response).values())[0], str)
        wanted = hugging_face.apply_chat_template(chat(prompt), add_generation_prompt=True, return_dict=False) if is_chat else hugging_face(prompt)["input_ids"]
        assert record["prompt_ids"] == wanted and record["response_ids"] == hugging_face(response, add_special_tokens=False)["input_ids"]
        assert (record["reward"], record["step"], record["id"], record["meta"]["gts"]) == (0.5, 3, index, "5")
        assert record["response"] == response and "old_logprobs" not in record
    espalier("train", "--model", model, "--rollouts", tmp_path / "out.jsonl", "--out", tmp_path / "trained")


@pytest.mark.parametrize("words, said", [(["--retokenize"], "--model"), (["--model", "m"], "--retokenize")])
def test_retokenize_and_model_go_together(words, said, espalier, tmp_path):
    dump = write_lines([{"prompt": "a", "completion": "b"}], tmp_path / "dump.jsonl")
    assert said in espalier("convert", dump, tmp_path / "out.jsonl", *words, expect=2).stderr


@pytest.mark.parametrize("record, where, got", [
    ({"prompt": "a"}, ":2", "fields prompt"), ({"prompt": "a", "responses": ["b", "c"]}, ":2: responses", '["b", "c"]'),
    ({"prompt": chat("a", "b", "c")[1:] + [{"content": "x"}], "response": "b"}, ":2", '{"content": "x"}')])
def test_what_cannot_be_tokenized_again_is_told_with_its_line(record, where, got, espalier, model, tmp_path):
    dump = write_lines([{"prompt": "a", "response": "b"}, record], tmp_path / "dump.jsonl")
    error = espalier("convert", dump, tmp_path / "out.jsonl", "--retokenize", "--model", model, "--json", expect=None).json["error"]
    assert error["where"] == f"{dump}{where}" and got in error["got"], error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_without_tokenizer_or_template_says_so(espalier, model_of, tmp_path):
    error = generate(espalier, model_of("qwen3_tied"), [{"prompt": "x"}], tmp_path, expect=3)
    assert "tokenizer.json" in error["expected"] and "prompt_ids" in error["remedy"]
    plain = make_text_model(tmp_path / "plain", byte_level_tokenizer(TEXTS, 270), chat_template=None)
    error = generate(espalier, plain, [{"prompt": chat("x")}], tmp_path, expect=3)
    assert "no chat template" in error["expected"]
    wide = make_text_model(tmp_path / "narrow", byte_level_tokenizer(TEXTS, 280), vocab_size=40)
    error = generate(espalier, wide, [{"prompt": "xyz"}], tmp_path, expect=3)
    assert "below 40" in error["expected"]


def test_a_missing_package_is_named_with_how_to_get_it(espalier, model, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S \"$@\"\n")  # no site-packages
    bare.chmod(0o755)
    error = generate(espalier, model, [{"prompt": "x"}], tmp_path, expect=4, how={"env": {**os.environ, "ESPALIER_PYTHON": str(bare)}})
    assert "tokenizers" in error["expected"] and "pip install tokenizers" in error["remedy"]
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    error = espalier("generate", "--model", model, "--prompts", tmp_path / "p.parquet", "--out", tmp_path / "o.jsonl", "--json", expect=4,
                     env={**os.environ, "ESPALIER_PYTHON": str(bare)}).json["error"]
    assert "pyarrow" in error["expected"] and "pip install pyarrow" in error["remedy"]


def test_verls_parquet_is_read_as_its_json_lines(espalier, model, reward, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow, which writes the Parquet file of this test, is not installed")
    import pyarrow
    import pyarrow.parquet
    rows = [{"data_source": "d", "prompt": chat(text), "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(index)},
             "extra_info": {"index": index, "split": "train"}} for index, text in enumerate(TEXTS)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    file = reward("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                  "    return int(ground_truth) + extra_info['index']\n")
    from_lines, _ = generate(espalier, model, rows, tmp_path, reward=file)
    espalier("generate", "--model", model, "--prompts", tmp_path / "prompts.parquet", "--out", tmp_path / "other.jsonl", "--n", 2,
             "--max-response-length", 12, "--reward", file)
    assert read_lines(tmp_path / "other.jsonl") == from_lines
    assert [record["reward"] for record in from_lines[::2]] == [0, 2, 4, 6, 8]


# ---- train's record -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(espalier, model, tmp_path_factory):
    """generate -> train on text prompts: the rollouts, what train printed as JSON, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "reward.py").write_text(LENGTH)
    generate(espalier, model, [{"prompt": text, "id": text[:5]} for text in TEXTS], folder,
             reward=folder / "reward.py", n=4)
    told = espalier("train", "--model", model, "--rollouts", folder / "rollouts.jsonl", "--out", folder / "out", "--mini-batch-size", 8,
                    "--epochs", 2, "--lr", "1e-3", "--json", "--rollout-metrics", folder / "each.jsonl", "--kl-loss-coef", 0,
                    "--entropy-coeff", 0.01)
    assert "unknown field" not in told.stderr
    return folder, told.json


def test_train_leaves_metrics_and_events(trained, espalier, tmp_path):
    folder, told = trained
    lines = read_lines(folder / "out/espalier/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7)) and {line["steps_total"] for line in lines} == {6}
    assert [{**step, "kind": "step"} for step in told["steps"]] == lines
    rollouts = read_lines(folder / "rollouts.jsonl")
    assert lines[0]["reward"] == pytest.approx(sum(record["reward"] for record in rollouts[:8]) / 8)
    assert lines[0]["length"]["max"] == max(len(record["response_ids"]) for record in rollouts[:8])
    assert any(path.name.startswith("events.out.tfevents.") for path in (folder / "out/espalier").iterdir())
    espalier("report", folder / "out", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Reward" in page and "Qwen3ForCausalLM" in page
    text = espalier("train", "--model", folder / "out", "--rollouts", folder / "rollouts.jsonl", "--steps", 1,
                    "--rollout-metrics", tmp_path / "each.jsonl").stdout
    assert re.search(r"step 1 of 1  reward \d", text), text


def test_a_continued_train_run_goes_on_with_its_curves(trained, espalier, tmp_path):
    folder, _ = trained
    model = json.loads((folder / "out/espalier/run.json").read_text())["options"]["model"]
    common = ["--rollouts", folder / "rollouts.jsonl", "--mini-batch-size", 8, "--epochs", 2, "--lr", "1e-3", "--entropy-coeff", 0.01]
    espalier("train", "--model", model, *common, "--steps", 2, "--out", tmp_path / "a")
    espalier("train", "--resume", tmp_path / "a", *common, "--out", tmp_path / "b")
    wanted = read_lines(folder / "out/espalier/metrics.jsonl")
    found = read_lines(tmp_path / "b/espalier/metrics.jsonl")
    assert [line["loss"] for line in found] == [line["loss"] for line in wanted]
    assert [line["steps_total"] for line in found] == [2, 2, 6, 6, 6, 6]


def test_rollout_metrics_sum_to_the_step(trained, espalier, model, tmp_path):
    folder, told = trained
    each = read_lines(folder / "each.jsonl")
    rollouts = read_lines(folder / "rollouts.jsonl")
    for step in told["steps"]:
        lines = [line for line in each if line["step"] == step["step"]]
        assert len(lines) == len({line["index"] for line in lines}) and sum(line["loss_tokens"] for line in lines) == step["loss_tokens"]
        # The same doubles, added in another order: n additions round by at most n ulp of the largest partial sum each.
        bound = 4 * len(lines) * math.ulp(sum(abs(line["loss"]) for line in lines) + abs(step["loss"]))
        assert abs(sum(line["loss"] for line in lines) - step["loss"]) <= bound
    for line in each:
        record = rollouts[line["index"]]
        assert line["reward"] == record["reward"] and line["id"] == record["id"] and line["group"] == record["group"]
        assert line["tokens"] == len(record["response_ids"]) and line["kl"] is None
        assert (line["ratio"], line["old_kl"]) == (1, 0)  # no old_logprobs: the policy's own
    espalier("train", "--model", model, "--rollouts", folder / "rollouts.jsonl", "--mini-batch-size", 8, "--epochs", 2, "--lr", "1e-3",
             "--entropy-coeff", 0.01, "--rollout-metrics", tmp_path / "each.csv")
    table = list(csv.DictReader((tmp_path / "each.csv").open(newline="")))
    assert len(table) == len(each)
    for row, line in zip(table, each):
        for name, value in line.items():
            assert row[name] == ("" if value is None else value if isinstance(value, str) else json.dumps(value)) or \
                float(row[name]) == value, (name, value, row[name])


def test_ratios_and_kl_of_recorded_logprobs(espalier, model, trained, tmp_path):
    folder, _ = trained
    espalier("score", "--model", model, "--rollouts", folder / "rollouts.jsonl", "--out", tmp_path / "old.jsonl", "--as", "old_logprobs")
    records = read_lines(tmp_path / "old.jsonl")
    for record in records:
        record["ref_logprobs"] = [value - 0.5 for value in record["old_logprobs"]]
        record["old_logprobs"] = [value - 0.25 for value in record["old_logprobs"]]
    write_lines(records, tmp_path / "shifted.jsonl")
    espalier("train", "--model", model, "--rollouts", tmp_path / "shifted.jsonl", "--rollout-metrics", tmp_path / "each.jsonl")
    for line in read_lines(tmp_path / "each.jsonl"):
        # log-probs of one model by two float32 passes: far closer than 1e-4
        assert abs(line["ratio"] - math.exp(0.25)) < 1e-3 and abs(line["ratio_max"] - math.exp(0.25)) < 1e-3
        assert abs(line["old_kl"] + 0.25) < 1e-3 and abs(line["kl"] - (math.exp(-0.5) + 0.5 - 1)) < 1e-3
        assert line["clip_fraction"] in (0, 1)


def test_inspect_shows_text(trained, espalier, model, tmp_path):
    folder, _ = trained
    records = read_lines(folder / "rollouts.jsonl")
    shown = espalier("inspect", folder / "rollouts.jsonl", "--show", 2, "--json").json["samples"]
    assert [(s["prompt"], s["response"], s["reward"]) for s in shown] == [(r["prompt"], r["response"], r["reward"]) for r in records[:2]]
    bare = [{name: record[name] for name in ("prompt_ids", "response_ids")} for record in records]
    path = write_lines(bare, tmp_path / "bare.jsonl")
    decoded = espalier("inspect", path, "--show", 2, "--model", model, "--json").json["samples"]
    assert [(s["prompt"], s["response"]) for s in decoded] == [(r["prompt"], r["response"]) for r in records[:2]]
    assert records[0]["prompt"] in espalier("inspect", path, "--show", 1, "--model", model).stdout
    assert espalier("inspect", path, "--show", 1, "--json", expect=2).json["error"]["where"] == "--show"


# ---- the closed loop ------------------------------------------------------------------------------------------------

LETTERS = "ant bee cow dog".split()
ECHO = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(4, len(words))
"""
LEARN = {"n": 16, "train-batch-size": 4, "max-response-length": 4, "lr": "3e-3", "threads": 2, "test-freq": 20, "save-freq": 20,
         "stop-ids": 0}


def options_of(settings):
    return [word for name, value in settings.items() for word in ((f"--{name}",) if value is True else (f"--{name}", value))]


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A task that a random model learns: say the word of the prompt four times. As messages, and the same as ids."""
    folder = tmp_path_factory.mktemp("echo")
    words = [*LETTERS, *"system user assistant You are helpful. say elk fox gnu hen owl".split()]
    template = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} {% endfor %}<|im_start|> assistant"
    model = make_text_model(folder / "model", word_tokenizer(words), chat_template=template, max_position_embeddings=64)
    (folder / "reward.py").write_text(ECHO)
    prompts = [{"prompt": chat(f"say {word}"), "ground_truth": word, "data_source": "echo"} for word in LETTERS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = [{"prompt_ids": tokenizer.apply_chat_template(p["prompt"], add_generation_prompt=True, return_dict=False),
            "ground_truth": p["ground_truth"], "data_source": "echo"} for p in prompts]
    return folder, model, write_lines(prompts, folder / "text.jsonl"), write_lines(ids, folder / "ids.jsonl")


def loop(espalier, echo, prompts, out, **settings):
    folder, model, *_ = echo
    return espalier("grpo", "--model", model, "--prompts", prompts, "--val-prompts", prompts, "--reward", folder / "reward.py",
                    "--out", out, *options_of({**LEARN, **settings}))


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(v) for name, v in value.items() if name not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def learned(espalier, echo):
    folder, _, text, _ = echo
    loop(espalier, echo, text, folder / "run", steps=80, show=1)
    return folder / "run"


def test_a_small_model_learns_from_text_prompts(learned):
    rewards = [line["reward"] for line in read_lines(learned / "metrics.jsonl") if line["kind"] == "step"]
    assert len(rewards) == 80 and sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-5:]) / 5 > 0.6, rewards
    evaluations = [line for line in read_lines(learned / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert evaluations[-1]["reward"] > evaluations[0]["reward"]
    record = read_lines(learned / "last_rollouts.jsonl")[0]
    assert record["prompt"].endswith("<|im_start|> assistant") and record["messages"][0]["role"] == "user"
    assert record["response"] and record["ground_truth"] in LETTERS and record["data_source"] == "echo"
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (learned / "model").iterdir()}


def test_text_and_ids_give_the_same_bits(learned, espalier, echo):
    folder, _, _, ids = echo
    loop(espalier, echo, ids, folder / "run_ids", steps=80, show=1)
    assert without_times(read_lines(folder / "run_ids/metrics.jsonl")) == without_times(read_lines(learned / "metrics.jsonl"))
    for file in ("model/model.safetensors", "checkpoints/step-000080/espalier/state.safetensors"):
        assert (folder / "run_ids" / file).read_bytes() == (learned / file).read_bytes(), file


def test_a_loop_on_text_continues_to_the_same_bits(learned, espalier, echo, tmp_path):
    """In the middle of a pass over the prompts, with groups dropped, so that the place in the file has to be kept."""
    _, _, text, _ = echo
    settings = {"train-batch-size": 3, "filter-groups": True, "save-freq": 2}
    loop(espalier, echo, text, tmp_path / "whole", **settings, steps=10)
    loop(espalier, echo, text, tmp_path / "parts", **settings, steps=4)
    espalier("grpo", "--resume", tmp_path / "parts", "--steps", 10, "--threads", 2)
    assert (tmp_path / "parts/model/model.safetensors").read_bytes() == (tmp_path / "whole/model/model.safetensors").read_bytes()
    lines = read_lines(text)
    (tmp_path / "fewer.jsonl").write_text(text.read_text())
    loop(espalier, echo, tmp_path / "fewer.jsonl", tmp_path / "other", steps=2)
    write_lines(lines[:3], tmp_path / "fewer.jsonl")
    error = espalier("grpo", "--resume", tmp_path / "other", "--steps", 4, "--json", "--threads", 2, expect=3).json["error"]
    assert error["where"].endswith("fewer.jsonl") and error["got"] == "other prompts"


def test_without_held_out_prompts_nothing_is_evaluated_but_samples_are_shown(espalier, echo, tmp_path):
    folder, model, text, _ = echo
    done = espalier("grpo", "--model", model, "--prompts", text, "--reward", folder / "reward.py", "--out", tmp_path / "run",
                    *options_of({**LEARN, "steps": 4, "test-freq": 2}), "--json")
    assert done.json["accuracy"] is None and done.json["evaluations"] == []
    samples = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["kind"] == "sample"]
    assert {line["step"] for line in samples} == {2, 4} and samples[0]["expected"] in LETTERS


def test_samples_of_any_text_are_printed_on_a_line(espalier, model, reward, tmp_path):
    """Long texts without a space, and with line ends, in characters of several bytes."""
    prompts = write_lines([{"prompt": "\u5b57" * 90}, {"prompt": "\u5b57\n" * 60}], tmp_path / "prompts.jsonl")
    text = espalier("grpo", "--model", model, "--prompts", prompts, "--val-prompts", prompts, "--reward", reward(LENGTH), "--out",
                    tmp_path / "run", *options_of({**LEARN, "steps": 1, "show": 2})).stdout
    asked = [line for line in text.splitlines() if line.startswith("  asked")]
    assert len(asked) == 4 and all("\ufffd" not in line and " ..." in line for line in asked), text
    assert "\u5b57\\n\u5b57" in asked[1]


def test_a_dry_run_reads_prompts_and_reward_and_writes_nothing(espalier, echo, tmp_path):
    folder, model, text, _ = echo
    options = ["--model", model, "--prompts", text, "--reward", folder / "reward.py", "--dry-run"]
    assert "4 prompts" in espalier("generate", *options, "--out", tmp_path / "out.jsonl").stdout
    espalier("grpo", *options, "--out", tmp_path / "run")
    (tmp_path / "bad.py").write_text("x = 1\n")
    options[5] = tmp_path / "bad.py"
    for verb in ("generate", "grpo"):
        error = espalier(verb, *options, "--out", tmp_path / "out", "--json", expect=3).json["error"]
        assert error["expected"].startswith("a function compute_score")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]


@pytest.mark.parametrize("options, where", [
    ([], "tokenizer.json"), (["--prompts", "TEXT"], "--reward"), (["--val-prompts", "TEXT"], "--val-prompts"),
    (["--prompts", "TEXT", "--reward", "REWARD", "--expect-accuracy", 0.5], "--expect-accuracy"),
], ids=["no_words_of_the_tasks", "no_reward", "only_held_out", "nothing_to_expect_of"])
def test_what_a_loop_lacks_is_named_before_anything_is_written(options, where, espalier, echo, tmp_path):
    folder, model, text, _ = echo
    options = [{"TEXT": text, "REWARD": folder / "reward.py"}.get(option, option) for option in options]
    done = espalier("grpo", "--model", model, *options, "--out", tmp_path / "run", "--json", "--max-response-length", 8, expect=None)
    assert done.json["error"]["where"].endswith(where) and done.status in (2, 3), done
    assert not (tmp_path / "run").exists()
    if where == "tokenizer.json":
        assert "'" in done.json["error"]["got"] and "--prompts" in done.json["error"]["remedy"]


# ---- real prompts, and the pages of the documents -------------------------------------------------------------------


def test_gsm8k_with_a_chat_template_end_to_end(espalier, reward, tmp_path):
    source = DATA / "gsm8k"
    if not source.is_dir():
        pytest.skip("../shared/data/gsm8k is absent")
    problems = read_lines(source / "train.jsonl")[:64]
    model = make_text_model(tmp_path / "model", byte_level_tokenizer([p["question"] + p["answer"] for p in problems], 600))
    prompts = [{"data_source": "openai/gsm8k", "prompt": chat(p["question"] + " Let's think step by step."),
                "reward_model": {"style": "rule", "ground_truth": p["answer"].split("#### ")[-1].replace(",", "")},
                "extra_info": {"index": index, "answer": p["answer"]}} for index, p in enumerate(problems)]
    text = write_lines(prompts[:48], tmp_path / "train.jsonl")
    held_out = write_lines(prompts[48:], tmp_path / "test.jsonl")
    # verl's rule for gsm8k, in its flexible form, and a little for every digit, so that a random model has something to learn from
    file = reward("""
import re
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "openai/gsm8k" and extra_info["answer"].replace(",", "").endswith(ground_truth)
    numbers = re.findall(r"-?[0-9][0-9.,]*", solution_str)
    right = bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == ground_truth
    return {"score": float(right) + 0.01 * sum(c.isdigit() for c in solution_str), "acc": right}
""")
    told = espalier("grpo", "--model", model, "--prompts", text, "--val-prompts", held_out, "--reward", file, "--out", tmp_path / "run",
                    "--n", 8, "--train-batch-size", 8, "--max-response-length", 24, "--mini-batch-size", 32, "--steps", 6, "--lr", "1e-3",
                    "--kl-loss-coef", 0.01, "--test-freq", 2, "--show", 1, "--json").json
    assert [step["step"] for step in told["steps"]] == list(range(1, 7)) and told["steps"][0]["reward"] > 0
    assert told["steps"][0]["rows"]["physical"] < told["steps"][0]["rows"]["logical"] / 3
    assert 0 <= told["accuracy"] <= 1 and len(told["evaluations"]) == 3  # before, after batch 2, at the end
    espalier("verify", "--model", model, "--rollouts", tmp_path / "run/last_rollouts.jsonl", "--kl-loss-coef", 0.01)
    espalier("report", tmp_path / "run")
    assert "step by step" in (tmp_path / "run/report.html").read_text()


def test_the_commands_of_the_page_on_own_data_work(program, tmp_path):
    """A new user's hour: the files and commands of docs/own_data.md, typed one after the other with an own model."""
    page = (ROOT / "docs/own_data.md").read_text()
    model = make_text_model(tmp_path / "MODEL", byte_level_tokenizer(TEXTS, 300))
    files = re.findall(r"^`([a-z_]+\.(?:jsonl|py))`:\n\n```\w+\n(.*?)^```$", page, re.M | re.S)
    assert [name for name, _ in files] == ["prompts.jsonl", "reward.py"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 3
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) >= 6 and all(command.startswith("espalier ") for command in commands)
    links = tmp_path / "bin"
    links.mkdir()
    (links / "espalier").symlink_to(program)
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "PATH": f"{links}:{os.environ['PATH']}"})
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "TRAINED/model.safetensors").is_file() and (tmp_path / "RUN/model/model.safetensors").is_file()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "TRAINED")("hi")["input_ids"]
    assert model.is_dir()
