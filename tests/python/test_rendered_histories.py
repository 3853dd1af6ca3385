"""`--observations render`: the history of a chat is what transformers renders, records begin anew where that changes it, and nothing is lost."""

import json

import pytest
import torch
import transformers

import oracle
from test_env import metrics, with_masks
from test_parallel import Ranks
from text_model import END, make_text_model, read_lines, word_tokenizer, write_lines

WORDS = "user assistant system tool You are helpful. a b c d e f g h <x>".split()
CHATS = [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "c d e f"}], [{"role": "user", "content": "a b"}]]
ENVIRONMENT = """
class Environment:
    def reset(self, prompt, **fields):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        return " ".join("abcdefgh"[:self.turns]), 1.0 + self.turns, text.split()[:1] == ["d"]
"""


def template(answer, user="{{ message.content }}"):
    """Words with spaces between them, so that a word is a token; `answer` is what the template makes of an assistant's earlier message."""
    return ("{%- for message in messages %}{% if message.role == 'assistant' %}<|im_start|> assistant " + answer + " " + END + " {% else %}<|im_start|> {{ message.role }} "
            + user + " " + END + " {% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|> assistant{% endif %}")


TEMPLATES = {
    "append": template("{{ message.content }}"),
    "shorter": template("{{ message.content.split()[:2] | join(' ') }}"),
    "first_word_changes": template("a {{ message.content }}"),
    "prompt_changes": template("{{ message.content }}", "{{ '<x> ' if messages | length > 1 else '' }}{{ message.content }}"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def find(name, **more):
        key = (name, *sorted(more))
        if key not in made:
            made[key] = make_text_model(tmp_path_factory.mktemp(name) / "model", word_tokenizer(WORDS), TEMPLATES[name], **more)
        return made[key]

    return find


def words(directory, folder, *options, observations="render", turns=4, n=3, longest=60):
    (folder / "env.py").write_text(ENVIRONMENT)
    prompts = write_lines([{"prompt": chat} for chat in CHATS], folder / "prompts.jsonl")
    return ["generate", "--model", directory, "--prompts", prompts, "--env", folder / "env.py", "--turns", turns, "--n", n, "--max-response-length", longest,
            "--observations", observations, "--dtype", "float64", "--threads", 1, "--json", *options]


def generated(espalier, directory, folder, *options, **how):
    out = folder / f"out{len(list(folder.iterdir()))}.jsonl"
    told = espalier(*words(directory, folder, *options, **how), "--out", out).json
    return with_masks(read_lines(out)), told


def trajectories(records):
    out = {}
    for record in records:
        out.setdefault((record["group"], record["trajectory"]), []).append(record)
    return list(out.values())


def turns_in(record):
    """The model's own tokens of each turn of a record."""
    out, before = [], 0
    for token, mask in zip(record["response_ids"], record["loss_mask"]):
        if mask and not before:
            out.append([])
        if mask:
            out[-1].append(token)
        before = mask
    return out


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_continues_what_transformers_renders(name, model, espalier, tmp_path):
    directory = model(name)
    exact = transformers.AutoTokenizer.from_pretrained(directory)
    records, told = generated(espalier, directory, tmp_path)
    sampled = turns = 0
    for records_of in trajectories(records):
        messages = list(CHATS[int(records_of[0]["group"])])
        place = 0
        for record in records_of:
            assert record["turn"] == place and record["turns"] == len(record["turn_rewards"]) == len(turns_in(record))
            history = record["prompt_ids"]
            for turn, said in enumerate(turns_in(record)):
                if turn == 0:
                    assert history == exact.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                before = said[:-1] if exact.decode(said[-1]) == END else said
                messages += [{"role": "assistant", "content": exact.decode(before)}, {"role": "user", "content": " ".join("abcdefgh"[:place + 1])}]
                place += 1
                sampled += len(said)
        assert records_of[-1]["finish_reason"] != "render" and all(record["finish_reason"] == "render" for record in records_of[:-1])
        assert {record["reward"] for record in records_of} == {sum(sum(record["turn_rewards"]) for record in records_of)}
        assert all("<|im_start|>" in record["prompt"] for record in records_of) and ["messages" in record for record in records_of] == [True] + [False] * (len(records_of) - 1)
        turns += place
    assert told["rollouts"] == len(trajectories(records)) == 9 and told["turns"] == pytest.approx(turns / 9)
    assert told["tokens"]["response"] == sampled == sum(sum(record["loss_mask"]) for record in records), "every sampled token trains once"
    assert (len(records) == 9) == (name == "append") and turns > 20


def test_where_nothing_changes_the_records_are_those_of_appending(model, espalier, tmp_path):
    rendered, _ = generated(espalier, model("append"), tmp_path)
    appended, _ = generated(espalier, model("append"), tmp_path, observations="append")
    assert [{name: value for name, value in record.items() if name not in ("trajectory", "turn")} for record in rendered] == appended


@pytest.mark.parametrize("name, kind", [("shorter", {}), ("first_word_changes", {}), ("prompt_changes", {}), ("append", {"kind": "Qwen3Next"}), ("shorter", {"kind": "Qwen3Next"})])
def test_log_probs_are_those_of_score_and_of_the_oracle(name, kind, model, espalier, tmp_path):
    more = {} if not kind else dict(kind, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                                    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    records, _ = generated(espalier, model(name, **more), tmp_path)
    rollouts = write_lines(records, tmp_path / "records.jsonl")
    espalier("score", "--model", model(name, **more), "--rollouts", rollouts, "--out", tmp_path / "scored.jsonl", "--dtype", "float64")
    truth = oracle.score(oracle.load_model(model(name, **more), torch.float64), records)[0]
    for record, scored, exact in zip(records, read_lines(tmp_path / "scored.jsonl"), truth, strict=True):
        for mask, found, again, own in zip(record["loss_mask"], record["rollout_logprobs"], scored["logprobs"], exact, strict=True):
            assert not mask or abs(found - own) < 1e-12 and abs(again - own) < 1e-12


@pytest.mark.parametrize("name", ["shorter", "prompt_changes"])
@pytest.mark.parametrize("options", [["--max-num-seqs", 2], ["--token-budget", 4], ["--max-num-seqs", 1, "--token-budget", 1]])
def test_what_runs_together_does_not_matter(name, options, model, espalier, tmp_path):
    together, _ = generated(espalier, model(name), tmp_path)
    apart, _ = generated(espalier, model(name), tmp_path, *options)
    for one, other in zip(together, apart, strict=True):
        assert one["rollout_logprobs"] == pytest.approx(other.pop("rollout_logprobs"), abs=1e-12)
        assert {key: value for key, value in one.items() if key != "rollout_logprobs"} == other


@pytest.mark.parametrize("name", ["shorter", "prompt_changes"])
@pytest.mark.parametrize("count, layout", [(2, ["--dp", 2]), (2, ["--tp", 2])])
def test_ranks_write_the_records_of_one_process(count, layout, name, model, espalier, program, tmp_path):
    alone, _ = generated(espalier, model(name), tmp_path)
    ranks = Ranks(program, count, [*words(model(name), tmp_path, *layout), "--out", tmp_path / "ranks.jsonl"])
    assert set(ranks.end()) == {0}, ranks.stderr
    for one, other in zip(alone, with_masks(read_lines(tmp_path / "ranks.jsonl")), strict=True):
        assert one["rollout_logprobs"] == pytest.approx(other.pop("rollout_logprobs"), abs=1e-12)
        assert {key: value for key, value in one.items() if key != "rollout_logprobs"} == other
    assert json.loads(ranks.stdout[0])["rollouts"] == 9


def test_the_tokens_in_memory_stay_where_the_history_does(model, espalier, tmp_path):
    """The prompt runs once for its group although histories change behind it; where they change inside it, every history runs."""
    def rows(name):
        return generated(espalier, model(name), tmp_path)[1]["tokens"]["prompt_physical"]
    kept = sum(len(transformers.AutoTokenizer.from_pretrained(model("shorter")).apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in CHATS[:2])
    assert rows("append") == rows("shorter") == kept < rows("prompt_changes")


def test_an_answer_may_be_a_message_of_the_environment(model, espalier, tmp_path):
    directory = model("append")
    exact = transformers.AutoTokenizer.from_pretrained(directory)
    command = words(directory, tmp_path)
    (tmp_path / "env.py").write_text("class Environment:\n    def reset(self, prompt): pass\n    def step(self, text):\n"
                                     "        return [{'role': 'assistant', 'content': 'g g'}, {'role': 'tool', 'content': 'h'}], 0.0, False\n")
    espalier(*command, "--out", tmp_path / "out.jsonl")
    later = [record for record in read_lines(tmp_path / "out.jsonl") if record["turn"] == 1]
    assert later
    for record in later:
        messages = CHATS[int(record["group"])] + [{"role": "assistant", "content": "g g"}, {"role": "tool", "content": "h"}]
        assert record["prompt_ids"] == exact.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_grpo_trains_on_rendered_histories(model, espalier, tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    prompts = write_lines([{"prompt": chat} for chat in CHATS[:2]], tmp_path / "prompts.jsonl")
    told = espalier("grpo", "--model", model("shorter"), "--prompts", prompts, "--val-prompts", prompts, "--env", tmp_path / "env.py", "--turns", 3, "--n", 4,
                    "--train-batch-size", 2, "--max-response-length", 40, "--observations", "render", "--steps", 2, "--lr", "1e-3", "--threads", 1,
                    "--out", tmp_path / "run", "--json").json
    records = with_masks(read_lines(tmp_path / "run/last_rollouts.jsonl"))
    runs, step = trajectories(records), told["steps"][-1]
    assert len(runs) == 8 < len(records)
    assert step["turns"] == pytest.approx(sum(record["turns"] for record in records) / 8)
    assert all(["reward" in record for record in run] == [False] * (len(run) - 1) + [True] for run in runs), "the loop's outcome stands with the last turn"
    assert step["reward"] == pytest.approx(sum(run[-1]["reward"] for run in runs) / 8)
    assert step["loss_tokens"] == sum(sum(record["loss_mask"]) for record in records)
    assert len(metrics(tmp_path / "run")) >= 2 and len(told["evaluations"]) >= 1


@pytest.mark.parametrize("prompt, options, status, word", [("a b", [], 3, "list of messages"), (CHATS[0], ["NO ENV"], 2, "--env")])
def test_what_cannot_be_rendered_is_refused(prompt, options, status, word, model, espalier, tmp_path):
    command = [str(part) for part in words(model("append"), tmp_path)]
    write_lines([{"prompt": prompt}], tmp_path / "prompts.jsonl")
    if options:
        at = command.index("--env")
        del command[at:at + 4]
    error = espalier(*command, "--out", tmp_path / "o.jsonl", expect=status).json["error"]
    assert word in error["expected"]
