"""One rank of verl's real engine with recorded experts (R3): verl_routes.py FOLDER RANK WORLD. Writes what differs to FOLDER/RANK.json.

verl's own FSDP engine replays nothing. Here its routers are given the record by a formula written out, one rollout a micro-batch.
"""

import dataclasses
import functools
import json

import verl_ranks
from verl_ranks import FOLDER, RANK, WIDE, actor, dist, mini_batch, torch, tu, update, worst

import transformers  # noqa: E402
from hf_models import all_float64  # noqa: E402
from verl.workers.utils.padding import no_padding_2_padding  # noqa: E402
from verl.workers.config import EngineRouterReplayConfig  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402
from espalier.hf import verification  # noqa: E402
from espalier.hf.checks import base_model  # noqa: E402

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


def write_model(folder):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=16, initializer_range=.15, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
                                         moe_intermediate_size=32)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def with_record(data, seed=3):
    """Equal beginnings have equal records; one rollout of a prompt has another; some tokens have none, as the last has none."""
    values, ends = data["input_ids"].values().tolist(), data["input_ids"].offsets().tolist()
    known, out = {}, []
    for i, (begin, end) in enumerate(zip(ends, ends[1:])):
        for at in range(begin, end):
            key = (tuple(values[begin:at + 1]), i == 3 and at > begin + 8)
            if key not in known:
                generator = torch.Generator().manual_seed(hash(key) % 2**31 + seed)
                drawn = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(LAYERS)])
                known[key] = drawn * int(torch.rand((), generator=generator) > .2)
            out.append(torch.zeros_like(known[key]) if at == end - 1 else known[key])
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(torch.stack(out).to(torch.int16), offsets=data["input_ids"].offsets())
    return data


def replayed(engine, data):
    """Gives the routers of verl's own engine the record, one rollout a call, in order."""
    records = list(data["routed_experts"].unbind())
    calls = [0] * LAYERS

    def replace(gate, layer):
        def forward(x):
            logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), gate.weight)
            record = records[calls[layer] % len(records)]
            calls[layer] += 1
            live = (record != 0).any(-1).any(-1, keepdim=True)
            chosen = torch.where(live, record[:, layer].long(), logits.topk(CHOSEN, -1).indices)
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

        gate.forward = forward

    for layer, block in enumerate(base_model(engine.module).model.layers):
        replace(block.mlp.gate, layer)


def batch():
    return with_record(mini_batch(torch.float64, use_dynamic_bsz=False, micro_batch_size_per_gpu=1))


def main():
    if RANK == 0:
        write_model(FOLDER / "model")
    dist.barrier()
    results, loss = {}, functools.partial(verl_ranks.ppo_loss, config=actor(entropy_coeff=.1))
    changes = dict(WIDE, router_replay=EngineRouterReplayConfig(mode="R3"))
    with all_float64():
        for strategy in ("fsdp2", "fsdp"):
            plain, shared = verl_ranks.engines(strategy=strategy, **changes)
            for engine in (plain, shared):
                base_model(engine.module).set_experts_implementation("eager")  # the others do not run in float64
            free = update(plain, batch(), loss)[2]
            data = batch()
            replayed(plain, data)
            wanted_loss, wanted_sums, wanted, _ = update(plain, data, loss)
            more = batch()
            tu.assign_non_tensor(more, use_dynamic_bsz=True, max_token_len_per_gpu=250)
            found_loss, found_sums, found, metrics = update(shared, more, loss)
            case = results[strategy] = dict(gradient=worst(found, wanted), without=worst(free, wanted), loss=abs(found_loss - wanted_loss) / abs(wanted_loss),
                                            metrics=max(abs(found_sums[name] - value) / abs(value) for name, value in wanted_sums.items()),
                                            rows=[int(metrics[f"espalier/rows_{kind}"].aggregate()) for kind in ("run", "without_sharing")])
            values = []
            for engine in (plain, shared):
                data = batch()
                with engine.eval_mode():
                    values.append(no_padding_2_padding(engine.infer_batch(data)["model_output"]["log_probs"], data))
            case["log_probs"] = float((values[0] - values[1]).abs().max())
    try:
        update(shared, mini_batch(torch.float64), loss)
    except Unsupported as problem:
        results["missing"] = str(problem)
    shared.options = dataclasses.replace(shared.options, verify=True)
    verification._verified.clear()
    with all_float64():
        found_loss = update(shared, batch(), loss)[0]
    results["verified"] = abs(found_loss - wanted_loss) / abs(wanted_loss)  # its own calls of the loss count once
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results, default=float))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
