"""Converts dumps of text to neutral records with a model's tokenizer. The token ids may differ from those that were sampled.

A record holds a prompt (text or chat messages) and a response under one of the names below, or a whole chat whose last message is the
response. `reward` or `score`, `advantage`, `step`, `group` and `id` are used if present; all other members go into `meta`.
"""

import gzip
import json

from espalier.records import line_of
from espalier.records.errors import RecordError, UnsupportedRecords
from espalier.records.parquet_files import START, Table

from .channel import ServiceError
from .tokenizer import ModelTokenizer

NAME = "text, tokenized again"
_PROMPTS, _RESPONSES = ("prompt", "input", "question"), ("response", "completion", "output", "answer", "responses", "completions")
_REWARDS = ("reward", "score", "rewards", "scores")
_TAKEN = ("advantage", "step", "group", "id")


def notes_on(model):
    return [f"the tokenizer of {model} made the token ids: the sampled tokens may have been others",
            "no log-probs are known: old_logprobs are left out, so that train takes the model's own (every ratio starts at 1)",
            "the sampling temperature is not known: 1 is taken, train --temperature names another",
            "a response ends with an end token only where its text shows one: which were cut off is not known"]


def lines(model, path, notes):
    tokenizer = _tokenizer(model)
    notes += notes_on(model)
    empty = True
    for number, member in _members(path):
        empty = False
        yield line_of(_record(tokenizer, member, f"{path}:{number}"))
    if empty:
        raise RecordError(path, "at least one record", "none", "Was it written completely?")


def _tokenizer(model):
    try:
        return ModelTokenizer(model)
    except ServiceError as error:
        remedy = f"pip install {error.fields['package']}" if "package" in error.fields else "name a model directory with tokenizer.json"
        raise RecordError(str(model), "a tokenizer that can be read", error.fields["message"], remedy) from error


def _members(path):
    """Yields (number, object) from JSON Lines (plain or .gz) or Parquet, from 1."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start == START:
        yield from enumerate(Table(path).rows(path), 1)
        return
    with (gzip.open if start[:2] == b"\x1f\x8b" else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                member = json.loads(line)
            except ValueError as error:
                raise RecordError(f"{path}:{number}", "JSON Lines, one object per line", str(error)) from error
            if not isinstance(member, dict):
                raise RecordError(f"{path}:{number}", "a JSON object", type(member).__name__)
            yield number, member


def _said(value):
    """The text of a response that is a text or a list of one text or message. None otherwise."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0].get("content") if isinstance(value[0], dict) else value[0]
    return value if isinstance(value, str) else None


def _record(tokenizer, member, where):
    prompt = next((name for name in _PROMPTS if member.get(name)), None)
    response = next((name for name in _RESPONSES if member.get(name) is not None), None)
    used = {prompt, response}
    if prompt and response:
        asked, said = member[prompt], _said(member[response])
    elif isinstance(member.get("messages"), list) and len(member["messages"]) > 1:
        asked, said, used = member["messages"][:-1], _said(member["messages"][-1:]), {"messages"}
    else:
        raise UnsupportedRecords(where, f"a prompt ({', '.join(_PROMPTS)}) and a response ({', '.join(_RESPONSES)}), or messages",
                                 f"fields {', '.join(member)[:120]}", "Rename the fields")
    if said is None:
        raise RecordError(f"{where}: {response or 'messages'}", "the text of one response", json.dumps(member[response or "messages"])[:80],
                          "Write one record for each response")
    out = _ids(tokenizer, asked, said, member, where)
    if isinstance(asked, list):
        used |= {"tools", "chat_template_kwargs"}
    for name in _REWARDS:
        if name in member and "reward" not in out:
            used.add(name)
            out["reward"] = member[name]
    used.update(name for name in _TAKEN if name in member)
    out.update((name, member[name]) for name in _TAKEN if member.get(name) is not None)
    meta = {name: value for name, value in member.items() if name not in used}
    return {**out, "meta": meta} if meta else out


def _ids(tokenizer, asked, said, member, where):
    try:
        start = tokenizer.special.get("bos_token")
        if start and isinstance(asked, str) and asked.startswith(start):  # a template already wrote the start token; the tokenizer would add another
            prompt = {"ids": tokenizer.ids_as_written(asked), "text": asked}
        else:
            [prompt] = tokenizer.encode([{"messages": asked, "fields": member} if isinstance(asked, list) else asked])
        return {"prompt_ids": prompt["ids"], "response_ids": tokenizer.ids_as_written(said), "prompt": prompt["text"], "response": said}
    except ServiceError as error:
        raise RecordError(where, "a prompt and a response that the tokenizer accepts", error.fields["message"]) from error
