"""TRL's GRPOTrainer on batches with images, plain against shared, in float64: TRL's own training step on the same micro-batches, over one
accumulation window in which a group is torn."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")
from datasets import Dataset  # noqa: E402
from hf_models import all_float64, gradients, worst  # noqa: E402
from test_hf_images import FAMILIES, IMAGE, MUTUAL, batch, make  # noqa: E402
from test_trl_trainer import load_example  # noqa: E402

ALLOWED = 1e-10
BATCHED = [family for family in FAMILIES if family != "Llava"]  # whose processor pads images of a batch to one size
WITHOUT_ROUTER_LOSS = ("Glm4vMoe",)  # transformers 5.23 reads a member for it that this configuration lacks


def micro_batch(family, rollouts, seed):
    """As TRL's trainer hands it to its loss: prompts padded on the left, responses on the right, images flattened over rows."""
    generator = torch.Generator().manual_seed(seed)
    pad = lambda parts, left: torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in parts], batch_first=True, padding_side="left" if left else "right")
    ones = lambda parts, left: pad([[1] * len(x) for x in parts], left)
    prompts, responses = [r["prompt_ids"] for r in rollouts], [r["response_ids"] for r in rollouts]
    ids = pad(prompts, True)
    kinds = torch.cat([(ids == IMAGE).long(), torch.zeros_like(pad(responses, False))], 1)
    own = [r["images"] for r in rollouts if "images" in r]
    pixels = dict(pixel_values=torch.cat([x["pixel_values"] for x in own])) if own else {}
    out = dict(prompt_ids=ids, prompt_mask=ones(prompts, True), completion_ids=pad(responses, False), completion_mask=ones(responses, False),
               advantages=torch.randn(len(rollouts), generator=generator, dtype=torch.float64),
               **pixels,
               num_images=[len(r["images"].get("image_grid_thw", r["images"]["pixel_values"])) if "images" in r else 0 for r in rollouts])
    if own and "image_grid_thw" in own[0]:
        out["image_grid_thw"] = torch.cat([x["image_grid_thw"] for x in own])
    out["token_type_ids" if family in MUTUAL else "mm_token_type_ids"] = kinds
    return out


def trainer_of(kind, family, folder, **more):
    class Given(kind):
        """Its micro-batches are given, not generated."""

        def _prepare_inputs(self, inputs):
            return inputs

    example = load_example()
    config = trl.GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no", per_device_train_batch_size=4,
                            num_generations=4, gradient_accumulation_steps=2, max_completion_length=12, loss_type="grpo", max_steps=1, seed=7,
                            gradient_checkpointing=False, router_aux_loss_coef=0.0 if family in WITHOUT_ROUTER_LOSS else None)
    trainer = Given(model=make(family), reward_funcs=example.reward, args=config, processing_class=example.tokenizer(),
                    train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * 4}), **more)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model_wrapped = trainer.model
    return trainer


def window(trainer, micro_batches):
    losses = []
    for number, inputs in enumerate(micro_batches):
        trainer.accelerator.gradient_state._set_sync_gradients(number == len(micro_batches) - 1)
        losses.append(float(trainer.training_step(trainer.model, inputs, None)))
    return losses, gradients(trainer.model)


@pytest.mark.parametrize("family", BATCHED)
def test_a_window_is_trl_s_own(family, tmp_path, caplog):
    rollouts = batch(family)
    order = [0, 3, 5, 1, 4, 7, 2, 6, 8]  # groups torn over both micro-batches
    micro_batches = [micro_batch(family, [rollouts[i] for i in part], seed) for seed, part in enumerate((order[:5], order[5:]))]
    results = []
    for kind in (trl.GRPOTrainer, shared.GRPOTrainer):
        with all_float64():
            trainer = trainer_of(kind, family, tmp_path)
            results.append(window(trainer, micro_batches))
    (plain_losses, wanted), (losses, found) = results
    assert not [record.getMessage() for record in caplog.records if "not shared" in record.getMessage()]
    assert max(abs(a - b) for a, b in zip(losses, plain_losses)) <= ALLOWED * max(map(abs, plain_losses))
    whole = sum(g.square().sum() for g in wanted.values()) ** .5
    small = {name for name in wanted if wanted[name].norm() < 1e-12 * whole}
    assert all(found[name].norm() < 1e-12 * whole for name in small & set(found))
    found, wanted = ({name: g for name, g in of.items() if name not in small} for of in (found, wanted))
    # TRL's head sums its weight's gradient in float32, here over less than 64 rows.
    head = {"lm_head.weight" if "lm_head.weight" in wanted else "model.language_model.embed_tokens.weight"}
    for names, allowed in ((head, 64 ** .5 * torch.finfo(torch.float32).eps / 2), (set(wanted) - head, ALLOWED)):
        error = worst({n: found[n] for n in names}, {n: wanted[n] for n in names})
        assert error[0] <= allowed, error
    assert any("visual" in name or "vision" in name for name in wanted)
    unique = {(tuple(r["prompt_ids"]), str(r.get("images", {}).get("pixel_values", ""))) for r in rollouts}
    last = 1 if trainer.aux_loss_enabled else 0  # the router's loss counts the rows of last tokens, too
    rows = sum(len(prompt) - 1 for prompt, _ in unique) + sum(len(r["response_ids"]) + last for r in rollouts)
    assert trainer.shared_rows == {"run": rows, "without_sharing": sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rollouts)}


def test_the_tower_runs_once_for_each_prompt_with_images(tmp_path):
    family, calls = "Qwen2_5_VL", []
    rollouts = batch(family)[:3] * 2
    with all_float64():
        trainer = trainer_of(shared.GRPOTrainer, family, tmp_path)
        parts = [micro_batch(family, rollouts[:3], 0), micro_batch(family, rollouts[3:], 1)]
        window(trainer, parts)
        trainer.model.model.visual.register_forward_hook(lambda *_: calls.append(1))
        window(trainer, parts)
    assert len(calls) == 1


def test_fields_of_another_family_run_trl_s_own_path(tmp_path, caplog):
    family = "Qwen2_5_VL"
    with all_float64():
        trainer = trainer_of(shared.GRPOTrainer, family, tmp_path)
        inputs = micro_batch(family, batch(family)[:4], 0)
        inputs["image_sizes"], inputs["pixel_attention_mask"] = None, torch.ones(1)
        try:
            window(trainer, [inputs])
        except TypeError:
            pass  # the model has no such argument
    assert any("pixel_attention_mask" in record.getMessage() for record in caplog.records) and trainer.shared_rows["run"] == 0
