"""Directories whose config.json ties the head: both matrices stored, equal or apart; an index that names a head which is in no file."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import oracle
from comparison import assert_equal_gradients
from text_model import read_lines, write_lines

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ANSWERS = [{"prompt_ids": [1, 40, 9], "response_ids": [7, 11, 2]}, {"prompt_ids": [1, 40, 9], "response_ids": [7, 33, 5, 2]}]


def diverged(embedding, by):
    head = embedding.clone()
    if by == "one element":
        head[7, 3] += 0.25
    if by == "all":
        head += 0.05 * torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
    if by == "sign of a zero":
        embedding[5, 2], head[5, 2] = 0.0, -0.0
    return head


@pytest.fixture
def directory(model_of, tmp_path):
    """directory(by, ...): a copy of a tied model with a head of its own in the files."""

    def make(by, dtype=None, sharded=False):
        folder = tmp_path / "model"
        shutil.copytree(model_of("qwen3_tied"), folder)
        tensors = load_file(folder / "model.safetensors")
        head = diverged(tensors[EMBEDDING], by)
        tensors[HEAD] = head if dtype is None else head.to(dtype)
        if dtype is not None:
            tensors[EMBEDDING] = tensors[EMBEDDING].to(dtype).float()
        if sharded:
            (folder / "model.safetensors").unlink()
            parts = {"a.safetensors": {k: v for k, v in tensors.items() if k != HEAD}, "b.safetensors": {HEAD: tensors[HEAD]}}
            for file, part in parts.items():
                save_file(part, folder / file, metadata={"format": "pt"})
            index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def scored(espalier, folder, tmp_path):
    done = espalier("score", "--model", folder, "--rollouts", write_lines(ANSWERS, tmp_path / "answers.jsonl"), "--out", tmp_path / "scored.jsonl",
                    "--dtype", "float64", "--overwrite")
    return [record["logprobs"] for record in read_lines(tmp_path / "scored.jsonl")], done.stderr


def assert_scores_are_exact(espalier, folder, tmp_path):
    exact, (found, notes) = oracle.load_model(folder, torch.float64), scored(espalier, folder, tmp_path)
    for record, own in zip(ANSWERS, found, strict=True):
        assert torch.allclose(torch.tensor(own, dtype=torch.float64), oracle.response_logprobs(exact, record)[0], rtol=0, atol=1e-12)
    return exact, notes


@pytest.mark.parametrize("by, how", [("nothing", {}), ("sign of a zero", {}), ("nothing", {"dtype": torch.bfloat16}), ("one element", {}), ("all", {}),
                                     ("all", {"dtype": torch.bfloat16}), ("one element", {"sharded": True})])
def test_matrices_that_differ_are_two_as_in_transformers(by, how, directory, espalier, tmp_path):
    folder = directory(by, **how)
    exact, notes = assert_scores_are_exact(espalier, folder, tmp_path)
    untied = exact.lm_head.weight.data_ptr() != exact.model.embed_tokens.weight.data_ptr()
    assert untied == (by in ("one element", "all")) == ("lm_head.weight and the embedding differ" in notes)


def test_they_train_and_are_saved_apart_and_the_run_continues(directory, espalier, tmp_path):
    folder = directory("one element")
    rollouts, base = write_lines(ANSWERS, tmp_path / "answers.jsonl"), ["train", "--objective", "sft", "--dtype", "float64", "--lr", "0.01"]
    espalier(*base, "--model", folder, "--rollouts", rollouts, "--out", tmp_path / "out", "--gradients", tmp_path / "g.safetensors", "--save-dtype", "float64")
    exact = oracle.load_model(folder, torch.float64)
    loss = -sum(oracle.response_logprobs(exact, record)[0].sum() for record in ANSWERS) / sum(len(record["response_ids"]) for record in ANSWERS)
    loss.backward()
    gradients = {name: p.grad for name, p in exact.named_parameters()}
    found = load_file(tmp_path / "g.safetensors")
    assert set(found) == set(gradients) and HEAD in found
    assert_equal_gradients(found, gradients, 0)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not torch.equal(saved[HEAD], saved[EMBEDDING])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert torch.equal(again.lm_head.weight, saved[HEAD]) and torch.equal(again.model.embed_tokens.weight, saved[EMBEDDING])
    _, notes = assert_scores_are_exact(espalier, tmp_path / "out", tmp_path)
    assert "differ" not in notes
    for name, steps in (("two", ["--model", folder, "--epochs", "2"]), ("resumed", ["--resume", tmp_path / "out", "--epochs", "2"])):
        espalier(*base, *steps, "--rollouts", rollouts, "--out", tmp_path / name, "--save-dtype", "float64")
    two, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "resumed"))
    assert all(torch.equal(two[name], resumed[name]) for name in two)


def test_an_index_may_name_a_head_that_no_file_holds(directory, espalier, tmp_path):
    folder = directory("nothing", sharded=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "b.safetensors").unlink()
    index["weight_map"][HEAD] = "a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_scores_are_exact(espalier, folder, tmp_path)
    index["weight_map"]["model.norm.weight"] = "a.safetensors"
    tensors = load_file(folder / "a.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "a.safetensors")
    error = espalier("score", "--model", folder, "--rollouts", tmp_path / "answers.jsonl", "--out", tmp_path / "o.jsonl", "--json", expect=3).json["error"]
    assert "model.norm.weight" in error["expected"] + error["got"] and "Fetch the model again" in error["remedy"]
