"""Reads a model directory's tokenizer and chat template as transformers does.

The tokenizers library reads `tokenizer.json`, and jinja2 renders templates in the environment that transformers documents. Importing these takes a
tenth of a second; importing transformers takes seconds and needs a dozen more packages. A directory without tokenizer.json (for example with
SentencePiece's tokenizer.model) needs transformers.
"""

import datetime
import json
import uuid
from pathlib import Path

from .channel import ServiceError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ANSWER = "espalier answers here"  # placeholder for the assistant's answer
_SLOW = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def _package(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise ServiceError("package", f"{type(error).__name__}: {error}", package=name) from error


def _json_file(path):
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ServiceError("tokenizer", f"{path.name}: {error}") from error


def _text_of(token):
    return token["content"] if isinstance(token, dict) else str(token)


def _check_whole(text, place):
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ServiceError("surrogate", "a lone surrogate (an escape of \\ud800 to \\udfff without its other half)", place=place)


class ModelTokenizer:
    def __init__(self, directory):
        directory = Path(directory)
        self._config = _json_file(directory / "tokenizer_config.json")
        if (directory / "tokenizer.json").is_file():
            self._read(directory)
        elif any((directory / name).is_file() for name in _SLOW):
            self._convert(directory)
        else:
            raise ServiceError("none", f"no tokenizer.json in {directory}")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._mark = ""
        self._template = self._compiled(self._template_text(directory))

    def _read(self, directory):
        tokenizers = _package("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise ServiceError("tokenizer", f"tokenizer.json: {error}") from error
        config = {**_json_file(directory / "special_tokens_map.json"), **self._config}
        self.special = {name: _text_of(config[name]) for name in _NAMED if config.get(name)}
        extra = [*config.get("additional_special_tokens", []), *config.get("extra_special_tokens", [])]
        if isinstance(config.get("extra_special_tokens"), dict):
            extra += config["extra_special_tokens"].values()
        known = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0])):
            if token["content"] not in known:
                fields = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in token}
                added = tokenizers.AddedToken(token["content"], **fields)
                (self._tokenizer.add_special_tokens if token.get("special") else self._tokenizer.add_tokens)([added])
                known[token["content"]] = added
        special = dict.fromkeys([*self.special.values(), *map(_text_of, extra)])
        self._tokenizer.add_special_tokens([token for token in special if token not in known or not known[token].special])

    def _convert(self, directory):
        transformers = _package("transformers")
        try:
            read = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
            self._tokenizer = read.backend_tokenizer
        except Exception as error:  # transformers' readers raise many types
            raise ServiceError("tokenizer", f"{type(error).__name__}: {error}") from error
        self.special = {name: str(token) for name, token in read.special_tokens_map.items() if isinstance(token, str)}

    def _template_text(self, directory):
        own_file = directory / "chat_template.jinja"
        if own_file.is_file():
            return own_file.read_text(encoding="utf-8")
        template = self._config.get("chat_template") or _json_file(directory / "chat_template.json").get("chat_template")
        if isinstance(template, list):  # a list of named templates
            named = {entry["name"]: entry["template"] for entry in template}
            return named.get("default")
        return template

    def _compiled(self, template):
        if not template:
            return None
        _package("jinja2")
        import jinja2.ext
        import jinja2.sandbox

        class Generation(jinja2.ext.Extension):
            """Renders {% generation %} blocks, the assistant's answers, with `self._mark` before and after each block."""

            tags = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            @staticmethod
            def _marked(caller):
                return self._mark + caller() + self._mark

        def raise_exception(message):
            raise jinja2.exceptions.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(template)
        except jinja2.exceptions.TemplateError as error:
            raise ServiceError("template", f"{type(error).__name__}: {error}") from error

    def about(self):
        eos = self.special.get("eos_token")
        return {"vocabulary": self._tokenizer.get_vocab_size(with_added_tokens=True),
                "eos": None if eos is None else self._tokenizer.token_to_id(eos), "chat_template": self._template is not None}

    def encode(self, prompts, arguments=None):
        """Returns {"text", "ids"} of each prompt. The tokenizer adds its special tokens around a text. The chat template renders messages up to the
        assistant's answer, with `arguments` (for example enable_thinking), and only the template adds special tokens."""
        texts = [prompt if isinstance(prompt, str) else self._rendered(prompt, place, arguments or {}) for place, prompt in enumerate(prompts)]
        for place, text in enumerate(texts):
            _check_whole(text, place)
        out = [None] * len(texts)
        for is_text in (True, False):
            places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str) == is_text]
            found = self._tokenizer.encode_batch([texts[place] for place in places], add_special_tokens=is_text)
            for place, encoding in zip(places, found):
                out[place] = {"text": texts[place], "ids": encoding.ids}
        return out

    def assistant_mask(self, messages, arguments):
        """1 for each token of the rendered messages that overlaps a {% generation %} block, else 0. None if the template has no such block."""
        self._mark = f"\x00{uuid.uuid4().hex}\x00"
        try:
            marked = self._rendered(messages, 0, arguments).split(self._mark)
        finally:
            self._mark = ""
        if len(marked) == 1:
            return None
        text, said = "", []
        for place, part in enumerate(marked):
            if place % 2 and part:
                said.append((len(text), len(text) + len(part)))
            text += part
        _check_whole(text, 0)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [int(any(begin < end_of and start_of < end for start_of, end_of in said)) for begin, end in encoding.offsets]

    def ids_as_written(self, text, place=0):
        """The ids of a text without added special tokens. Special tokens written in the text are encoded as such."""
        _check_whole(text, place)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def observed(self, items, arguments=None):
        """The ids of each observation {"content", "chat", "last"}. Without a chat the content is a text, encoded as written. In a chat, these are the
        tokens that the template puts between an assistant's answer, which ended with the token `last`, and the next answer."""
        return [self.ids_as_written(self._observed_text(item, place, arguments or {}), place) for place, item in enumerate(items)]

    def _observed_text(self, item, place, arguments):
        content = item["content"]
        if not item["chat"]:
            if not isinstance(content, str):
                raise ServiceError("message", "messages, although the prompt is not a list of messages: use a text", place=place)
            return content
        said = [{"role": "user", "content": content}] if isinstance(content, str) else [content] if isinstance(content, dict) else content
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        _, answered, text = self._rendered([*history, *said], place, arguments).partition(_ANSWER)
        if not answered:
            raise ServiceError("render", "the template omits the assistant's answer", place=place)
        return text.removeprefix(self._tokenizer.decode([item["last"]], skip_special_tokens=False))

    def _rendered(self, messages, place, arguments):
        if self._template is None:
            raise ServiceError("no_template", "the model has no chat template", place=place)
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ServiceError("message", json.dumps(message)[:200], place=place)
        try:
            given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special, **arguments}
            return self._template.render(messages=messages, **given)
        except Exception as error:  # a template may raise any exception
            raise ServiceError("render", f"{type(error).__name__}: {error}", place=place) from error

    def decode(self, ids, skip_special_tokens):
        return self._tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)


def serve(directory, channel):
    tokenizer = ModelTokenizer(directory)
    channel.answer(ready=tokenizer.about())
    for request in channel.requests():
        try:
            if "observe" in request:
                channel.answer(observed=tokenizer.observed(request["observe"], request.get("template", {})))
            elif "encode" in request:
                channel.answer(encoded=tokenizer.encode(request["encode"], request.get("template", {})))
            else:
                channel.answer(decoded=tokenizer.decode(request["decode"], request["skip_special_tokens"]))
        except ServiceError as error:
            channel.fail(error)
