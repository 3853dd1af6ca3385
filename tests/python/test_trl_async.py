"""TRL's AsyncGRPOTrainer with espalier.trl's attention against the same loss of every sample alone, and its rows against TRL's trie."""

import queue
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_models import all_float64
from test_trl_trainer import load_example

pytest.importorskip("trl.experimental.async_grpo")
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TreeRow

from espalier.trl import AsyncGRPOTrainer
from espalier.trl.asynchronous import NAME, register_attention, subtree_ends


class Nothing:
    """A worker and a transfer that have all their samples, and an engine that needs no weights."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def __getattr__(self, name):
        return lambda *_: None


def samples_of(prompts):
    """Four conversations each of prompts that share a beginning: two answers, and of one answer two continuations behind a tool's tokens."""
    draw = random.Random(3)
    words = lambda n: [draw.randrange(3, 96) for _ in range(n)]
    system, out = words(11), []
    for group in range(prompts):
        prompt = system + words(20 + 3 * group)
        answers = [words(7), words(9)]
        forked = prompt + answers[1]
        for number, (context, answer, masked) in enumerate((
                (prompt, answers[0], 0), (prompt, answers[1], 0), (forked, words(8), 3), (forked, words(6), 3))):
            ids = context + answer
            trained = [0] * (len(context) + masked) + [1] * (len(answer) - masked)
            out.append(RolloutSample(prompt=[], completion=[], input_ids=np.array(ids), completion_mask=np.array(trained),
                                     old_log_probs=np.array([-4.5 * t for t in trained], dtype=np.float32), advantage=(1.5, -1., .5, -.25)[number],
                                     model_version=0, group_id=group, metrics={}))
    return out


def dense_gradients(model, samples, trainer):
    """Gradients of the sum over samples, each run alone."""
    tokens = sum(int(s.completion_mask.sum()) for s in samples)
    for s in samples:
        ids, trained = torch.tensor(s.input_ids), torch.tensor(s.completion_mask).bool()
        logits = model(ids[None]).logits[0, :-1].double() / trainer.temperature
        log_probs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][trained[1:]]
        ratio = (log_probs - torch.tensor(s.old_log_probs)[trained].double()).exp()
        (-torch.min(ratio * s.advantage, ratio.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high) * s.advantage).sum() / tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradients_are_those_of_every_sample_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")  # the trainer looks up the FLOP rate of a GPU, use_cpu or not
    example, samples = load_example(), samples_of(2)
    example.small_model().double().save_pretrained(tmp_path / "model")
    example.tokenizer().save_pretrained(tmp_path / "model")
    grads = {}

    class Recording(AsyncGRPOTrainer):
        def training_step(self, model, *args):
            loss = super().training_step(model, *args)
            grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return loss

    config = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, fp16=False, report_to=[], save_strategy="no", per_device_train_batch_size=len(samples),
        gradient_accumulation_steps=1, num_generations=4, max_steps=1, token_budget=0, dtype="auto", optim="sgd", max_grad_norm=0., disable_tqdm=True,
        dataloader_pin_memory=False)
    worker = Nothing(3 * samples)  # batches are fetched ahead
    trainer = Recording(model=str(tmp_path / "model"), args=config, rollout_worker=worker, weight_transfer=worker,
                        train_dataset=Dataset.from_dict({"prompt": ["", ""]}))
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, attn_implementation="eager")
    expected = dense_gradients(model, samples, trainer)
    assert set(grads) == set(expected)
    whole = sum(g.square().sum() for g in expected.values())
    assert whole > 0
    # TRL's head works in float32: a log-prob near -4.6 is rounded by up to 2^-22, and with it the ratio that weighs the token's gradient.
    assert float((sum((grads[n] - g).square().sum() for n, g in expected.items()) / whole).sqrt()) < 2 * 2 ** -21


def packed_row(samples):
    row = TreeRow()
    for sample in samples:
        row.add({name: torch.tensor(getattr(sample, name)) for name in ("input_ids", "completion_mask", "old_log_probs")} | dict(
            advantage=sample.advantage, group_id=sample.group_id))
    return row.pack()


@all_float64()
@pytest.mark.parametrize("window", [None, 200])  # one that hides nothing
def test_hidden_states_and_gradients_are_those_of_every_sample_alone(window):
    register_attention()
    model, samples = load_example().small_model().double(), samples_of(2)
    packed, found = packed_row(samples), []
    weigh = lambda hidden: (hidden * torch.cos(torch.arange(hidden.numel(), dtype=torch.float64)).view_as(hidden)).sum()
    hidden = []
    for sample in samples:
        at = [p - 1 for p, trained in enumerate(sample.completion_mask) if trained]
        hidden.append(model.model(torch.tensor(sample.input_ids)[None]).last_hidden_state[0, at])
    weigh(torch.cat(hidden)).backward()
    found.append((torch.cat(hidden).detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    model.zero_grad()
    model.set_attn_implementation(NAME)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window
    longest = packed["tree_max_seqlens"].tolist()
    states = model.model(packed["input_ids"][None], position_ids=packed["position_ids"][None], tree_kv_index=packed["tree_kv_index"],
                         tree_cu_seqlens_q=packed["tree_cu_seqlens_q"], tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
                         tree_max_seqlen_q=longest[0], tree_max_seqlen_k=longest[1]).last_hidden_state[0, packed["token_index"]]
    weigh(states).backward()
    found.append((states.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (a, grads), (b, shared) = found
    assert set(grads) == set(shared)
    for expected, got in [(a, b), *((grads[name], shared[name]) for name in grads)]:
        assert float((expected - got).norm() / expected.norm()) < 1e-10


def test_the_end_of_a_subtree_is_behind_the_last_row_that_sees_its_own():
    packed = packed_row(samples_of(3))
    q, k, index = (packed[name].tolist() for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index"))
    ends = subtree_ends(packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"]).tolist()
    seen = {(i, j) for s in range(len(q) - 1) for i in range(q[s], q[s + 1]) for j in index[k[s]:k[s + 1]] if j <= i}
    assert seen == {(i, j) for j, end in enumerate(ends) for i in range(j, end)}
    assert len(ends) == len(packed["input_ids"]) < sum(len(s.input_ids) for s in samples_of(3)) / 2
