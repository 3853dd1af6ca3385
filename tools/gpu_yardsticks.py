#!/usr/bin/env python3
"""Rates of other software on this GPU, for the same minute as the program's (first_hour.py).

    gpu_yardsticks.py fa3 WHEEL [--lower]      FlashAttention 3 by PyPI's flash-attn3-jax (BSD-3-Clause), at shapes of `espalier selftest`
    gpu_yardsticks.py stock --device cuda      layers of Llama-3-8B by transformers: the gradient of the dense step
    gpu_yardsticks.py fla --device cuda        the gated delta rule by flash-linear-attention, at the shape of `espalier selftest`

Each prints a JSON object, again with what was measured since; the last one has all. Exit code 8: what it measures is not there. --lower: calls are compiled for a GPU and do not run.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import zipfile
from pathlib import Path

NOT_THERE = 8
STEADY = .05  # seconds of calls that warm up, and of calls that are timed
HEAD = 128
# Name in `espalier selftest`, heads, heads of keys, queries, keys, causal. Its wave behind a path is two calls here.
SHAPES = (("a wave behind a path: the path", 32, 8, 16384, 10240, False), ("a wave behind a path: one of 8 branches", 32, 8, 2048, 2048, True),
          ("a prompt", 32, 8, 10240, 10240, True), ("a dense sequence", 32, 8, 12288, 12288, True))
LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, vocab_size=32768,
             max_position_embeddings=131072)
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
            max_position_embeddings=512)


def steady_seconds(call, finish):
    """Of one call among others, on a warm GPU. `finish(result)` waits for a call and those before it."""
    finish(call())
    begin = time.perf_counter()
    finish(call())
    calls = max(1, math.ceil(STEADY / max(time.perf_counter() - begin, 1e-6)))
    for _ in range(2):  # the first round warms up
        begin = time.perf_counter()
        for _ in range(calls):
            last = call()
        finish(last)
    return (time.perf_counter() - begin) / calls


def fa3_module(wheel):
    """The wheel's package. It is built for Python 3.11 and marked so; only its table of calls is used, which other versions read as well."""
    folder = Path(tempfile.mkdtemp())
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    (module,) = folder.glob("flash_attn3_jax_lib/flash_api.*.so")
    mark, here = b"\0003.11\0", b"\000%d.%d\000" % sys.version_info[:2]
    code = module.read_bytes()
    if code.count(mark) != 1 or len(here) != len(mark):
        raise SystemExit(f"{wheel}: expected one mark of Python 3.11, found {code.count(mark)}")
    module.unlink()
    module.with_name("flash_api.so").write_bytes(code.replace(mark, here))
    sys.path.insert(0, str(folder))
    import flash_attn3_jax
    return flash_attn3_jax


def fa3(arguments):
    import jax
    import jax.numpy as jnp
    if not arguments.lower and jax.default_backend() != "gpu":
        print("this jax has no GPU", file=sys.stderr)
        return NOT_THERE
    attend, rates, scale = fa3_module(arguments.wheel).flash_mha, [], HEAD ** -.5
    tell = lambda: print(json.dumps({"attention_rates": rates}), flush=True)
    for name, heads, kv_heads, queries, keys, causal in SHAPES:
        def forward(q, k, v, causal=causal):
            return attend(q, k, v, softmax_scale=scale, is_causal=causal)

        def both(q, k, v, grad, forward=forward):
            return jax.vjp(forward, q, k, v)[1](grad)

        sizes = [(1, queries, heads, HEAD), (1, keys, kv_heads, HEAD), (1, keys, kv_heads, HEAD), (1, queries, heads, HEAD)]
        if arguments.lower:
            import jax.export
            unchecked = [jax.export.DisabledSafetyCheck.custom_call(call) for call in ("flash_mha_fwd", "flash_mha_bwd")]
            operands = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
            for call, count in ((forward, 3), (both, 4)):
                jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=unchecked)(*operands[:count])
            rates.append({"shape": name, "lowered": True})
            tell()
            continue
        operands = [jax.random.normal(jax.random.PRNGKey(i), size, jnp.bfloat16) for i, size in enumerate(sizes)]
        one, two = jax.jit(forward), jax.jit(both)
        ahead = steady_seconds(lambda: one(*operands[:3]), jax.block_until_ready)
        back = steady_seconds(lambda: two(*operands), jax.block_until_ready) - ahead
        flops = 4 * HEAD * heads * (queries * (queries + 1) / 2 if causal else queries * keys)
        rates.append({"shape": name, "forward": {"seconds": ahead, "flops_per_second": flops / ahead},
                      "backward": {"seconds": back, "flops_per_second": 2.5 * flops / back}})
        tell()
    return 0


def stock(arguments):
    """One response a micro-batch, log-probs of the response alone, gradients in bfloat16: what a trainer of dense rows does at least."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import LlamaConfig, LlamaForCausalLM
    on_gpu = arguments.device == "cuda"
    prefix, suffix, n = (10240, 2048, 32) if on_gpu else (24, 8, 2)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = LlamaForCausalLM(LlamaConfig(**(LLAMA if on_gpu else TINY), tie_word_embeddings=False, attn_implementation="sdpa")).to(torch.bfloat16)
        ids = torch.randint(0, model.config.vocab_size, (n, prefix + suffix))
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def step(rows):
        model.zero_grad(set_to_none=True)
        for row in rows:
            logits = model(row[None], logits_to_keep=suffix + 1, use_cache=False).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits.float(), row[prefix:], reduction="sum").div(n * suffix).backward()
        synchronize()

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION} if on_gpu else {"math": SDPBackend.MATH}
    steps = {}
    for name, backend in backends.items():
        try:
            with sdpa_kernel(backend):
                step(ids[:2])
                begin = time.perf_counter()
                step(ids)
                steps[f"dense, {name}"] = {"seconds": time.perf_counter() - begin, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}
        except RuntimeError as error:  # the other backend says something, too
            steps[f"dense, {name}"] = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({"prefix": prefix, "suffix": suffix, "n": n, "steps": steps}), flush=True)
    return 0 if any("seconds" in each for each in steps.values()) else 6


def fla(arguments):
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    on_gpu = arguments.device == "cuda"
    rows, run, heads = (16384, 2048, 32) if on_gpu else (32, 16, 2)
    torch.manual_seed(0)
    draw = lambda *sizes: torch.randn(rows // run, run, heads, *sizes, device=arguments.device, dtype=torch.bfloat16)
    q, k, v = (draw(HEAD).requires_grad_() for _ in range(3))
    g = (-torch.nn.functional.softplus(draw().float())).requires_grad_()
    beta, grad = draw().sigmoid().detach().requires_grad_(), draw(HEAD)
    forward = lambda: chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    finish = lambda _: torch.cuda.synchronize() if on_gpu else None
    rates = []
    for operation, call in (("delta_rule", forward),
                            ("add_delta_rule_backward", lambda: torch.autograd.grad(forward(), (q, k, v, g, beta), grad))):
        try:
            seconds = steady_seconds(call, finish)
        except Exception as error:  # without a GPU a rehearsal has a stand-in, or nothing
            if on_gpu:
                raise
            print(f"kernels of flash-linear-attention need a GPU: {error}", file=sys.stderr)
            return NOT_THERE
        rates.append({"operation": operation, "rows": rows, "seconds": seconds - sum(rate["seconds"] for rate in rates)})
        print(json.dumps({"rates": rates}), flush=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fa3", "stock", "fla"))
    parser.add_argument("wheel", nargs="?")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--lower", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "fa3" and not arguments.wheel:
        parser.error("fa3 needs the wheel of flash-attn3-jax")
    return {"fa3": fa3, "stock": stock, "fla": fla}[arguments.what](arguments)


if __name__ == "__main__":
    sys.exit(main())
