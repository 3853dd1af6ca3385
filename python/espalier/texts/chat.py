"""Renders chat messages as transformers does: with its apply_chat_template, on the tokenizer and the template of a model directory."""

import json
import os
import re

from .channel import ServiceError

# AutoTokenizer gives a directory that names transformers' generic class a class of its own for these types of models (tests/python/test_chat_templates.py).
_OWN_CLASS = ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASKED, _ANSWER = {"role": "user", "content": "?"}, "espalier answers here"  # placeholders for a chat up to the assistant's answer


def package(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise ServiceError("package", f"{type(error).__name__}: {error}", package=name) from error


def json_file(path):
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ServiceError("tokenizer", f"{path.name}: {error}") from error


def check_whole(text, place):
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ServiceError("surrogate", "a lone surrogate (an escape of \\ud800 to \\udfff without its other half)", place=place)


def _parsed(row, name, kind, expected, place):
    """The member `name` of a row, which Parquet may hold as JSON text. None if it is absent."""
    value = row.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        pass
    if value is None or isinstance(value, kind):
        return value
    raise ServiceError("template_field", json.dumps(row[name])[:200], field=name, expected=expected, place=place)


def template_arguments(row, place=0):
    """The arguments of apply_chat_template that a row holds: `tools` and the members of `chat_template_kwargs`."""
    tools = _parsed(row, "tools", list, "a list of tools, as JSON schemas", place)
    return {**({} if tools is None else {"tools": tools}), **(_parsed(row, "chat_template_kwargs", dict, "an object", place) or {})}


def transformers_tokenizer(directory):
    """The tokenizer of AutoTokenizer. A directory that names the generic class is read by that class: importing AutoTokenizer imports torch, too,
    which takes seconds."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers = package("transformers")
    named = json_file(directory / "tokenizer_config.json")
    generic = named.get("tokenizer_class") in _GENERIC and "auto_map" not in named and not (directory / "tekken.json").exists()
    generic = generic and json_file(directory / "config.json").get("model_type") not in _OWN_CLASS
    try:
        reader = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        read = reader.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers' readers raise many types
        raise ServiceError("tokenizer", f"{type(error).__name__}: {error}") from error
    if read.chat_template is None:  # a model with images may have its template beside its processor
        read.chat_template = json_file(directory / "chat_template.json").get("chat_template")
    return read


class ChatTemplate:
    def __init__(self, tokenizer):
        """`tokenizer`: of transformers_tokenizer()."""
        package("jinja2")
        self._tokenizer = tokenizer

    def _applied(self, messages, arguments, place, **how):
        if self._tokenizer.chat_template is None:
            raise ServiceError("no_template", "the model has no chat template", place=place)
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ServiceError("message", json.dumps(message)[:200], place=place)
        try:
            return self._tokenizer.apply_chat_template(messages, **arguments, **how)
        except Exception as error:  # a template may raise any exception
            name = type(error).__name__
            kind = {"ImportError": "package", "TemplateSyntaxError": "template"}.get(name, "render")
            raise ServiceError(kind, f"{name}: {error}", place=place, **({"package": "jinja2"} if kind == "package" else {})) from error

    def text(self, messages, arguments, place=0):
        text = self._applied(messages, arguments, place, tokenize=False)
        check_whole(text, place)
        return text

    def encoded(self, chats):
        """{"text", "ids"} of each chat (messages, arguments, place)."""
        sanitize = "sanitize_control_tokens"
        texts = [self.text(messages, {name: value for name, value in given.items() if name != sanitize}, place) for messages, given, place in chats]
        if any(given.get(sanitize) for _, given, _ in chats):  # control tokens in the text then are ordinary text
            ids = [self._applied(*chat, tokenize=True, return_dict=False) for chat in chats]
        else:
            ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [{"text": text, "ids": list(own)} for text, own in zip(texts, ids)]

    def assistant_mask(self, messages, arguments):
        """1 for each token of an assistant's answer, as the template marks them, else 0. None if the template has no {% generation %} block."""
        if not _MARKS.search(self._tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))):
            return None
        return list(self._applied(messages, arguments, 0, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"])

    def continuation(self, said, last, arguments, place=0):
        """The text behind an assistant's answer: its end, the messages `said`, and the beginning of the next answer. `last`, the text of the answer's
        last token, is left out if the end begins with it. An assistant's message at the beginning of `said` is the answer as a message, for
        example with tool_calls."""
        arguments = {"add_generation_prompt": True, **arguments}
        if said[0].get("role") == "assistant" and len(said) > 1:
            found = self._behind(said[0], said[1:], last, arguments, place)
            return self._behind_text(said[1:], last, arguments, place) if found is None else found
        try:
            return self._behind_text(said, last, arguments, place)
        except ServiceError:
            calls = _calls_of(said)
            found = self._behind({"role": "assistant", "content": "", "tool_calls": calls}, said, last, arguments, place) if calls else None
            if found is None:
                raise
            return found

    def history(self, messages, ids, text, said, arguments, place=0):
        """(messages, token ids) of a chat after another answer of the assistant, the tokens `ids`, and the messages `said`, up to its next answer.
        The answer becomes a message by the tokenizer's parse_response if it has a response template, otherwise with `text` as its content (None:
        the text of `ids`, its special tokens included, up to the token that ended it). An assistant's message at the beginning of `said` is the
        answer as a message."""
        arguments = {"add_generation_prompt": True, **arguments}
        if not said or said[0].get("role") != "assistant":
            said = [self._message_of(messages, ids, text, arguments, place), *said]
        messages = [*messages, *said]
        return messages, self.encoded([(messages, arguments, place)])[0]["ids"]

    def _message_of(self, messages, ids, text, arguments, place):
        if getattr(self._tokenizer, "response_template", None) is not None:
            try:
                parsed = self._tokenizer.parse_response(ids, prefix=self.text(messages, arguments, place), tools=arguments.get("tools"))
                return {"role": "assistant", **parsed}
            except Exception:  # an answer of another form is a text
                pass
        if text is None:
            ended = ids and ids[-1] in self._tokenizer.all_special_ids
            text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return {"role": "assistant", "content": text}

    def _behind_text(self, said, last, arguments, place):
        """continuation() of an answer that is a text."""
        whole = self.text([_ASKED, {"role": "assistant", "content": _ANSWER}, *said], arguments, place)
        _, answered, behind = whole.partition(_ANSWER)
        if not answered:
            raise ServiceError("render", "the template omits the assistant's answer", place=place)
        without_space = behind.lstrip()  # some templates put a space before the token that ends an answer
        end = behind if behind.startswith(last) or not without_space.startswith(last) else without_space
        return end.removeprefix(last)

    def _behind(self, answer, said, last, arguments, place):
        """continuation() of an answer that is a message. None if the template refuses it, or renders it differently once messages follow."""
        ended = {**arguments, "add_generation_prompt": False}
        try:
            asked, whole = self.text([_ASKED], ended, place), self.text([_ASKED, answer, *said], arguments, place)
            alone, plain = (self.text([_ASKED, one], ended, place) for one in (answer, {"role": "assistant", "content": _ANSWER}))
        except ServiceError:
            return None
        if not whole.startswith(alone):
            return None
        own = alone[len(os.path.commonprefix([asked, alone])):]
        _, found, end = own.rpartition(last)
        if not found or end.strip():  # another token ended the answer: the template's end of an answer is missing
            end = plain.partition(_ANSWER)[2]
            end = end if own.endswith(end) else ""
        return end + whole[len(alone):]


def _calls_of(said):
    """tool_calls that the leading tool messages of `said` may answer."""
    replies = [message for message in said if message.get("role") == "tool"]
    return [{"id": reply.get("tool_call_id", f"call{place:05}"), "type": "function", "function": {"name": reply.get("name", "tool"), "arguments": {}}}
            for place, reply in enumerate(replies)]
