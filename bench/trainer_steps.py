"""Seconds of a training step of TRL's own trainers beside espalier.trl's, and of a dense loop beside espalier.hf for agents' turns, against the rows saved.

    tools/python bench/trainer_steps.py [--cases dpo-250/300,reward-2000/300] [--scale 4] [--rounds 3] [--hidden 512] [--layers 2]
                                        [--fsdp 2] [--out bench/results/trainer_steps.jsonl]

Cases: dpo-P/R (two pairs), reward-P/R and sft-P/R (eight answers below one prompt of P tokens, R each), texts-P/R (the same texts as those of sft,
with labels on the prompt too), grpo-P/R (a window of two micro-batches of four answers each, one prompt a rank; without generation), agent-P/R/T (two trajectories of T turns of R
tokens and R observed ones below a system prompt of P). --scale divides all lengths, for small machines: row ratios stay, and attention's share falls.
Each run is a process of its own, plain and shared in turns; a trainer's second step is timed, in seconds of processors, which other work
disturbs less. "of rows": the speed-up over the row ratio. --fsdp 1 or 2: two ranks, each with such a batch, whose trainers shard the model with FSDP
over gloo; the slower rank counts.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]
CASES = "dpo-250/300,dpo-4000/400,reward-2000/300,sft-4000/600,agent-4000/300/10"


def lengths_of(case, scale):
    kind, numbers = case.split("-")
    lengths = [int(number) for number in numbers.split("/")]
    turns = lengths[2:]
    return kind, [max(2, length // scale) for length in lengths[:2]] + turns


def config(options):
    from transformers import Qwen3Config
    hidden = options.hidden
    return Qwen3Config(vocab_size=options.vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=options.layers,
                       num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64, max_position_embeddings=16384,
                       tie_word_embeddings=True, pad_token_id=0, num_labels=1)


def trainer_step(options, kind, prompt, answer):
    """Seconds of the second step, and rows of the batch without and with sharing."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    import espalier.trl
    import trl_batches
    start = trl_batches.words(1, prompt)
    answers = [trl_batches.words(30 + i, answer) for i in range(16)]
    if kind == "dpo":
        rows = {"prompt": [trl_batches.words(i, prompt) for i in (1, 2)] * 2, "chosen": answers[:4], "rejected": answers[4:8]}
    elif kind == "reward":
        rows = {"prompt": [start] * 8, "chosen": answers[:8], "rejected": answers[8:]}
    elif kind == "texts":
        rows = {"text": [start + answer for answer in answers]}
    else:
        rows = {"prompt": [start] * 16, "completion": answers}
    name, batch = {"dpo": ("DPO", 2), "reward": ("Reward", 4), "sft": ("SFT", 8), "texts": ("SFT", 8), "grpo": ("GRPO", 4)}[kind]
    more = {}
    if kind == "grpo":
        rows = {"prompt": [trl_batches.words(i, prompt) for i in (1, 2)] * 2}
        more = dict(reward_funcs=lambda completion_ids, **_: [float(i % 3) for i in range(len(completion_ids))])
    elif options.fsdp:  # ranks take batches in turns
        rows = {column: [value for at in range(0, len(values), batch) for value in values[at:at + batch] * 2] for column, values in rows.items()}
    torch.manual_seed(0)
    make = transformers.Qwen3ForSequenceClassification if kind == "reward" else transformers.Qwen3ForCausalLM
    model = make(config(options))
    seconds, generating = [], [0.0]

    class Timed(getattr(trl if options.run == "plain" else espalier.trl, f"{name}Trainer")):
        def training_step(self, *args, **kwargs):
            begin, generating[0] = time.process_time(), 0.0
            out = super().training_step(*args, **kwargs)
            seconds.append(time.process_time() - begin - generating[0])
            return out

        def _prepare_inputs(self, *args, **kwargs):  # GRPO generates here
            begin = time.process_time()
            out = super()._prepare_inputs(*args, **kwargs)
            generating[0] += time.process_time() - begin
            return out

    with tempfile.TemporaryDirectory() as folder:
        settings = dict(output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_strategy="no",
                        per_device_train_batch_size=batch, max_steps=2, disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False,
                        train_sampling_strategy="sequential")
        if kind == "grpo":
            settings.update(gradient_accumulation_steps=2, num_generations=8, max_completion_length=answer, generation_kwargs=dict(min_new_tokens=answer))
        else:
            settings.update(max_length=None)
        sharding = contextlib.nullcontext()
        if options.fsdp:
            import trl_sharding
            sharding = trl_sharding.sharding_on_a_cpu()
            settings.update(fsdp=True, fsdp_config=dict(version=options.fsdp, transformer_layer_cls_to_wrap=["Qwen3DecoderLayer"],
                                                        sync_module_states=False, use_orig_params=True))
        with sharding:
            trainer = Timed(model=model, args=getattr(trl, f"{name}Config")(**settings), processing_class=trl_batches.example.tokenizer(),
                            train_dataset=Dataset.from_dict(rows), **({"ref_model": make(config(options))} if kind == "dpo" else {}), **more)
            with trl_batches.counted_rows(trainer) as counts:
                trainer.train()
    shared = getattr(trainer, "shared_rows", None) if kind == "grpo" else None
    return sum(seconds[len(seconds) // 2:]), *((shared["without_sharing"], shared["run"]) if shared else (counts["all"], counts["unique"]))


def agent_step(options, system, tokens, turns):
    import torch
    from transformers import Qwen3ForCausalLM

    import espalier.hf
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config(options))
    draw = lambda count: torch.randint(3, 97, (count,)).tolist()  # noqa: E731
    start, rollouts = draw(system), []
    for _ in range(2):
        history = start
        for _ in range(turns):
            rollouts.append(dict(prompt_ids=history, response_ids=draw(tokens)))
            history = history + rollouts[-1]["response_ids"] + draw(tokens)
    count = sum(len(r["response_ids"]) for r in rollouts)

    def dense():
        for r in rollouts:
            ids = torch.tensor([r["prompt_ids"] + r["response_ids"]])
            logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(r["response_ids"])).logits
            (-logits.log_softmax(-1).gather(-1, ids[:, -len(r["response_ids"]):, None]).sum() / count).backward()

    def shared():
        espalier.hf.phased_step(model, rollouts, lambda wave: -wave.logprobs.sum() / count)

    espalier.hf.check(model)
    begin = time.process_time()
    dense() if options.run == "plain" else shared()
    seconds = time.process_time() - begin
    paths = [r["prompt_ids"] + r["response_ids"] for r in rollouts]
    from espalier import native
    shape = dict(layers=1, hidden=64, inner=64, heads=1, kv_heads=1, head_dim=64, vocabulary=100)
    plan = native.Plan([r["prompt_ids"] for r in rollouts], [r["response_ids"] for r in rollouts], shape, wave_tokens=1_000_000_000)
    return seconds, sum(map(len, paths)), int(plan.items[0].rows) if len(plan.items) == 1 else sum(int(item.rows) for item in plan.items)


def of_ranks(command, count):
    """What each of `count` processes of torch.distributed printed last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = lambda rank: dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # noqa: E731
    ranks = [subprocess.Popen(command, env=os.environ | (variables(rank) if count > 1 else {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for rank in range(count)]
    outputs = [rank.communicate() for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs):
        if rank.returncode:
            raise SystemExit(errors[-2000:])
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--fsdp", type=int, choices=[1, 2], default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", choices=["plain", "shared"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        import torch
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        kind, lengths = lengths_of(options.cases, options.scale)
        seconds, rows, unique = agent_step(options, *lengths) if kind == "agent" else trainer_step(options, kind, *lengths)
        print(json.dumps(dict(seconds=seconds, rows=rows, unique=unique)))
        return
    print(f"{'case':>20} {'plain s':>8} {'shared s':>9} {'speed-up':>9} {'row ratio':>10} {'of rows':>8}")
    for case in options.cases.split(","):
        seen = {"plain": [], "shared": []}
        for _ in range(options.rounds):
            for run, found in seen.items():
                names = ("scale", "hidden", "layers", "vocabulary", *(("fsdp",) if options.fsdp else ()))
                command = [sys.executable, __file__, "--run", run, "--cases", case, *(word for name in names
                                                                                    for word in (f"--{name}", str(getattr(options, name))))]
                found.append(max(of_ranks(command, 2 if options.fsdp else 1), key=lambda one: one["seconds"]))
        plain, shared = (statistics.median(run["seconds"] for run in seen[kind]) for kind in ("plain", "shared"))
        ratio = seen["shared"][0]["rows"] / seen["shared"][0]["unique"]
        if options.out:
            with open(options.out, "a") as file:
                file.write(json.dumps(dict(case=case, scale=options.scale, hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary,
                                           rounds=options.rounds, fsdp=options.fsdp, date=time.strftime("%Y-%m-%d"), plain_cpu_seconds=plain, shared_cpu_seconds=shared,
                                           speed_up=plain / shared, row_ratio=ratio)) + "\n")
        print(f"{case:>20} {plain:8.2f} {shared:9.2f} {plain / shared:9.2f} {ratio:10.2f} {plain / shared / ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
