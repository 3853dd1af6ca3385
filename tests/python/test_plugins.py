"""The plug-ins of examples/ in other trainers' own commands, each beside the same command without it: two steps of a tiny model in float32, so the printed
losses and norms are equal but for the last digit. ESPALIER_PLUGINS names Pythons that have the trainers: axolotl=PATH, swift=PATH, llamafactory=PATH."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from conftest import ROOT
from test_trl_trainer import load_example

PYTHONS = dict(entry.split("=", 1) for entry in os.environ.get("ESPALIER_PLUGINS", "").split(os.pathsep) if entry)
EXAMPLES = ROOT / "examples"
AXOLOTL = dict(base_model="model", sequence_len=256, micro_batch_size=4, gradient_accumulation_steps=1, max_steps=2, optimizer="adamw_torch",
               learning_rate=1e-4, output_dir="out", bf16=False, fp16=False, tf32=False, save_strategy="no", seed=7)
PAIRS = dict(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected", prompt_format="{prompt}", chosen_format="{chosen}",
             rejected_format="{rejected}")
KINDS = {
    "dpo": dict(rl="dpo", datasets=[dict(path="pairs.jsonl", ds_type="json", split="train", type=PAIRS)]),
    "ipo": dict(rl="ipo", datasets=[dict(path="pairs.jsonl", ds_type="json", split="train", type=PAIRS)]),
    "kto": dict(rl="kto", remove_unused_columns=False, datasets=[dict(path="labelled.jsonl", ds_type="json", split="train", type=dict(field_prompt="prompt", field_label="label"))]),
    "reward": dict(base_model="judge", reward_model=True, model_type="AutoModelForSequenceClassification", num_labels=1, chat_template="tokenizer_default",
                   datasets=[dict(path="judged.jsonl", ds_type="json", split="train", type="bradley_terry.chat_template")]),
    "grpo": dict(rl="grpo", datasets=[dict(path="pairs.jsonl", ds_type="json", split="train", type="tasks.prompts")],
                 trl=dict(num_generations=4, max_completion_length=12, reward_funcs=["tasks.reward"], use_vllm=False)),
    "sft": dict(datasets=[dict(path="texts.jsonl", ds_type="json", split="train", type="completion")], sample_packing=False, pad_to_sequence_len=False,
                gradient_checkpointing=True),  # reentrant by axolotl's default
}
TASKS = """
def reward(completions, **_):
    return [len(set(text.split())) / 10 for text in completions]


def prompts(cfg, *_, **__):
    return lambda example, tokenizer=None: {"prompt": example["prompt"]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, data in each trainer's form, a reward."""
    folder, example = tmp_path_factory.mktemp("plugins"), load_example()
    example.small_model().save_pretrained(folder / "model")
    tokenizer = example.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)  # whose head is drawn here, not once a run
    judge.config.pad_token_id = tokenizer.pad_token_id
    judge.save_pretrained(folder / "judge")
    for name in ("model", "judge"):
        tokenizer.save_pretrained(folder / name)
    words = lambda seed, n: " ".join(f"w{3 + (7 * seed + k * k) % 90}" for k in range(n))
    lines = lambda name, records: (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    pairs = [(words(i, 60), words(i + 31, 12), words(i + 57, 9)) for i in range(16)]
    lines("pairs.jsonl", [dict(prompt=p, chosen=c, rejected=r) for p, c, r in pairs])
    lines("judged.jsonl", [dict(system="", input=p, chosen=c, rejected=r) for p, c, r in pairs])
    lines("labelled.jsonl", [dict(prompt=words(0, 60), completion=words(i + 3, 9 + i % 4), label=i % 2 == 0) for i in range(16)])
    lines("texts.jsonl", [dict(text=words(0, 60) + " " + words(i + 3, 9 + i % 4)) for i in range(16)])
    lines("messages.jsonl", [dict(messages=[dict(role="user", content=p), dict(role="assistant", content=c)], rejected_response=r) for p, c, r in pairs])
    (folder / "instructions.json").write_text(json.dumps([dict(instruction=words(0, 60), input="", output=words(i + 3, 9 + i % 4)) for i in range(16)]))
    (folder / "data.yaml").write_text("demo:\n  path: instructions.json\n  source: local\n  converter: alpaca\n")
    (folder / "tasks.py").write_text(TASKS)
    return folder


def run(folder, name, *command):
    """(printed losses and norms, rows run, rows without sharing); the rows are None without the plug-in."""
    if name not in PYTHONS:
        pytest.skip(f"ESPALIER_PLUGINS names no Python with {name}")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (ROOT / "python", EXAMPLES, folder))), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
               AXOLOTL_DO_NOT_TRACK="1")
    env.setdefault("ESPALIER_CORE_LIBRARY", str(ROOT / "build/libespalier_core.so"))
    done = subprocess.run([PYTHONS[name], *map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert "prompts are not shared" not in text
    numbers = [float(x) for x in re.findall(r"(?:'loss'|'grad_norm'|\bloss|grad_norm)\W+([-0-9.e]+)", text)]
    rows = re.findall(r"(\d+) rows run instead of (\d+)", text)
    return numbers, *(map(int, rows[-1]) if rows else (None, None))


def check(plain, shared):
    assert plain[1] is None and 0 < shared[1] < .7 * shared[2], (plain, shared)
    assert len(plain[0]) == len(shared[0]) >= 2, (plain, shared)
    assert all(abs(a - b) <= 2e-3 * max(abs(a), 1e-3) for a, b in zip(plain[0], shared[0])), (plain, shared)


@pytest.mark.parametrize("kind", KINDS)
def test_axolotl(folder, kind):
    found = []
    for more in ({}, dict(plugins=["axolotl_plugin.SharedPrompts"])):
        (folder / "config.yml").write_text(json.dumps(dict(AXOLOTL, **KINDS[kind], **more)))
        found.append(run(folder, "axolotl", "-m", "axolotl.cli.train", "config.yml"))
    check(*found)


def test_ms_swift(folder):
    program = [Path("-m"), "swift.cli.rlhf", "--rlhf_type", "dpo", "--model", "model", "--model_type", "qwen3", "--template", "qwen3", "--dataset", "messages.jsonl",
               "--use_hf", "true", "--tuner_type", "full", "--max_steps", 2, "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1,
               "--learning_rate", 1e-4, "--output_dir", "swift", "--save_strategy", "no", "--report_to", "none", "--torch_dtype", "float32",
               "--logging_steps", 1, "--max_length", 512, "--split_dataset_ratio", 0]
    check(run(folder, "swift", *program), run(folder, "swift", *program, "--external_plugins", EXAMPLES / "swift_plugin.py"))


def test_llama_factory(folder):
    found = []
    for more in ({}, dict(kernel_config=dict(name="espalier"))):
        (folder / "sft.yaml").write_text(json.dumps(dict(
            model="model", train_dataset="data.yaml", template="qwen3_nothink", output_dir="factory", micro_batch_size=4, global_batch_size=4, cutoff_len=256,
            learning_rate=1e-4, max_steps=2, logging_steps=1, bf16=False, flash_attn="sdpa", **more)))
        found.append(run(folder, "llamafactory", EXAMPLES / "llamafactory_plugin.py", "sft", "sft.yaml"))
    check(*found)
