"""Images in prompts and responses, in float64: log-probs, loss and every gradient, the vision tower's too, against the unmodified model's own calls,
one rollout a call with its images. The tower runs once for each different image."""

import pytest
import torch
import transformers

import espalier.hf
from espalier.errors import Error, Unsupported
from espalier.hf.images import Images
from espalier.hf.towers import Tower
from hf_models import COMMON, PlainWave, all_float64, checkpointed, gradients, loss_of, shared_step, worst
from rank_processes import written_by_ranks

IMAGE, PATCH = 90, 3 * 2 * 4 * 4
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
TEXT = dict(COMMON, head_dim=16, bos_token_id=1, eos_token_id=2)
TOKENS = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
GLM_TOKENS = dict(image_token_id=IMAGE, video_token_id=91, image_start_token_id=92, image_end_token_id=93, video_start_token_id=94,
                  video_end_token_id=95)
GLM_VISION = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4, image_size=32, spatial_merge_size=2,
                  temporal_patch_size=2)
SQUARE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
ALLOWED = 1e-10

FAMILIES = {
    "Qwen2VL": dict(text_config=dict(TEXT, rope_parameters=MROPE), **TOKENS, vision_config=dict(
        depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)),
    "Qwen2_5_VL": dict(text_config=dict(TEXT, rope_parameters=MROPE), **TOKENS, vision_config=dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1])),
    "Qwen3VL": dict(text_config=dict(TEXT, rope_parameters=MROPE), **TOKENS, vision_config=dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])),
    "Qwen3VLMoe": dict(text_config=dict(TEXT, rope_parameters=MROPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24), **TOKENS, vision_config=dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])),
    "Glm4v": dict(text_config=dict(TEXT, rope_parameters=dict(MROPE, mrope_section=[2, 1, 1], partial_rotary_factor=.5)), **GLM_TOKENS,
                  vision_config=GLM_VISION),
    "Glm4vMoe": dict(text_config=dict(TEXT, rope_parameters=dict(MROPE, mrope_section=[2, 1, 1], partial_rotary_factor=.5), n_routed_experts=6,
                                      num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1),
                     **GLM_TOKENS, vision_config=GLM_VISION),
    "Llava": dict(text_config=dict(TEXT, model_type="qwen2"), image_token_id=IMAGE, image_token_index=IMAGE, vision_config=dict(
        SQUARE, model_type="siglip_vision_model"), vision_feature_layer=-1, vision_feature_select_strategy="full"),
}
# Rows of an image see each other. Windows of 7 rows, fewer than an image has.
MUTUAL = {
    "Gemma3": dict(text_config=dict(TEXT, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]), image_token_index=IMAGE,
                   mm_tokens_per_image=16, vision_config=SQUARE),
}
FAMILIES.update(MUTUAL)


def make(family):
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**(FAMILIES[family]))
    model = getattr(transformers, family + "ForConditionalGeneration")(config).double().train()
    if family.endswith("Moe"):
        model.set_experts_implementation("eager")  # the other knows no float64
    for name, weight in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # 0 in a fresh model: nothing of an image would be seen
            torch.nn.init.normal_(weight, std=.3)
    return model


class Draw:
    """Prompts with images as processors give them: [grid] of each, a placeholder for every merged patch."""

    def __init__(self, family, seed=0):
        self.by_grid, self.generator = family.startswith(("Qwen", "Glm")), torch.Generator().manual_seed(seed)

    def tokens(self, n):
        return torch.randint(3, 88, (n,), generator=self.generator).tolist()

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def images(self, grids):
        if not self.by_grid:
            return dict(pixel_values=self.normal(len(grids), 3, 16, 16))
        return dict(pixel_values=self.normal(sum(h * w for _, h, w in grids), PATCH), image_grid_thw=torch.tensor(grids))

    def prompt(self, grids):
        out = self.tokens(9)
        for _, h, w in grids:
            out += [92] + [IMAGE] * (h * w // 4 if self.by_grid else 16) + [93] + self.tokens(4)
        return out

    def group(self, grids, responses):
        prompt, images = self.prompt(grids), self.images(grids)
        return [dict(prompt_ids=prompt, response_ids=self.tokens(n), images=images) for n in responses]


def batch(family):
    """A group with an image, one with two, equal tokens below another image, and a group of text alone."""
    draw = Draw(family)
    out = draw.group([(1, 4, 6)], (7, 5, 9)) + draw.group([(1, 4, 4), (1, 8, 4)], (4, 6))
    other = draw.images([(1, 4, 6)])
    out += [dict(out[0], response_ids=draw.tokens(n), images={name: x.clone() for name, x in other.items()}) for n in (6, 3)]
    text = draw.tokens(12)
    return out + [dict(prompt_ids=text, response_ids=draw.tokens(n)) for n in (5, 3)]


def tool_batch(family):
    """Screenshots in responses: siblings with equal ones, others, equal tokens around another one, several; below a prompt with an image and one of
    text. One response ends in an image."""
    draw = Draw(family, seed=1)
    prompt, of_prompt = draw.prompt([(1, 4, 6)]), draw.images([(1, 4, 6)])
    a, b, c = (draw.images([grid]) for grid in ((1, 4, 4), (1, 8, 4), (1, 4, 4)))
    seen = lambda grid: [92] + [IMAGE] * (grid[1] * grid[2] // 4 if draw.by_grid else 16) + [93]
    of_a, of_b = seen((1, 4, 4)), seen((1, 8, 4))
    act = draw.tokens(3)
    both = lambda *parts: {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    of = lambda response, *parts: dict(prompt_ids=prompt, response_ids=response, images=both(of_prompt, *parts))
    out = [of(act + of_a + draw.tokens(4), a), of(act + of_a + draw.tokens(2), both(a)), of(act + of_a + draw.tokens(3), c),
           of(draw.tokens(2) + of_a + draw.tokens(3) + of_b + draw.tokens(2), a, b), of(draw.tokens(5))]
    text = draw.tokens(11)
    of = lambda response, *parts: dict(prompt_ids=text, response_ids=response, images=both(*parts))
    out += [of(act + of_b + draw.tokens(5), b), of(act + of_b + draw.tokens(3) + of_a[:-1], b, c), dict(prompt_ids=text, response_ids=draw.tokens(6))]
    return out


def images_of(record):
    """(pixels, number of tokens) of each image of a rollout."""
    given = record.get("images")
    if given is None:
        return []
    grids = given.get("image_grid_thw")
    if grids is None:
        return [(pixels, 16) for pixels in given["pixel_values"]]
    return [(pixels, len(pixels) // 4) for pixels in given["pixel_values"].split(grids.prod(-1).tolist())]


def unique_rows(rollouts):
    """The number of different beginnings of rollouts, with their images."""
    seen = set()
    for record in rollouts:
        images = iter([f"{pixels.tolist()}" for pixels, count in images_of(record) for _ in range(count)])
        path = ()
        for token in record["prompt_ids"] + record["response_ids"]:
            path = hash((path, token, next(images) if token == IMAGE and "images" in record else ""))
            seen.add(path)
    return len(seen)


def plain_call(model, record):
    """The model's own logits of the response, with what its processor would give."""
    ids = torch.tensor([record["prompt_ids"] + record["response_ids"]])
    name = "token_type_ids" if mutual(model) else "mm_token_type_ids"
    kinds = {name: (ids == IMAGE).int()} if name == "token_type_ids" or hasattr(model.model, "get_rope_index") else {}
    more = {**record["images"], **kinds} if "images" in record else {}
    return model(input_ids=ids, use_cache=False, **more).logits[0, len(record["prompt_ids"]) - 1:-1]


def mutual(model):
    return type(model).__name__.removesuffix("ForConditionalGeneration") in MUTUAL


def plain_step(model, rollouts, loss):
    total = 0.0
    for i, record in enumerate(rollouts):
        response = torch.tensor(record["response_ids"])
        logp = plain_call(model, record).log_softmax(-1)
        value = loss(PlainWave([i], torch.full_like(response, i), torch.arange(len(response)), logp.gather(1, response[:, None])[:, 0],
                               -(logp.exp() * logp).sum(-1)))
        value.backward()
        total += float(value.detach())
    return total


@pytest.fixture(scope="module", params=[(family, place) for family in FAMILIES for place in ("prompts", "responses")], ids="-".join)
def case(request):
    """(model, rollouts, loss, the plain step's loss and gradients)."""
    family, place = request.param
    model, rollouts = make(family), batch(family) if place == "prompts" else tool_batch(family)
    loss = loss_of(rollouts)
    with all_float64():
        total = plain_step(model, rollouts, loss)
    return model, rollouts, loss, total, gradients(model)


def same_gradients(found, wanted):
    assert any("visual" in name or "vision" in name for name in wanted)
    whole = sum(g.square().sum() for g in wanted.values()) ** .5
    for name in [name for name in wanted if wanted[name].norm() < 1e-12 * whole]:  # a key's bias without rotary positions: exactly nothing
        assert found.pop(name).norm() < 1e-12 * whole and name.endswith("k_proj.bias")
        wanted = {other: g for other, g in wanted.items() if other != name}
    assert worst(found, wanted)[0] <= ALLOWED, worst(found, wanted)


HOW = {"packed": {}, "kept": dict(wave_tokens=30), "recomputed": dict(trunk_state="recompute", wave_tokens=30), "images cut by trunks": dict(wave_tokens=11),
       "dense": dict(schedule="dense")}


@pytest.mark.parametrize("how", HOW)
def test_a_step_is_the_models_own(case, how):
    model, rollouts, loss, total, wanted = case
    options = {"schedule": "shared", **HOW[how]}
    if mutual(model) and "wave_tokens" in options:
        options["wave_tokens"] = 80  # no trunk may cut an image
    with all_float64():
        result = espalier.hf.phased_step(model, rollouts, loss, **options)
    same_gradients(gradients(model), wanted)
    assert abs(result.loss - total) <= ALLOWED * abs(total)
    assert how == "dense" or result.rows < .75 * result.rows_without_sharing
    assert how != "packed" or result.rows == unique_rows(rollouts)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Gemma3"])
def test_a_step_with_checkpointed_layers(family):
    model, rollouts = make(family), tool_batch(family)
    loss = loss_of(rollouts)
    with all_float64():
        plain_step(model, rollouts, loss)
        wanted = gradients(model)
        espalier.hf.phased_step(checkpointed(model), rollouts, loss, schedule="shared", wave_tokens=80)
    same_gradients(gradients(model), wanted)


def test_scores_are_the_models_own(case):
    model, rollouts, *_ = case
    with all_float64(), torch.no_grad():
        for record, found in zip(rollouts, espalier.hf.logprobs(model, rollouts)):
            wanted = plain_call(model, record).log_softmax(-1).gather(1, torch.tensor(record["response_ids"])[:, None])[:, 0]
            assert (found - wanted).abs().max() <= ALLOWED


def test_the_tower_runs_each_image_once(case):
    """Images that always follow each other run in one call."""
    model, rollouts, loss, *_ = case
    tower, calls = getattr(model.model, "visual", None) or model.model.vision_tower, []
    espalier.hf.logprobs(model, rollouts[:1])  # the model's images are checked once
    rows = lambda args, kwargs: len(args[0] if args else kwargs["pixel_values"])
    handle = tower.register_forward_pre_hook(lambda _, args, kwargs: calls.append(rows(args, kwargs)), with_kwargs=True)
    shared_step(model, rollouts, loss)
    handle.remove()
    gradients(model)
    different = {str(pixels.tolist()): len(pixels) if pixels.dim() == 2 else 1 for record in rollouts for pixels, _ in images_of(record)}
    of_responses = any(IMAGE in record["response_ids"] for record in rollouts)
    assert sum(calls) == sum(different.values()) and len(calls) == (len(different) if of_responses else 3), calls


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_ranks_that_share_a_model_call_its_tower_equally_often(family, tmp_path):
    """FSDP2 and FSDP1: the mean of both ranks' dense gradients, where they have different numbers of images, or one has none."""
    for rank in written_by_ranks("hf_image_ranks.py", tmp_path, 2, [family], 600):
        cases = rank[family]
        assert "images in a sharded model" in cases.pop("dense") and len(cases) == 9
        for name, case in cases.items():
            assert case["gradient"][0] <= ALLOWED and case["log_probs"] <= ALLOWED, (name, case)


def test_a_rollout_that_lacks_the_others_images_is_an_error():
    """In a batch without any images the token is text, as in transformers."""
    rollouts = Draw("Qwen2_5_VL").group([(1, 4, 6)], (4, 5))
    rollouts[1].pop("images")
    with pytest.raises(Error, match="image tokens"):
        espalier.hf.phased_step(make("Qwen2_5_VL"), rollouts, lambda wave: wave.logprobs.sum())


def test_verified(case):
    model, rollouts, loss, *_ = case
    result = shared_step(model, rollouts, loss, verify=True)
    gradients(model)
    assert result.verification.verdict == "pass"


@pytest.mark.parametrize("family", MUTUAL)
def test_an_image_that_a_trunk_would_cut_is_refused_before_anything_runs(family):
    model, rollouts = make(family), batch(family)
    with pytest.raises(Unsupported, match="an image split by a trunk.*Raise wave_tokens"):
        espalier.hf.phased_step(model, rollouts, loss_of(rollouts), schedule="shared", wave_tokens=11)
    assert not gradients(model)


@pytest.mark.parametrize("family", MUTUAL)
def test_image_rows_that_do_not_see_each_other_are_refused(family, monkeypatch):
    """The check of a model's first images finds rows that see less than the model's own."""
    monkeypatch.setattr(Images, "blocks", lambda self, rollout, begin, end: [])
    rollouts = Draw(family).group([(1, 4, 4)], (4, 6))
    with pytest.raises(Unsupported, match="rounding explains"):
        espalier.hf.phased_step(make(family), rollouts, lambda wave: wave.logprobs.sum())


def test_positions_that_forget_the_image_are_refused(monkeypatch):
    """The check of a model's first images finds rows whose positions are not the model's own."""
    monkeypatch.setattr(Images, "positions", lambda self, rollout, begin, end: torch.arange(begin, end).expand(3, -1).numpy())
    rollouts = Draw("Qwen2_5_VL").group([(1, 4, 6)], (4, 6))
    with pytest.raises(Unsupported, match="rounding explains"):
        espalier.hf.phased_step(make("Qwen2_5_VL"), rollouts, lambda wave: wave.logprobs.sum())


def one_step_further(positions):
    def wrong(self, rollout, begin, end):
        """Positions of the response count from the wrong place."""
        out = positions(self, rollout, begin, end).copy()
        out[:, max(len(self.prompts[rollout]) - begin, 0):] += 1
        return out

    return wrong


def of_a_sibling(rows):
    """Image 1 and image 2 have equally many tokens."""
    def wrong(self, rollout, begin, end):
        other = {self.place[1][0]: self.place[2][0], self.place[2][0]: self.place[1][0]}
        return [(other.get(index, index), *row) for index, *row in rows(self, rollout, begin, end)]

    return wrong


def counted_twice(finish):
    def wrong(self, indices):
        pairs = finish(self, indices)
        return [x if place % 2 == 0 else 2 * x for place, x in enumerate(pairs)]

    return wrong


@pytest.mark.parametrize("kind, name, fault", [(Images, "positions", one_step_further), (Images, "rows", of_a_sibling), (Tower, "finish", counted_twice)],
                         ids=["positions", "a sibling's image", "an image twice"])
def test_verify_finds_a_fault_behind_the_fork(kind, name, fault, monkeypatch):
    model, rollouts = make("Qwen2_5_VL"), tool_batch("Qwen2_5_VL")[:4]
    espalier.hf.logprobs(model, rollouts)  # the check of a model's first images passes
    monkeypatch.setattr(kind, name, fault(getattr(kind, name)))
    with pytest.raises(Error, match="dense step's gradient"):
        espalier.hf.phased_step(model, rollouts, loss_of(rollouts), schedule="shared", verify=True)


def test_images_of_recorded_experts():
    """Rows with equal images and other recorded experts are different rows; targets are the tokens."""
    family = "Qwen3VLMoe"
    model, rollouts = make(family), tool_batch(family)[:4]
    wanted = espalier.hf.logprobs(model, rollouts)
    free = [dict(r, routed_experts=None) for r in rollouts]
    chosen = [[[0, 1], [1, 2], [2, 3]]] * len(rollouts[0]["prompt_ids"] + rollouts[0]["response_ids"])
    free[0]["routed_experts"] = chosen
    found = espalier.hf.score(model, free)
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(found.logprobs[1:], wanted[1:])) and (found.logprobs[0] - wanted[0]).abs().max() > 1e-3
    alone = espalier.hf.score(model, free[:1])
    assert (found.logprobs[0] - alone.logprobs[0]).abs().max() < 1e-10


@pytest.mark.parametrize("change, message", [
    (lambda r: r["prompt_ids"].pop(12), "features for 5 image tokens|tokens: 5, features: 6"),
    (lambda r: r["response_ids"].append(IMAGE), "features for 7 image tokens.*6 of the vision tower|tokens: 7, features: 6"), (lambda r: r["images"].update(pixel_values_videos=1), "videos .pixel_values_videos"),
    (lambda r: r["images"].update(input_features=1), "audio .input_features"), (lambda r: r.update(prompt_ids=[4, 5, 6]), "image tokens"),
], ids=["a placeholder less", "one more in the response", "a video", "audio", "no placeholder"])
def test_hostile_input(change, message):
    model, rollouts = make("Qwen2_5_VL"), Draw("Qwen2_5_VL").group([(1, 4, 6)], (4,))
    change(rollouts[0])
    with pytest.raises(Error, match=message):
        espalier.hf.phased_step(model, rollouts, lambda wave: wave.logprobs.sum())
    assert not gradients(model)
