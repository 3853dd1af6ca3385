"""What a GPU should take, from bytes and FLOPs at the rates of docs/machines.md: of each kernel, and of reference steps. No GPU is
asked.

    bench/gpu_prediction.py run [--espalier build/espalier]   writes bench/results/gpu_prediction.json and prints the tables

bench/targets.py report puts the tables into docs/performance.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench/results/gpu_prediction.json"
LAYERS = 8  # of a model's shape: whole models of 8 billion parameters and their optimizer are more than one GPU holds

SHAPES = {
    "Llama-3-8B": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 14336, "vocab_size": 128256},
    "Qwen3-8B": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 12288, "vocab_size": 151936},
}
# prompt, response, rollouts; what others have published of such steps, as a factor over unshared ones
STEPS = [
    (10240, 2048, 32, "2.53 (4.12 over its eager baseline): three-phase schedule, arXiv 2606.01143, Llama-3-8B on 8 H20"),
    (10240, 2048, 128, "2.93 (4.40 over its eager baseline): the same"),
    (32768, 2048, 16, "-"),
]

# Kernels, at the sizes of one layer of Qwen3-8B on 65,536 rows: bytes that go to and from memory, in bfloat16.
R, M, F, H, J, D, V, BLOCK, N = 65536, 4096, 12288, 32, 8, 128, 151936, 4096, 8.19e9
KERNELS = [
    ("norm; the same again", "4 R M", 4 * R * M),
    ("add_norm_backward", "8 R M", 8 * R * M),
    ("rotate, with QK-norm", "4 R (H + J) D", 4 * R * (H + J) * D),
    ("add_rotate_backward", "8 R (H + J) D", 8 * R * (H + J) * D),
    ("swiglu", "6 R F", 6 * R * F),
    ("swiglu_backward", "10 R F", 10 * R * F),
    ("gather, look_up", "4 R M", 4 * R * M),
    ("add_look_up_backward (every id once)", "10 R M", 10 * R * M),
    ("attention_delta", "4 R H D", 4 * R * H * D),
    ("logit_sums, 4096 rows", "2 B V", 2 * BLOCK * V),
    ("logit_gradients, 4096 rows", "4 B V", 4 * BLOCK * V),
    ("sum_of_squares, of a whole model's gradient", "4 n", 4 * N),
    ("adamw, of a whole model", "30 n", 30 * N),
]
# FLOP/s of products and bytes/s that large kernels reach: docs/machines.md
MACHINES = {"H100": (0.8 * 989e12, 0.9 * 3.35e12), "H200": (0.8 * 989e12, 0.9 * 4.8e12)}


def attention_rows():
    """Of one layer, 32,768 prompt rows and 16 responses of 2,048: FLOPs that count, 2 products forward and 5 backward, and the
    rates, forward and backward, that `selftest` measured on an H200."""
    prompt, response, rollouts = 32768, 2048, 16
    pairs = prompt * prompt / 2 + rollouts * response * prompt + rollouts * response * response / 2
    product = 2 * pairs * H * D
    kernels = {"cudnn": (364e12, 275e12), "flash": (247e12, 149e12), "own": (297e12, 201e12)}
    return [(operation, name, products * product, rates[backward])
            for backward, (operation, products) in enumerate((("attention", 2), ("add_attention_backward", 5)))
            for name, rates in kernels.items()]


def planned(espalier, model, folder, prompt, response, rollouts, attention="auto"):
    records = Path(folder) / "rollouts.jsonl"
    with records.open("w") as out:
        for i in range(rollouts):
            out.write(json.dumps({"group": "g", "reward": i % 2, "prompt_ids": [j * 7 % 997 for j in range(prompt)],
                                  "response_ids": [(j * 31 + i * 17) % 997 for j in range(response)]}) + "\n")
    done = subprocess.run([espalier, "plan", "--model", model, "--rollouts", records, "--machine", "h100", "--dtype", "bfloat16",
                           "--attention", attention, "--schedule", "phased", "--json", "--quiet"], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def run(espalier):
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        for name, own in SHAPES.items():
            shape = {"hidden_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": H, "num_key_value_heads": J, "head_dim": D,
                     "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
                     "hidden_act": "silu", "torch_dtype": "bfloat16", **own}
            model = Path(folder) / name
            model.mkdir()
            (model / "config.json").write_text(json.dumps(shape))
            for prompt, response, rollouts, published in STEPS:
                plan = planned(espalier, model, folder, prompt, response, rollouts)
                dense, shared = plan["predicted"]["dense"], plan["predicted"]["phased"]
                by_kernels = {kernels: planned(espalier, model, folder, prompt, response, rollouts, kernels)["predicted"]["phased"]["seconds"]
                              for kernels in ("flash", "own")}
                steps.append({"model": name, "prompt": prompt, "response": response, "n": rollouts, "dense": dense["seconds"],
                              "phased": shared["seconds"], **by_kernels, "ceiling": plan["ceiling"], "fits": shared["fits"],
                              "gib": max(shared["peak_bytes"].values()) / 2**30, "published": published})
    RESULT.write_text(json.dumps({"machine": "h100", "layers": LAYERS, "steps": steps}, indent=1) + "\n")


def milliseconds(seconds):
    return f"{1e3 * seconds:.3g}"


def section():
    """Lines of Markdown."""
    kept = json.loads(RESULT.read_text())
    lines = ["## On a GPU: predictions", "",
             "[cuda.md](cuda.md#measured-on-an-h200) has what was measured on an H200; there, predictions were 1 to 11 % from the measured seconds. This section",
             "predicts larger steps: `tools/python bench/gpu_prediction.py run` computes it from bytes, FLOPs and the rates of [machines.md](machines.md).", "",
             f"Seconds of one gradient by `espalier plan --machine h100`, in bfloat16 on one H100. Each model has {kept['layers']} layers of the given shape,",
             "the embedding and the head. Attention is cuDNN's unless the column says otherwise.", "",
             "| layers of | prompt/response | N | dense s | phased s | with flash | with own | factor | FLOP ceiling | GiB | published factor |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for s in kept["steps"]:
        fits = f"{s['gib']:.0f}" if s["fits"] else f"{s['gib']:.0f}, too much"
        lines.append(f"| {s['model']} | {s['prompt']}/{s['response']} | {s['n']} | {s['dense']:.2f} | {s['phased']:.2f} | {s['flash']:.2f} | "
                     f"{s['own']:.2f} | {s['dense'] / s['phased']:.2f} | "
                     f"{s['ceiling']:.2f} | {fits} | {s['published']} |")
    lines += ["", f"Milliseconds of the kernels of one layer of Qwen3-8B on R = {R:,} rows. M is 4096, F 12,288, H/J 32/8, D 128, V 151,936. A block of logits",
              "has B = 4096 rows. The model has n = 8.19e9 parameters.", "",
              "| operation | bytes | GB | H100 | H200 |", "| --- | --- | ---: | ---: | ---: |"]
    for name, formula, moved in KERNELS:
        times = " | ".join(milliseconds(moved / rate) for _, rate in MACHINES.values())
        lines.append(f"| {name} | {formula} | {moved / 1e9:.3g} | {times} |")
    lines += ["", "Attention of one layer over 32,768 prompt rows and 16 responses of 2,048 tokens, by the rates that `selftest` measured on an H200. For",
              "forward and backward of this case in float16 on an A100, DualKV publishes 526 ms.", "",
              "| operation | `--attention` | TFLOP | ms |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {name} | {kernels} | {flops / 1e12:.3g} | {milliseconds(flops / rate)} |" for name, kernels, flops, rate in attention_rows()]
    return [*lines, ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run"])
    parser.add_argument("--espalier", default=str(ROOT / "build/espalier"))
    run(parser.parse_args().espalier)
    print("\n".join(section()))


if __name__ == "__main__":
    sys.exit(main())
