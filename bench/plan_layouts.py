"""Plans of layouts that no machine at hand could run: Llama-3-8B on 8, 64 and 1,024 H100, Qwen3-30B-A3B with its experts spread.

Prints the tables of docs/parallel.md. 256 prompts of 1,024 tokens with 16 responses of 512 to 1,536 tokens, seeded.
"""

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
QWEN = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": []}
STATE = ["--shard", "optimizer"]
RUNS = [("Llama-3-8B", LLAMA, "h100", ["--layout", "auto", "--ranks", "8", *STATE]),
        ("Llama-3-8B", LLAMA, "h100", ["--layout", "auto", "--ranks", "64", *STATE]),
        ("Llama-3-8B", LLAMA, "h100", ["--layout", "auto", "--ranks", "1024", *STATE]),
        ("Llama-3-8B", LLAMA, "h100", ["--dp", "8", "--shard", "full"]),
        ("Llama-3-8B", LLAMA, "h100", ["--dp", "64", "--shard", "full"]),
        ("Llama-3-8B", LLAMA, "h100", ["--layout", "auto", "--ranks", "64", "--shard", "full"]),
        ("Qwen3-30B-A3B", QWEN, "h100", ["--dp", "8", "--ep", "8"]),
        ("Qwen3-30B-A3B", QWEN, "h200", ["--dp", "8", "--ep", "8"]),
        ("Qwen3-30B-A3B", QWEN, "h200", ["--layout", "auto", "--ranks", "64"])]


def rollouts(path, prompts, responses):
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as out:
        for group in range(prompts):
            prompt = [group] + chance.choices(range(1000), k=1023)
            for _ in range(responses):
                response = chance.choices(range(1000), k=chance.randint(512, 1536))
                out.write(json.dumps({"prompt_ids": prompt, "response_ids": response, "reward": chance.random()},
                                     separators=(",", ":")) + "\n")


def gib(count):
    return f"{count / 2 ** 30:.1f}"


def row(name, machine, words, layout):
    degrees = " ".join(f"{axis} {layout[axis]}" for axis in ("tp", "cp", "pp", "dp", "ep") if layout[axis] > 1) + (" shard full" if layout["shard"] == "full" else "")
    ranks, given = layout["ranks"], {}
    for axis, phases in layout["ranks"]["bytes"].items():
        given[axis] = sum(phases.values())
    peaks = ranks["peak_bytes"]
    return [name, f"{layout['processes']} {machine}", degrees + ("" if words[0] == "--layout" else " (given)"), gib(peaks["A"]), gib(peaks["B"]),
            gib(peaks["C"]), ", ".join(f"{axis} {gib(count)}" for axis, count in given.items()), f"{ranks['seconds']:.1f}",
            f"{ranks['communication_seconds']:.1f}", f"{100 * layout['bubble']:.0f} %", f"{100 * layout['balance']:.0f} %",
            f"{layout['seconds']:.1f}", "yes" if layout["fits"] else "no"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--responses", type=int, default=16)
    arguments = parser.parse_args()
    head = ["model", "GPUs", "layout", "A GiB", "B GiB", "C GiB", "sent GiB", "compute s", "comm. s", "bubble", "balance", "step s", "fits"]
    print("| " + " | ".join(head) + " |\n| --- | ---: | --- |" + " ---: |" * 3 + " --- |" + " ---: |" * 5 + " --- |")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rollouts(folder / "rollouts.jsonl", arguments.prompts, arguments.responses)
        for name, config, machine, words in RUNS:
            (folder / "config.json").write_text(json.dumps(config))
            done = subprocess.run([arguments.program, "plan", "--model", folder / "config.json", "--rollouts", folder / "rollouts.jsonl",
                                   "--machine", machine, "--dtype", "bfloat16", "--quiet", "--json", *words],
                                  capture_output=True, text=True)
            if done.returncode not in (0, 5):
                raise SystemExit(done.stderr)
            print("| " + " | ".join(row(name, machine, words, json.loads(done.stdout)["layout"])) + " |")


if __name__ == "__main__":
    main()
