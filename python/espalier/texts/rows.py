"""Converts rows of text data sets to records. A model's tokenizer makes the token ids, as in TRL 1.16's trainers.

For "dpo" and "reward" a row is a preference pair: `chosen` and `rejected`, with `prompt` or with the prompt inside both. For "reward" it may also
be a list: `prompt` and `answers`, each with `response` and `score`. For "sft" it has `prompt` and `completion`, `messages` (or
`conversations`), or `text`. Prompts and answers are texts or lists of chat messages; `tools` and `chat_template_kwargs` go to the template.

Texts end with the tokenizer's end token; the template ends messages. A response begins at the first token in which prompt plus response differs
from the prompt alone. A row with `prompt_ids` already is a record. Columns of other names are named by `--columns prompt=question,...`.
"""

import json

from espalier.records import line_of
from espalier.records.errors import RecordError

from .channel import ServiceError
from .chat import template_arguments
from .retokenize import _members, _tokenizer

NAME = "rows of text"
_KEPT = ("group", "step", "id", "temperature", "margin", "ref_chosen_logps", "ref_rejected_logps")
_COLUMNS = {"dpo": "chosen and rejected, with prompt or with the prompt inside both", "sft": "prompt and completion, or messages (conversations), or text",
            "reward": "chosen and rejected, with prompt or with the prompt inside both; or prompt and answers"}
_NAMED = {"dpo": ("prompt", "chosen", "rejected"), "reward": ("prompt", "chosen", "rejected"), "sft": ("prompt", "completion")}
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_BESIDE = ("tools", "chat_template_kwargs")
_LONGER = "the tokens of some prompts end otherwise with a response behind them: their last tokens are left out, as TRL does"


def lines(objective, model, columns, path, notes):
    rows = Rows(objective, _tokenizer(model), notes, dict(part.split("=", 1) for part in columns.split(",") if part))
    empty = True
    for number, member in _members(path):
        empty = False
        yield line_of(rows.record(member, f"{path}:{number}"))
    if empty:
        raise RecordError(path, "at least one row", "none", "Was it written completely?")


def _example(objective):
    return ",".join(f"{name}=COLUMN" for name in _NAMED[objective])


def _common(*sequences):
    """The length of the sequences' common beginning, in tokens, characters or messages."""
    length = 0
    for items in zip(*sequences):
        if any(item != items[0] for item in items):
            break
        length += 1
    return length


def _without_prompt(chosen, rejected):
    """(prompt, chosen, rejected) for answers that contain their prompt. The prompt is their common beginning; a text loses a space at its end."""
    length = _common(chosen, rejected)
    length -= length == min(len(chosen), len(rejected))  # if one answer begins with the other, the last item is the answer, as in TRL
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


def _holds(chosen, rejected, prompt):
    """True if both answers are lists of messages that begin with the text `prompt`, among others: the column then says again what they hold, as in
    UltraFeedback."""
    if isinstance(chosen, str) or not isinstance(prompt, str):
        return False
    begin = _without_prompt(chosen, rejected)[0]
    return any(isinstance(message, dict) and message.get("content") == prompt for message in begin)


def _as_chat(value):
    """Renames from and value in messages to role and content."""
    if not isinstance(value, list):
        return value
    names = {"from": "role", "value": "content"}
    return [{names.get(key, key): item for key, item in message.items()} if isinstance(message, dict) else message for message in value]


class Rows:
    def __init__(self, objective, tokenizer, notes, columns=None):
        self._objective, self._tokenizer, self._notes, self._columns = objective, tokenizer, notes, columns or {}

    def _named(self, row, where):
        """The row with its columns under the names that are used here."""
        for name, column in self._columns.items():
            if column not in row:
                raise RecordError(where, f"the column {column}, for {name} (--columns)", f"columns {', '.join(row)[:160]}")
        rest = {name: value for name, value in row.items() if name not in self._columns.values()}
        return {**rest, **{name: row[column] for name, column in self._columns.items()}}

    def _check_columns(self, row, where):
        if self._objective == "sft":
            found = any(row.get(name) is not None for name in ("completion", "messages", "conversations", "text"))
        else:
            found = {"chosen", "rejected"} <= row.keys() or (self._objective == "reward" and row.get("answers") is not None)
        if not found:
            raise RecordError(where, f"the columns {_COLUMNS[self._objective]}", f"columns {', '.join(row)[:160]}",
                              f"Rename the columns, or name them: --columns {_example(self._objective)}")

    def record(self, row, where):
        if "prompt_ids" in row:
            return row
        row = self._named(row, where)
        self._check_columns(row, where)
        used = {"prompt", *_BESIDE}
        try:
            if self._objective == "sft":
                used |= {"completion", "messages", "conversations", "text"}
                out = self._supervised(row, where)
            elif self._objective == "reward" and "answers" in row:
                used |= {"answers"}
                out = self._list(row, where)
            else:
                used |= {"chosen", "rejected"}
                out = self._pair(row, where)
        except ServiceError as error:
            raise RecordError(where, "text that the tokenizer and the chat template accept", error.fields["message"]) from error
        out.update((name, row[name]) for name in _KEPT if row.get(name) is not None)
        meta = {name: value for name, value in row.items() if name not in used and name not in _KEPT}
        return {**out, "meta": meta} if meta else out

    def _field(self, row, name, where):
        value = _as_chat(row.get(name))
        if isinstance(value, str) or (isinstance(value, list) and value):
            return value
        raise RecordError(f"{where}: {name}", "a text or a list of messages", json.dumps(value)[:80])

    def _ids(self, row, text, prompt=False):
        """The token ids of a text or of messages. With `prompt` the template also begins the assistant's answer."""
        if isinstance(text, str):
            return self._tokenizer.encode([text])[0]["ids"]
        return self._tokenizer.encode([{"messages": text, "fields": row}], {"add_generation_prompt": prompt})[0]["ids"]

    def _ended(self, answer):
        end = self._tokenizer.special.get("eos_token")
        if isinstance(answer, list) or not end or answer.endswith(end):
            return answer
        return answer + end

    def _joined(self, prompt, answer, where):
        if type(prompt) is not type(answer):
            raise RecordError(where, "a prompt and answers of one kind, texts or lists of messages", "one of each",
                              'Write the text as messages: [{"role": ..., "content": ...}]')
        return prompt + answer

    def _pair(self, row, where):
        chosen, rejected = self._field(row, "chosen", where), self._field(row, "rejected", where)
        if type(chosen) is not type(rejected):
            raise RecordError(where, "chosen and rejected of one kind, texts or lists of messages", "one of each")
        given = "prompt" in row and not _holds(chosen, rejected, row["prompt"])
        if self._objective == "reward":
            answers = [self._ended(chosen), self._ended(rejected)]
            if given:
                answers = [self._joined(self._field(row, "prompt", where), answer, where) for answer in answers]
            prompt, chosen, rejected = self._split([self._ids(row, answer) for answer in answers], where)
            return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        prompt, chosen, rejected = (self._field(row, "prompt", where), chosen, rejected) if given else _without_prompt(chosen, rejected)
        whole = [self._ids(row, self._joined(prompt, self._ended(answer), where)) for answer in (chosen, rejected)]
        alone = self._ids(row, prompt, True) if prompt else []
        length = min(_common(alone, ids) for ids in whole)
        self._look(length, alone)
        if length == 0 or any(len(ids) <= length for ids in whole):
            raise RecordError(where, "a prompt and two answers of at least one token each", f"{length} tokens of the prompt and "
                              f"{len(whole[0]) - length} and {len(whole[1]) - length} of the answers")
        return {"prompt_ids": whole[0][:length], "chosen_ids": whole[0][length:], "rejected_ids": whole[1][length:]}

    def _list(self, row, where):
        answers = row["answers"]
        if not isinstance(answers, list) or not all(isinstance(each, dict) and "score" in each for each in answers) or len(answers) < 2:
            raise RecordError(f"{where}: answers", "at least two objects with response and score", json.dumps(answers)[:80])
        prompt = self._field(row, "prompt", where)
        responses = [self._ended(self._field(each, "response", where)) for each in answers]
        begin, *ids = self._split([self._ids(row, self._joined(prompt, response, where)) for response in responses], where)
        return {"prompt_ids": begin, "answers": [{"response_ids": own, "score": each["score"]} for own, each in zip(ids, answers)]}

    @staticmethod
    def _split(sequences, where):
        """(common beginning, rest of each sequence ...); every rest has at least one token. Scores belong to the whole sequence, so the place of
        the cut does not change them."""
        length = min(_common(*sequences), min(map(len, sequences)) - 1)
        if length < 1:
            raise RecordError(where, "answers that begin with the same token", "other first tokens, or an answer of one token",
                              "Give the prompt; the answers of a record need one")
        return sequences[0][:length], *(ids[length:] for ids in sequences)

    def _look(self, length, prompt):
        if length < len(prompt) and _LONGER not in self._notes:
            self._notes.append(_LONGER)

    def _supervised(self, row, where):
        if "completion" in row:
            prompt = self._field(row, "prompt", where)
            whole = self._joined(prompt, self._ended(self._field(row, "completion", where)), where)
            ids, alone = self._ids(row, whole), self._ids(row, prompt, True)
            length = _common(alone, ids)
            self._look(length, alone)
            mask = [int(place >= length) for place in range(len(ids))]
            said = self._said(row, whole) if isinstance(whole, list) else None
            return self._trained(ids, mask if said is None else [a & b for a, b in zip(mask, said)], where)
        messages = row.get("messages") or row.get("conversations")
        if messages:
            ids, said = self._ids(row, _as_chat(messages)), self._said(row, _as_chat(messages))
            return self._trained(ids, [1] * len(ids) if said is None else said, where, _as_chat(messages))
        ids = self._ids(row, self._ended(self._field(row, "text", where)))
        return self._trained(ids, [1] * len(ids), where)

    def _said(self, row, messages):
        """1 for each token of the assistant, else 0. None if the template does not mark the assistant's tokens."""
        return self._tokenizer.assistant_mask(messages, template_arguments(row))

    @staticmethod
    def _trained(ids, mask, where, messages=()):
        """The record, with loss where `mask` is 1. The first token has no loss, because no token precedes it."""
        if len(ids) < 2 or 1 not in mask[1:]:
            roles = dict.fromkeys(str(message.get("role")) for message in messages if isinstance(message, dict))
            raise RecordError(where, "at least two tokens, of which one is trained on",
                              f"{len(ids)} tokens, {sum(mask[1:])} with loss" + (f", of messages by {', '.join(roles)}" if roles else ""),
                              "Chat templates know the roles system, user, assistant and tool: rename others" if roles.keys() - _ROLES else "")
        begin = mask[1:].index(1) + 1
        out = {"prompt_ids": ids[:begin], "response_ids": ids[begin:]}
        return out if all(mask[begin:]) else {**out, "loss_mask": mask[begin:]}
