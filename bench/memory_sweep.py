"""Is the memory prediction kept? Predicted against measured bytes over shapes, dtypes, schedules and budgets.

    python bench/memory_sweep.py [--program build/espalier] [--only PATTERN] [--threads N] [--keep]

Every case is a process of its own on a random model: `train` with its second update, `score` or `generate`. Compared
are the ledger of the steps (bytes held, and the arena's mark of each phase), what the plan predicted, and what the
system saw: the most resident bytes of the process (VmHWM), saving included. "Above" is what a step holds more than the
same run on one rollout of two tokens: activations, path and state, without weights and libraries. A case is met where
what is measured above is within 5 % of what is predicted above, or within 4 MiB; where the whole ledger is within 5 % of
its prediction, or within 16 MiB; and where the process does not pass its budget, if it has one.
Prints a table; with --keep a line for each case is appended to bench/results/memory_sweep.jsonl.
"""

import argparse
import array
import fnmatch
import json
import random
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT, machine

MEBI = 2**20
SHAPE = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, head_dim=64, intermediate_size=1536, vocab_size=8192, max_position_embeddings=32768,
             rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu", attention_bias=False,
             initializer_range=0.02, bos_token_id=1, eos_token_id=2, torch_dtype="float32")
TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=192,
            vocab_size=500)
EXPERTS = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=64, num_experts_per_tok=4,
               moe_intermediate_size=128, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
               router_aux_loss_coef=0.001, output_router_logits=False)
LARGE = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, intermediate_size=3072)
FLAT = dict(prompt=512, response=128, n=8)


class Case:
    def __init__(self, name, shape=(), rollouts=None, options="", verb="train"):
        self.name, self.verb, self.options = name, verb, options.split()
        self.shape, self.rollouts = {**SHAPE, **dict(shape)}, {**FLAT, **(rollouts or {})}


CASES = [
    Case("512 float32"), Case("512 float64", options="--dtype float64"), Case("512 bfloat16", options="--dtype bfloat16"),
    Case("512 one thread", options="--threads 1"),
    Case("512 dense", options="--schedule dense"), Case("512 packed", options="--schedule packed"),
    Case("512 phased", options="--schedule phased --token-budget 512"),
    Case("512 phased, recompute", options="--schedule phased --trunk-state recompute --token-budget 512"),
    Case("512 one row a wave", rollouts=dict(prompt=64, response=16, n=4), options="--token-budget 1"),
    Case("512 waves of 16k rows", rollouts=dict(prompt=1024, response=512, n=32), options="--token-budget 16384"),
    Case("512 N = 1", rollouts=dict(prompt=512, response=512, n=1)), Case("512 N = 64", rollouts=dict(prompt=512, response=64, n=64)),
    Case("512 prompt 8192", rollouts=dict(prompt=8192, response=128, n=4), options="--schedule phased"),
    Case("512 turns", rollouts=dict(prompt=512, response=128, n=8, turns=3), options="--schedule phased --token-budget 256"),
    Case("512 gspo", options="--policy-loss gspo"), Case("512 KL, entropy", options="--kl-loss-coef 0.01 --entropy-coeff 0.01"),
    Case("512 4 batches, 2 epochs", rollouts=dict(groups=4, n=4, response=128), options="--mini-batch-size 4 --epochs 2 --steps 0"),
    Case("512 critic", options="--critic {model} --adv-estimator gae"),
    Case("512 bfloat16, critic", options="--critic {model} --adv-estimator gae --dtype bfloat16"),
    Case("64 tiny", TINY, dict(prompt=64, response=32, n=4)), Case("64 tiny float64", TINY, dict(prompt=64, response=32, n=4), "--dtype float64"),
    Case("64 tiny bfloat16", TINY, dict(prompt=64, response=32, n=4), "--dtype bfloat16"),
    Case("64 tiny, 4096 rows", TINY, dict(prompt=512, response=512, n=8)),
    Case("128 24 layers", dict(TINY, hidden_size=128, num_hidden_layers=24, num_attention_heads=4, intermediate_size=384)),
    Case("256 8 layers", dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=768)),
    Case("1024 4 layers", LARGE, dict(response=128)), Case("1024 4 layers bfloat16", LARGE, dict(response=128), "--dtype bfloat16"),
    Case("1024 1 layer", dict(LARGE, num_hidden_layers=1)),
    Case("head size 128", dict(num_attention_heads=4, num_key_value_heads=4, head_dim=128)),
    Case("head size 256", dict(num_attention_heads=4, num_key_value_heads=1, head_dim=256)),
    Case("32 heads", dict(num_attention_heads=32, num_key_value_heads=32, head_dim=64)),
    Case("inner 8192", dict(intermediate_size=8192, num_hidden_layers=2)),
    Case("vocabulary 500", dict(vocab_size=500)),
    Case("vocabulary 150k, tied", dict(vocab_size=150000, hidden_size=256, tie_word_embeddings=True), dict(prompt=512, response=128)),
    Case("vocabulary 150k", dict(vocab_size=150000, hidden_size=256), dict(prompt=512, response=128)),
    Case("vocabulary 150k bfloat16", dict(vocab_size=150000, hidden_size=256), dict(prompt=512, response=128), "--dtype bfloat16"),
    Case("64 experts", EXPERTS), Case("64 experts bfloat16", EXPERTS, options="--dtype bfloat16"),
    Case("64 experts, router losses", EXPERTS, options="--router-aux-loss-coef 0.01 --router-aux-loss-scope minibatch --router-z-loss-coef 0.001"),
    Case("256 experts", dict(EXPERTS, hidden_size=256, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=64)),
    Case("512 within 470 MiB", options="--memory-budget 470MiB"), Case("512 within 500 MiB", options="--memory-budget 500MiB"),
    *(Case(f"512 prompt 4096, {trunks}, waves {waves}{f', {dtype}' if dtype != 'float32' else ''}", rollouts=dict(prompt=4096, response=128, n=4),
           options=f"--schedule phased --token-budget 1024 --trunk-state {trunks} --wave-state {waves} --dtype {dtype}")
      for dtype in ("float32", "bfloat16", "float64") for trunks in ("keep", "recompute", "offload") for waves in ("keep", "recompute")),
    *(Case(f"512 prompt 4096, path stored, {dtype}", rollouts=dict(prompt=4096, response=128, n=4),
           options=f"--schedule phased --token-budget 512 --trunk-state recompute --path-state offload --dtype {dtype}")
      for dtype in ("float32", "bfloat16", "float64")),
    *(Case(f"512 turns, {trunks}", rollouts=dict(prompt=2048, response=256, n=8, turns=3), options=f"--schedule phased --token-budget 512 --trunk-state {trunks}")
      for trunks in ("recompute", "offload")),
    *(Case(f"64 experts, prompt 4096, {trunks}", EXPERTS, dict(prompt=4096, response=128, n=4), f"--schedule phased --token-budget 1024 --trunk-state {trunks}")
      for trunks in ("keep", "recompute", "offload")),
    *(Case(f"512 prompt 4096 within {budget} MiB", rollouts=dict(prompt=4096, response=128, n=4), options=f"--memory-budget {budget}MiB")
      for budget in (480, 500, 520, 600)),
    Case("512 prompt 4096, dense, waves recompute", rollouts=dict(prompt=4096, response=128, n=2), options="--schedule dense --wave-state recompute"),
    Case("1024 prompt 4096, offload", LARGE, dict(prompt=4096, response=128, n=4), "--schedule phased --trunk-state offload --token-budget 1024"),
    Case("score within 250 MiB", verb="score", options="--memory-budget 250MiB"),
    Case("score, bfloat16, within 220 MiB", verb="score", options="--dtype bfloat16 --memory-budget 220MiB"),
    Case("score, critic's values, within 320 MiB", verb="score", options="--critic {model} --values --memory-budget 320MiB"),
    Case("generate within 300 MiB", verb="generate", rollouts=dict(groups=8),
         options="--n 32 --max-response-length 64 --memory-budget 300MiB"),
]


def parameters(config):
    """Names and shapes of the Hugging Face layout."""
    M, D, H, J = (config[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (config["vocab_size"], M)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", H * D, M), ("k", J * D, M), ("v", J * D, M), ("o", M, H * D)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, columns)
        for name, width in (("self_attn.q_norm", D), ("self_attn.k_norm", D), ("input_layernorm", M), ("post_attention_layernorm", M)):
            yield f"{at}{name}.weight", (width,)
        mlps = [("mlp.", config["intermediate_size"])]
        if "num_experts" in config:
            yield f"{at}mlp.gate.weight", (config["num_experts"], M)
            mlps = [(f"mlp.experts.{e}.", config["moe_intermediate_size"]) for e in range(config["num_experts"])]
        for mlp, inner in mlps:
            for name, rows, columns in (("gate", inner, M), ("up", inner, M), ("down", M, inner)):
                yield f"{at}{mlp}{name}_proj.weight", (rows, columns)
    yield "model.norm.weight", (M,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], M)


def write_model(directory, config):
    """Random float32 weights, drawn once and read again and again from the start of a prime number of them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    draw, count = random.Random(0), 99991
    pool = array.array("f", (draw.gauss(0, 0.02) for _ in range(count))).tobytes()
    ones, header, end = struct.pack("f", 1), {}, 0
    for name, shape in parameters(config):
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[end, end + size])
        end += size
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if len(entry["shape"]) == 1:
                out.write(ones * ((end - begin) // 4))
                continue
            for at in range(begin, end, len(pool)):
                out.write(pool[:end - at])
    return directory


def write_prompts(path, vocabulary, prompt, groups=1, **unused):
    draw = random.Random(0)
    path.write_text("".join(json.dumps({"prompt_ids": [draw.randrange(3, vocabulary) for _ in range(prompt)]}) + "\n" for _ in range(groups)))


def write_rollouts(path, vocabulary, prompt, response, n, groups=1, turns=1):
    """Random groups. With turns, responses of a group also share their first parts: a tree of two branches a turn."""
    draw = random.Random(0)
    ids = lambda count: [draw.randrange(3, vocabulary) for _ in range(count)]
    series = lambda: [-draw.random() for _ in range(response * turns)]
    with open(path, "w") as out:
        for group in range(groups):
            start, parts = ids(prompt), {}
            for i in range(n):
                part = lambda turn: parts.setdefault((turn, i % 2**(turn + 1)), ids(response)) if turn < turns - 1 else ids(response)
                out.write(json.dumps(dict(group=group, prompt_ids=start, response_ids=[t for turn in range(turns) for t in part(turn)],
                                          reward=draw.random(), ref_logprobs=series(), values=series())) + "\n")


def command(case, folder, program, threads):
    model, rollouts = folder / "model", folder / "rollouts.jsonl"
    words = [program, case.verb, "--model", model, "--json", "--quiet"]
    if "--threads" not in case.options:
        words += ["--threads", threads]
    words += ["--prompts" if case.verb == "generate" else "--rollouts", rollouts]
    words += ["--out", folder / ("out.jsonl" if case.verb != "train" else "out")]
    words += ["--overwrite"]
    if case.verb == "train" and "--epochs" not in case.options:
        words += ["--epochs", 2]
    return [str(word) for word in words] + [option.format(model=model) for option in case.options]


def run(words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nended with {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}")
    return json.loads(done.stdout)


def measure(case, folder, options):
    write_model(folder / "model", case.shape)
    write = write_prompts if case.verb == "generate" else write_rollouts
    write(folder / "rollouts.jsonl", case.shape["vocab_size"], **case.rollouts)
    words = command(case, folder, options.program, options.threads)
    found = run(words)
    row = {"case": case.name, "command": " ".join(words[1:2] + case.options), "shape": case.shape, "rollouts": case.rollouts,
           "process": found["peak_bytes"]}
    if "--memory-budget" in case.options:
        row["budget"] = MEBI * int(case.options[case.options.index("--memory-budget") + 1].removesuffix("MiB"))
    steps = found.get("steps")
    if steps:
        steps += [step["critic"] for step in found["steps"] if "critic" in step and "peak_bytes" in step["critic"]]
        last = max(steps, key=lambda step: max(step["predicted"]["peak_bytes"].values()))
        row.update(measured=most(last["peak_bytes"]), predicted=most(last["predicted"]["peak_bytes"]), arena=most(last["arena_bytes"]))
        write_rollouts(folder / "rollouts.jsonl", case.shape["vocab_size"], prompt=1, response=1, n=1)
        tiny = run(words)["steps"][-1]
        row.update(tiny_measured=most(tiny["peak_bytes"]), tiny_predicted=most(tiny["predicted"]["peak_bytes"]))
    return row


def most(phases):
    return max(phases.values())


def above(row):
    """(measured, predicted) bytes above the run on two tokens."""
    return row["measured"] - row["tiny_measured"], row["predicted"] - row["tiny_predicted"]


def met(row):
    within = row["process"] <= row.get("budget", row["process"])
    if "measured" in row:
        measured, predicted = above(row)
        within = within and abs(measured - predicted) <= max(4 * MEBI, 0.05 * predicted)
    return within and abs(row.get("measured", 0) - row.get("predicted", 0)) <= max(16 * MEBI, 0.05 * row.get("predicted", 0))


def mebibytes(value):
    return f"{value / MEBI:.0f}"


def line(row):
    if "predicted" not in row:
        return f"| {row['case']} | | | | | | | | {mebibytes(row['process'])} | | {'yes' if met(row) else 'no'} |"
    measured, predicted = above(row)
    return (f"| {row['case']} | {mebibytes(row['predicted'])} | {mebibytes(row['measured'])} | {mebibytes(row['arena'])} | "
            f"{row['measured'] / row['predicted']:.3f} | {mebibytes(predicted)} | {mebibytes(measured)} | {measured / max(predicted, 1):.3f} | {mebibytes(row['process'])} | {row['process'] / row['predicted']:.3f} | "
            f"{'yes' if met(row) else 'no'} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--only", default="*", help="patterns of case names, with commas: '*experts*,score*'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="append to bench/results/memory_sweep.jsonl")
    options = parser.parse_args()
    about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "threads": options.threads}
    print("| MiB | predicted | ledger | arena | ledger over predicted | predicted above | ledger above | above over predicted | process | "
          "process over predicted | met |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for case in CASES:
        if not any(fnmatch.fnmatch(case.name, pattern) for pattern in options.only.split(",")):
            continue
        with tempfile.TemporaryDirectory(prefix="espalier-memory-") as name:
            row = measure(case, Path(name), options)
        print(line(row), flush=True)
        if options.keep:
            with open(ROOT / "bench/results/memory_sweep.jsonl", "a") as out:
                out.write(json.dumps({**about, **row}) + "\n")


if __name__ == "__main__":
    main()
