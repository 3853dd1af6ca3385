"""Reads a model directory's tokenizer as transformers does.

The tokenizers library reads `tokenizer.json`; importing it takes a tenth of a second. Chat messages need transformers, whose import takes longer
(chat.py), and so does a directory without tokenizer.json (for example with SentencePiece's tokenizer.model).
"""

import functools
from pathlib import Path

from .channel import ServiceError
from .chat import ChatTemplate, check_whole, json_file, package, template_arguments, transformers_tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def _text_of(token):
    return token["content"] if isinstance(token, dict) else str(token)


def _as_messages(content):
    """The messages of an observation: a text is one of the user. None is no message."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [] if content is None else [content] if isinstance(content, dict) else content


class ModelTokenizer:
    def __init__(self, directory):
        directory = self._directory = Path(directory)
        self._config = json_file(directory / "tokenizer_config.json")
        if (directory / "tokenizer.json").is_file():
            self._read(directory)
        elif any((directory / name).is_file() for name in _SLOW):
            self._convert()
        else:
            raise ServiceError("none", f"no tokenizer.json in {directory}")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @functools.cached_property
    def _transformers(self):
        return transformers_tokenizer(self._directory)

    @functools.cached_property
    def _chat(self):
        return ChatTemplate(self._transformers)

    def _read(self, directory):
        tokenizers = package("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise ServiceError("tokenizer", f"tokenizer.json: {error}") from error
        config = {**json_file(directory / "special_tokens_map.json"), **self._config}
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

    def _convert(self):
        read = self._transformers
        try:
            self._tokenizer = read.backend_tokenizer
        except AttributeError as error:
            raise ServiceError("tokenizer", f"{type(error).__name__}: {error}") from error
        self.special = {name: str(token) for name, token in read.special_tokens_map.items() if isinstance(token, str)}

    def about(self):
        eos = self.special.get("eos_token")
        return {"vocabulary": self._tokenizer.get_vocab_size(with_added_tokens=True), "eos": None if eos is None else self._tokenizer.token_to_id(eos)}

    def encode(self, prompts, arguments=None):
        """Returns {"text", "ids"} of each prompt: a text, a list of messages, or {"messages", "fields"}, whose fields hold arguments of the template.
        The tokenizer adds its special tokens around a text. The chat template renders messages up to the assistant's answer, with `arguments` (for
        example enable_thinking), which fields override, and only the template adds special tokens."""
        out = [None] * len(prompts)
        texts = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
        for place in texts:
            check_whole(prompts[place], place)
        for place, encoding in zip(texts, self._tokenizer.encode_batch([prompts[place] for place in texts], add_special_tokens=True)):
            out[place] = {"text": prompts[place], "ids": encoding.ids}
        chats = [place for place in range(len(prompts)) if out[place] is None]
        if chats:
            given = [self._chat_of(prompts[place], arguments or {}, place) for place in chats]
            for place, encoded in zip(chats, self._chat.encoded(given)):
                out[place] = encoded
        return out

    @staticmethod
    def _chat_of(prompt, arguments, place):
        messages, fields = (prompt["messages"], prompt["fields"]) if isinstance(prompt, dict) else (prompt, {})
        return messages, {"add_generation_prompt": True, **arguments, **template_arguments(fields, place)}, place

    def assistant_mask(self, messages, arguments):
        return self._chat.assistant_mask(messages, arguments)

    def ids_as_written(self, text, place=0):
        """The ids of a text without added special tokens. Special tokens written in the text are encoded as such."""
        check_whole(text, place)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def observed(self, items, arguments=None):
        """The ids of each observation {"content", "chat", "last", "fields"}. Without a chat the content is a text, encoded as written. In a chat, these
        are the tokens that the template puts between an assistant's answer, which ended with the token `last`, and the next answer."""
        return [self.ids_as_written(self._observed_text(item, place, arguments or {}), place) for place, item in enumerate(items)]

    def rendered(self, items, arguments=None):
        """{"messages", "ids"} of each chat {"messages", "answer", "text", "content", "fields"}: its messages behind the answer (token ids, or the text
        before a stop text) and the observation `content`, and their tokens up to the next answer."""
        out = []
        for place, item in enumerate(items):
            given = {**(arguments or {}), **template_arguments(item["fields"], place)}
            messages, ids = self._chat.history(item["messages"], item["answer"], item["text"], _as_messages(item["content"]), given, place)
            out.append({"messages": messages, "ids": ids})
        return out

    def _observed_text(self, item, place, arguments):
        content = item["content"]
        if not item["chat"]:
            if not isinstance(content, str):
                raise ServiceError("message", "messages, although the prompt is not a list of messages: use a text", place=place)
            return content
        said = _as_messages(content)
        arguments = {**arguments, **template_arguments(item.get("fields", {}), place)}
        return self._chat.continuation(said, self._tokenizer.decode([item["last"]], skip_special_tokens=False), arguments, place)

    def decode(self, ids, skip_special_tokens):
        return self._tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)


def serve(directory, channel):
    tokenizer = ModelTokenizer(directory)
    channel.answer(ready=tokenizer.about())
    for request in channel.requests():
        try:
            if "observe" in request:
                channel.answer(observed=tokenizer.observed(request["observe"], request.get("template", {})))
            elif "render" in request:
                channel.answer(rendered=tokenizer.rendered(request["render"], request.get("template", {})))
            elif "encode" in request:
                channel.answer(encoded=tokenizer.encode(request["encode"], request.get("template", {})))
            else:
                channel.answer(decoded=tokenizer.decode(request["decode"], request["skip_special_tokens"]))
        except ServiceError as error:
            channel.fail(error)
