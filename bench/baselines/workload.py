"""The benchmark's workload, and the parts that every plain PyTorch baseline shares: model, rollouts, loss, optimizer, clock.

A workload is a model directory and a rollout file, so that espalier and every baseline read the same two things.
"""

import argparse
import contextlib
import json
import random
import resource
import sys
import time
from pathlib import Path

import torch
import transformers

# A Qwen3-like model: hidden 512, 8 layers, 8 query and 2 key/value heads of 64, inner 1536, vocabulary 8192.
SHAPE = dict(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1536,
    vocab_size=8192, max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=1e6))
# Models by name: how each differs from SHAPE, and its classes in transformers. Qwen3-Next's has three layers of the gated delta rule
# and one of attention, with the heads of the published model at a quarter of its width.
MODELS = {
    "qwen3": (dict(), "Qwen3"),
    "qwen3_next": (dict(
        num_hidden_layers=4, num_experts=0, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25)), "Qwen3Next"),
}
CLIP = 0.2
ADAMW = dict(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
MAX_GRAD_NORM = 1.0


def shape_of(name):
    return {**SHAPE, **MODELS[name][0]}


def write_model(directory, seed=0, name="qwen3", **changes):
    torch.manual_seed(seed)
    kind = MODELS[name][1]
    config = getattr(transformers, kind + "Config")(**{**shape_of(name), **changes})
    getattr(transformers, kind + "ForCausalLM")(config).float().save_pretrained(directory)
    return Path(directory)


def write_rollouts(path, prompt, response, n, groups=1, vocabulary=SHAPE["vocab_size"], seed=0):
    """`groups` groups of n rollouts of equal lengths, with random tokens and given advantages."""
    source = random.Random(seed)
    tokens = lambda count: [source.randrange(3, vocabulary) for _ in range(count)]
    with open(path, "w") as out:
        for group in range(groups):
            start = tokens(prompt)
            for _ in range(n):
                out.write(json.dumps({"group": group, "prompt_ids": start, "response_ids": tokens(response),
                                      "advantage": round(source.gauss(0, 1), 4)}) + "\n")
    return Path(path)


def read_rollouts(path):
    with open(path) as lines:
        return [json.loads(line) for line in lines]


def load_model(directory, attention="sdpa"):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).train()


def make_optimizer(model, kind):
    return torch.optim.AdamW(model.parameters(), fused=kind == "fused", foreach=kind == "foreach", **ADAMW)


def policy_loss(logits, targets, advantage):
    """Sum over tokens of the clipped loss at ratio 1 (no recorded log-probs). logits [.., V], targets and advantage [..]."""
    logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    ratio = torch.exp(logprob - logprob.detach())
    advantage = advantage.flatten()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()


class Clock:
    """Adds up seconds by name."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def __call__(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=1, help="timed updates")
    parser.add_argument("--warmup", type=int, default=1, help="updates before them")
    parser.add_argument("--on-request", action="store_true", help="after the warm-up one update for each line of stdin, one JSON line for each")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    parser.add_argument("--gradients", type=Path, help="write the gradient of the first update before clipping (safetensors)")
    return parser


class Updates:
    """Whole updates of one model, timed. accumulate(model, clock) does forward and backward of the mini-batch and returns the loss."""

    def __init__(self, model, accumulate, options):
        torch.set_num_threads(options.threads)
        self.model, self.accumulate, self.optimizer = model, accumulate, make_optimizer(model, options.optimizer)

    def one(self, gradients=None):
        clock, start = Clock(), time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.accumulate(self.model, clock)
        if gradients:
            pause = time.perf_counter()
            save_gradients(self.model, gradients)
            start += time.perf_counter() - pause
        with clock("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM, foreach=True)
            self.optimizer.step()
        clock.seconds["total"] = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": clock.seconds, "loss": loss, "grad_norm": float(norm), "peak_bytes": peak}


def run(model, accumulate, options, name, **details):
    updates = Updates(model, accumulate, options)
    done = [updates.one(options.gradients if number == 0 else None) for number in range(options.warmup)]
    about = {"baseline": name, "threads": options.threads, "torch": torch.__version__, "transformers": transformers.__version__, **details}
    if options.on_request:
        print(json.dumps(about), flush=True)
        for _ in sys.stdin:
            print(json.dumps(updates.one()), flush=True)
        return
    timed = [updates.one(options.gradients if number == 0 and not done else None) for number in range(options.repeats)]
    print(json.dumps({**about, "updates": timed, "peak_bytes": timed[-1]["peak_bytes"]}))


def save_gradients(model, path):
    from safetensors.torch import save_file
    save_file({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, path)
