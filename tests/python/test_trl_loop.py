"""Training loops that are not TRL's: SharedLoop around a micro-batch and inside of model.forward, in float64 against the same loop alone; and the log-probs of
TRL's releases without a head of their own."""

import pytest
import torch

pytest.importorskip("trl")
from hf_models import all_float64, checkpointed, gradients, make, worst

from espalier import trl as shared
from espalier.trl import head

ALLOWED = 1e-10
PROMPT = list(range(3, 20))


def batch(left=False, **more):
    """Three texts behind one prompt, padded. Positions count from 1, as LLaMA-Factory's do."""
    texts = [PROMPT + [21, 22, 23, 24], PROMPT + [21, 22, 31], PROMPT + [41, 42]]
    longest = max(map(len, texts))
    pad = lambda x, fill: [fill] * (longest - len(x)) + x if left else x + [fill] * (longest - len(x))
    ids, mask = (torch.tensor([pad(x, 0) for x in rows]) for rows in (texts, [[1] * len(x) for x in texts]))
    return dict(dict(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(1) * mask), **more)


def loss_of(model, inputs):
    logits = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    return -(logits.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0] * (inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1] != 0)).sum()


def unique():
    return len(PROMPT) + 4 + 1 + 2


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("how", ["context", "attached", "attached, checkpointing"])
def test_a_micro_batch_is_the_loop_s_own(how, left):
    model, inputs = make("Qwen3"), batch(left)
    with all_float64():
        loss_of(model, inputs).backward()
        wanted = gradients(model)
        loop = shared.SharedLoop(checkpointed(model) if "checkpointing" in how else model)
        if how == "context":
            with loop.micro_batch():
                loss_of(model, inputs).backward()
        else:
            loop.attach()
            loss_of(model, inputs).backward()
    assert worst(gradients(model), wanted)[0] <= ALLOWED
    assert loop.shared_rows == {"run": unique(), "without_sharing": int(inputs["attention_mask"].sum())}
    with torch.no_grad():  # an evaluation is the model's own
        loss_of(model, inputs)
    assert model.config._attn_implementation == "sdpa" and loop.shared_rows["run"] == unique()


@pytest.mark.parametrize("more, why", [
    (dict(attention_mask=torch.tensor([[1] * 17 + [2] * 4] * 3)), "several documents"),
    (dict(position_ids=torch.tensor([list(range(17)) + [0, 1, 2, 3]] * 3)), "position_ids"),
], ids=["documents", "positions that begin again"])
def test_rows_of_several_documents_run_the_loop_s_own_path(more, why, caplog):
    """LLaMA-Factory's reward model has both answers in one row."""
    model, inputs = make("Qwen3"), batch(**more)
    loop = shared.SharedLoop(model)
    with loop.micro_batch():
        loss_of(model, dict(inputs, attention_mask=(inputs["attention_mask"] != 0).long()) if why == "position_ids" else inputs).backward()
    assert loop.shared_rows["run"] == 0 and [why in record.getMessage() for record in caplog.records] == [True]


def test_a_context_inside_another_changes_nothing():
    """ms-swift computes the reference's log-probs inside of the loss."""
    model, inputs = make("Qwen3"), batch()
    loop = shared.SharedLoop(model)
    with loop.micro_batch(), loop._shared_backbones():
        loss_of(model, inputs).backward()
    assert loop.shared_rows["run"] == unique()


def test_verified_and_a_fault_found(monkeypatch):
    from espalier.errors import Error
    from espalier.trl.tree import Tree
    model, inputs = make("Qwen3"), batch()
    loop = shared.SharedLoop(model, verify=True)
    with loop.micro_batch():
        loss_of(model, inputs).backward()
    assert loop.verification.verdict == "pass"
    monkeypatch.setattr(Tree, "moved", lambda self, position_ids: setattr(self, "positions", 2 * self.positions) or True)
    with pytest.raises(Error, match="dense step's gradient"), shared.SharedLoop(model, verify=True).micro_batch():
        loss_of(model, inputs).backward()


def test_log_probs_without_trl_s_head(monkeypatch):
    """Older releases of TRL take a softmax over the logits, divided by the temperature."""
    monkeypatch.setattr(head, "FUSED", False)
    model = make("Qwen3")
    trainer = type("Trainer", (), {"temperature": .7, "_entropy_bonus_enabled": True})()
    ids, labels = torch.tensor([PROMPT]), torch.tensor(PROMPT[1:] + [-100])
    found, entropies = head.scored(trainer, model, labels, input_ids=ids)
    wanted = (model(input_ids=ids, use_cache=False).logits[0] / .7).log_softmax(-1)
    assert (found[:-1] - wanted[:-1].gather(1, labels[:-1, None])[:, 0]).abs().max() < 1e-12
    assert (entropies + (wanted.exp() * wanted).sum(-1)).abs().max() < 1e-12 and entropies.requires_grad
    assert head.stand_in(model, ids[:, :1]).shape[:2] == (1, 1)
