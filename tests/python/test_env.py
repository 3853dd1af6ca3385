"""`--env`: trajectories of turns against an environment, in `generate` and `grpo`."""

import json
import os
import subprocess

import pytest
import torch

import oracle
from text_model import END, byte_level_tokenizer, make_text_model, read_lines, word_tokenizer, write_lines

WORDS = "a b c d e f g h".split()
# Observations that tell the turn, a reward of its own for each, and an early end for some.
ENVIRONMENT = """
class Environment:
    def reset(self, prompt, ground_truth=None):
        self.turns, self.asked = 0, prompt
    def step(self, text):
        self.turns += 1
        return " ".join("abcdefgh"[:self.turns]), self.turns + 0.25 * ("c" in text.split()), text.split()[:1] == ["d"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of a few words, so that its turns end soon."""
    return make_text_model(tmp_path_factory.mktemp("env") / "model", word_tokenizer(WORDS))


def with_masks(records):
    """A mask of ones is not written."""
    return [{"loss_mask": [1] * len(record["response_ids"]), **record} for record in records]


def generate(espalier, model, folder, environment, *options, prompts=({"prompt": "a b"}, {"prompt": "c d e"}), longest=40, turns=3, n=6,
             expect=0, **settings):
    path, out = write_lines(list(prompts), folder / "prompts.jsonl"), folder / f"out{len(list(folder.iterdir()))}.jsonl"
    (folder / "env.py").write_text(environment)
    done = espalier("generate", "--model", model, "--prompts", path, "--out", out, "--json", "--n", n, "--max-response-length", longest,
                    "--env", folder / "env.py", "--turns", turns, *options, expect=expect, **settings)
    return (with_masks(read_lines(out)), done.json) if expect == 0 else (out, done.json["error"])


def turns_of(record):
    """The model's own tokens of each turn and the observations between them, by the mask."""
    own, observed, before = [], [], 0
    for token, mask in zip(record["response_ids"], record["loss_mask"]):
        if mask and not before:
            own.append([])
        if not mask and (before or not observed):
            observed.append([])
        (own if mask else observed)[-1].append(token)
        before = mask
    return own, observed


def test_observations_have_no_kept_set(espalier, model, tmp_path):
    records, told = generate(espalier, model, tmp_path, ENVIRONMENT, "--top-p", 0.7)
    assert told["logprobs_over"] == "kept_ids"
    for record in records:
        for token, mask, ids, logprob, full in zip(*(record[name] for name in (
                "response_ids", "loss_mask", "kept_ids", "rollout_logprobs", "full_logprobs")), strict=True):
            assert token in ids and full < logprob if mask else ids is None and logprob == full == 0


def test_observations_stand_between_the_turns_and_have_no_loss(espalier, model, tmp_path):
    records, told = generate(espalier, model, tmp_path, ENVIRONMENT)
    tokenizer = {word: index for index, word in enumerate([END, "<|im_start|>", *WORDS])}
    reasons = set()
    assert len(records) == told["rollouts"] == 12 and told["prompts"] == 2
    for record in records:
        own, observed = turns_of(record)
        rewards = record["turn_rewards"]
        reasons.add(record["finish_reason"])
        assert record["turns"] == len(rewards) == len(own) and len(observed) == len(own) - 1
        for turn, ids in enumerate(observed):
            assert ids == [tokenizer[word] for word in WORDS[:turn + 1]]
            assert own[turn][-1] == tokenizer[END], "a turn that is followed by another has ended"
        assert rewards == [turn + 1 + 0.25 * (tokenizer["c"] in ids) for turn, ids in enumerate(own)]
        assert record["reward"] == sum(rewards)
        assert all((logprob == 0) == (mask == 0) for logprob, mask in zip(record["rollout_logprobs"], record["loss_mask"]))
        assert len(record["response_ids"]) <= 40
        ended_early = next((ids for ids in own if tokenizer["d"] == ids[0]), None)
        if record["finish_reason"] == "done":
            assert ended_early is own[-1]
        else:
            assert ended_early is None
        if record["finish_reason"] == "turns":
            assert len(own) == 3
    assert {"done", "turns"} <= reasons, "the case has both"
    assert told["turns"] == sum(record["turns"] for record in records) / 12
    assert told["tokens"]["observation"] == sum(mask == 0 for record in records for mask in record["loss_mask"])
    assert told["tokens"]["response"] == sum(mask == 1 for record in records for mask in record["loss_mask"])


@pytest.mark.parametrize("longest", [1, 5, 9, 14])
def test_the_length_bounds_the_whole_trajectory(longest, espalier, model, tmp_path):
    records, _ = generate(espalier, model, tmp_path, ENVIRONMENT, longest=longest, turns=50)
    assert "length" in {record["finish_reason"] for record in records}
    for record in records:
        assert len(record["response_ids"]) <= longest and record["loss_mask"][-1] == 1, "no observation stands at the end"
        assert len(record["turn_rewards"]) == record["turns"] == len(turns_of(record)[0]), "the cut turn is rewarded, too"


def test_recurrent_layers_read_observations_of_several_tokens(espalier, tmp_path):
    model = make_text_model(tmp_path / "model", word_tokenizer(WORDS), kind="Qwen3Next", num_hidden_layers=4, num_experts=4, num_experts_per_tok=2,
                            moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
                            linear_key_head_dim=8, linear_value_head_dim=8)
    records, _ = generate(espalier, model, tmp_path, ENVIRONMENT, "--dtype", "float64", turns=4)
    truth = oracle.score(oracle.load_model(model, torch.float64), records)[0]
    assert max(mask.count(0) for mask in (record["loss_mask"] for record in records)) >= 3, "the case has observations of several tokens"
    for record, exact in zip(records, truth, strict=True):
        for mask, found, own in zip(record["loss_mask"], record["rollout_logprobs"], exact, strict=True):
            assert not mask or abs(found - own) < 1e-12


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_log_probs_are_those_of_score_and_of_the_oracle(dtype, espalier, model, tmp_path):
    records, _ = generate(espalier, model, tmp_path, ENVIRONMENT, "--dtype", dtype)
    out = write_lines(records, tmp_path / "records.jsonl")
    espalier("score", "--model", model, "--rollouts", out, "--out", tmp_path / "scored.jsonl", "--dtype", dtype)
    dense = {name: oracle.score(oracle.load_model(model, kind), records)[0] for name, kind in
             (("float64", torch.float64), ("float32", torch.float32))}
    own = 0.0
    for index, (record, scored) in enumerate(zip(records, read_lines(tmp_path / "scored.jsonl"), strict=True)):
        for place, (found, again) in enumerate(zip(record["rollout_logprobs"], scored["logprobs"], strict=True)):
            if record["loss_mask"][place]:
                truth = float(dense["float64"][index][place])
                own = max(own, abs(found - truth), abs(again - truth))
    allowed = 1e-12 if dtype == "float64" else 2 * max(
        abs(float(a) - float(b)) for one, other in zip(dense["float32"], dense["float64"]) for a, b in zip(one, other))
    assert own <= allowed


def test_with_sums_of_a_defined_order_they_are_the_same_bits(program, model, tmp_path):
    environment = dict(os.environ, ESPALIER_PRODUCTS="own")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    prompts = write_lines([{"prompt": "a b"}, {"prompt": "c d e"}], tmp_path / "prompts.jsonl")

    def run(*arguments):
        subprocess.run([str(program), *map(str, arguments), "--dtype", "float32"], env=environment, check=True, capture_output=True)

    run("generate", "--model", model, "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--n", 6, "--max-response-length", 40,
        "--env", tmp_path / "env.py", "--turns", 3)
    run("score", "--model", model, "--rollouts", tmp_path / "out.jsonl", "--out", tmp_path / "scored.jsonl")
    compared = 0
    for record, scored in zip(with_masks(read_lines(tmp_path / "out.jsonl")), read_lines(tmp_path / "scored.jsonl"), strict=True):
        for mask, found, again in zip(record["loss_mask"], record["rollout_logprobs"], scored["logprobs"], strict=True):
            assert found == again or not mask
            compared += mask
    assert compared > 50


@pytest.mark.parametrize("options", [["--max-num-seqs", 2], ["--token-budget", 4], ["--max-num-seqs", 1, "--token-budget", 1]])
def test_what_runs_together_does_not_matter(options, espalier, model, tmp_path):
    together, _ = generate(espalier, model, tmp_path, ENVIRONMENT, "--dtype", "float64")
    apart, _ = generate(espalier, model, tmp_path, ENVIRONMENT, "--dtype", "float64", *options)
    for one, other in zip(together, apart, strict=True):
        assert one["rollout_logprobs"] == pytest.approx(other.pop("rollout_logprobs"), abs=1e-12)
        assert {name: value for name, value in one.items() if name != "rollout_logprobs"} == other


def test_a_seed_gives_the_same_trajectories_however_slow_the_environment_is(espalier, model, tmp_path):
    quick, _ = generate(espalier, model, tmp_path, ENVIRONMENT)
    slow, _ = generate(espalier, model, tmp_path, "import time\n" + ENVIRONMENT.replace("self.turns += 1", "self.turns += 1; time.sleep(0.01)"))
    assert quick == slow
    assert generate(espalier, model, tmp_path, ENVIRONMENT, "--seed", 7)[0] != quick


def test_coroutines_of_one_call_run_together(espalier, model, tmp_path):
    plain, _ = generate(espalier, model, tmp_path, ENVIRONMENT)
    meeting = "import asyncio\nmet = []\n" + ENVIRONMENT.replace("def ", "async def ").replace(
        "self.turns, self", "met.append(0); await asyncio.sleep(0); assert len(met) == 12; self.turns, self")
    assert generate(espalier, model, tmp_path, meeting)[0] == plain


def test_what_reset_returns_joins_the_prompt(espalier, model, tmp_path):
    environment = ENVIRONMENT.replace("self.turns, self.asked = 0, prompt", "self.turns = 0; return 'g h'")
    for record in generate(espalier, model, tmp_path, environment, longest=8)[0]:
        assert record["prompt"] in ("a bg h", "c d eg h") and record["prompt_ids"][-2:] == [2 + WORDS.index("g"), 2 + WORDS.index("h")]
        assert len(record["response_ids"]) <= 6, "its tokens count"


@pytest.mark.parametrize("stop", [False, True])
def test_with_messages_an_observation_is_a_message_of_the_chat_template(stop, espalier, tmp_path):
    model = make_text_model(tmp_path / "model", byte_level_tokenizer(["tool says yes"], 300))
    environment = ("class Environment:\n    def reset(self, prompt, **fields):\n        assert prompt == [{'role': 'user', 'content': 'hi'}] and fields['id'] == 7\n"
                   "        return 'now'\n    def step(self, text):\n        return 'tool says', 0.5, False\n")
    options = ["--stop", "e", "--stop", "a", "--stop", "s"] if stop else []
    records, _ = generate(espalier, model, tmp_path, environment, *options, longest=400, turns=2, n=16,
                          prompts=[{"prompt": [{"role": "user", "content": "hi"}], "id": 7}])
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    seen = set()
    for record in records:
        assert record["prompt"].endswith("<|im_start|>user\nhi\nnow<|im_end|>\n<|im_start|>assistant\n")
        own, observed = turns_of(record)
        for turn, ids in zip(own, observed):
            ended = tokenizer.id_to_token(turn[-1]) == END
            seen.add(ended)
            wanted = "\n<|im_start|>user\ntool says<|im_end|>\n<|im_start|>assistant\n"
            assert ids == tokenizer.encode(("" if ended else END) + wanted, add_special_tokens=False).ids
    assert (False if stop else True) in seen


FAULTS = {
    "exception": ("raise ValueError('boom')", "ValueError: boom", "env.py:7"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3", "env.py:7"),
    "no tuple": ("return 'x'", "str: 'x'", "env.py"),
    "no number": ("return None, 'much', False", "str: 'much'", "env.py"),
    "not finite": ("return None, float('nan'), False", "not a finite number", "env.py"),
    "no observation": ("return 3, 1, False", "int: 3", "env.py"),
    "death": ("import os; os._exit(4)", "status 4", "env.py"),
    "late": ("import time; time.sleep(30)", "none within", "env.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_step_names_its_trajectory_and_loses_nothing(fault, espalier, model, tmp_path):
    line, message, where = FAULTS[fault]
    environment = ENVIRONMENT.replace("self.turns += 1\n", f"self.turns += 1\n        if self.turns == 2: {line}\n")
    out, error = generate(espalier, model, tmp_path, environment, "--reward-timeout", 1, expect=3)
    assert message in error["got"] and error["where"].endswith(where), error
    assert "turn 2 of trajectory " in error["remedy"] and "prompts.jsonl:" in error["remedy"], error
    records = read_lines(out)
    assert len(records) == 12
    cut = [record for record in records if record["finish_reason"] == "abort"]
    assert cut and all("reward" not in record and len(record["turn_rewards"]) <= 2 for record in cut)
    assert all("reward" in record for record in records if record["finish_reason"] != "abort")


@pytest.mark.parametrize("text, message", [("class Environments: pass", "Environments"), ("x = 1", "no class at all"),
                                           ("class Environment:\n    def reset(self, prompt): pass", "without step"),
                                           ("class Environment\n", "SyntaxError"), ("import nothing_like_it", "nothing_like_it"),
                                           ("class Environment:\n    def reset(self, prompt): raise OSError('down')\n    def step(self, text): pass", "OSError: down")])
def test_a_file_without_an_environment_is_refused(text, message, espalier, model, tmp_path):
    out, error = generate(espalier, model, tmp_path, text, expect=3)
    assert message in error["got"] and not out.exists()


@pytest.mark.parametrize("options", [["--turns", 2], ["--env", "ENV", "--reward", "ENV"], ["--env", "missing.py"]])
def test_options_that_contradict_are_refused(options, espalier, model, tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    prompts = write_lines([{"prompt": "a"}], tmp_path / "prompts.jsonl")
    options = [tmp_path / "env.py" if word == "ENV" else word for word in options]
    espalier("generate", "--model", model, "--prompts", prompts, "--out", tmp_path / "out.jsonl", *options,
             expect=3 if "missing.py" in options else 2)


def test_the_gradient_is_that_of_the_models_own_tokens(espalier, model, tmp_path):
    """The record as written against one made by hand: each turn a record of its own, whose prompt repeats the history."""
    records, _ = generate(espalier, model, tmp_path, ENVIRONMENT, "--dtype", "float64", n=2)
    by_hand = []
    for index, record in enumerate(records):
        ids, mask = record["response_ids"], record["loss_mask"]
        advantage = (-1) ** index * (1 + index)
        record |= {"advantage": advantage}
        begins = [place for place in range(len(ids)) if mask[place] and (place == 0 or not mask[place - 1])]
        for begin in begins:
            end = next((place for place in range(begin, len(ids)) if not mask[place]), len(ids))
            by_hand.append({"prompt_ids": record["prompt_ids"] + ids[:begin], "response_ids": ids[begin:end], "advantage": advantage,
                            "group": record["group"]})
    assert len(by_hand) > len(records)

    def trained(name, lines):
        path = write_lines(lines, tmp_path / f"{name}.jsonl")
        done = espalier("train", "--model", model, "--rollouts", path, "--out", tmp_path / name, "--adv-estimator", "given", "--dtype", "float64",
                        "--loss-agg-mode", "token-mean", "--lr", "1e-3", "--mini-batch-size", 0, "--json").json
        return done["steps"][0]

    kept = [{name: record[name] for name in ("prompt_ids", "response_ids", "loss_mask", "advantage", "group")} for record in records]
    written, made = trained("written", kept), trained("made", by_hand)
    assert written["loss_tokens"] == made["loss_tokens"] == sum(sum(record["loss_mask"]) for record in records)
    assert written["grad_norm"] == pytest.approx(made["grad_norm"], rel=1e-12) and written["grad_norm"] > 0
    unmasked = trained("unmasked", [{**record, "loss_mask": [1] * len(record["loss_mask"])} for record in kept])
    assert abs(unmasked["grad_norm"] - written["grad_norm"]) > 1e-6 * written["grad_norm"], "the mask matters"


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_grpo_learns_from_trajectories_of_prompts(espalier, model, tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    prompts = write_lines([{"prompt": "a b"}, {"prompt": "c"}], tmp_path / "prompts.jsonl")
    arguments = ["grpo", "--model", model, "--prompts", prompts, "--val-prompts", prompts, "--env", tmp_path / "env.py", "--turns", 3, "--n", 6,
                 "--train-batch-size", 2, "--max-response-length", 30, "--steps", 2, "--lr", "1e-3", "--threads", 1]
    told = espalier(*arguments, "--out", tmp_path / "run", "--json").json
    records = with_masks(read_lines(tmp_path / "run/last_rollouts.jsonl"))
    step = told["steps"][-1]
    assert step["turns"] == pytest.approx(sum(record["turns"] for record in records) / len(records))
    assert step["reward"] == pytest.approx(sum(record["reward"] for record in records) / len(records))
    assert step["loss_tokens"] == sum(sum(record["loss_mask"]) for record in records) < sum(len(record["loss_mask"]) for record in records)
    assert all(1 <= evaluation["turns"] <= 3 for evaluation in told["evaluations"]) and told["evaluations"]
    espalier(*arguments, "--out", tmp_path / "again")
    for file in ("model/model.safetensors", "last_rollouts.jsonl"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_a_failing_environment_ends_grpo_which_can_be_continued(espalier, model, tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT.replace("self.turns += 1", "self.turns += 1; import pathlib; assert not pathlib.Path(__file__).with_name('down').exists()"))
    prompts = write_lines([{"prompt": "a b"}], tmp_path / "prompts.jsonl")
    arguments = ["--threads", 1]
    (tmp_path / "down").touch()
    failed = espalier("grpo", "--model", model, "--prompts", prompts, "--env", tmp_path / "env.py", "--turns", 2, "--n", 4, "--train-batch-size", 1,
                      "--max-response-length", 16, "--steps", 1, "--out", tmp_path / "run", "--json", *arguments, expect=3)
    assert "AssertionError" in failed.json["error"]["got"] and "trajectory" in failed.json["error"]["remedy"]
    (tmp_path / "down").unlink()
    espalier("grpo", "--resume", tmp_path / "run", *arguments)
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_grpo_takes_an_environment_for_its_own_tasks(espalier, tmp_path):
    from conftest import ROOT
    told = espalier("grpo", "--task", "retrieval", "--env", ROOT / "examples/look_up_tool.py", "--turns", 2, "--prompt-length", 64, "--max-response-length", 16,
                    "--train-batch-size", 4, "--n", 4, "--warm-start-steps", 4, "--steps", 2, "--val-size", 4, "--threads", 1, "--out", tmp_path / "run", "--json").json
    assert all(1 <= step["turns"] <= 2 for step in told["steps"])
    (tmp_path / "env.py").write_text("class Environment:\n    def reset(self, prompt): return 'supercalifragilistic'\n    def step(self, text): return None, 0, True\n")
    error = espalier("grpo", "--task", "retrieval", "--env", tmp_path / "env.py", "--prompt-length", 64, "--max-response-length", 16, "--train-batch-size", 4,
                     "--n", 4, "--warm-start-steps", 1, "--steps", 1, "--threads", 1, "--out", tmp_path / "words", "--json", expect=3).json["error"]
    assert "supercalifragilistic" in error["got"] and "observation" in error["where"]
