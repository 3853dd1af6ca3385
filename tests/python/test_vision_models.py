"""Directories of models with a vision tower (...ForConditionalGeneration): the program trains their text model as it trains the text model
on its own, and leaves everything else as it was."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file

import oracle
from make_model import FAMILIES, make_model, make_rollouts, write_records

SEED = 53
SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
QWEN = dict(hidden_size=16, depth=1, num_heads=2, intermediate_size=16, patch_size=4, num_position_embeddings=16, out_hidden_size=48,
            fullatt_block_indexes=[0], deepstack_visual_indexes=[0])
GLM = dict(QWEN, out_hidden_size=64, image_size=8)
GLM_IMAGE = dict(image_token_id=96, video_token_id=95, image_start_token_id=94, image_end_token_id=93, video_start_token_id=92, video_end_token_id=91)
GEMMA4 = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=4,
              position_embedding_size=16)
# transformers puts the token of padding in the place of images' tokens, and fails without one.
GEMMA4_IMAGE = dict(image_token_id=96, video_token_id=95, boi_token_id=94, eoi_token_id=93, audio_token_id=92, boa_token_id=91, eoa_token_index=90)
# The text model's family in make_model.py, what it has otherwise, the tower, and where the tokens of images are named otherwise, their names.
MODELS = {
    "Gemma3": dict(text="gemma3", vision=SIGLIP, image=dict(image_token_index=96, boi_token_index=94, eoi_token_index=95)),
    "Gemma4": dict(text="gemma4", more=dict(pad_token_id=0), vision=GEMMA4, image=GEMMA4_IMAGE),
    "Gemma4 with experts": dict(text="gemma4_moe", more=dict(pad_token_id=0), vision=GEMMA4, image=GEMMA4_IMAGE),
    "Gemma4 that reads": dict(text="gemma4_reads", more=dict(pad_token_id=0), vision=GEMMA4, image=GEMMA4_IMAGE),
    "Qwen3_5": dict(text="qwen3_5", vision=QWEN),
    "Qwen3_5Moe": dict(text="qwen3_5_moe", vision=QWEN),
    "Mistral3": dict(text="mistral", vision=SIGLIP, image=dict(image_token_index=96)),
    "Qwen3VL": dict(text="qwen3_tied", vision=QWEN, rope=dict(mrope_section=[2, 3, 3], mrope_interleaved=True)),
    "Qwen2_5_VL": dict(text="qwen2_untied", vision=QWEN, rope=dict(mrope_section=[2, 2, 2])),
    "Mistral3 with ministral3": dict(text="ministral3", vision=SIGLIP, image=dict(image_token_index=96)),
    "Glm4v": dict(text="glm4", more=dict(hidden_size=64), vision=GLM, rope=dict(mrope_section=[1, 1, 2]), image=GLM_IMAGE),
    "Glm4vMoe": dict(text="glm4_moe", more=dict(hidden_size=64, use_qk_norm=False), vision=GLM, rope=dict(mrope_section=[1, 1, 2]), image=GLM_IMAGE),
}


def tensors(directory):
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module", params=MODELS)
def directories(request, tmp_path_factory):
    """(name, directory of the whole model, directory of its text model on its own)."""
    row, folder = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    kind, text = request.param.split()[0], make_model(row["text"], folder / "text", **row.get("more", {}))
    alone = transformers.AutoModelForCausalLM.from_pretrained(text)
    members = json.loads((text / "config.json").read_text())
    members = {name: value for name, value in members.items() if name not in ("architectures", "model_type", "transformers_version")}
    if "rope" in row:
        members["rope_parameters"] = {**members["rope_parameters"], **row["rope"]}
    if kind == "Mistral3":
        members["model_type"] = row["text"]
    config = getattr(transformers, kind + "Config")(
        text_config=members, vision_config=row["vision"], tie_word_embeddings=FAMILIES[row["text"]]["tied"],
        **row.get("image", dict(image_token_id=96, video_token_id=95, vision_start_token_id=94, vision_end_token_id=93)))
    torch.manual_seed(SEED)
    whole = getattr(transformers, kind + "ForConditionalGeneration")(config).float()
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    whole.save_pretrained(folder / "whole", **({"max_shard_size": "60KB"} if request.param == "Qwen3VL" else {}))
    return request.param, folder / "whole", text


@pytest.fixture(scope="module")
def records():
    """Without the tokens of images."""
    return [{**r, "prompt_ids": [i % 90 for i in r["prompt_ids"]], "response_ids": [i % 90 for i in r["response_ids"]]} for r in make_rollouts(SEED)]


def text_names(stored):
    """A name of the files as the text model on its own has it, or None for what is beside it."""
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", stored)
    name = "lm_head.weight" if name == "language_model.lm_head.weight" else name
    return name if re.match(r"model\.(embed_tokens|embed_tokens_per_layer|per_layer_\w+|layers|norm)\.|lm_head\.", name) else None


def test_log_probs_are_those_of_the_whole_model_of_transformers(directories, records, espalier, tmp_path):
    _, whole, _ = directories
    rollouts, scored = write_records(records, tmp_path / "rollouts.jsonl"), tmp_path / "scored.jsonl"
    espalier("score", "--model", whole, "--rollouts", rollouts, "--out", scored, "--dtype", "float64")
    model = transformers.AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float64, attn_implementation="eager").eval()
    oracle.run_experts_one_by_one(model)
    wanted, _ = oracle.score(oracle.widened(model), records)
    for found, expected in zip(scored.read_text().splitlines(), wanted, strict=True):
        assert json.loads(found)["logprobs"] == pytest.approx(expected, abs=1e-9, rel=0)


def test_a_step_is_that_of_the_text_model_and_the_rest_stays(directories, records, espalier, tmp_path):
    _, whole, text = directories
    rollouts = write_records(records, tmp_path / "rollouts.jsonl")
    for name, model in (("whole", whole), ("text", text)):
        espalier("train", "--model", model, "--rollouts", rollouts, "--out", tmp_path / name, "--lr", 1e-2)
    before, after, alone = tensors(whole), tensors(tmp_path / "whole"), tensors(tmp_path / "text")
    assert set(after) == set(before)
    beside = [name for name in before if text_names(name) is None]
    assert beside and all(torch.equal(before[name], after[name]) for name in beside)
    of_text = {text_names(name): tensor for name, tensor in after.items() if text_names(name)}
    if FAMILIES[MODELS[directories[0]]["text"]]["tied"]:
        of_text.pop("lm_head.weight", None), alone.pop("lm_head.weight", None)
    assert set(of_text) == set(alone) and all(torch.equal(of_text[name], alone[name]) for name in alone)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert json.loads((tmp_path / "whole/config.json").read_text()) == json.loads((whole / "config.json").read_text())


def test_bfloat16_is_stated_by_both_configurations(directories, records, espalier, tmp_path):
    _, whole, _ = directories
    out = tmp_path / "out"
    espalier("train", "--model", whole, "--rollouts", write_records(records, tmp_path / "r.jsonl"), "--out", out, "--save-dtype", "bfloat16")
    before, after = tensors(whole), tensors(out)
    narrowed = lambda name: text_names(name) and not name.endswith(("correction_bias", "layer_scalar"))  # numbers that no product reads
    assert all(after[name].dtype == (torch.bfloat16 if narrowed(name) else before[name].dtype) for name in before)
    config = json.loads((out / "config.json").read_text())
    assert {config.get("dtype"), config["text_config"].get("dtype", "bfloat16")} == {"bfloat16"}


def test_tokens_of_images_are_refused_with_their_place(directories, records, espalier, tmp_path):
    _, whole, _ = directories
    with_image = [*records[:3], {**records[3], "prompt_ids": [5, 96, 96, 7]}, *records[4:]]
    done = espalier("train", "--model", whole, "--rollouts", write_records(with_image, tmp_path / "r.jsonl"), "--out", tmp_path / "out", expect=4)
    assert "r.jsonl:4: prompt_ids" in done.stderr and "token 96, which stands for an image" in done.stderr and "espalier.hf" in done.stderr
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [3, 96]}\n')
    done = espalier("generate", "--model", whole, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl", "--stop-ids", 1, expect=4)
    assert "p.jsonl:1" in done.stderr and not (tmp_path / "o.jsonl").exists()


def test_sampling_and_adapters(directories, espalier, tmp_path):
    _, whole, _ = directories
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [3, 9, 12]}\n')
    espalier("generate", "--model", whole, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl", "--stop-ids", 1, "--n", 2,
             "--max-response-length", 8)
    done = espalier("train", "--model", whole, "--rollouts", tmp_path / "o.jsonl", "--out", tmp_path / "x", "--lora-rank", 2, expect=4)
    assert "--lora-rank" in done.stderr and ("text model in a directory of its own" in done.stderr or "delta rule" in done.stderr)


def test_a_text_model_of_another_type_is_refused_by_name(directories, espalier, tmp_path):
    name, whole, _ = directories
    config = json.loads((whole / "config.json").read_text())
    config["text_config"]["model_type"] = "mamba"
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    done = espalier("plan", "--model", tmp_path / "m", "--rollouts", write_records(make_rollouts(SEED), tmp_path / "r.jsonl"), expect=4)
    assert "'mamba'" in done.stderr and "a text model of type" in done.stderr, name
