"""espalier.megatron on a device: a step verified, then seconds of Megatron's own step and of the shared one, and of a step that shares nothing.

    device_megatron.py --device cuda|cpu [--layers 4] [--hidden 4096] [--prompt 8192] [--response 1024] [--n 8] [--repetitions 3]

Layers of Llama-3-8B's proportions. On a GPU: bfloat16 and Transformer Engine's layers. On a CPU: float32, Megatron's local layers and what stands in
for a GPU (megatron/cpu.py); seconds are those of the processor, because other work beside it hardly changes them. `overhead`: of a step that shares
nothing, the seconds outside of Megatron's own function over those inside. Prints JSON. Exit code: 6 if the
shared step is too far from Megatron's own, 8 where a package or the GPU is missing.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_THERE, FAILED = 8, 6
VOCABULARY = 32768


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in dict(layers=4, hidden=4096, prompt=8192, response=1024, n=8, repetitions=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def found(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False


def missing(device):
    """The reason why nothing can run here, or ""."""
    import torch
    packages = ["megatron.core", *(["transformer_engine"] if device == "cuda" else [])]
    absent = [name for name in packages if not found(name)]
    if absent:
        return f"this Python has no {' and no '.join(absent)}"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return ""


def model_of(options):
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    on_gpu = options.device == "cuda"
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(3)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden, num_attention_heads=max(2, options.hidden // 128),
        num_query_groups=max(1, options.hidden // 512), ffn_hidden_size=options.hidden * 7 // 2, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=on_gpu, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False, use_cpu_initialization=not on_gpu)
    layer = (gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec() if on_gpu
             else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = GPTModel(config=config, transformer_layer_spec=layer, vocab_size=VOCABULARY if on_gpu else 512, max_sequence_length=1 << 17,
                     position_embedding_type="rope", parallel_output=True)
    return model.to(dtype).cuda() if on_gpu else model.to(dtype)


def group(model, prompt, response, n, shared=True):
    import torch
    draw = lambda count: torch.randint(0, model.vocab_size, (count,)).tolist()
    common = draw(prompt)
    return [dict(prompt_ids=common if shared else draw(prompt), response_ids=draw(response)) for _ in range(n)]


def forward_step(device):
    """A trainer's own, one rollout a micro-batch."""
    import torch

    def step(rollouts, model):
        record = next(rollouts)
        prompt, ids = len(record["prompt_ids"]), torch.tensor([record["prompt_ids"] + record["response_ids"]], device=device)
        n = ids.shape[1]
        reads = torch.zeros_like(ids)
        reads[0, prompt - 1:n - 1] = 1
        mask = None if device == "cuda" else torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]

        def loss(logits):
            own = logits[0, prompt - 1:n - 1].float()
            value = torch.nn.functional.cross_entropy(own, ids[0, prompt:])
            return value, dict(loss=value.detach())

        return model(ids, torch.arange(n, device=device)[None], mask, loss_mask=reads), loss

    return step


def timed(call, device):
    """(what a call returns, its seconds)"""
    import torch
    clock = time.perf_counter if device == "cuda" else time.process_time
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = clock()
    out = call()
    wait()
    return out, clock() - start


def measured(options):
    import torch
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import espalier.megatron as em
    model, device = model_of(options), options.device
    rollouts = group(model, options.prompt, options.response, options.n)
    apart = group(model, options.prompt + options.response - 8, 8, options.n, shared=False)
    em.install(model, verify=True)
    result = em.phased_step(model, rollouts, lambda wave: -wave.logprobs.sum() / options.response, wave_tokens=max(64, options.prompt))
    em.install(model, verify=False)
    own, inside = get_forward_backward_func(), []
    step = forward_step(device)

    def within(**arguments):
        out, seconds = timed(lambda: own(**arguments), device)
        inside.append(seconds)
        return out

    def run(function, records):
        for p in model.parameters():
            p.grad = None
        function(forward_step_func=step, data_iterator=iter(records), model=model, num_microbatches=len(records), seq_length=1, micro_batch_size=1,
                 forward_only=False)

    seconds, peak = {}, {}
    for name, function, records in (("dense", own, rollouts), ("shared", em.forward_backward(own), rollouts), ("apart", em.forward_backward(within), apart)):
        run(function, records[:2])  # kernels are chosen in a first call
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        inside.clear()
        found = [timed(lambda: run(function, records), device)[1] for _ in range(options.repetitions)]
        seconds[name] = min(found)
        peak[name] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    worst = result.verification.worst
    return {"megatron_core": importlib.metadata.version("megatron-core"),
            "transformer_engine": importlib.metadata.version("transformer_engine") if device == "cuda" else None,
            "dtype": "bfloat16" if device == "cuda" else "float32", "verdict": result.verification.verdict,
            "worst": {"parameter": worst["parameter"], "ratio": worst["ratio"]},
            "seconds_of": seconds, "speedup": seconds["dense"] / seconds["shared"], "peak_bytes": peak,
            "rows": result.rows, "rows_without_sharing": result.rows_without_sharing, "row_ratio": result.rows_without_sharing / result.rows,
            "overhead": min(all_of / own_part - 1 for all_of, own_part in zip(found, inside)), "seconds": seconds["shared"]}


def main():
    options = arguments()
    reason = missing(options.device)
    if reason:
        print(reason, file=sys.stderr)
        return NOT_THERE
    if options.device == "cpu":
        sys.path.insert(0, str(HERE / "megatron"))
        import cpu  # noqa: F401  before megatron
        import torch
        torch.set_num_threads(1)
    from espalier.errors import Error
    try:
        print(json.dumps(measured(options)))
    except Error as error:
        print(error, file=sys.stderr)
        return FAILED if error.kind == "verification" else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
