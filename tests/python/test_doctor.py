"""`doctor`: dumps with one known fault each, and healthy twins that must stay clean. The samples are drawn with transformers."""

import copy
import json
import math
import random

import pytest
import torch
import transformers

from make_model import make_model
from text_model import byte_level_tokenizer, make_text_model, write_lines

VOCABULARY = 96
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY)


def loaded(directory, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def moved(model, by, seed):
    """The same model with weights a step of training away."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


def kept_mask(logits, top_p=1.0, top_k=0):
    """What a sampler keeps: the k most likely, of these the fewest with mass top_p."""
    order = logits.argsort(descending=True)
    if top_k:
        order = order[:top_k]
    probabilities = torch.softmax(logits[order], -1)
    count = int((probabilities.cumsum(-1) < top_p).sum()) + 1 if top_p < 1 else len(order)
    return torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, order[:count], True)


@torch.no_grad()
def drawn(model, prompts, length, seed, temperature=1.0, greedy=False, **rule):
    """One response per prompt: (ids, log-probs over what was kept, kept sets)."""
    generator, out = torch.Generator().manual_seed(seed), []
    for prompt in prompts:
        ids, logprobs, sets = list(prompt), [], []
        for _ in range(length):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float() / temperature
            kept = kept_mask(logits, **rule)
            logits = logits.masked_fill(~kept, -math.inf)
            token = int(logits.argmax()) if greedy else int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
            ids.append(token), logprobs.append(float(torch.log_softmax(logits, -1)[token])), sets.append(kept.nonzero()[:, 0].tolist())
        out.append((ids[len(prompt):], logprobs, sets))
    return out


@torch.no_grad()
def scored(model, record, temperature=None):
    temperature = record.get("temperature", 1.0) if temperature is None else temperature
    logits = model(input_ids=torch.tensor([record["prompt_ids"] + record["response_ids"]]), use_cache=False).logits[0].float() / temperature
    place = len(record["prompt_ids"]) - 1
    return [float(torch.log_softmax(logits[place + t], -1)[token]) for t, token in enumerate(record["response_ids"])]


class Place:
    """The models, and a dump of three groups of four responses."""

    def __init__(self, folder):
        self.directory = make_model("qwen3_tied", folder / "model", head_dim=16, num_key_value_heads=1, **SIZES)
        self.model = loaded(self.directory)
        draw = random.Random(7)
        self.prompts = [[draw.randrange(VOCABULARY) for _ in range(6)] for _ in range(3)]

    def dump(self, temperature=1.0, length=20, seed=1, model=None, **rule):
        prompts = [prompt for prompt in self.prompts for _ in range(4)]
        records = []
        for place, (prompt, (ids, logprobs, sets)) in enumerate(zip(prompts, drawn(model or self.model, prompts, length, seed, temperature, **rule))):
            record = {"prompt_ids": prompt, "group": f"g{place // 4}", "response_ids": ids, "rollout_logprobs": logprobs, "reward": float(place % 3 == 0)}
            if temperature != 1:
                record["temperature"] = temperature
            records.append((record, sets))
        return [record for record, _ in records] if not rule else records


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="module")
def base(place):
    return place.dump()


def changed(records, change, where=None):
    """A copy with change(record) applied to all records, or to those of the places."""
    out = copy.deepcopy(records)
    for at, record in enumerate(out):
        if where is None or at in where:
            record.update(change(record))
    return out


def turns_of(base, per=2):
    """Trajectories of `per` turns; each turn's prompt continues the one before by two tokens of a tool."""
    out = []
    for at, record in enumerate(base):
        half = len(record["response_ids"]) // per
        for turn in range(per):
            begin = turn * half
            out.append({"group": record["group"], "trajectory": f"t{at}", "turn": turn, "reward": record["reward"], "response_ids": record["response_ids"][begin:begin + half],
                        "prompt_ids": record["prompt_ids"] + record["response_ids"][:begin], "rollout_logprobs": record["rollout_logprobs"][begin:begin + half]})
    return out


def grpo(rewards, reward):
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return (reward - mean) / (deviation + 1e-6)


def with_votes(turns, per_record):
    """Turns of unequal number, with grpo's advantages of votes per record or per trajectory."""
    kept = [t for t in turns if not (t["turn"] == 1 and t["reward"] == 0)]
    for record in kept:
        members = [t for t in kept if t["group"] == record["group"]]
        votes = [t["reward"] for t in members] if per_record else list({t["trajectory"]: t["reward"] for t in members}.values())
        record["advantage"] = grpo(votes, record["reward"])
    return kept


def divided(base, count):
    """The first five tokens of every response come from a tool; the last response has no loss at all."""
    out = changed(base, lambda r: {"loss_mask": [0] * 5 + [1] * (len(r["response_ids"]) - 5)})
    out[-1]["loss_mask"] = [0] * len(out[-1]["response_ids"])
    return changed(out, lambda r: {"token_divisor": count(r)})


def in_batch(base, count):
    out = changed(base, lambda r: {"loss_mask": [0] * 5 + [1] * (len(r["response_ids"]) - 5)})
    total = sum(count(record) for record in out)
    return changed(out, lambda r: {"num_items_in_batch": total})


def branched(base, declared):
    """Response 5 ends where response 4 goes on, after 18 tokens."""
    out = copy.deepcopy(base)
    for series in ("response_ids", "rollout_logprobs"):
        out[5][series] = out[4][series][:18]
    if declared:
        for name, at in (("a", 4), ("b", 5)):
            out[at].update(trajectory="one", branch=name)
    return out


def cumulative(base, masked):
    """The second turn's record holds both turns."""
    out = []
    for record in turns_of(base):
        if record["turn"] == 1:
            before = len(record["response_ids"])
            record["response_ids"] = record["prompt_ids"][6:] + record["response_ids"]
            record["prompt_ids"] = record["prompt_ids"][:6]
            record["rollout_logprobs"] = [0.0] * before + record["rollout_logprobs"]
            record["loss_mask"] = [0 if masked else 1] * before + [1] * before
            if not masked:
                record["rollout_logprobs"][:before] = out[-1]["rollout_logprobs"]
        out.append(record)
    return out


def advantages(base, zero_first):
    return [{**record, "advantage": 0.0 if zero_first and record["turn"] == 0 else 0.7 - record["reward"]} for record in turns_of(base)]


def advantages_within(base, zero_first):
    out = changed(base, lambda r: {"loss_mask": [1] * 8 + [0] * 4 + [1] * (len(r["response_ids"]) - 12)})
    return changed(out, lambda r: {"advantage": [0.0 if zero_first and t < 8 else 0.5 for t in range(len(r["response_ids"]))]})


def greedy_among(place, base, replaced):
    out = copy.deepcopy(base)
    if replaced:
        for at in (2, 9):
            [(ids, _, _)] = drawn(place.model, [out[at]["prompt_ids"]], 60, 0, greedy=True)
            out[at]["response_ids"] = ids
            out[at]["rollout_logprobs"] = scored(place.model, out[at])
    return out


def of_other_weights(place, base, where, own_series):
    """Rows that other weights drew. Healthy with the log-probs of the model beside the sampler's."""
    other, out = moved(place.model, 0.4, 3), copy.deepcopy(base)
    for at in where:
        [(ids, logprobs, _)] = drawn(other, [out[at]["prompt_ids"]], 20, 50 + at)
        out[at].update(response_ids=ids, rollout_logprobs=logprobs)
        if own_series:
            out[at]["rollout_logprobs"] = scored(place.model, out[at])
    return out


def kept(place, with_sets, **rule):
    return [{**record, **({"kept_ids": sets} if with_sets else {})} for record, sets in place.dump(seed=4, **rule)]


def tempered(place, change):
    return changed(place.dump(0.7, seed=5), change)


def tooled(place, base, mask):
    """Six tokens of a tool in the midst of three responses."""
    def change(record):
        ids, loss = record["response_ids"][:7] + [5, 9, 23, 11, 40, 8] + record["response_ids"][13:], [1] * 7 + [mask] * 6 + [1] * 7
        logprobs = scored(place.model, {**record, "response_ids": ids})
        return {"response_ids": ids, "loss_mask": loss, "rollout_logprobs": [0.0 if 7 <= t < 13 else value for t, value in enumerate(logprobs)]}
    return changed(base, change, {0, 5, 7})


def shifted(values, by):
    return values[by:] + [-1.5] * by if by > 0 else [-1.5] * -by + values[:by]


RECORDS_ALONE = {  # fault, sick, healthy; of `base`
    "an exact copy": ("trained_n_times", lambda b: b + [copy.deepcopy(b[3])], lambda b: b),
    "undeclared branches": ("trained_n_times", lambda b: branched(b, False), lambda b: branched(b, True)),
    "cumulative turns": ("trained_n_times", lambda b: cumulative(b, False), lambda b: cumulative(b, True)),
    "divided by all tokens": ("wrong_divisor", lambda b: divided(b, lambda r: len(r["response_ids"])), lambda b: divided(b, lambda r: sum(r["loss_mask"]))),
    "a token for each masked record": ("wrong_divisor", lambda b: divided(b, lambda r: max(1, sum(r["loss_mask"]))), lambda b: divided(b, lambda r: sum(r["loss_mask"]))),
    "truncated tokens counted": ("wrong_divisor", lambda b: in_batch(b, lambda r: len(r["response_ids"])), lambda b: in_batch(b, lambda r: sum(r["loss_mask"]))),
    "a vote for each turn": ("votes_per_record", lambda b: with_votes(turns_of(b), True), lambda b: with_votes(turns_of(b), False)),
    "turns of advantage 0": ("zero_advantages", lambda b: advantages(b, True), lambda b: advantages(b, False)),
    "turns of advantage 0 in a record": ("zero_advantages", lambda b: advantages_within(b, True), lambda b: advantages_within(b, False)),
    "rows of an evaluation": ("evaluation_rows", lambda b: changed(b, lambda r: {"meta": {"split": "validation"}}, {1, 2}), lambda b: changed(b, lambda r: {"meta": {"split": "train"}})),
    "a flag of evaluation": ("evaluation_rows", lambda b: changed(b, lambda r: {"is_eval": True}, {7}), lambda b: changed(b, lambda r: {"is_eval": False})),
    "old versions": ("stale_policy", lambda b: changed(changed(b, lambda r: {"meta": {"policy_version": 9}}), lambda r: {"meta": {"policy_version": 5}}, {3, 4}),
                     lambda b: changed(changed(b, lambda r: {"meta": {"policy_version": 9}}), lambda r: {"meta": {"policy_version": 8}}, {3, 4})),
    "several versions in a row": ("stale_policy", lambda b: changed(b, lambda r: {"meta": {"weight_versions": ["4"] * 10 + ["6"] * 10}}, {0}),
                                  lambda b: changed(b, lambda r: {"meta": {"weight_versions": ["6"] * 20}})),
    "zeros for log-probs": ("unrecorded_logprobs", lambda b: changed(b, lambda r: {"rollout_logprobs": [0.0] * 20}, {6}),
                            lambda b: changed(b, lambda r: {"rollout_logprobs": [0.0] * 20, "loss_mask": [0] * 20}, {6})),
}
WITH_MODEL = {  # of the place and `base`
    "a tool's tokens with loss": ("unrecorded_logprobs", lambda p, b: tooled(p, b, 1), lambda p, b: tooled(p, b, 0)),
    "greedy rows": ("evaluation_rows", lambda p, b: greedy_among(p, b, True), lambda p, b: greedy_among(p, b, False)),
    "rows of other weights": ("stale_policy", lambda p, b: of_other_weights(p, b, range(0, 12, 3), False), lambda p, b: of_other_weights(p, b, range(0, 12, 3), True)),
    "all of other weights": ("stale_policy", lambda p, b: of_other_weights(p, b, range(12), False), lambda p, b: of_other_weights(p, b, range(12), True)),
    "top-p without sets": ("kept_sets_missing", lambda p, b: kept(p, False, top_p=0.8), lambda p, b: kept(p, True, top_p=0.8)),
    "top-k without sets": ("kept_sets_missing", lambda p, b: kept(p, False, top_k=10), lambda p, b: kept(p, True, top_k=10)),
    "both without sets": ("kept_sets_missing", lambda p, b: kept(p, False, top_k=20, top_p=0.9), lambda p, b: kept(p, True, top_k=20, top_p=0.9)),
    "a small part cut off": ("kept_sets_missing", lambda p, b: kept(p, False, top_p=0.995), lambda p, b: kept(p, True, top_p=0.995)),
    "no temperature recorded": ("other_temperature", lambda p, b: [{k: v for k, v in r.items() if k != "temperature"} for r in p.dump(0.7, seed=5)], lambda p, b: p.dump(0.7, seed=5)),
    "before the temperature": ("other_temperature", lambda p, b: tempered(p, lambda r: {"rollout_logprobs": scored(p.model, r, 1.0)}),
                               lambda p, b: tempered(p, lambda r: {"rollout_logprobs": scored(p.model, r)})),
    "log-probs divided by it": ("other_temperature", lambda p, b: tempered(p, lambda r: {"rollout_logprobs": [x / 0.7 for x in scored(p.model, r, 1.0)]}),
                                lambda p, b: tempered(p, lambda r: {})),
    "old log-probs at another": ("other_temperature", lambda p, b: changed(b, lambda r: {"old_logprobs": scored(p.model, r, 0.6)}), lambda p, b: changed(b, lambda r: {"old_logprobs": scored(p.model, r)})),
    "one place late": ("shifted_logprobs", lambda p, b: changed(b, lambda r: {"rollout_logprobs": shifted(r["rollout_logprobs"], -1)}), lambda p, b: b),
    "one place early": ("shifted_logprobs", lambda p, b: changed(b, lambda r: {"rollout_logprobs": shifted(r["rollout_logprobs"], 1)}, {2, 3, 8}), lambda p, b: b),
}


def diagnosed(espalier, dump, folder, *options, expect):
    path = write_lines(dump, folder / "dump.jsonl")
    done = espalier("doctor", path, "--json", *options, expect=None)
    found = done.json
    assert done.status == expect, json.dumps(found.get("findings", found), indent=1) + done.stderr
    for finding in found["findings"]:
        assert set(finding) >= {"kind", "sure", "rows", "text", "report", "remedy"} and finding["rows"] and finding["report"].startswith("https://")
    return found["findings"]


def assert_found(findings, fault, rows=None):
    assert [finding["kind"] for finding in findings] == [fault], json.dumps(findings, indent=1)
    if rows is not None:
        assert findings[0]["rows"] == [row for row in findings[0]["rows"]] and {int(row.rsplit(":", 1)[1]) - 1 for row in findings[0]["rows"]} == set(rows)
    return findings[0]


@pytest.mark.parametrize("case", RECORDS_ALONE)
def test_faults_of_records_are_found_without_a_model(case, base, espalier, tmp_path):
    fault, sick, healthy = RECORDS_ALONE[case]
    assert_found(diagnosed(espalier, sick(copy.deepcopy(base)), tmp_path, expect=6), fault)
    assert diagnosed(espalier, healthy(copy.deepcopy(base)), tmp_path, expect=0) == []


@pytest.mark.parametrize("case", WITH_MODEL)
def test_faults_of_log_probs_are_found_with_the_model(case, place, base, espalier, tmp_path):
    fault, sick, healthy = WITH_MODEL[case]
    assert_found(diagnosed(espalier, sick(place, copy.deepcopy(base)), tmp_path, "--model", place.directory, expect=6), fault)
    assert diagnosed(espalier, healthy(place, copy.deepcopy(base)), tmp_path, "--model", place.directory, expect=0) == []


@pytest.mark.parametrize("case", RECORDS_ALONE)
def test_the_model_adds_no_false_alarm(case, place, base, espalier, tmp_path):
    fault, sick, healthy = RECORDS_ALONE[case]
    assert_found(diagnosed(espalier, sick(copy.deepcopy(base)), tmp_path, "--model", place.directory, expect=6), fault)
    assert diagnosed(espalier, healthy(copy.deepcopy(base)), tmp_path, "--model", place.directory, expect=0) == []


def test_the_rows_that_are_named_are_the_sick_ones(place, base, espalier, tmp_path):
    _, sick, _ = WITH_MODEL["one place early"]
    finding = assert_found(diagnosed(espalier, sick(place, base), tmp_path, "--model", place.directory, expect=6), "shifted_logprobs", {2, 3, 8})
    assert finding["sure"] == "certain" and "rollout_logprobs" in finding["text"]
    both = changed(sick(place, base), lambda r: {"rollout_logprobs": scored(place.model, r, 0.5)}, {0, 11})
    findings = {finding["kind"]: finding for finding in diagnosed(espalier, both, tmp_path, "--model", place.directory, expect=6)}
    assert set(findings) == {"shifted_logprobs", "other_temperature"}
    assert "temperature 0.5" in findings["other_temperature"]["text"] and len(findings["other_temperature"]["rows"]) == 2


def test_a_sampler_in_bfloat16_is_no_fault_and_hides_none(place, base, espalier, tmp_path):
    rounded = loaded(place.directory, torch.bfloat16)
    healthy = changed(base, lambda r: {"rollout_logprobs": scored(rounded, r)})
    assert diagnosed(espalier, healthy, tmp_path, "--model", place.directory, expect=0) == []
    sick = changed(base, lambda r: {"rollout_logprobs": scored(rounded, r, 0.7)})
    assert "temperature 0.7" in assert_found(diagnosed(espalier, sick, tmp_path, "--model", place.directory, expect=6), "other_temperature")["text"]


def test_a_dump_of_another_model_is_told(place, base, espalier, tmp_path):
    foreign = changed(base, lambda r: {"rollout_logprobs": [-0.3 - 0.1 * (t % 7) for t in range(20)]})
    finding = assert_found(diagnosed(espalier, foreign, tmp_path, "--model", place.directory, expect=6), "unexplained_logprobs")
    assert finding["sure"] == "possible"


def test_a_sample_is_replayed(place, base, espalier, tmp_path):
    _, sick, _ = WITH_MODEL["no temperature recorded"]
    dump = write_lines(sick(place, base), tmp_path / "d.jsonl")
    found = espalier("doctor", dump, "--json", "--model", place.directory, "--sample", 80, expect=6).json
    assert found["replayed"] == {"rollouts": 4, "tokens": 80} and found["findings"][0]["kind"] == "other_temperature"
    text = espalier("doctor", dump, dump, "--model", place.directory, expect=6).stdout
    for word in ("trained_n_times (certain)", "other_temperature", "rows", "https://", "remedy", "24 rollouts"):
        assert word in text
    assert espalier("doctor", write_lines(base, tmp_path / "b.jsonl"), expect=0).stdout.endswith("none replayed (--model): no known fault\n")
    espalier("doctor", tmp_path / "nothing.jsonl", expect=3)


# ---- experts -------------------------------------------------------------------------------------------------------


def routed(model, tokens, experts, free=()):
    """Log-probs [tokens - 1] with the experts of `experts` [token][layer], and what the routers choose by themselves."""
    saved, chosen = [], [[None] * len(model.model.layers) for _ in tokens]
    for layer, block in enumerate(model.model.layers):
        def hook(module, args, output, layer=layer):
            logits, _, index = output
            index = index.clone()
            probabilities = torch.softmax(logits.float(), -1)
            for at in range(len(tokens)):
                if experts is not None and at < len(experts) and experts[at] is not None:
                    index[at] = torch.tensor(experts[at][layer])
                chosen[at][layer] = index[at].tolist()
            weights = probabilities.gather(-1, index)
            return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index
        saved.append(block.mlp.gate.register_forward_hook(hook))
    try:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        for one in saved:
            one.remove()
    return torch.log_softmax(logits, -1), chosen


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model with experts, and rows whose recorded experts are those of another sampler."""
    directory = make_model("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", **{**SIZES, "moe_intermediate_size": 16, "num_experts": 6,
                                                                                        "num_experts_per_tok": 2, "norm_topk_prob": True})
    model, draw, records = loaded(directory), random.Random(3), []
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for at in range(6):
            tokens = [draw.randrange(VOCABULARY) for _ in range(26)]
            # The sampler chose otherwise than the model at tokens 3 to 23, so that a shift by one loses nothing that counts.
            others = [[sorted(draw.sample(range(6), 2)) for _ in model.model.layers] if 3 <= t < 24 else None for t in range(25)]
            logprobs, routes = routed(model, tokens, others)
            routes = routes[:-1]
            records.append({"prompt_ids": tokens[:6], "response_ids": tokens[6:], "group": f"g{at // 2}", "reward": float(at % 2), "routed_experts": routes,
                            "rollout_logprobs": [float(logprobs[5 + t][token]) for t, token in enumerate(tokens[6:])]})
            records[-1]["own"] = [float(routed(model, tokens, None)[0][5 + t][token]) for t, token in enumerate(tokens[6:])]
    return directory, records


@pytest.mark.parametrize("fault, change", [
    ("shifted_routes", lambda r: {"routed_experts": [r["routed_experts"][0], *r["routed_experts"][:-1]]}),
    ("shifted_routes", lambda r: {"routed_experts": [*r["routed_experts"][1:], r["routed_experts"][-1]]}),
    ("stale_routes", lambda r: {"rollout_logprobs": r["own"]})])
def test_faults_of_recorded_experts_are_found(fault, change, experts, espalier, tmp_path):
    directory, records = experts
    clean = lambda dump: [{name: value for name, value in record.items() if name != "own"} for record in dump]
    finding = assert_found(diagnosed(espalier, clean(changed(records, change, {1, 2, 4})), tmp_path, "--model", directory, expect=6), fault, {1, 2, 4})
    assert finding["sure"] == "certain"
    assert diagnosed(espalier, clean(records), tmp_path, "--model", directory, expect=0) == []


# ---- histories -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A model with a tokenizer, and two-turn trajectories of text."""
    directory = make_text_model(tmp_path_factory.mktemp("agent") / "model", byte_level_tokenizer(["the tool says that the answer is seven"] * 4, 320))
    exact = transformers.AutoTokenizer.from_pretrained(directory)

    def ids(text):
        return exact(text, add_special_tokens=False)["input_ids"]

    def byte_by_byte(text):
        return [token for character in text for token in ids(character)]

    return directory, ids, byte_by_byte


def trajectories(agent, history):
    """The second prompt repeats the first turn as `history(prompt, said, answer)` says. The first turn was sampled in bytes.
    The trajectories differ from their first token on: a random model gives a common beginning no chance."""
    _, ids, byte_by_byte = agent
    out = []
    for at, answer in enumerate(("seven is the answer", "the tool says that")):
        prompt, said, tool = ids("ask the tool"), byte_by_byte(f"{at} thinks. ") + byte_by_byte(answer), ids(" tool says seven")
        out.append({"group": "g", "trajectory": at, "turn": 0, "prompt_ids": prompt, "response_ids": said, "reward": float(at)})
        out.append({"group": "g", "trajectory": at, "turn": 1, "prompt_ids": history(prompt, said, answer) + tool, "response_ids": ids("that is it"), "reward": float(at)})
    return out


def test_histories_are_told_apart_by_their_text(agent, espalier, tmp_path):
    directory, ids, byte_by_byte = agent
    again = trajectories(agent, lambda prompt, said, answer: prompt + ids(f"{'st'.index(answer[0])} thinks. " + answer))
    dropped = trajectories(agent, lambda prompt, said, answer: prompt + byte_by_byte(answer))
    healthy = trajectories(agent, lambda prompt, said, answer: prompt + said)
    for dump, fault in ((again, "retokenized_turns"), (dropped, "changed_history")):
        finding = assert_found(diagnosed(espalier, dump, tmp_path, "--model", directory, expect=6), fault, {1, 3})
        assert finding["sure"] == "certain" and ":2" in finding["text"]
    assert diagnosed(espalier, healthy, tmp_path, "--model", directory, expect=0) == []
    assert diagnosed(espalier, healthy, tmp_path, expect=0) == []
    assert {finding["kind"] for finding in diagnosed(espalier, dropped, tmp_path, expect=6)} == {"changed_history"}
