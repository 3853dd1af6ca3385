"""Reads rollouts that other systems recorded, as neutral records (docs/rollout_format.md). No code from a file is executed.

    from espalier import records
    for record in records.read("dump.pt"): ...
    records.convert("dump.pkl", "rollouts.jsonl.gz")

    python -m espalier.records dump.pt > rollouts.jsonl

Formats: slime debug dumps, verl DataProto pickles, SkyRL training batches, TRL batches (.pt, .safetensors), ART packed folders, Parquet, and as JSON
rLLM episodes, verifiers and prime-rl traces, NeMo Gym rollouts and Harbor trials. A folder may hold several dumps of one format: they are read in the order of their steps, and slime's rollout and
train dumps are joined. Errors are RecordError.
"""

import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from . import art, harbor, json_files, nemo_gym, parquet_files, pickles, rllm, safetensors_files, skyrl, slime, torch_files, trl, unpacking, verifiers, verl
from .errors import RecordError, UnsupportedRecords
from .left_out import Notes

__all__ = ["RecordError", "UnsupportedRecords", "convert", "read"]

ENDINGS = (".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".parquet", ".json")
SLIME_FOLDERS = ("rollout_data", "train_data")  # of slime's --dump-details
TRIAL = "result.json"  # of each folder below that of a job of Harbor
_FORMATS = (parquet_files, slime, verl, trl, rllm, skyrl, verifiers, nemo_gym, harbor)
_TEXT_FIELDS = {"prompt", "prompts", "completion", "completions", "response", "responses", "messages", "text", "output"}
_REMEDY = ("Supported formats: JSON Lines with token ids, slime debug dumps, verl DataProto, SkyRL training batches, TRL batches, ART folders, rLLM episodes, "
           "verifiers traces, NeMo Gym rollouts, Harbor trials and Parquet (docs/rollout_format.md)")


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the neutral records of a file or folder, each a dict. Errors: RecordError."""
    yield from Reading(path).records()


def convert(path: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Writes the records of `path` to `out` (.jsonl or .jsonl.gz) and returns their number. `out` appears complete or not at all."""
    out, count = Path(out), 0
    if not out.name.endswith((".jsonl", ".jsonl.gz")):
        raise RecordError(str(out), "a name that ends in .jsonl or .jsonl.gz", out.name)
    if not overwrite and out.exists() and out.stat().st_size > 0:
        raise RecordError(str(out), "a file that does not exist yet", "one that exists", "Use overwrite=True to replace it, or choose another name")
    handle, partial = tempfile.mkstemp(dir=out.absolute().parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "wb") as raw:
            stream = gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) if out.suffix == ".gz" else raw
            for record in read(path):
                stream.write(line_of(record).encode("ascii"))
                count += 1
            if stream is not raw:
                stream.close()
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)
        os.replace(partial, out)
    except BaseException:
        os.unlink(partial)
        raise
    return count


def line_of(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


class Reading:
    """One file or folder. `format` and `notes` are complete after the last record of `records()`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.format = str(path), ""
        self.notes = Notes()

    def records(self) -> Iterator[dict[str, Any]]:
        try:
            if not os.path.isdir(self.path):
                yield from self._files([self.path], in_folder=False)
            elif art.matches(self.path):
                self.format = art.NAME
                yield from art.records(self.path, self.notes)
                self.notes.finish()
            else:
                yield from self._files(dumps_of(self.path), in_folder=True)
        except RecordError as error:
            raise error.at(self.path) from None
        except OSError as error:
            raise RecordError(error.filename or self.path, "a readable file", error.strerror or str(error)) from None

    def _files(self, paths: list[str], in_folder: bool) -> Iterator[dict[str, Any]]:
        """The records of all files. JSON of another kind in a folder, such as a configuration, is left out."""
        kind: Any = None
        contents: list[tuple[str, Any]] = []
        empty, left = True, None
        for path in paths:
            with open(path, "rb") as file:
                content = _content(file, path)
                try:
                    found = _format_of(content, path)
                except UnsupportedRecords as error:
                    if not in_folder or not isinstance(content, list):
                        raise
                    left = left or error
                    continue
                if kind not in (None, found):
                    raise UnsupportedRecords(path, f"a {kind.NAME} like the other files", f"a {found.NAME}", "Read them one by one")
                kind, self.format = found, found.NAME
                if found is slime:
                    contents.append((path, _loaded(content)))
                    continue
                for record in found.records([(path, content, step_of_name(path))], self.notes):
                    empty = False
                    yield record
        if kind is slime:
            for record in slime.records(contents, self.notes):
                empty = False
                yield record
        if left and kind is None:
            raise left
        if empty:
            raise RecordError(self.path, "at least one rollout", "none", "Was it written completely?")
        self.notes.finish()


def step_of_name(path: str) -> int | None:
    """The step in a file's name: 12 for "batch_step_12.pkl" and "global_step12.pt". None if the name has no step."""
    found = re.search(r"step[_-]?(\d+)", Path(path).name, re.IGNORECASE)
    return int(found.group(1)) if found else None


def dumps_of(folder: str) -> list[str]:
    """The paths of a folder's dumps, sorted by step, then by name; numbers in names compare as numbers."""
    def order(name: str) -> Any:
        step = step_of_name(name)
        return step is None, step or 0, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    trials = [os.path.join(name, TRIAL) for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, TRIAL))]
    if trials:
        return [os.path.join(folder, name) for name in sorted(trials, key=order)]
    places = [folder, *(path for path in (os.path.join(folder, name) for name in SLIME_FOLDERS) if os.path.isdir(path))]
    names = [os.path.relpath(os.path.join(place, name), folder) for place in places for name in os.listdir(place) if _is_dump(name)]
    if not names:
        raise UnsupportedRecords(folder, "a folder of dumps", f"no file that ends in {', '.join(ENDINGS)}", _REMEDY)
    return [os.path.join(folder, name) for name in sorted(names, key=order)]


def _is_dump(name: str) -> bool:
    name = name.lower()
    return next((name.removesuffix(ending) for ending in unpacking.ENDINGS if name.endswith(ending)), name).endswith(ENDINGS)


def _content(packed: BinaryIO, path: str) -> Any:
    file, name, size = unpacking.unpacked(packed, path)
    start = file.read(32)
    file.seek(0)
    if torch_files.is_zip(start):
        return torch_files.load_zip(file, path)
    if torch_files.is_legacy(start):
        return torch_files.load_legacy(file, path)
    if start.startswith(pickles.PROTOCOL_STARTS):
        return pickles.load(file, path)
    if start.startswith(parquet_files.START):
        if file is not packed:
            raise UnsupportedRecords(path, "Parquet, which packs its columns itself", "Parquet inside gzip or zstd", "Unpack the file")
        return parquet_files.Table(path)
    if name.lower().endswith(".safetensors") and start[8:9] == b"{":
        return safetensors_files.load(file, size, path)
    if json_files.is_json(start, name):
        return json_files.load(file, path)
    if not start:
        raise RecordError(path, "at least one rollout", "an empty file", "Was it written completely?")
    raise UnsupportedRecords(path, "a file of torch.save, a pickle, safetensors or Parquet", "other bytes", _REMEDY)


def _format_of(content: Any, path: str) -> Any:
    for kind in _FORMATS:
        if kind.matches(content):
            return kind
    if isinstance(content, list) and content and isinstance(content[0], dict):  # JSON
        if {"prompt_ids", "response_ids", "token_ids"} & content[0].keys():
            raise UnsupportedRecords(path, "JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst)", "a JSON array of records",
                                     "Write one record per line: jq -c '.[]' FILE > FILE.jsonl")
        content = content[0]
    names = sorted(str(name) for name in content) if isinstance(content, dict) else []
    if _TEXT_FIELDS & set(names):
        raise UnsupportedRecords(path, "token ids", f"text only: fields {', '.join(names)[:120]}",
                                 "Text does not tell which tokens were sampled: record token ids")
    got = f"fields {', '.join(names)[:120]}" if names else f"a {getattr(content, 'name', '') or type(content).__name__}"
    raise UnsupportedRecords(path, "rollouts with token ids", got, _REMEDY)


def _loaded(content: Any) -> Any:
    """Reads all storages of `content`, so that its file may be closed. Returns `content`."""
    stack = [content]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(v for v in value if not isinstance(v, (int, float, str)))
        elif hasattr(value, "flat"):
            value.flat()
    return content
