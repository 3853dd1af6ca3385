"""One LoRA update of a model with the shape of Llama 3 8B: seconds and peak memory beside the plan's.

    python bench/lora_update.py --folder DIR [--layers 32] [--cases bfloat16:20GiB,nf4:9GiB] [--program build/espalier] [--keep]

The model gets random weights, in DIR/model, if none is there (15 GiB). A group of 8 responses of 128 tokens to a prompt of 1,024,
rank 16 on all linear layers, activations in bfloat16. A case is the storage of the frozen matrices and the memory budget. With --keep
a line for each case is appended to bench/results/lora_update.jsonl.
"""

import argparse
import json
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from baselines import workload
from grid import ROOT, machine

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
              num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
              tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2)


def write_model(folder, layers):
    """A file for each layer, one for the embedding and one for the head. Weights have a standard deviation of 0.02."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, rows = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    places, total = {}, 0

    def write(name, shapes):
        nonlocal total
        tensors = {key: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else
                   torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        total += sum(tensor.numel() * 2 for tensor in tensors.values())

    write("model-embedding.safetensors", {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)})
    write("model-head.safetensors", {"lm_head.weight": (rows, hidden)})
    for layer in range(layers):
        shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
                  "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
                  "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        write(f"model-{layer:02}.safetensors", {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()})
        print(f"layer {layer + 1} of {layers} written", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))  # last: a folder without it is written again


def measure(options, case):
    weights, budget = case.split(":")
    words = ["train", "--model", options.folder / "model", "--rollouts", options.folder / "rollouts.jsonl", "--lora-rank", 16,
             "--dtype", "bfloat16", "--memory-budget", budget, "--out", options.folder / "out", "--overwrite", "--json", "--quiet"]
    words += ["--weights", weights] if weights != "bfloat16" else []
    done = subprocess.run(list(map(str, [options.program, *words])), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case}: train ended with {done.returncode}: {done.stderr[-500:]}")
    step = json.loads(done.stdout)["steps"][0]
    return dict(weights=weights, budget=budget, layers=options.layers, seconds=step["seconds"]["total"],
                predicted_seconds=step["predicted"]["seconds"], peak_bytes=max(step["peak_bytes"].values()),
                predicted_peak_bytes=max(step["predicted"]["peak_bytes"].values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cases", default="bfloat16:20GiB,nf4:9GiB")
    parser.add_argument("--program", type=Path, default=ROOT / "build/espalier")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "model/config.json").exists():
        write_model(options.folder / "model", options.layers)
    workload.write_rollouts(options.folder / "rollouts.jsonl", 1024, 128, 8, vocabulary=CONFIG["vocab_size"])
    for case in options.cases.split(","):
        row = {**measure(options, case), **machine()}
        print(json.dumps(row), flush=True)
        if options.keep:
            with open(ROOT / "bench/results/lora_update.jsonl", "a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
