"""Small models, data and a run of TRL's trainers whose batches couple their rows, for test_trl_batches.py and test_trl_tree.py."""

import contextlib
import copy

import torch
from datasets import Dataset
from espalier.hf import probe
from test_trl_trainer import load_example
from trl_recording import recorded

example = load_example()


def words(seed, count):
    return "".join(f" w{3 + (11 * seed + 7 * k + k * k * (seed % 5 + 1)) % 93}" for k in range(count))


SYSTEM = words(1, 24)  # every row's first tokens, as a system prompt's


def preferences(count=8):
    """Pairs below prompts of several lengths, two of them below the same prompt."""
    prompts = [SYSTEM + words(2 + i // 2, 5 + 3 * (i // 2)) for i in range(count)]
    return Dataset.from_dict({"prompt": prompts, "chosen": [words(30 + i, 3 + i % 4) for i in range(count)],
                              "rejected": [words(60 + i, 2 + i % 5) for i in range(count)]})


def margins():
    return preferences().add_column("margin", [.1 * i for i in range(8)])


def unpaired(count=8):
    rows = preferences(count)
    return Dataset.from_dict({"prompt": rows["prompt"], "completion": [rows["rejected" if i % 3 else "chosen"][i] for i in range(count)],
                              "label": [i % 3 == 0 for i in range(count)]})


def answers(count=8):
    rows = preferences(count)
    return Dataset.from_dict({"prompt": rows["prompt"], "completion": rows["chosen"]})


def texts(count=8):
    rows = answers(count)
    return Dataset.from_dict({"text": [a + b for a, b in zip(rows["prompt"], rows["completion"])]})


def stories(count=8):
    """Texts in a field of another name."""
    return texts(count).rename_column("text", "story")


def prompts(count=8):
    return answers(count).select_columns(["prompt"])


def chats(count=8):
    rows = answers(count)
    return Dataset.from_dict({"messages": [[{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
                                           for prompt, completion in zip(rows["prompt"], rows["completion"])]})


def answering(trainer_class):
    """A trainer whose student's answers depend on the prompt alone: sampled tokens would differ where a weight's last bit does."""

    class Answering(trainer_class):
        def _generate_single_turn(self, prompt_ids, *_):
            return [[3 + (sum(ids) + 7 * t) % 90 for t in range(3 + sum(ids) % 5)] for ids in prompt_ids]

    return Answering


def sampling(trainer_class):
    """A GKD trainer whose models answer by the prompt alone, where it has them answer at all."""

    class Sampling(trainer_class):
        @staticmethod
        def generate_on_policy_outputs(model, inputs, generation_config):
            ids, mask = inputs["prompts"], inputs["prompt_attention_mask"]
            answers = 3 + ((ids * mask).sum(1, keepdim=True) + 7 * torch.arange(6)) % 90
            tokens = torch.cat([ids, answers], 1)
            labels = torch.cat([torch.full_like(ids, -100), answers], 1)
            return tokens, torch.cat([mask, torch.ones_like(answers)], 1), labels

    return Sampling


def teacher():
    """A wider model than the student."""
    config = copy.deepcopy(example.small_model().config)
    config.hidden_size, config.num_hidden_layers, config.layer_types = 96, 3, ["full_attention"] * 3
    torch.manual_seed(2)
    return type(example.small_model())(config)


def chat_tokenizer():
    """Its template marks what an assistant says."""
    tokenizer = example.tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}{% endgeneration %} "
                               "{% else %}{{ m['content'] }} {% endif %}{% endfor %}")
    return tokenizer


def scorer():
    """A sequence classifier with one number a row."""
    from transformers import Qwen3ForSequenceClassification
    config = copy.deepcopy(example.small_model().config)
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return Qwen3ForSequenceClassification(config)


def run(trainer_class, config_class, dataset, folder, *, make=None, attention=None, reference=False, teacher=None, chat=False,
        prepare=None, **settings):
    """The trainer after two windows of two micro-batches of four rows, with `losses`, `grads` and `unique`, a count of the token rows of
    every call of the backbones, made from what TRL passed."""

    model = (make or example.small_model)()
    if attention:
        model.set_attn_implementation(attention)
    model.config.pad_token_id = 0
    more = {"ref_model": copy.deepcopy(model)} if reference else {"teacher_model": teacher()} if teacher else {}
    config = config_class(**dict(dict(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to=[], save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=2 if reference else 4, gradient_accumulation_steps=2, learning_rate=.05, optim="sgd",
        lr_scheduler_type="constant", max_steps=2, seed=7, disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False), **settings))
    trainer = recorded(trainer_class)(model=model, args=config, processing_class=chat_tokenizer() if chat else example.tokenizer(), train_dataset=dataset(), **more)
    if prepare:
        prepare(trainer)
    with counted_rows(trainer) as trainer.counts:
        trainer.train()
    return trainer


@contextlib.contextmanager
def counted_rows(trainer):
    """[rows run, unique rows, rows], of all calls that TRL makes of the backbones of the policy, the reference and the teacher. Rows are unique by
    their tokens from the first on, in one call."""
    counts = {"run": 0, "unique": 0, "all": 0}
    undo = []
    for model in {id(m): m for m in (trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "teacher_model", None))
                  if m is not None}.values():
        base = model.get_base_model() if hasattr(model, "get_base_model") else model

        def before(_, args, kwargs):  # of what TRL passes to the backbone
            if "espalier" in kwargs or probe.running():
                return
            ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            rows = [row[on.bool()].tolist() for row, on in zip(ids, mask)]
            counts["unique"] += len({tuple(row[:t + 1]) for row in rows for t in range(len(row))})
            counts["all"] += sum(map(len, rows))

        def inside(_, args, kwargs):  # of what reaches the first layer
            if probe.running():
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            counts["run"] += hidden.shape[0] * hidden.shape[1]

        undo += [base.base_model.register_forward_pre_hook(before, with_kwargs=True),
                 base.base_model.layers[0].register_forward_pre_hook(inside, with_kwargs=True)]
    try:
        yield counts
    finally:
        for handle in undo:
            handle.remove()
