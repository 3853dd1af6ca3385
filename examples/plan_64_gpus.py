"""A plan for 64 GPUs, made on any machine: the layout, the seconds of a step, the bytes of a GPU.

    python examples/plan_64_gpus.py [config.json] [--machine h200] [--ranks 64]

A plan reads the sizes of the model and the lengths of rollouts, no weights. Without a file the model is Qwen3-30B-A3B and the step
has 64 prompts of 1,024 tokens with 16 responses of 512 to 1,536 tokens. Rates come from data sheets (docs/machines.md).
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import espalier

QWEN3_30B_A3B = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
                     intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
                     num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
                     decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6,
                     hidden_act="silu", attention_bias=False, tie_word_embeddings=False)


def rollouts(prompts, responses):
    """Records as a sampler writes them; a plan uses their lengths and common beginnings alone."""
    draw = random.Random(0)
    for prompt in range(prompts):
        ids = [draw.randrange(1000) for _ in range(1024)]
        for _ in range(responses):
            yield {"prompt_ids": ids, "response_ids": [draw.randrange(1000) for _ in range(draw.randint(512, 1536))], "group": prompt,
                   "reward": 0.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.config or Path(folder) / "config.json"
        if arguments.config is None:
            config.write_text(json.dumps(QWEN3_30B_A3B))
        file = Path(folder) / "rollouts.jsonl"
        with file.open("w") as out:
            out.writelines(json.dumps(record) + "\n" for record in rollouts(arguments.prompts, arguments.responses))
        plan = espalier.plan(model=config, rollouts=file, layout="auto", ranks=arguments.ranks, machine=arguments.machine, dtype="bfloat16",
                             quiet=True)
    layout = plan["layout"]
    degrees = ", ".join(f"{axis} {layout[axis]}" for axis in ("tp", "cp", "pp", "dp", "ep") if layout[axis] > 1)
    print(f"layout: {degrees}; {'fits' if layout['fits'] else 'does not fit'}")
    print(f"why: {layout['reason']}")
    print(f"a step: {layout['seconds']:.2f} s, {layout['ranks']['communication_seconds']:.2f} s of it communication")
    print(f"a GPU: at most {max(layout['ranks']['peak_bytes'].values()) / 2**30:.1f} GiB of {plan['memory_budget'] / 2**30:.1f} GiB")
    rows = sum(rank["rows"] for rank in layout["by_rank"] if rank["pp"] == 0)
    print(f"{rows} rows run instead of {plan['rows']['logical']}")


if __name__ == "__main__":
    main()
