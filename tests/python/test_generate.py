"""`generate`: responses to prompts, held against transformers' generate, the oracle's log-probs and `score`."""

import functools
import gzip
import json
import random

import pytest
import torch
import transformers

import oracle
from make_model import FAMILIES, VOCABULARY, write_records

SEED = 31
LOGPROB_FLOAT64 = 1e-11  # as in test_train_parity.py
STOP = 2  # eos_token_id of the models of make_model.py


def make_prompts(lengths=(9, 1, 40, 3, 130, 9)):
    source = random.Random(SEED)
    return [{"prompt_ids": [source.randrange(VOCABULARY) for _ in range(length)], "id": f"p{i}"} for i, length in enumerate(lengths)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(espalier, model, prompts, folder, *options):
    path, out = write_records(prompts, folder / "prompts.jsonl"), folder / "out.jsonl"
    out.unlink(missing_ok=True)
    summary = espalier("generate", "--model", model, "--prompts", path, "--out", out, "--json", *options).json
    return read(out), summary


def greedy_of_transformers(model, prompt, longest, stop):
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                             max_new_tokens=longest, eos_token_id=stop, pad_token_id=0)
    return ids[0, len(prompt):].tolist()


def is_greedy(model, prompt, response, longest, stop):
    """Whether transformers generates this response token by token, from one forward: if each token is the likeliest after those before it, a
    generation begins with the first of them and goes on with each next one."""
    length = len(response)
    if not 0 < length <= longest or stop in response[:-1] or (length < longest and response[-1] != stop):
        return False
    with torch.no_grad():
        # As long as this call are all factors of longrope: it changes them behind the first token of the tests' model.
        likeliest = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1:-1].argmax(-1)
    return likeliest.tolist() == response


@functools.cache
def float64_model(directory):
    """Only read, so tests of one family share it."""
    return oracle.load_model(directory, torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_transformers_generates(family, espalier, model_of, tmp_path):
    prompts = make_prompts()
    records, _ = run(espalier, model_of(family), prompts, tmp_path, "--dtype", "float64", "--temperature", 0, "--n", 2,
                     "--max-response-length", 60)
    model = float64_model(model_of(family))
    for index, prompt in enumerate(prompts):
        first, second = records[2 * index:2 * index + 2]
        assert is_greedy(model, prompt["prompt_ids"], first["response_ids"], 60, STOP), f"seed {SEED}, prompt {index}"
        assert second["response_ids"] == first["response_ids"], f"seed {SEED}, prompt {index}"
        assert first["finish_reason"] == second["finish_reason"] == ("stop" if first["response_ids"][-1] == STOP else "length")


@pytest.mark.rounding
def test_greedy_stories_are_those_of_transformers(espalier, stories, tmp_path):
    seen, prompts = set(), []
    for record in read(stories / "rollouts.jsonl"):
        if record["group"] not in seen:
            prompts.append({"prompt_ids": record["prompt_ids"], "group": record["group"]})
        seen.add(record["group"])
    records, summary = run(espalier, stories / "hf", prompts, tmp_path, "--temperature", 0, "--n", 4, "--max-response-length", 80)
    model = transformers.AutoModelForCausalLM.from_pretrained(stories / "hf", dtype=torch.float32).eval()
    for index, prompt in enumerate(prompts):
        wanted = greedy_of_transformers(model, prompt["prompt_ids"], 80, 1)
        assert all(record["response_ids"] == wanted for record in records[4 * index:4 * index + 4]), f"prompt {index}"
    assert summary["tokens"]["prompt"] == 4 * summary["tokens"]["prompt_physical"]
    assert summary["kv_bytes"] < summary["kv_bytes_unshared"]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_oracles(family, espalier, model_of, tmp_path):
    records, summary = run(espalier, model_of(family), make_prompts(), tmp_path, "--dtype", "float64", "--temperature", 0.7,
                           "--top-p", 0.9, "--top-k", 40, "--n", 3, "--max-response-length", 30, "--seed", SEED)
    logprobs, _ = oracle.score(float64_model(model_of(family)), records)
    for index, (record, wanted) in enumerate(zip(records, logprobs, strict=True)):
        assert record["rollout_logprobs"] == pytest.approx(wanted, abs=LOGPROB_FLOAT64, rel=0), f"seed {SEED}, record {index}"
        assert record["temperature"] == 0.7
    assert summary["rollouts"] == len(records) == 18 and summary["prompts"] == 6
    assert summary["tokens"]["response"] == sum(len(r["response_ids"]) for r in records)
    assert set(summary) >= {"espalier", "verb", "device", "dtype", "threads", "options", "seconds", "peak_bytes",
                            "tokens_per_second", "generation_seconds", "kv_bytes", "kv_bytes_unshared"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_those_of_score_bit_for_bit(family, dtype, espalier, model_of, tmp_path):
    """At any temperature, with top-p over the kept sets and over the whole vocabulary. The plan of `score` shares prompts in waves; the sampler has
    a row for each response."""
    own = ("--dtype", dtype, "--products", "own")
    records, _ = run(espalier, model_of(family), make_prompts(), tmp_path, *own, "--temperature", 0.7, "--n", 3, "--max-response-length", 30,
                     "--top-p", 0.8)
    for kept, field in (("auto", "rollout_logprobs"), ("ignore", "full_logprobs")):
        espalier("score", "--model", model_of(family), "--rollouts", tmp_path / "out.jsonl", "--out", tmp_path / "scored.jsonl", "--overwrite",
                 "--kept-sets", kept, *own)
        scored = read(tmp_path / "scored.jsonl")
        assert [record["logprobs"] for record in scored] == [record[field] for record in records]
        assert [record["kept_ids"] for record in scored] == [record["kept_ids"] for record in records], "nothing is lost by scoring"


def kept_by_rule(logits, temperature, top_k, top_p):
    """The rule of docs/sampling.md on one row of logits."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))[:top_k or None]
    weights = torch.softmax(torch.tensor([logits[v] for v in order], dtype=torch.float64) / temperature, 0).cumsum(0)
    return sorted(order[:int((weights < top_p).sum()) + 1])


def test_kept_ids_are_what_top_k_and_top_p_leave(espalier, model_of, tmp_path):
    model = model_of("qwen3_tied")
    for options, top_k, top_p in ((("--top-p", 0.6), 0, 0.6), (("--top-k", 5), 5, 1.0), (("--top-k", 12, "--top-p", 0.7), 12, 0.7)):
        records, summary = run(espalier, model, make_prompts(), tmp_path, "--dtype", "float64", "--temperature", 0.9, "--n", 2,
                               "--max-response-length", 12, *options)
        assert summary["logprobs_over"] == "kept_ids"
        sizes = []
        for record in records:
            prompt, response = record["prompt_ids"], record["response_ids"]
            with torch.no_grad():
                rows = float64_model(model)(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1:-1].tolist()
            assert record["kept_ids"] == [kept_by_rule(row, 0.9, top_k, top_p) for row in rows]
            sizes += map(len, record["kept_ids"])
        assert summary["mean_kept_ids"] == pytest.approx(sum(sizes) / len(sizes))


@pytest.mark.parametrize("options", [(), ("--temperature", 0, "--top-p", 0.5), ("--top-p", 0.5, "--kept-sets", "ignore"),
                                     ("--top-k", VOCABULARY)])
def test_records_have_no_sets_where_nothing_is_cut_off_or_they_are_ignored(options, espalier, model_of, tmp_path):
    records, summary = run(espalier, model_of("qwen3_tied"), make_prompts(), tmp_path, "--n", 1, "--max-response-length", 4, *options)
    assert summary["logprobs_over"] == "vocabulary"
    assert not any("kept_ids" in record or "full_logprobs" in record for record in records)


def test_records_train_and_score_as_they_are(espalier, model_of, tmp_path):
    """Written records are rollouts: `score` reads them without a remark and finds their log-probs again."""
    model = model_of("qwen3_tied")
    records, _ = run(espalier, model, make_prompts(), tmp_path, "--dtype", "float64", "--n", 2, "--max-response-length", 20)
    scored = espalier("score", "--model", model, "--rollouts", tmp_path / "out.jsonl", "--out", tmp_path / "scored.jsonl", "--dtype", "float64")
    for before, after in zip(records, read(tmp_path / "scored.jsonl"), strict=True):
        assert after["logprobs"] == pytest.approx(before["rollout_logprobs"], abs=LOGPROB_FLOAT64, rel=0)
    assert "finish_reason" not in scored.stderr


def test_the_same_seed_gives_the_same_file_however_many_are_decoded_at_once(espalier, model_of, tmp_path):
    model, settings = model_of("llama_untied"), ("--dtype", "float64", "--n", 4, "--max-response-length", 25, "--seed", 5)
    first, _ = run(espalier, model, make_prompts(), tmp_path, *settings)
    second, _ = run(espalier, model, make_prompts(), tmp_path, *settings, "--max-num-seqs", 3, "--threads", 1, "--token-budget", 11)
    assert [r["response_ids"] for r in first] == [r["response_ids"] for r in second]
    other, _ = run(espalier, model, make_prompts(), tmp_path, *settings[:-1], 6)
    assert [r["response_ids"] for r in first] != [r["response_ids"] for r in other]


def test_stop_ids_and_what_prompts_carry(espalier, model_of, tmp_path):
    prompts = [{**p, "group": f"g{i}", "meta": {"answer": i}, "data_source": "x"} for i, p in enumerate(make_prompts((4, 5)))]
    records, _ = run(espalier, model_of("qwen2_untied"), prompts, tmp_path, "--stop-ids", "7,8,9,10,11,12", "--n", 10, "--seed", SEED)
    assert {r["finish_reason"] for r in records} == {"stop"}
    assert all(r["response_ids"][-1] in range(7, 13) for r in records)
    assert all(t not in range(7, 13) for r in records for t in r["response_ids"][:-1])
    for index, record in enumerate(records):
        assert {k: record[k] for k in ("group", "meta", "data_source", "id", "prompt_ids")} == prompts[index // 10]


def test_packed_prompts_are_read_like_plain_ones(espalier, model_of, tmp_path):
    path = write_records(make_prompts(), tmp_path / "prompts.jsonl")
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for source, out in ((path, "a.jsonl"), (packed, "b.jsonl")):
        espalier("generate", "--model", model_of("qwen3_tied"), "--prompts", source, "--out", tmp_path / out, "--max-response-length", 5)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize("text, where, status", [
    ('{"prompt_ids": [1, 500]}', "prompts.jsonl:1: prompt_ids[1]", 3),
    ('{"prompt_ids": [1]}\n{"prompt_ids": []}', "prompts.jsonl:2: prompt_ids", 3),
    ('{"prompt_ids": [1], "response_ids": [1]}', "prompts.jsonl:1: response_ids", 3),
    ('{"prompt_ids": [1]', "prompts.jsonl:1", 3),
    ("", "prompts.jsonl", 3),
])
def test_bad_prompts_are_refused_with_their_place_and_leave_no_file(text, where, status, espalier, model_of, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(text)
    failed = espalier("generate", "--model", model_of("qwen3_tied"), "--prompts", tmp_path / "prompts.jsonl", "--out",
                      tmp_path / "out.jsonl", "--json", expect=status)
    assert failed.json["error"]["where"].endswith(where)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_fills_the_positions_is_read_with_a_note(espalier, model_of, tmp_path):
    """The tables of positions go on; a shorter prompt's response still ends at the last position. Log-probs are those of score."""
    prompts = write_records([{"prompt_ids": [1 + i % 60 for i in range(length)]} for length in (510, 512, 530)], tmp_path / "prompts.jsonl")
    words = ["--model", model_of("qwen3_tied"), "--dtype", "float64"]
    done = espalier("generate", *words, "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--max-response-length", 5, "--n", 1, "--stop-ids", 0)
    assert "more than the model's 512 positions (max_position_embeddings)" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(len(record["response_ids"]) <= most for record, most in zip(records, (2, 5, 5), strict=True)) and len(records[2]["response_ids"]) == 5
    espalier("score", *words, "--rollouts", tmp_path / "out.jsonl", "--out", tmp_path / "scored.jsonl")
    for line, record in zip((tmp_path / "scored.jsonl").read_text().splitlines(), records, strict=True):
        assert json.loads(line)["logprobs"] == pytest.approx(record["rollout_logprobs"], abs=1e-12)


@pytest.mark.parametrize("option, value", [("--n", "2,3"), ("--n", 0), ("--top-p", 0), ("--temperature", -1), ("--stop-ids", 97)])
def test_settings_out_of_range_are_refused(option, value, espalier, model_of, tmp_path):
    path = write_records(make_prompts(), tmp_path / "prompts.jsonl")
    espalier("generate", "--model", model_of("qwen3_tied"), "--prompts", path, "--out", tmp_path / "out.jsonl", option, value, expect=2)
    assert not (tmp_path / "out.jsonl").exists()
