"""Rows of text as records: token for token what TRL's trainers prepare from the same rows, and read by the verbs."""

import types

import pytest
import transformers

from espalier.records.errors import RecordError
from espalier.texts import rows
from text_model import CHAT_TEMPLATE, byte_level_tokenizer, make_text_model, read_lines, write_lines

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ASK = [{"role": "user", "content": "How many apples are three apples and two apples?"}]
MORE = [{"role": "assistant", "content": "Do you mean apples alone?"}, {"role": "user", "content": "Yes, and quickly."}]


def said(text):
    return [{"role": "assistant", "content": text}]


TEXT = [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green, I think."}, {"prompt": "Two and two", "chosen": " make four<|im_end|>", "rejected": " make fish"}]
INSIDE = [{"chosen": "The sky is blue.", "rejected": "The sky is green."}, {"chosen": "Say yes", "rejected": "Say no, never"}]
CHAT = [{"prompt": ASK, "chosen": said("Five."), "rejected": said("Six, of course.")}, {"prompt": ASK + MORE, "chosen": said("Five apples."), "rejected": said("Five pears.")}]
CHAT_INSIDE = [{"chosen": ASK + said("Five."), "rejected": ASK + said("Six.")}, {"chosen": ASK + MORE + said("5"), "rejected": ASK + MORE + said("6")}]
REPEATED = [{"prompt": row["chosen"][0]["content"], **row} for row in CHAT_INSIDE]  # UltraFeedback's columns
PAIRS = {"text": TEXT, "text_inside": INSIDE, "chat": CHAT, "chat_inside": CHAT_INSIDE}

SFT = {
    "text": [{"text": "Once upon a time."}, {"text": "The end<|im_end|>"}],
    "completion": [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "Two and", "completion": " two<|im_end|>"}],
    "chat_completion": [{"prompt": ASK, "completion": said("Five.")}, {"prompt": ASK + MORE, "completion": said("Five apples.")}],
    "messages": [{"messages": ASK + said("Five.")}, {"messages": ASK + MORE + said("Five apples.")}],
    "conversations": [{"conversations": [{"from": "user", "value": "How many?"}, {"from": "assistant", "value": "Five."}]}],
}


@pytest.fixture(scope="module", params=["marks", "plain"])
def model(request, tmp_path_factory):
    """A model whose template marks what the assistant says, and one whose template does not."""
    tokenizer = byte_level_tokenizer(["the sky is blue and green", "three apples and two apples make five", "assistant user system"] * 4, 400)
    template = CHAT_TEMPLATE if request.param == "marks" else PLAIN_TEMPLATE
    return make_text_model(tmp_path_factory.mktemp(request.param) / "model", tokenizer, template), request.param == "marks"


def prepared(trainer, given, directory, **state):
    """The data set that TRL's trainer makes of rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    own = types.SimpleNamespace(_tokenizer=tokenizer, chat_template=None, **state)
    args = types.SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start", dataset_text_field="text", shuffle_dataset=False,
                                 assistant_only_loss=state.get("assistant_only_loss", False))
    more = (False, None) if trainer is trl.SFTTrainer else ()
    return list(trainer._prepare_dataset(own, datasets.Dataset.from_list(given), tokenizer, args, *more, "train"))


def records(objective, given, directory, tmp_path, columns=""):
    notes = []
    path = write_lines(given, tmp_path / "rows.jsonl")
    (tmp_path / "records.jsonl").write_text("".join(rows.lines(objective, str(directory), columns, str(path), notes)))
    return read_lines(tmp_path / "records.jsonl")


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_dpo_are_trls(kind, model, tmp_path):
    exact = prepared(trl.DPOTrainer, PAIRS[kind], model[0])
    found = records("dpo", PAIRS[kind], model[0], tmp_path)
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert [row[name] for row in found] == [row[name] for row in exact], name


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_reward_models_are_trls(kind, model, tmp_path):
    exact = prepared(trl.RewardTrainer, PAIRS[kind], model[0])
    found = records("reward", PAIRS[kind], model[0], tmp_path)
    for name in ("chosen_ids", "rejected_ids"):
        assert [row["prompt_ids"] + row[name] for row in found] == [row[name] for row in exact], name


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_a_text_prompt_may_repeat_what_both_answers_hold(objective, model, tmp_path):
    assert [trl.maybe_extract_prompt(dict(row)) for row in REPEATED] == [trl.maybe_extract_prompt(dict(row)) for row in CHAT_INSIDE]
    assert records(objective, REPEATED, model[0], tmp_path) == records(objective, CHAT_INSIDE, model[0], tmp_path)


@pytest.mark.parametrize("kind", SFT)
def test_supervised_rows_and_their_labels_are_trls(kind, model, tmp_path):
    directory, marks = model
    chat = kind in ("chat_completion", "messages", "conversations")
    exact = prepared(trl.SFTTrainer, SFT[kind], directory, assistant_only_loss=marks and chat, completion_only_loss="completion" in kind)
    for row, wanted in zip(records("sft", SFT[kind], directory, tmp_path), exact, strict=True):
        assert row["prompt_ids"] + row["response_ids"] == wanted["input_ids"]
        mask = row.get("loss_mask", [1] * len(row["response_ids"]))
        labels = [-100] * len(row["prompt_ids"]) + [token if one else -100 for token, one in zip(row["response_ids"], mask)]
        assert labels[1:] == wanted["labels"][1:]  # nothing predicts the first token
        assert 1 in mask


def test_a_list_of_scored_answers_is_tokenized_as_pairs_are(model, tmp_path):
    given = [{"prompt": ASK, "answers": [{"response": said(text), "score": score} for text, score in (("Five.", 2), ("Six.", 0.5), ("Five pears", 1))]}]
    [record] = records("reward", given, model[0], tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model[0])
    for answer, row in zip(record["answers"], given[0]["answers"], strict=True):
        assert record["prompt_ids"] + answer["response_ids"] == tokenizer.apply_chat_template(ASK + row["response"], return_dict=False)
        assert answer["score"] == row["score"]


@pytest.mark.parametrize("model", ["marks"], indirect=True)
@pytest.mark.parametrize("objective, given", [("dpo", TEXT), ("reward", CHAT), ("sft", SFT["messages"])])
def test_verbs_read_rows_directly_as_converted(objective, given, model, espalier, tmp_path):
    given = [{**row, "id": place} for place, row in enumerate(given)]
    path = write_lines(given, tmp_path / "rows.jsonl")
    records_of = tmp_path / "converted.jsonl"
    told = espalier("convert", "--model", model[0], "--objective", objective, "--json", path, records_of).json
    own = records(objective, given, model[0], tmp_path)
    assert [{**row, "id": 0} for row in read_lines(records_of)] == [{**row, "id": 0} for row in own]
    assert "rows of text" in told["format"]
    words = ["--model", model[0], "--objective", objective, "--json"]
    a, b = (espalier("train", *words, "--rollouts", rollouts, "--out", tmp_path / name).json["steps"] for name, rollouts in (("a", path), ("b", records_of)))
    assert a[0]["loss"] == b[0]["loss"] and a[0]["rows"] == b[0]["rows"]
    assert espalier("plan", *words, "--rollouts", path).json["rows"] == a[0]["rows"]
    assert espalier("verify", *words, "--rollouts", path).json["verdict"] == "pass"


@pytest.mark.parametrize("objective, row, expected", [
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": 3}, "rejected"), ("dpo", {"prompt": ASK, "chosen": "b", "rejected": "c"}, "of one kind"),
    ("dpo", {"chosen": "yes", "rejected": "no"}, "a prompt and two answers"), ("reward", {"chosen": "yes", "rejected": "no"}, "begin with the same token"),
    ("reward", {"prompt": "a", "answers": [{"response": "b", "score": 1}]}, "at least two"), ("sft", {"text": ""}, "at least two tokens"),
    ("sft", {"prompt": "a", "completion": 1}, "completion"), ("sft", {"messages": [{"role": "cook", "content": "x"}]}, "no role cook"),
    ("dpo", {"prompt": "Say", "chosen": said("yes"), "rejected": said("no")}, "of one kind"),
    ("dpo", {"prompt": "Other", "chosen": ASK + said("yes"), "rejected": ASK + said("no")}, "of one kind")])
def test_damaged_rows_are_refused_by_line(objective, row, expected, model, tmp_path):
    with pytest.raises(RecordError) as raised:
        records(objective, [row], model[0], tmp_path)
    error = raised.value
    assert "rows.jsonl:1" in error.where and expected in f"{error.where} {error.expected} {error.got}"


def test_roles_that_the_template_leaves_out_are_named(tmp_path):
    template = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    directory = make_text_model(tmp_path / "model", byte_level_tokenizer(["how many"] * 4, 300), template)
    with pytest.raises(RecordError) as raised:
        records("sft", [{"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Five."}]}], directory, tmp_path)
    assert "0 tokens" in raised.value.got and "human, gpt" in raised.value.got and "user, assistant" in raised.value.remedy


@pytest.mark.parametrize("model", ["marks"], indirect=True)
def test_the_program_says_which_row_is_damaged(model, espalier, tmp_path):
    path = write_lines([{"prompt": "a", "chosen": "b", "rejected": 3}], tmp_path / "rows.jsonl")
    outcome = espalier("train", "--model", model[0], "--objective", "dpo", "--rollouts", path, "--out", tmp_path / "out", expect=3)
    assert "rows.jsonl:1: rejected" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_convert_writes_pairs_and_lists_as_it_reads_them(espalier, tmp_path):
    given = [{"group": "g", "prompt_ids": [3, 4], "chosen_ids": [5], "ref_chosen_logps": -1.5, "rejected_ids": [6, 7], "ref_rejected_logps": -2.25, "margin": 0.5},
             {"prompt_ids": [3], "temperature": 0.5, "answers": [{"response_ids": [5], "score": 1.0}, {"response_ids": [6, 8], "score": -2.0}]}]
    path = write_lines(given, tmp_path / "in.jsonl")
    espalier("convert", path, tmp_path / "out.jsonl")
    assert read_lines(tmp_path / "out.jsonl") == given


def test_converting_text_needs_a_model(espalier, tmp_path):
    path = write_lines(TEXT, tmp_path / "rows.jsonl")
    outcome = espalier("convert", "--objective", "dpo", path, tmp_path / "out.jsonl", expect=2)
    assert "--model" in outcome.stderr


ALPACA = {"instruction": "Two and two", "input": "", "output": " make four"}


@pytest.mark.parametrize("model", ["plain"], indirect=True)
@pytest.mark.parametrize("objective, given, columns", [
    ("dpo", [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"], "chosen": "x"} for row in TEXT], "prompt=question,chosen=good,rejected=bad"),
    ("reward", [{"ask": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in CHAT], "prompt=ask"),
    ("sft", [ALPACA], "prompt=instruction,completion=output"), ("sft", [{"dialog": row["messages"]} for row in SFT["messages"]], "messages=dialog")])
def test_columns_of_other_names_are_read(objective, given, columns, model, espalier, tmp_path):
    usual = dict(part.split("=")[::-1] for part in columns.split(","))
    renamed = [{usual.get(name, name): value for name, value in row.items() if usual.get(name, name) == name or name in usual} for row in
               [{k: v for k, v in row.items() if k not in usual.values()} for row in given]]
    exact = records(objective, renamed, model[0], tmp_path)
    rest = {"prompt_ids", "chosen_ids", "rejected_ids", "response_ids"}
    espalier("convert", "--model", model[0], "--objective", objective, "--columns", columns, write_lines(given, tmp_path / "named.jsonl"), tmp_path / "o.jsonl")
    for found, wanted in zip(read_lines(tmp_path / "o.jsonl"), exact, strict=True):
        assert {name: found[name] for name in rest & set(found)} == {name: wanted[name] for name in rest & set(wanted)}


@pytest.mark.parametrize("model", ["plain"], indirect=True)
@pytest.mark.parametrize("objective, row, words", [
    ("dpo", {"question": "a", "good": "b", "bad": "c"}, ["chosen and rejected", "question, good, bad", "--columns prompt=COLUMN,chosen=COLUMN"]),
    ("dpo", {"prompt": "a", "completion": "b", "label": True}, ["chosen and rejected", "prompt, completion, label"]),
    ("reward", {"prompt": "a", "accepted": "b", "rejected": "c"}, ["chosen and rejected", "prompt, accepted, rejected", "--columns"]),
    ("reward", {"q": "a"}, ["answers", "columns q"]), ("sft", ALPACA, ["messages", "completion", "instruction, input, output", "--columns prompt=COLUMN,completion=COLUMN"])])
def test_unknown_columns_are_named_with_those_looked_for(objective, row, words, model, espalier, tmp_path):
    path = write_lines([row], tmp_path / "rows.jsonl")
    error = espalier("train", "--model", model[0], "--objective", objective, "--rollouts", path, "--out", tmp_path / "o", "--json", expect=3).json["error"]
    for word in words:
        assert word in f"{error['expected']} {error['got']} {error['remedy']}", error
    assert error["where"].endswith("rows.jsonl:1")


@pytest.mark.parametrize("model", ["plain"], indirect=True)
@pytest.mark.parametrize("columns, objective, status, word", [
    ("chosen", "dpo", 2, "NAME=COLUMN"), ("winner=good", "dpo", 2, "chosen"), ("chosen=a,chosen=b", "dpo", 2, "once"), ("chosen=nothing", "dpo", 3, "the column nothing"),
    ("chosen=good", "grpo", 2, "--objective")])
def test_wrong_columns_are_refused(columns, objective, status, word, model, espalier, tmp_path):
    path = write_lines([{"prompt": "a", "good": "b", "rejected": "c"}], tmp_path / "rows.jsonl")
    error = espalier("plan", "--model", model[0], "--objective", objective, "--rollouts", path, "--columns", columns, "--json", expect=status).json["error"]
    assert word in f"{error['where']} {error['expected']} {error['got']} {error['remedy']}"
