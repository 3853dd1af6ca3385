"""Chats have the tokens of transformers' apply_chat_template: every template that TRL ships and forms of messages, and what stands beside prompts."""

import json
import pathlib

import pytest
import tokenizers
import transformers

from espalier.texts import chat, rows
from espalier.texts.channel import ServiceError
from espalier.texts.tokenizer import ModelTokenizer
from text_model import byte_level_tokenizer, make_text_model, read_lines, write_lines

trl = pytest.importorskip("trl")

TEMPLATES = {path.stem: path.read_text() for path in sorted((pathlib.Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
TOKENS = ["<bos>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<start_of_turn>", "<end_of_turn>",
          "<|turn>", "<turn|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>", "<|channel|>", "<|eot_id|>", "<|user|>"]
ASK, SAY = [{"role": "user", "content": "two and two"}], {"role": "assistant", "content": "four"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "one"}}, "required": ["a"]}}}]
CALL = {"role": "assistant", "tool_calls": [{"id": "c00000001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
REPLY = {"role": "tool", "name": "add", "tool_call_id": "c00000001", "content": "4"}
FORMS = {
    "plain": (ASK + [SAY], {}),
    "prompt": (ASK, {"chat_template_kwargs": {"add_generation_prompt": True}}),
    "reasoning": (ASK + [{**SAY, "reasoning": "easy"}], {}),
    "thinking": (ASK + [{**SAY, "thinking": "easy"}], {}),
    "reasoning_content": (ASK + [{**SAY, "reasoning_content": "easy"}], {}),
    "earlier reasoning": (ASK + [{**SAY, "reasoning_content": "easy"}] + ASK, {}),
    "keys of None": (ASK + [{**SAY, "reasoning_content": None, "tool_calls": None, "name": None}], {}),
    "tools": (ASK + [SAY], {"tools": TOOLS}),
    "tools as text": (ASK + [SAY], {"tools": json.dumps(TOOLS)}),
    "no tools": (ASK + [SAY], {"tools": []}),
    "call without content": (ASK + [CALL, REPLY, SAY], {"tools": TOOLS}),
    "content None": (ASK + [{**CALL, "content": None}, REPLY, SAY], {}),
    "content empty": (ASK + [{**CALL, "content": ""}, REPLY, SAY], {}),
    "replies in a row": (ASK + [CALL, REPLY, REPLY], {}),
    "reasoning and call": (ASK + [{**CALL, "reasoning": "use it", "content": ""}, REPLY, SAY], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "two and two"}]}, SAY], {}),
    "system": ([{"role": "system", "content": "be brief"}, *ASK, SAY], {}),
    "developer": ([{"role": "developer", "content": "be brief"}, *ASK, SAY], {}),
    "arguments": (ASK, {"chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": True}}),
    "tokens in the text": ([{"role": "user", "content": "<think>two</think>"}, SAY], {}),
    "sanitized": ([{"role": "user", "content": "<think>two</think>"}, SAY], {"chat_template_kwargs": {"sanitize_control_tokens": True}}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tokenizer whose special tokens are those of the templates. The template is written by each test."""
    made = byte_level_tokenizer(["user assistant system tool two and two is four be brief"] * 4, 400)
    made.add_special_tokens(TOKENS)
    folder = tmp_path_factory.mktemp("templates")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<|im_end|>"}))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_has_the_tokens_of_transformers(name, directory):
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    exact, own = transformers.AutoTokenizer.from_pretrained(directory), ModelTokenizer(directory)
    compared = 0
    for form, (messages, beside) in FORMS.items():
        tools = json.loads(beside["tools"]) if isinstance(beside.get("tools"), str) else beside.get("tools")
        given = {"add_generation_prompt": False, "tools": tools, **beside.get("chat_template_kwargs", {})}
        try:
            wanted = exact.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
        except Exception:
            with pytest.raises(ServiceError):
                own.encode([{"messages": messages, "fields": beside}], {"add_generation_prompt": False})
            continue
        [found] = own.encode([{"messages": messages, "fields": beside}], {"add_generation_prompt": False})
        assert found["ids"] == wanted, form
        sanitized = given.pop("sanitize_control_tokens", False)
        assert found["text"] == exact.apply_chat_template(messages, tokenize=False, **given), form
        compared += 1
        if "{% generation %}" in TEMPLATES[name] and messages[-1]["role"] == "assistant" and not sanitized:
            mask = exact.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **given)["assistant_masks"]
            assert own.assistant_mask(messages, chat.template_arguments(beside)) == mask, form
    assert compared >= 2


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "_training" not in name])
def test_observations_are_what_the_template_puts_behind_an_answer(name, directory):
    """Prompt, sampled answer and observation end as the whole conversation does; with templates that rewrite nothing they are its tokens."""
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    exact, own = transformers.AutoTokenizer.from_pretrained(directory), ModelTokenizer(directory)
    end = own.special["eos_token"]

    def rendered(messages, beside):
        return exact.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **beside)

    for said in ("and three", {"role": "tool", "content": "5", "name": "add", "tool_call_id": "c00000001"}, [{**CALL, "content": ""}, REPLY]):
        turn = [{"role": "user", "content": said}] if isinstance(said, str) else said if isinstance(said, list) else [said]
        beside = {"tools": TOOLS} if isinstance(said, list) else {}
        item = {"content": said, "chat": True, "last": exact.convert_tokens_to_ids(end), "fields": beside}
        history = ASK + ([] if isinstance(said, list) else [SAY])
        try:
            whole = rendered(history + turn, beside)
        except Exception as refused:
            if not isinstance(said, dict) or "no previous assistant message with a tool call" not in str(refused):
                continue
            whole = rendered(ASK + [CALL] + turn, beside) + "four"  # gpt-oss: a reply needs a call
        if "four" not in whole and not isinstance(said, list):  # the template takes parts alone
            with pytest.raises(ServiceError, match="omits the assistant's answer"):
                own.observed([item])
            continue
        [ids] = own.observed([item])
        assert ids, said
        assert whole.removesuffix("four").endswith(exact.decode(ids)), said


def test_an_answer_as_a_message_continues_the_template(directory):
    """gpt-oss writes calls that end with a token of their own, and names the function in the reply."""
    (directory / "chat_template.jinja").write_text(TEMPLATES["gptoss"])
    own = ModelTokenizer(directory)
    calls = {name: own.ids_as_written(name)[0] for name in ("<|call|>", "<|end|>")}
    reply = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    for last in calls.values():
        for said in ([CALL, REPLY], REPLY, [REPLY]):
            [ids] = own.observed([{"content": said, "chat": True, "last": last, "fields": {}}])
            assert ids == own.ids_as_written(reply), said
    (directory / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    own = ModelTokenizer(directory)
    for last, begin in (("<|im_end|>", ""), ("four", "<|im_end|>")):
        [ids] = own.observed([{"content": [CALL, REPLY], "chat": True, "last": own.ids_as_written(last)[-1], "fields": {}}])
        assert ids == own.ids_as_written(begin + "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_directory_of_the_generic_class_is_read_as_by_auto_tokenizer():
    """AutoTokenizer replaces the generic class by another for the types that chat.py lists, and for no others."""
    from transformers.models.auto import tokenization_auto as auto
    generic = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "MistralCommonBackend", None}
    replaced = {kind for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
                if (name := auto.TOKENIZER_MAPPING_NAMES.get(kind)) and name.removesuffix("Fast") not in generic}
    assert replaced == set(chat._OWN_CLASS)


@pytest.mark.parametrize("fields, field", [({"tools": {"a": 1}}, "tools"), ({"tools": "{not json"}, "tools"), ({"chat_template_kwargs": [1]}, "chat_template_kwargs")])
def test_a_wrong_argument_of_the_template_is_named(fields, field, directory):
    (directory / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    with pytest.raises(ServiceError) as raised:
        ModelTokenizer(directory).encode(["text", {"messages": ASK, "fields": fields}])
    assert raised.value.fields["field"] == field and raised.value.fields["place"] == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = byte_level_tokenizer(["user assistant system tool two and two is four function name add"] * 4, 330)
    return make_text_model(tmp_path_factory.mktemp("model") / "model", tokenizer, TEMPLATES["qwen3"], max_position_embeddings=2048, hidden_size=16,
                           intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


def test_prompts_and_environments_are_told_tools_and_arguments(model, espalier, tmp_path):
    exact = transformers.AutoTokenizer.from_pretrained(model)
    beside = [{"tools": TOOLS}, {"tools": json.dumps(TOOLS), "chat_template_kwargs": {"enable_thinking": False}}, {}, {"tools": None}]
    prompts = [{"prompt": ASK + [CALL, REPLY], **more} for more in beside] + [{"prompt": "two and", "tools": TOOLS}]
    (tmp_path / "env.py").write_text("class Environment:\n    def reset(self, prompt, tools=None):\n        self.told = tools\n"
                                     "    def step(self, text):\n        return [{'role': 'tool', 'content': '5'}], 0.0, False\n")
    base = ["generate", "--model", model, "--prompts", write_lines(prompts[:-1], tmp_path / "chats.jsonl"), "--n", 1, "--seed", 3, "--chat-template-kwargs", "enable_thinking=true"]
    espalier(*base, "--max-response-length", 60, "--turns", 2, "--env", tmp_path / "env.py", "--out", tmp_path / "turns.jsonl")
    for record, more in zip(read_lines(tmp_path / "turns.jsonl"), beside, strict=True):
        given = {"enable_thinking": True, **more.get("chat_template_kwargs", {})}
        tools = TOOLS if more.get("tools") else None
        assert record["prompt_ids"] == exact.apply_chat_template(ASK + [CALL, REPLY], tools=tools, add_generation_prompt=True, return_dict=False, **given)
        assert record.get("tools") == more.get("tools")
    done = espalier(*base[:3], "--prompts", write_lines(prompts[-1:], tmp_path / "text.jsonl"), "--max-response-length", 2, "--out", tmp_path / "text_out.jsonl")
    assert '"tools" is kept and not used' in done.stderr and "messages" in done.stderr
    bad = write_lines([prompts[0], {**prompts[0], "chat_template_kwargs": 3}], tmp_path / "bad.jsonl")
    error = espalier(*base[:3], "--prompts", bad, "--out", tmp_path / "o.jsonl", "--json", expect=3).json["error"]
    assert error["where"].endswith("bad.jsonl:2: chat_template_kwargs") and "object" in error["expected"]


def test_rows_of_pairs_and_answers_render_as_transformers(directory):
    (directory / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    exact, made = transformers.AutoTokenizer.from_pretrained(directory), ModelTokenizer(directory)
    history, beside = ASK + [{**CALL, "content": None, "reasoning": "add them"}, REPLY], {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    whole = exact.apply_chat_template(history + [SAY], tools=TOOLS, enable_thinking=False, return_dict=False)
    pair = rows.Rows("dpo", made, []).record({"prompt": history, "chosen": [SAY], "rejected": [{**SAY, "content": "five"}], **beside}, "here")
    assert pair["prompt_ids"] + pair["chosen_ids"] == whole
    answer = rows.Rows("sft", made, []).record({"messages": history + [SAY], **beside}, "here")
    assert answer["prompt_ids"] + answer["response_ids"] == whole


def test_a_tokenizer_is_read_without_transformers_until_there_are_messages(directory):
    (directory / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    own = ModelTokenizer(directory)
    own.encode(["two"]), own.decode([[5]], True)
    assert "_transformers" not in vars(own) and isinstance(own._tokenizer, tokenizers.Tokenizer)
    own.encode([ASK])
    assert type(vars(own)["_transformers"]) is type(transformers.AutoTokenizer.from_pretrained(directory))
