"""What a program computes, bit by bit, on generated cases: whether a change of the engine changed a result.

    python bench/same_bits.py build/espalier --out before.json     SHA-256 of every tensor, log-prob, loss and token
    python bench/same_bits.py OLD build/espalier                   runs both and compares
    python bench/same_bits.py build/espalier --against before.json

Cases: three number types; dense, packed, phased and recomputed plans; grouped queries, tied heads, biases, QK-norm, experts
with router losses and recorded routes, a critic, losses of tokens and of whole rollouts, KL and entropy; two optimizer steps
with --gradients, --logprobs and --out; score; generate; and plans of layouts of ranks for a machine of GPUs: their rows, bytes by
axis and phase, peaks and predicted seconds, to the last byte. Two minutes at most. Bits are compared on one machine with one number
of threads; other machines have others. Exit 1 where something differs or is missing on one side.
"""

import argparse
import hashlib
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save_file

SEED, VOCABULARY, HEAD = 11, 257, 16
MODELS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4, "attention_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 1},
    "moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "moe-sparse": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 1,
                   "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
                   "decoder_sparse_step": 2},
}
SETTINGS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": HEAD,
            "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 2, "bos_token_id": 1}
PLANS = {"dense": ["--schedule", "dense", "--token-budget", "300"], "packed": ["--schedule", "packed"],
         "phased": ["--schedule", "phased", "--token-budget", "170", "--trunk-state", "keep"],
         "recomputed": ["--schedule", "phased", "--token-budget", "170", "--trunk-state", "recompute"]}
LOSSES = {"vanilla": ["--entropy-coeff", "0.01"], "kl": ["--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--rollout-is", "token"],
          "gspo": ["--policy-loss", "gspo"], "cispo": ["--policy-loss", "cispo", "--loss-agg-mode", "seq-mean-token-mean"],
          "sequence": ["--rollout-is", "sequence", "--entropy-coeff", "0.02"]}
ROUTERS = {"rollout": ["--router-aux-loss-coef", "0.05"],
           "minibatch": ["--router-aux-loss-coef", "0.05", "--router-aux-loss-scope", "minibatch", "--router-z-loss-coef", "0.01"]}
# name: model, type, plan, loss, router losses, and whether there is a critic
TRAININGS = [
    ("qwen3", "float32", "dense", "vanilla", None, False), ("qwen3", "float32", "packed", "kl", None, False),
    ("qwen3", "float32", "phased", "vanilla", None, False), ("qwen3", "float32", "recomputed", "gspo", None, False),
    ("qwen3", "float64", "phased", "kl", None, False), ("qwen3", "float64", "packed", "sequence", None, False),
    ("qwen3", "bfloat16", "dense", "vanilla", None, False), ("qwen3", "bfloat16", "packed", "gspo", None, False),
    ("qwen3", "bfloat16", "phased", "kl", None, False), ("qwen3", "bfloat16", "recomputed", "cispo", None, False),
    ("llama", "float32", "phased", "cispo", None, False), ("llama", "bfloat16", "phased", "sequence", None, False),
    ("llama", "float64", "recomputed", "vanilla", None, False), ("qwen2", "float32", "recomputed", "kl", None, False),
    ("qwen2", "bfloat16", "packed", "vanilla", None, False), ("qwen3", "float32", "phased", "vanilla", None, True),
    ("qwen2", "bfloat16", "phased", "vanilla", None, True), ("llama", "float64", "packed", "gspo", None, True),
    ("moe", "float32", "phased", "vanilla", "rollout", False), ("moe", "float64", "recomputed", "gspo", "minibatch", False),
    ("moe", "bfloat16", "phased", "kl", "minibatch", False), ("moe", "bfloat16", "dense", "vanilla", None, False),
    ("moe-sparse", "float32", "packed", "cispo", "rollout", False),
    ("moe-sparse", "bfloat16", "recomputed", "vanilla", "rollout", False),
]
GENERATIONS = [("qwen3", "float32", "1", "0", "1"), ("qwen3", "bfloat16", "0.8", "20", "0.9"), ("llama", "float64", "0", "0", "1"),
               ("qwen2", "bfloat16", "0", "0", "1"), ("moe", "float32", "1.3", "5", "1"), ("moe-sparse", "bfloat16", "1", "0", "0.8")]
SCORES = [("qwen3", "float32", "phased"), ("qwen3", "bfloat16", "packed"), ("moe", "float64", "dense")]

LAYOUTS = {"one": [], "tp": ["--tp", "2"], "cp": ["--cp", "3"], "pp": ["--pp", "3"], "dp": ["--dp", "3"],
           "full": ["--dp", "3", "--shard", "full"], "optimizer": ["--dp", "2", "--shard", "optimizer"],
           "mixed": ["--tp", "2", "--pp", "2", "--dp", "2"], "path": ["--cp", "2", "--pp", "2", "--path-state", "divide"],
           "full-path": ["--cp", "2", "--dp", "2", "--shard", "full", "--path-state", "divide"]}
EXPERT_LAYOUTS = {"ep": ["--dp", "2", "--ep", "2"], "ep-full": ["--tp", "2", "--dp", "2", "--ep", "2", "--shard", "full"]}
# of each layout: schedule, rows of a wave, state of trunks, loss
PLANNED = {"phased": ("phased", "40", "recompute", "vanilla"), "packed": ("packed", "0", "keep", "gspo"),
           "auto": ("auto", "0", "offload", "vanilla")}
MEASURED = {"espalier", "device", "threads", "seconds", "peak_bytes", "options"}  # of a report, at its top


def shapes_of(config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * HEAD, config["num_key_value_heads"] * HEAD
    kind = config["model_type"]
    yield "model.embed_tokens.weight", (VOCABULARY, width)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCABULARY, width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (width,)
        yield at + "post_attention_layernorm.weight", (width,)
        for name, rows, columns in (("q", queries, width), ("k", keys, width), ("v", keys, width), ("o", width, queries)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, columns)
            if config.get("attention_bias") or kind == "qwen2" and name != "o":
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
        if kind in ("qwen3", "qwen3_moe"):
            yield at + "self_attn.q_norm.weight", (HEAD,)
            yield at + "self_attn.k_norm.weight", (HEAD,)
        experts = config.get("num_experts", 0) if (layer + 1) % config.get("decoder_sparse_step", 1) == 0 else 0
        if experts:
            yield at + "mlp.gate.weight", (experts, width)
        for prefix, size in ([(f"{at}mlp.experts.{e}.", config["moe_intermediate_size"]) for e in range(experts)]
                             or [(at + "mlp.", inner)]):
            yield prefix + "gate_proj.weight", (size, width)
            yield prefix + "up_proj.weight", (size, width)
            yield prefix + "down_proj.weight", (width, size)


def write_model(directory, name):
    directory.mkdir()
    config = {**SETTINGS, **MODELS[name]}
    (directory / "config.json").write_text(json.dumps(config))
    source = numpy.random.default_rng(SEED)
    draw = lambda key, shape: ((1.0 if "norm" in key else 0.0) + 0.2 * source.standard_normal(shape)).astype(numpy.float32)
    save_file({key: draw(key, shape) for key, shape in shapes_of(config)}, directory / "model.safetensors", {"format": "pt"})


def make_records():
    source = random.Random(SEED)
    tokens = lambda count: [source.randrange(3, VOCABULARY) for _ in range(count)]
    records = []
    for group, (prompt, responses) in enumerate([(90, 5), (1, 3), (40, 4)]):
        prompt_ids, start = tokens(prompt), tokens(30)
        for index in range(responses):
            response = (start if index % 2 else []) + tokens(source.randint(1, 60))
            series = lambda: [-source.uniform(0.5, 6) for _ in response]
            records.append({"prompt_ids": prompt_ids, "response_ids": response, "group": str(group),
                            "loss_mask": [int(source.random() < 0.9) for _ in response], "reward": source.uniform(-1, 2),
                            "old_logprobs": series(), "ref_logprobs": series(), "rollout_logprobs": series(),
                            "values": series(), "temperature": 0.7 if index == 2 else 1.0})
    return records


def routed(records):
    """The same with experts recorded for some of the rollouts, for every token of a prompt alike."""
    source, out = random.Random(SEED + 1), []
    known = {}
    for index, record in enumerate(records):
        ids = record["prompt_ids"] + record["response_ids"]
        routes = [known.setdefault(tuple(ids[:t + 1]), [source.sample(range(6), 2) for _ in range(3)]) for t in range(len(ids))]
        out.append({**record, "routed_experts": routes} if index % 3 else record)
    return out


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def digest(data):
    return hashlib.sha256(data).hexdigest()


def tensors_of(path, into, name):
    """Every tensor of a file by its own bytes. bfloat16 has no numpy type: then the file's bytes behind its header."""
    try:
        for key, value in load_file(path).items():
            into[f"{name}/{key}"] = digest(value.tobytes())
    except (TypeError, KeyError, AttributeError):
        data = path.read_bytes()
        header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
        body = data[8 + int.from_bytes(data[:8], "little"):]
        for key, entry in header.items():
            if key != "__metadata__":
                into[f"{name}/{key}"] = digest(body[slice(*entry["data_offsets"])])


def collect(folder, into, name):
    for path in sorted(folder.rglob("*")):
        key = f"{name}/{path.relative_to(folder)}"
        if path.suffix == ".safetensors":
            tensors_of(path, into, key)
        elif path.suffix == ".jsonl" and path.name != "metrics.jsonl":  # which holds seconds
            for number, line in enumerate(path.read_text().splitlines()):
                into[f"{key}/{number}"] = digest(line.encode())


def run(program, *arguments):
    command = [str(program), *map(str, arguments), "--json", "--quiet", "--threads", "2", "--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def numbers_of(step):
    """The step's own numbers, without what the clock and the memory say."""
    return {key: value for key, value in step.items()
            if isinstance(value, float) and math.isfinite(value) and "second" not in key and key != "mfu"}


def run_training(program, work, case, records, routes, into):
    model, dtype, plan, loss, router, critic = case
    name = "-".join(["train", model, dtype, plan, loss, router or "plain", "critic" if critic else "actor"])
    out = work / name
    out.mkdir()
    options = ["--model", work / model, "--rollouts", routes if model == "moe" and loss == "kl" else records, "--dtype", dtype,
               "--mini-batch-size", "8", "--epochs", "1", "--lr", "1e-3", "--memory-budget", "4GiB", *PLANS[plan], *LOSSES[loss],
               *(ROUTERS[router] if router else []), *(["--critic", work / "critic", "--adv-estimator", "gae"] if critic else [])]
    if critic and model != "qwen3":
        options[options.index("--critic") + 1] = work / model
    summary = run(program, "train", *options, "--out", out / "model", "--gradients", out / "gradients.safetensors",
                  "--logprobs", out / "logprobs.jsonl")
    collect(out, into, name)
    for number, step in enumerate(summary["steps"]):
        for key, value in numbers_of(step).items():
            into[f"{name}/step {number}/{key}"] = repr(value)


def numbers_in(value, into, name):
    """Every number and text of a report, by its place."""
    if isinstance(value, (dict, list)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            numbers_in(one, into, f"{name}/{key}")
    else:
        into[name] = repr(value)


def run_plans(program, work, model, records, into):
    layouts = LAYOUTS | (EXPERT_LAYOUTS if model.startswith("moe") else {})
    for layout, degrees in layouts.items():
        for planned, (schedule, rows, state, loss) in PLANNED.items():
            found = run(program, "plan", "--model", work / model, "--rollouts", records, "--machine", "h100", "--dtype", "bfloat16",
                        "--schedule", schedule, "--token-budget", rows, "--trunk-state", state, "--policy-loss", loss, *degrees)
            numbers_in({key: value for key, value in found.items() if key not in MEASURED}, into, f"plan-{model}-{layout}-{planned}")


def run_all(program, work):
    into = {}
    for name in MODELS:
        write_model(work / name, name)
    write_model(work / "critic", "qwen3")
    records = write_lines(work / "records.jsonl", make_records())
    routes = write_lines(work / "routes.jsonl", routed(make_records()))
    prompts = write_lines(work / "prompts.jsonl", [{"prompt_ids": r["prompt_ids"]} for r in make_records()[::3]])
    for case in TRAININGS:
        run_training(program, work, case, records, routes, into)
    for model in ("qwen3", "llama", "moe", "moe-sparse"):
        run_plans(program, work, model, records, into)
    for model, dtype, temperature, top_k, top_p in GENERATIONS:
        name = f"generate-{model}-{dtype}-{temperature}-{top_k}-{top_p}"
        out = work / name
        out.mkdir()
        run(program, "generate", "--model", work / model, "--prompts", prompts, "--out", out / "out.jsonl", "--dtype", dtype, "--n", "5",
            "--temperature", temperature, "--top-k", top_k, "--top-p", top_p, "--max-response-length", "50", "--memory-budget", "4GiB")
        collect(out, into, name)
    for model, dtype, plan in SCORES:
        name = f"score-{model}-{dtype}-{plan}"
        out = work / name
        out.mkdir()
        run(program, "score", "--model", work / model, "--rollouts", records, "--out", out / "out.jsonl", "--dtype", dtype, "--entropies",
            "--memory-budget", "4GiB", *PLANS[plan])
        collect(out, into, name)
    return into


def results_of(program):
    with tempfile.TemporaryDirectory() as folder:
        return run_all(Path(program).resolve(), Path(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="+", help="one, or two to compare")
    parser.add_argument("--out", help="write the sums as JSON")
    parser.add_argument("--against", help="a JSON that --out wrote")
    given = parser.parse_args()
    found = [json.loads(Path(given.against).read_text())] if given.against else []
    found += [results_of(program) for program in given.program]
    if given.out:
        Path(given.out).write_text(json.dumps(found[-1], indent=0, sort_keys=True))
    first, last = found[0], found[-1]
    differing = sorted(key for key in first.keys() | last.keys() if first.get(key) != last.get(key))
    for key in differing[:40]:
        print(f"differs: {key}  {first.get(key, 'absent')[:16]}  {last.get(key, 'absent')[:16]}")
    cases = len({key.split("/")[0] for key in last})
    print(f"{cases} cases, {len(last)} results, {len(differing)} differ")
    return 1 if differing or not last else 0


if __name__ == "__main__":
    sys.exit(main())
