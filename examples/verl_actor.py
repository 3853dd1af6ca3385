"""verl's actor worker with shared prompts: log-probs and updates of the real engine, on a CPU.

    VERL_ENGINE_VENDOR=espalier python examples/verl_actor.py [--steps 2]

One environment variable is all that differs from verl's own worker (--plain). On GPUs it is the same variable in front of verl's
own command; see examples/verl_grpo.sh. verl has no platform for a machine without a GPU, so verl_cpu.py brings a small one.
"""

import argparse
import functools
import os
import tempfile
from pathlib import Path

if __name__ == "__main__":  # verl reads these when it is imported
    for name, value in dict(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu,espalier.verl", HF_HUB_OFFLINE="1", RANK="0", WORLD_SIZE="1",
                            LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo").items():
        os.environ.setdefault(name, value)

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def write_model(folder):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, head_dim=16, initializer_range=.15)).save_pretrained(folder)


def configurations(folder, strategy="fsdp2", **changes):
    """verl's configuration of the model, the engine and the optimizer."""
    take = lambda cls: {name: changes.pop(name) for name in list(changes) if name in cls.__dataclass_fields__}
    model = HFModelConfig(**{**dict(path=str(folder), load_tokenizer=False, use_remove_padding=False, enable_gradient_checkpointing=False,
                                    override_config={"attn_implementation": "sdpa"}), **take(HFModelConfig)})
    engine = FSDPEngineConfig(**{**dict(strategy=strategy, use_torch_compile=False, mixed_precision=FULL, use_dynamic_bsz=True,
                                        max_token_len_per_gpu=512, infer_max_token_len_per_gpu=512), **take(FSDPEngineConfig)})
    optimizer = FSDPOptimizerConfig(**{**dict(lr=1e-4, total_training_steps=10), **take(FSDPOptimizerConfig)})
    if changes:
        raise TypeError(f"no option of verl's: {sorted(changes)}")
    return dict(model_config=model, engine_config=engine, optimizer_config=optimizer, checkpoint_config=CheckpointConfig())


def rollouts(groups=3, n=6, prompt=120, response=16, seed=5):
    """Groups of random tokens, shuffled as verl's balancing leaves them: groups are torn over micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda k: torch.randint(3, 97, (k,), generator=generator)
    out = []
    for group in range(groups):
        shared = draw(prompt - 7 * group)
        out += [(shared, draw(int(torch.randint(2, response + 1, (1,), generator=generator)))) for _ in range(n)]
    return [out[i] for i in torch.randperm(len(out), generator=generator)]


def mini_batch(rows, dtype=torch.float32, seed=6, **settings):
    """As verl's trainer hands it to its workers: prompts padded on the left, responses on the right, then the padding taken out."""
    generator = torch.Generator().manual_seed(seed)
    p, r = (max(len(row[part]) for row in rows) for part in (0, 1))
    prompts, responses = torch.zeros(len(rows), p, dtype=torch.long), torch.zeros(len(rows), r, dtype=torch.long)
    mask = torch.zeros(len(rows), p + r, dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        prompts[i, p - len(prompt):], responses[i, :len(response)] = prompt, response
        mask[i, p - len(prompt):p + len(response)] = 1
    numbers = lambda: torch.randn(len(rows), r, generator=generator, dtype=torch.float64).to(dtype)
    data = tu.get_tensordict(dict(
        input_ids=torch.cat([prompts, responses], 1), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        prompts=prompts, responses=responses, response_mask=mask[:, p:].clone(), advantages=numbers()[:, :1].repeat(1, r),
        old_log_probs=-4.5 + .3 * numbers(), ref_log_prob=-4.5 + .3 * numbers()), non_tensor_dict={})
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, **{"temperature": 1.0, "global_batch_size": len(rows), **settings})
    return data


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="verl's own engine, as without VERL_ENGINE_VENDOR")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.plain:
        os.environ.pop("VERL_ENGINE_VENDOR", None)
    from verl.workers.engine_workers import TrainingWorker
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        write_model(Path(folder) / "model")
        worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configurations(Path(folder) / "model")))
        worker.reset()
        worker.set_loss_fn(functools.partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=6, use_dynamic_bsz=True)))
        rows = rollouts()
        for step in range(arguments.steps):
            scored = worker.infer_batch(mini_batch(rows, compute_loss=False, calculate_entropy=True, global_token_num=None))
            data = mini_batch(rows, mini_batch_size=len(rows), epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
            data["old_log_probs"] = no_padding_2_padding(scored["log_probs"], data)
            metrics = tu.get(worker.train_mini_batch(data), "metrics")
            print(f"step {step}: loss {metrics['loss'][0]:.6f}, grad_norm {metrics['grad_norm'][0]:.6f}")
        counted = getattr(worker.engine, "shared_rows", None)
        if counted:
            print(f"{counted['run']} rows run instead of {counted['without_sharing']}")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
