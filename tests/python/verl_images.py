"""One rank of verl's real engine with images in prompts, and in responses as agent loops have them: verl_images.py FOLDER RANK WORLD. Writes what differs to FOLDER/RANK.json."""

import copy
import functools
import importlib
import itertools
import json

import verl_ranks
from verl_ranks import FOLDER, RANK, WIDE, WORLD, actor, dist, torch, tu, update, verl_actor, worst

import transformers  # noqa: E402
from test_hf_images import FAMILIES, IMAGE, Draw, tool_batch  # noqa: E402
from hf_models import all_float64  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402,F401

CASES = ("Qwen2_5_VL", "Qwen3VL")
for kind in ("Qwen2VL", "Qwen3VL"):  # verl 0.9.1 asks for classes of outputs that transformers has joined since
    place = importlib.import_module(f"transformers.models.{(name := kind.removesuffix('VL').lower() + '_vl')}.modeling_{name}")
    vars(place).setdefault(f"{kind}CausalLMOutputWithPast", transformers.modeling_outputs.CausalLMOutputWithPast)


def write_model(family):
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**copy.deepcopy(FAMILIES[family]))
    getattr(transformers, family + "ForConditionalGeneration")(config).save_pretrained(FOLDER / family)


def records(family, place):
    """Groups of four: an image, two, equal tokens below another image; or screenshots in responses, and none. Torn over ranks."""
    if place == "responses":
        return [dict(row, images=row.get("images", {})) for row in tool_batch(family)]
    draw = Draw(family)
    out = draw.group([(1, 4, 6)], (7, 5, 9, 4)) + draw.group([(1, 4, 4), (1, 8, 4)], (4, 6, 8, 3))
    other = draw.images([(1, 4, 6)])
    out += [dict(out[0], response_ids=draw.tokens(n), images=other) for n in (6, 3, 5, 7)]
    order = torch.randperm(len(out), generator=torch.Generator().manual_seed(5))
    return [out[i] for i in order]


def as_verl_hands_it_over(images):
    return {} if not images else dict(images, images_seqlens=images["image_grid_thw"][:, 1:].prod(-1))


def mini_batch(model, family, place="prompts", dtype=torch.float64, positions=True, **settings):
    """As verl's agent loop hands it over: position ids are those of the text, then of the model's get_rope_index over prompt and response; a count of
    patches beside the processor's tensors; what a tool returned has no loss."""
    rows = records(family, place)
    p, r = (max(len(row[field]) for row in rows) for field in ("prompt_ids", "response_ids"))
    prompts, responses = torch.zeros(len(rows), p, dtype=torch.long), torch.zeros(len(rows), r, dtype=torch.long)
    mask, place = torch.zeros(len(rows), p + r, dtype=torch.long), torch.zeros(len(rows), 4, p + r, dtype=torch.long)
    for i, row in enumerate(rows):
        prompt, response = (torch.tensor(row[field]) for field in ("prompt_ids", "response_ids"))
        prompts[i, p - len(prompt):], responses[i, :len(response)] = prompt, response
        used = slice(p - len(prompt), p + len(response))
        mask[i, used] = 1
        ids = torch.cat([prompt, response])[None]
        seen, _ = model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=row["images"].get("image_grid_thw"))
        place[i, :, used] = torch.cat([torch.arange(ids.shape[1])[None], seen[:, 0]]) + (0 if positions else i)
    generator = torch.Generator().manual_seed(6)
    numbers = lambda: torch.randn(len(rows), r, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    data = tu.get_tensordict(dict(
        input_ids=torch.cat([prompts, responses], 1), attention_mask=mask, position_ids=place, prompts=prompts, responses=responses,
        response_mask=mask[:, p:] * (responses != IMAGE), advantages=numbers()[:, :1].repeat(1, r), old_log_probs=-4.5 + .3 * numbers(),
        ref_log_prob=-4.5 + .3 * numbers(), multi_modal_inputs=[as_verl_hands_it_over(row["images"]) for row in rows]), non_tensor_dict={})
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, **{"temperature": 1.0, "global_batch_size": len(rows), "calculate_entropy": True, "use_dynamic_bsz": True,
                                  "max_token_len_per_gpu": 90, "use_remove_padding": False, **settings})
    per_rank = len(rows) // WORLD
    return tu.index_select_tensor_dict(data, torch.arange(RANK * per_rank, (RANK + 1) * per_rank))


def engines(family, **changes):
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
    out = []
    for kind in (FSDPEngineWithLMHead, EngineRegistry.get_engine_cls("language_model", changes.get("strategy", "fsdp2"))):
        engine = kind(**verl_actor.configurations(FOLDER / family, **changes))
        engine.initialize()
        out.append(engine)
    return out


def main():
    if RANK == 0:
        for family in CASES:
            write_model(family)
    dist.barrier()
    notes = verl_ranks.Notes()
    verl_ranks.logging.getLogger("espalier").addHandler(notes)
    results, loss = {}, functools.partial(verl_ranks.ppo_loss, config=actor(entropy_coeff=.1))
    with all_float64():
        for family in CASES:
            own = getattr(transformers, family + "ForConditionalGeneration").from_pretrained(FOLDER / family).model
            for strategy, place in itertools.product(("fsdp2", "fsdp"), ("prompts", "responses")):
                pair = engines(family, strategy=strategy, **WIDE)
                (wanted_loss, wanted_sums, wanted, _), (found_loss, found_sums, found, metrics) = (
                    update(engine, mini_batch(own, family, place), loss) for engine in pair)
                values = []
                for engine in pair:
                    data = mini_batch(own, family, place)
                    with engine.eval_mode():
                        values.append(no_padding_2_padding(engine.infer_batch(data)["model_output"]["log_probs"], data))
                results[f"{family} {strategy} {place}"] = dict(
                    gradient=worst(found, wanted), loss=abs(found_loss - wanted_loss) / abs(wanted_loss),
                    metrics=max(abs(found_sums[name] - value) / abs(value) for name, value in wanted_sums.items()),
                    rows=[int(metrics[f"espalier/rows_{kind}"].aggregate()) for kind in ("run", "without_sharing")],
                    log_probs=float((values[0] - values[1]).abs().max()), notes=list(notes.lines))
        for engine in pair:
            update(engine, mini_batch(own, family, positions=False), loss)
        results["notes"] = notes.lines
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results, default=float))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
