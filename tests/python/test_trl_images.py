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
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, ProcessorMixin  # noqa: E402
from hf_models import all_float64, gradients, worst  # noqa: E402
from test_hf_images import FAMILIES, IMAGE, MUTUAL, batch, images_of, make, tool_batch  # noqa: E402
from test_trl_trainer import load_example  # noqa: E402
from trl_recording import recorded  # noqa: E402

ALLOWED = 1e-10
BATCHED = [family for family in FAMILIES if family != "Llava"]  # whose processor pads images of a batch to one size
WITHOUT_ROUTER_LOSS = ("Glm4vMoe",)  # transformers 5.23 reads a member for it that this configuration lacks

ROUTER = 1e-4  # transformers divides a router's counts in float32: of its loss, of about 2, half a unit of that is 1e-7, and with this coefficient 1e-11


def micro_batch(family, rollouts, seed):
    """As TRL's trainer hands it to its loss: prompts padded on the left, responses on the right, images flattened over rows."""
    generator = torch.Generator().manual_seed(seed)
    pad = lambda parts, left: torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in parts], batch_first=True, padding_side="left" if left else "right")
    ones = lambda parts, left: pad([[1] * len(x) for x in parts], left)
    prompts, responses = [r["prompt_ids"] for r in rollouts], [r["response_ids"] for r in rollouts]
    ids = pad(prompts, True)
    kinds = (torch.cat([ids, pad(responses, False)], 1) == IMAGE).long()
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
                            gradient_checkpointing=False, router_aux_loss_coef=0.0 if family in WITHOUT_ROUTER_LOSS else ROUTER if family.endswith("Moe") else None)
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


def same(found, wanted):
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


# Groups torn over both micro-batches. In Gemma 3, whose image rows see each other, no response may end in an image.
ORDERS = {"prompts": ([0, 3, 5, 1, 4], [7, 2, 6, 8]), "responses": ([0, 3, 5, 4], [7, 1, 6, 2])}


@pytest.mark.parametrize("place", ORDERS)
@pytest.mark.parametrize("family", BATCHED)
def test_a_window_is_trl_s_own(family, place, tmp_path, caplog):
    rollouts = batch(family) if place == "prompts" else tool_batch(family)
    if place == "responses" and family in MUTUAL:
        rollouts[6]["response_ids"].append(7)
    micro_batches = [micro_batch(family, [rollouts[i] for i in part], seed) for seed, part in enumerate(ORDERS[place])]
    results = []
    for kind in (trl.GRPOTrainer, shared.GRPOTrainer):
        with all_float64():
            trainer = trainer_of(kind, family, tmp_path)
            results.append(window(trainer, micro_batches))
    (plain_losses, wanted), (losses, found) = results
    assert not [record.getMessage() for record in caplog.records if "not shared" in record.getMessage()]
    assert max(abs(a - b) for a, b in zip(losses, plain_losses)) <= ALLOWED * max(map(abs, plain_losses))
    same(found, wanted)
    unique = {(tuple(r["prompt_ids"]), str([x.tolist() for x, _ in images_of(r)[:r["prompt_ids"].count(92)]])) for r in rollouts}
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


def test_images_of_responses_run_once_in_a_micro_batch(tmp_path):
    """A prompt's image stays until the window's end; equal screenshots of siblings are one."""
    family, calls = "Qwen2_5_VL", []
    rollouts = tool_batch(family)
    parts = [micro_batch(family, [rollouts[i] for i in (0, 1, 3)], 0), micro_batch(family, [rollouts[i] for i in (1, 0, 2)], 1)]
    with all_float64():
        trainer = trainer_of(shared.GRPOTrainer, family, tmp_path)
        window(trainer, parts)
        trainer.model.model.visual.register_forward_pre_hook(lambda _, args, kwargs: calls.append(len(args[0])), with_kwargs=True)
        window(trainer, parts)
    image, a, b = 24, 16, 32  # patches
    assert sorted(calls) == sorted([image, a, b, a, a]), calls


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Gemma3"])
def test_verified(family, tmp_path):
    """With checkpointed layers, in the dtype of a model's weights."""
    rollouts = tool_batch(family)
    trainer = trainer_of(shared.GRPOTrainer, family, tmp_path, verify=True)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    window(trainer, [micro_batch(family, rollouts[:4], 0), micro_batch(family, rollouts[2:6], 1)])
    assert trainer.verification.verdict == "pass" and trainer.shared_rows["run"] < trainer.shared_rows["without_sharing"]


@pytest.mark.parametrize("family, change, message", [
    ("Gemma3", lambda inputs: None, "image's last token"),
    ("Qwen2_5_VL", lambda inputs: inputs["mm_token_type_ids"].zero_(), "mm_token_type_ids that mark its image tokens"),
], ids=["a response that ends in an image", "images marked as text"])
def test_a_batch_that_runs_trl_s_own_path_and_then_one_that_shares(family, change, message, tmp_path, caplog):
    rollouts = tool_batch(family)
    odd = micro_batch(family, rollouts[5:], 0)
    change(odd)
    with all_float64():
        trainer = trainer_of(shared.GRPOTrainer, family, tmp_path)
        try:
            window(trainer, [odd])
        except IndexError:
            pass  # the model counts grids that no token has
        assert trainer.shared_rows["run"] == 0
        window(trainer, [micro_batch(family, rollouts[:4], 0)])
    assert trainer.shared_rows["run"] and [message in record.getMessage() for record in caplog.records if "not shared" in record.getMessage()] == [True]


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


class Screens(ProcessorMixin):
    """A processor whose images are pairs (pixel values, grid)."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def batch_decode(self, *args, **kwargs):
        return self.tokenizer.batch_decode(*args, **kwargs)

    def image_processor(self, images, return_tensors):
        return dict(pixel_values=torch.cat([pixels for pixels, _ in images]), image_grid_thw=torch.cat([grid for _, grid in images]))


def look():
    """A tool that returns a screenshot."""


def run_with_a_tool(kind, family, folder, rollouts):
    """Two steps of TRL's own loop. Everything but generation is TRL's: images of tools behind those of prompts, token types, log-probs, loss."""
    def pairs(record):
        own = record.get("images")
        return [] if own is None else list(zip(own["pixel_values"].split(own["image_grid_thw"].prod(-1).tolist()), own["image_grid_thw"].split(1)))

    class Given(recorded(kind)):

        def _generate(self, prompts):
            masks = [[int(token not in (IMAGE, 92, 93)) for token in r["response_ids"]] for r in rollouts]
            images = [pairs(r) for r in rollouts]
            return ([r["prompt_ids"] for r in rollouts], [r["response_ids"] for r in rollouts], masks, ["" for _ in rollouts], None, {}, images,
                    [own[r["prompt_ids"].count(92):] for own, r in zip(images, rollouts)])

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 96)}}
    words["<|image_pad|>"] = words.pop(f"w{IMAGE}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), pad_token="<pad>", eos_token="<eos>",
                                        unk_token="<unk>")
    config = trl.GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no", per_device_train_batch_size=4,
                            num_generations=8, gradient_accumulation_steps=2, max_completion_length=40, loss_type="grpo", max_steps=2, seed=7,
                            gradient_checkpointing=False, num_iterations=2, disable_tqdm=True)
    trainer = Given(model=make(family), reward_funcs=lambda completion_ids, **_: [sum(ids) % 7 for ids in completion_ids], args=config,
                    processing_class=Screens(tokenizer), train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * 8}))
    trainer.tools = [look]
    trainer.train()
    return trainer


def test_screenshots_of_tools_in_trl_s_own_loop(tmp_path, caplog):
    """Old log-probs are computed before the first update."""
    family = "Qwen2_5_VL"
    rollouts = tool_batch(family)
    with all_float64():
        plain, ours = (run_with_a_tool(kind, family, tmp_path, rollouts) for kind in (trl.GRPOTrainer, shared.GRPOTrainer))
    assert not [record.getMessage() for record in caplog.records if "not shared" in record.getMessage()]
    assert ours.shared_rows["run"] < .8 * ours.shared_rows["without_sharing"]
    same(ours.grads[0], plain.grads[0])
    assert len(ours.losses) == len(plain.losses) == 4 and all(abs(a - b) <= ALLOWED for a, b in zip(ours.losses[:2], plain.losses[:2]))
