"""Makes a small random Qwen3 model and rollouts with long shared prompts, with nothing but the standard library.

    python3 tools/make_demo.py build/demo [--prompt 768] [--response 96] [--n 8] [--groups 3] [--seed 0]

Writes DIRECTORY/model (config.json, model.safetensors) and DIRECTORY/rollouts.jsonl.
"""

import argparse
import array
import json
import random
import struct
import sys
from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCABULARY = 192, 4, 4, 2, 48, 512, 1024

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "intermediate_size": INNER,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}


def parameters():
    """Names and shapes, in file order."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        yield prefix + "self_attn.q_proj.weight", (HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.k_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.v_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_SIZE)
        yield prefix + "self_attn.q_norm.weight", (HEAD_SIZE,)
        yield prefix + "self_attn.k_norm.weight", (HEAD_SIZE,)
        yield prefix + "mlp.gate_proj.weight", (INNER, HIDDEN)
        yield prefix + "mlp.up_proj.weight", (INNER, HIDDEN)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)


def write_model(directory, source):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    header, payload = {}, bytearray()
    for name, shape in parameters():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if name.endswith("norm.weight"):
            values = array.array("f", [1.0]) * count
        else:
            width = 0.05 if "embed" in name else shape[1] ** -0.5
            values = array.array("f", (source.gauss(0, width) for _ in range(count)))
        if sys.byteorder == "big":
            values.byteswap()
        begin = len(payload)
        payload += values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(payload)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + payload)


def write_rollouts(path, source, groups, n, prompt, response):
    """Groups of n rollouts: one long prompt, responses of half to full length, random rewards."""
    tokens = lambda count: [source.randrange(3, VOCABULARY) for _ in range(count)]
    with open(path, "w") as out:
        for group in range(groups):
            start = tokens(source.randint(prompt * 3 // 4, prompt))
            for _ in range(n):
                record = {"group": f"question-{group}", "prompt_ids": start, "response_ids": tokens(source.randint(response // 2, response)),
                          "reward": round(source.random(), 3)}
                out.write(json.dumps(record) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    for name, default in (("prompt", 768), ("response", 96), ("n", 8), ("groups", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    source = random.Random(options.seed)
    write_model(options.directory / "model", source)
    write_rollouts(options.directory / "rollouts.jsonl", source, options.groups, options.n, options.prompt, options.response)


if __name__ == "__main__":
    main()
