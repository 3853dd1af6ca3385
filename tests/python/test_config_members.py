"""Every member of a family's configuration, changed one at a time: the program's log-probs are transformers', or it refuses the model (exit 3
or 4). A member that the program does not read and transformers does is found here."""

import json

import pytest
import torch
import transformers

from make_model import FAMILIES, make_model, make_rollouts, randomised, write_records

FIRST_OF_KIND = {row["kind"]: name for name, row in reversed(FAMILIES.items())}
# What says nothing of a forward pass, and what has a family of its own or a test of its own (heads, vocabularies, counts of layers).
APART = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "vocab_size", "tie_word_embeddings", "num_hidden_layers",
    "return_dict", "output_hidden_states", "output_attentions", "use_cache", "chunk_size_feed_forward", "problem_type", "id2label", "label2id",
    "is_encoder_decoder", "initializer_range", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "pretraining_tp"}
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu", "sigmoid")
# Times what float32 makes of transformers' own log-probs: the largest of some sixty errors of another order of sums. What is read wrongly
# changes them by 1e-2 and more.
OF_THE_FLOOR = 16


def ropes(value):
    theta = value.get("rope_theta", 10000.0)
    more = {name: value[name] for name in ("partial_rotary_factor",) if name in value}
    yarn = dict(rope_type="yarn", rope_theta=theta, factor=4.0, original_max_position_embeddings=16, **more)
    return [
        dict(rope_type="default", rope_theta=500.0, **more), dict(rope_type="linear", rope_theta=theta, factor=2.5, **more),
        dict(rope_type="dynamic", rope_theta=theta, factor=2.0, **more), yarn, dict(yarn, truncate=False), dict(yarn, mscale=.7, mscale_all_dim=1.3),
        dict(yarn, beta_fast=20.0, beta_slow=2.0, attention_factor=1.3), dict(value, partial_rotary_factor=.5),
        dict(rope_type="llama3", rope_theta=theta, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64, **more)]


def others(name, value):
    """Values that the member may have instead."""
    if name == "rope_parameters" and "rope_type" in (value or {}):
        return ropes(value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value * 2, 1, 0} - {value})
    if isinstance(value, float):
        return sorted({value * 1.7 + .013, 0.0} - {value})
    if isinstance(value, str) and (name.endswith("_act") or "activation" in name):
        return [other for other in ACTIVATIONS if other != value]
    if isinstance(value, list):
        return [value[::-1]] if value[::-1] != value else []
    return [True, 3, .7] if value is None else []


def logprobs(model, records):
    out = []
    with torch.no_grad():
        for record in records:
            prompt, response = record["prompt_ids"], record["response_ids"]
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1:-1] / record["temperature"]
            out.append(torch.log_softmax(logits.double(), -1)[torch.arange(len(response)), response])
    return torch.cat(out)


def model_with(kind, members, folder, records):
    """(transformers' log-probs in float64, and the most that float32 changes of them) of the model written there, or None: it does not run."""
    try:
        # Its grouped products of experts know no float64.
        config = kind.config_class(**members, attn_implementation="eager", experts_implementation="eager")
        torch.manual_seed(1)
        narrow = randomised(kind(config).float(), 1).eval()
        narrow.save_pretrained(folder)
        single = logprobs(narrow, records)
        exact = logprobs(narrow.double(), records)
    except Exception:  # whatever a configuration that makes no sense ends with
        return None
    if not (single.isfinite().all() and exact.isfinite().all()):
        return None
    return exact, float((single - exact).abs().max())


# From the shortest to the longest: 8 to 48 tokens.
RECORDS = sorted((record for record in make_rollouts(3, groups=3) if record["response_ids"]),
                 key=lambda record: len(record["prompt_ids"] + record["response_ids"]))[::3]


@pytest.mark.parametrize("family", sorted(FIRST_OF_KIND.values()))
def test_exact_or_refused(family, espalier, tmp_path):
    base = make_model(family, tmp_path / "base")
    kind = getattr(transformers, FAMILIES[family]["kind"] + "ForCausalLM")
    members = {name: value for name, value in kind.config_class.from_pretrained(base).to_dict().items()
               if name not in ("architectures", "model_type", "transformers_version")}
    rollouts = write_records(RECORDS, tmp_path / "rollouts.jsonl")
    exact, wrong = 0, []
    for name in sorted(set(members) - APART):
        for value in others(name, members[name]):
            wanted = model_with(kind, {**members, name: value}, tmp_path / "model", RECORDS)
            if wanted is None:
                continue
            done = espalier("score", "--model", tmp_path / "model", "--rollouts", rollouts, "--out", tmp_path / "out.jsonl", "--overwrite",
                            "--dtype", "float32", expect=None)
            if done.status in (3, 4):
                continue
            assert done.status == 0, (name, value, done)
            found = torch.tensor([x for line in (tmp_path / "out.jsonl").read_text().splitlines() for x in json.loads(line)["logprobs"]])
            error = float((found - wanted[0]).abs().max())
            exact += 1
            if error > OF_THE_FLOOR * wanted[1]:
                wrong.append((name, value, error, wanted[1]))
    assert not wrong and exact > 10, wrong
