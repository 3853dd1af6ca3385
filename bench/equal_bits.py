"""Log-probs under every plan, layout and instruction set, bit by bit, on as many tokens as are asked for.

    python bench/equal_bits.py [--tokens 1000000] [--dtypes float32,bfloat16] [--build build]

A random Qwen3-like model samples responses with `generate`; `score` computes their log-probs and entropies dense on one thread, and then
under other schedules, budgets, states, orders of records, threads, ranks and instruction sets. Each line says how many numbers have other
bits than the dense ones, and how many log-probs of `generate` have other bits than those of `score`. Tokens: those of prompts and
responses, counted once a rollout; waves of one row take a thirtieth of them. Exit 1 where any number differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "baselines"))
import workload  # noqa: E402

PROMPT, RESPONSE, N = 480, 32, 8  # tokens, and responses to a prompt
# name: options of score, environment, ranks, share of the groups
RUNS = {
    "two threads": (["--schedule", "dense", "--threads", "2"], {}, 1, 1),
    "packed": (["--schedule", "packed"], {}, 1, 1),
    "phased": (["--schedule", "phased"], {}, 1, 1),
    "waves of 512 rows": (["--schedule", "phased", "--token-budget", "512"], {}, 1, 1),
    "waves of 7 rows": (["--schedule", "phased", "--token-budget", "7"], {}, 1, 1 / 10),
    "waves of 1 row": (["--schedule", "phased", "--token-budget", "1"], {}, 1, 1 / 30),
    "path offloaded": (["--schedule", "phased", "--token-budget", "512", "--path-state", "offload"], {}, 1, 1),
    "shuffled records": (["--schedule", "phased"], {}, 1, 1),
    "AVX2": (["--schedule", "phased"], {"ESPALIER_INSTRUCTION_SET": "avx2"}, 1, 1),
    "AVX-512": (["--schedule", "phased"], {"ESPALIER_INSTRUCTION_SET": "avx512"}, 1, 1),
    "dp 2": (["--schedule", "phased", "--dp", "2"], {}, 2, 1),
    "cp 2": (["--schedule", "phased", "--cp", "2"], {}, 2, 1),
    "pp 2": (["--schedule", "phased", "--pp", "2"], {}, 2, 1),
}


def run(program, words, environment=None, ranks=1):
    command = [str(program), *map(str, words), "--quiet"]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python", *command]
    more = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    done = subprocess.run(command, env={**os.environ, **more, **(environment or {})}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")


def read(path):
    with open(path) as lines:
        return [json.loads(line) for line in lines]


def write(path, records):
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def numbers(record):
    """Equal as text where they are equal bit for bit: the program writes the shortest text that gives the number again."""
    return record["logprobs"] + record["entropies"]


def differing(found, expected):
    count = sum(len(numbers(record)) for record in expected)
    return sum(a != b for one, other in zip(found, expected, strict=True) for a, b in zip(numbers(one), numbers(other), strict=True)), count


def levels(build):
    tool = build / "tests/support/list_instruction_levels"
    return subprocess.run([tool], capture_output=True, text=True).stdout.split() if tool.is_file() else []


def compare(program, model, folder, groups, dtype, there):
    source, common = random.Random(0), ["--model", model, "--dtype", dtype, "--products", "own"]
    prompts = [{"prompt_ids": [source.randrange(3, 8000) for _ in range(PROMPT)]} for _ in range(groups)]
    records = folder / f"{dtype}.jsonl"
    run(program, ["generate", *common, "--prompts", write(folder / "prompts.jsonl", prompts), "--out", records, "--n", N,
                  "--max-response-length", RESPONSE, "--temperature", 0.8, "--stop-ids", 2])

    def score(name, options, environment=None, ranks=1, of=records):
        out = folder / f"{dtype}-{name.replace(' ', '-')}.jsonl"
        run(program, ["score", *common, "--rollouts", of, "--out", out, "--entropies", "--overwrite", *options], environment, ranks)
        return read(out)

    sampled = read(records)
    dense = score("dense", ["--schedule", "dense", "--threads", "1"])
    yield "generate", sum(a != b for one, other in zip(sampled, dense) for a, b in zip(one["rollout_logprobs"], other["logprobs"])), \
        sum(len(record["logprobs"]) for record in dense)
    for name, (options, environment, ranks, share) in RUNS.items():
        level = environment.get("ESPALIER_INSTRUCTION_SET")
        if level and level not in there:
            continue
        count = max(N, int(len(sampled) * share) // N * N)
        order = list(range(count))
        if name == "shuffled records":
            random.Random(1).shuffle(order)
        of = write(folder / "part.jsonl", [sampled[i] for i in order])
        yield name, *differing(score(name, options, environment, ranks, of), [dense[i] for i in order])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--build", type=Path, default=Path("build"))
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="espalier-bits-") as name:
        folder = Path(name)
        model = workload.write_model(folder / "model", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, head_dim=32)
        groups = max(1, options.tokens // ((PROMPT + RESPONSE) * N))
        print(f"{groups * N * (PROMPT + RESPONSE):,} tokens in {groups * N:,} rollouts", flush=True)
        print("| dtype | against dense on one thread | numbers | with other bits | seconds |\n| --- | --- | ---: | ---: | ---: |", flush=True)
        for dtype in options.dtypes.split(","):
            begin = time.monotonic()
            for case, differs, count in compare(options.build / "espalier", model, folder, groups, dtype, levels(options.build)):
                print(f"| {dtype} | {case} | {count:,} | {differs:,} | {time.monotonic() - begin:.0f} |", flush=True)
                wrong, begin = wrong + differs, time.monotonic()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
