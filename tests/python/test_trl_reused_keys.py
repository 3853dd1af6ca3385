"""TRL's trainers on models whose last layers read the keys and values of earlier ones (Gemma 3n, Gemma 4 E2B and E4B): shared, without a note, and
in float64 the plain trainer's losses and gradients to 1e-10.

transformers runs such layers of Gemma 4 for the last rows alone if it is told a number of `logits_to_keep`, as TRL's distillation does.
"""

import logging

import pytest
import torch
import transformers

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

import trl_batches as data  # noqa: E402
from hf_models import all_float64  # noqa: E402
from test_trl_batches import distance as distance_of_batches  # noqa: E402
from test_trl_trainer import furthest, load_example, run  # noqa: E402
from trl.kernels import chunked_divergence, chunked_logprob  # noqa: E402

BOUND = 1e-10
example = load_example()
LAYERS = dict(layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=16)
COMMON = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0, eos_token_id=1,
              bos_token_id=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, **LAYERS)
FAMILIES = {
    "Gemma4": dict(global_head_dim=16), "Gemma4Unified": dict(global_head_dim=16),
    "Gemma3n": dict(laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4),
}


def made(family, attention="sdpa"):
    torch.manual_seed(0)
    config = getattr(transformers, family + "TextConfig")(**COMMON, **FAMILIES[family], attn_implementation=attention)
    model = getattr(transformers, family + "ForCausalLM")(config).double()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * .2 + (parameter.dim() == 1))
    return model


class _Wide:
    """torch, in which float32 is float64: TRL's fused head holds its sums in float32 by name."""

    def __getattr__(self, name):
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.fixture(autouse=True)
def nothing_is_rounded_to_float32(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # norms and rotary tables, in checkpointed layers too
    for module in (chunked_logprob, chunked_divergence):
        monkeypatch.setattr(module, "torch", _Wide())


def notes(caplog):
    return [record.message for record in caplog.records if "not shared" in record.message]


@pytest.mark.parametrize("kind, family, checkpointing", [("GRPO", "Gemma4", False), ("RLOO", "Gemma4", True), ("GRPO", "Gemma4Unified", True),
                                                         ("RLOO", "Gemma3n", False)])
def test_prompts_are_shared_exactly(kind, family, checkpointing, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(example, "small_model", lambda: made(family))
    settings = dict(gradient_checkpointing=checkpointing, max_steps=2, learning_rate=1e-3, max_completion_length=6)
    runs = []
    with caplog.at_level(logging.WARNING, "espalier"):
        for trainers in (trl, shared):
            runs.append(run(example, getattr(trainers, kind + "Trainer"), getattr(trl, kind + "Config"), tmp_path / trainers.__name__, **settings))
    assert not notes(caplog)
    assert 0 < max(furthest(*runs)) <= BOUND
    assert 0 < runs[1].shared_rows["run"] < runs[1].shared_rows["without_sharing"] / 2


@pytest.mark.parametrize("attention, verify", [("sdpa", False), ("eager", False), ("sdpa", True)])
def test_a_number_of_rows_for_the_head_is_not_for_the_layers(attention, verify, tmp_path, caplog):
    """Distillation calls the backbone with `logits_to_keep`."""
    make, runs = lambda: made("Gemma4", attention), []
    with all_float64(), caplog.at_level(logging.WARNING, "espalier"):
        for trainers in (trl, shared):
            trainer = data.answering(trainers.DistillationTrainer)
            runs.append(data.run(_set(trainer, verify) if trainers is shared else trainer, trl.DistillationConfig, data.prompts, tmp_path / trainers.__name__,
                                 make=make, teacher=lambda: data.teacher().double(), max_completion_length=8, learning_rate=1e-3))
    assert not notes(caplog)
    assert 0 < max(distance_of_batches(*runs)) <= BOUND
    assert 0 < runs[1].shared_rows["run"] < .75 * runs[1].shared_rows["without_sharing"]
    assert not verify or runs[1].verification.verdict == "pass"


def _set(trainer, verify):
    return type(trainer.__name__, (trainer,), {"__init__": lambda self, *args, **more: trainer.__init__(self, *args, verify=verify, **more)})
