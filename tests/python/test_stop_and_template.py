"""`--stop` texts and `--chat-template-kwargs`: where responses end, and what the template is told."""

import json

import pytest

from text_model import CHAT_TEMPLATE, byte_level_tokenizer, make_text_model, read_lines, word_tokenizer, write_lines

WORDS = "a b c d e f g h".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of a few words, so that any word comes soon."""
    return make_text_model(tmp_path_factory.mktemp("stop") / "model", word_tokenizer(WORDS))


def generate(espalier, model, folder, *options, prompts=({"prompt": "a b"},), longest=24, expect=0):
    path, out = write_lines(list(prompts), folder / "prompts.jsonl"), folder / f"out{len(list(folder.iterdir()))}.jsonl"
    done = espalier("generate", "--model", model, "--prompts", path, "--out", out, "--json", "--n", 16, "--max-response-length", longest, *options,
                    expect=expect)
    return read_lines(out) if expect == 0 else done.json["error"]


def test_a_response_ends_with_the_token_that_completes_a_stop_text(espalier, model, tmp_path):
    free = generate(espalier, model, tmp_path)
    stopped = generate(espalier, model, tmp_path, "--stop", "c", "--stop", "e f")
    ended = 0
    for without, record in zip(free, stopped):
        ids = record["response_ids"]
        assert ids == without["response_ids"][:len(ids)], "the same draws, cut"
        words = without["response"].split()
        text = " ".join(words)
        first = min((text.find(stop) for stop in ("c", "e f") if stop in text), default=None)
        if first is None:
            assert ids == without["response_ids"] and record["response"] == without["response"]
            continue
        ended += 1
        assert record["finish_reason"] == "stop" and record["response"] == text[:first]
        assert len(ids) == len(text[:first].split()) + (1 if text[first] == "c" else 2), "tokens of the stop text stay"
        assert len(record["rollout_logprobs"]) == len(ids)
    assert ended > 4


def test_a_stop_text_may_cross_bytes_of_several_tokens(espalier, tmp_path):
    model = make_text_model(tmp_path / "bytes", byte_level_tokenizer(["x"], 259))
    free = generate(espalier, model, tmp_path, longest=200)
    stop = next(text[i:i + 2] for text in (record["response"] for record in free) for i in range(5, len(text) - 2)
                if "\ufffd" not in text[i:i + 2] and text[i:i + 2].isprintable())
    for without, record in zip(free, generate(espalier, model, tmp_path, "--stop", stop, longest=200)):
        assert record["response"] == without["response"].split(stop)[0]


def test_the_reward_sees_the_text_before_the_stop(espalier, model, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                                        "    return float('c' in solution_str) + 2 * float(extra_info['ended'])\n")
    for record in generate(espalier, model, tmp_path, "--stop", "c", "--reward", tmp_path / "reward.py"):
        assert record["reward"] == (2.0 if record["finish_reason"] == "stop" else 0.0)


@pytest.mark.parametrize("option, value, where", [("--chat-template-kwargs", "enable", "--chat-template-kwargs"),
                                                  ("--chat-template-kwargs", "{1}", "--chat-template-kwargs"),
                                                  ("--chat-template-kwargs", "messages=1", "--chat-template-kwargs")])
def test_wrong_values_are_refused(option, value, where, espalier, model, tmp_path):
    assert where in generate(espalier, model, tmp_path, option, value, prompts=[{"prompt": [{"role": "user", "content": "a"}]}], expect=2)["where"]


@pytest.mark.parametrize("given", ["enable_thinking=false,depth=3,tone=dry", json.dumps({"enable_thinking": False, "depth": 3, "tone": "dry"})])
def test_the_chat_template_gets_the_arguments(given, espalier, tmp_path):
    template = CHAT_TEMPLATE + "{%- if enable_thinking is defined and enable_thinking is false %}{{ 'quick' }}{{ depth + 1 }}{{ tone }}{% endif %}"
    model = make_text_model(tmp_path / "model", byte_level_tokenizer(["quick"], 300), chat_template=template)
    prompts = [{"prompt": [{"role": "user", "content": "hi"}]}]
    plain, told = (generate(espalier, model, tmp_path, *options, prompts=prompts)[0]["prompt"] for options in ((), ("--chat-template-kwargs", given)))
    assert told == plain + "quick4dry"


def test_grpo_stops_at_texts_and_refuses_them_for_its_own_tasks(espalier, model, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str))\n")
    prompts = write_lines([{"prompt": "a b"}, {"prompt": "c"}], tmp_path / "prompts.jsonl")
    espalier("grpo", "--model", model, "--prompts", prompts, "--reward", tmp_path / "reward.py", "--out", tmp_path / "run", "--stop", "c", "--n", 8,
             "--train-batch-size", 2, "--max-response-length", 24, "--steps", 1)
    records = read_lines(tmp_path / "run/last_rollouts.jsonl")
    assert any(record["finish_reason"] == "stop" for record in records)
    assert all("c" not in record["response"].split() for record in records)
    refused = espalier("grpo", "--out", tmp_path / "task", "--stop", "c", expect=2).stderr
    assert "--stop" in refused and "built-in task" in refused
