"""Notes of `train` about what other programs make of its output: a reward model's padding token, adapters of experts in vLLM."""

import json

import pytest

from make_model import make_model
from text_model import write_lines

PAIRS = [{"prompt_ids": [1, 40, 9], "chosen_ids": [7, 2], "rejected_ids": [33, 2]}]
PAD = {"added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 2, "content": "<end>"}]}


@pytest.mark.parametrize("pad, tokenizer_pads_with, words", [
    (2, None, ["pad_token_id", "is 2", "one token early"]), (None, None, ["no pad_token_id", "refuses"]), (2, "<pad>", ["<pad>, 0"]), (2, "<end>", ["is 2"]),
    (0, "<end>", None), (-1, None, ["is -1", "at their padding"])])
def test_a_reward_model_without_a_padding_token_of_its_own_is_told(pad, tokenizer_pads_with, words, espalier, tmp_path):
    model = make_model("qwen3_tied", tmp_path / "model", pad_token_id=pad)
    if tokenizer_pads_with:
        (model / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": tokenizer_pads_with}}))
        (model / "tokenizer.json").write_text(json.dumps(PAD))
    done = espalier("train", "--objective", "reward", "--model", model, "--rollouts", write_lines(PAIRS, tmp_path / "pairs.jsonl"), "--out", tmp_path / "out")
    assert ("pad" in done.stderr) == (words is not None), done.stderr
    for word in words or []:
        assert word in done.stderr
    assert ("the tokenizer pads" in done.stderr) == (tokenizer_pads_with == "<pad>")


def test_a_padding_token_that_ends_the_tokenizer_s_texts_is_told(espalier, tmp_path):
    model = make_model("qwen3_tied", tmp_path / "model", pad_token_id=3)  # config.json has another end token
    rollouts = write_lines(PAIRS, tmp_path / "pairs.jsonl")
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 3, "content": "<turn>"}, {"id": 2, "content": "<end>"}]}))
    for end, told in (("<turn>", True), ("<end>", False)):
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        done = espalier("train", "--objective", "reward", "--model", model, "--rollouts", rollouts, "--out", tmp_path / end[1:-1])
        assert ("pad_token_id in config.json is 3, an end token" in done.stderr) == told


def test_an_adapter_of_experts_is_told_what_vllm_does_with_it(model_of, espalier, tmp_path):
    rollouts = write_lines([{"prompt_ids": [1, 40], "response_ids": [7, 2], "advantage": 1.0}], tmp_path / "r.jsonl")
    for targets, told in (("experts,q_proj", True), ("q_proj", False)):
        done = espalier("train", "--model", model_of("qwen3_moe"), "--rollouts", rollouts, "--out", tmp_path / targets, "--lora-rank", 2, "--lora-target", targets)
        assert ("vLLM" in done.stderr) == told
