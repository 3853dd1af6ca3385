"""Writes an adapter in the form in which vLLM loads adapters of experts.

    python -m espalier.vllm_adapter ADAPTER OUT [--model BASE] [--experts each|together]

peft holds the adapters of a layer's experts in two pairs of matrices (docs/lora.md). vLLM has two forms, one for each kind of model:

    each        one pair for every expert and projection, under the names of the base model's files: experts.3.gate_proj.lora_A
    together    peft's pairs, both of them, for models whose experts are one tensor in vLLM (gpt-oss, Qwen3.5-MoE, Qwen3-VL-MoE, InternS1-Pro)

Without --experts the form is that of the base model's files: "each" if they hold one matrix for each expert. A projection without an adapter gets one of
zeros, because vLLM wants all of a layer. All other tensors keep their bytes. Needs NumPy only.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import Error, Unsupported

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OF_EXPERTS = re.compile(r"(?P<layer>.*\blayers\.\d+\.)(?P<block>\w+)\.experts(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight")
_OF_EXPERT = re.compile(r"(?P<layer>.*\blayers\.\d+\.)(?P<block>\w+)\.experts\.\d+\.(?P<projection>\w+)\.weight")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up and down, as base models name them
_FILE = "adapter_model.safetensors"

Tensors = dict[str, tuple[str, np.ndarray]]  # name: (dtype, the numbers' bits)
Pair = tuple[str, np.ndarray, np.ndarray]  # (dtype, A [E, r, in], B [E, out, r])


def convert(adapter: str | os.PathLike[str], out: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None,
            experts: str | None = None) -> dict[str, Any]:
    """Converts the adapter directory `adapter` to the new directory `out`. Returns what was written: the form and the number of tensors.

    `model`: the base model's directory; by default the one that the adapter names. `experts`: "each", "together", or None for the base model's form.
    """
    source, target = Path(adapter), Path(out)
    if experts not in (None, "each", "together"):
        raise Error("option", "experts", "'each' or 'together'", repr(experts), exit_code=2)
    if target.exists():
        raise Error("write", str(target), "a directory that does not exist yet", "one that does", "Choose another name", 2)
    config, tensors = _config(source / "adapter_config.json"), _read(source / _FILE)
    layers = _layers(tensors)
    form = None
    if layers:
        base = Path(model if model is not None else config.get("base_model_name_or_path") or "")
        names, (count, in_turn) = _names_of_experts(base), _experts_of(base)
        form = experts or ("each" if names else "together")
        alone = any(str(name).endswith("gate_up_proj") for name in config.get("target_parameters") or ())
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            raise Unsupported(str(source / "adapter_config.json"), "one rank and one factor for all modules", "rank_pattern or alpha_pattern",
                              "Continue the adapter with `espalier train --adapter`, which writes one rank, or merge it")
        pairs = {where: _pairs(tensors, where, found, count, int(config["r"]), alone) for where, found in layers.items()}
        kept = {name: tensor for name, tensor in tensors.items() if not _OF_EXPERTS.fullmatch(name)}
        written = _together(pairs) if form == "together" else _each(pairs, *(names or ("", _PROJECTIONS[0])), in_turn)
        tensors = {**kept, **written}
    _write(target, config, tensors)
    return {"out": str(target), "experts": form, "tensors": len(tensors)}


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
        int(config["r"]), float(config["lora_alpha"])
        return config
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise Error("input", str(path), "an adapter's configuration with r and lora_alpha", f"{type(problem).__name__}: {problem}",
                    "Give a folder that `espalier train --lora-rank` or peft wrote", 3) from None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """(the header of a safetensors file, where its numbers begin)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= path.stat().st_size - 8:
                raise ValueError("a header that is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return header, 8 + length
    except (OSError, ValueError, AttributeError) as problem:
        raise Error("input", str(path), "a safetensors file", f"{type(problem).__name__}: {problem}", "", 3) from None


def _read(path: Path) -> Tensors:
    header, begin = _header(path)
    data = np.memmap(path, np.uint8, "r", offset=begin) if path.stat().st_size > begin else np.zeros(0, np.uint8)
    found: Tensors = {}
    for name, tensor in header.items():
        dtype, shape, (first, last) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        size = _BYTES.get(dtype)
        if size is None:
            raise Unsupported(f"{path}: {name}", "float64, float32, float16 or bfloat16", dtype)
        if last - first != math.prod(shape) * size or last > len(data):
            raise Error("input", f"{path}: {name}", f"{math.prod(shape) * size} bytes", f"{min(last, len(data)) - first}", "The file is damaged", 3)
        found[name] = dtype, data[first:last].view(f"u{size}").reshape(shape)
    return found


def _layers(tensors: Tensors) -> dict[str, dict[str, dict[str, str]]]:
    """{"...layers.0.mlp.experts": {"" or ".base_layer": {"A": tensor, "B": tensor}}} of the adapters of experts."""
    layers: dict[str, dict[str, dict[str, str]]] = {}
    for name in tensors:
        if match := _OF_EXPERTS.fullmatch(name):
            pairs = layers.setdefault(f"{match['layer']}{match['block']}.experts", {})
            pairs.setdefault(match["inner"] or "", {})[match["side"]] = name
    for where, pairs in layers.items():
        for inner, pair in pairs.items():
            if set(pair) != {"A", "B"}:
                raise Error("input", where + inner, "lora_A and lora_B", "one of them", "The file is damaged", 3)
    return layers


def _base_tensors(base: Path) -> Iterator[str]:
    index = base / "model.safetensors.index.json"
    if index.is_file():
        yield from json.loads(index.read_text())["weight_map"]
        return
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise Error("input", str(base) or "the base model", "the base model's directory, whose files name its experts", "no safetensors file there",
                    "Give it with --model", 3)
    for file in files:
        yield from _header(file)[0]


def _names_of_experts(base: Path) -> tuple[str, tuple[str, str, str]] | None:
    """(the block that holds the experts, the names of gate, up and down) in files with one matrix for each expert, else None."""
    found: dict[str, set[str]] = {}
    for name in _base_tensors(base):
        if match := _OF_EXPERT.fullmatch(name):
            found.setdefault(match["block"], set()).add(match["projection"])
    if not found:
        return None
    for block, own in found.items():
        for names in _PROJECTIONS:
            if own >= set(names):
                return block, names
    raise Unsupported(str(base), "experts with " + " or ".join(", ".join(names) for names in _PROJECTIONS),
                      "; ".join(f"{block}: {', '.join(sorted(own))}" for block, own in found.items()), "Merge the adapter for vLLM")


def _experts_of(base: Path) -> tuple[int, bool]:
    """(the number of experts, whether rows of gate and up stand in turn), of a base model's configuration."""
    try:
        config = json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as problem:
        raise Error("input", str(base / "config.json"), "the base model's configuration", f"{type(problem).__name__}: {problem}", "Give --model", 3) from None
    for part in (config.get("text_config") or {}, config):
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(part.get(name), int) and part[name] > 0:
                return int(part[name]), config.get("model_type") == "gpt_oss"
    raise Error("input", str(base / "config.json"), "a number of experts", "none", "Give the model with which the adapter was trained", 3)


def _together(pairs: Mapping[str, list[Pair]]) -> Tensors:
    out: Tensors = {}
    for where, both in pairs.items():
        for inner, (dtype, a, b) in zip((".base_layer", ""), both):
            out[f"{where}{inner}.lora_A.weight"] = dtype, a.reshape(-1, a.shape[2])
            out[f"{where}{inner}.lora_B.weight"] = dtype, np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(b.shape[1], -1)
    return out


def _each(pairs: Mapping[str, list[Pair]], block: str, names: tuple[str, str, str], in_turn: bool) -> Tensors:
    """`block`: the part of the model's layer that holds the experts in its files, if that has another name than in transformers."""
    out: Tensors = {}
    for where, (gate_up, down) in pairs.items():
        layer = where.removesuffix(".experts").rpartition(".")[0]
        stem = f"{layer}.{block}.experts" if block else where
        half = gate_up[2].shape[1] // 2
        of_gate, of_up = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(half), slice(half, None))
        for expert in range(len(down[1])):
            for projection, (dtype, a, b), rows in zip(names, (gate_up, gate_up, down), (of_gate, of_up, slice(None))):
                out[f"{stem}.{expert}.{projection}.lora_A.weight"] = dtype, a[expert]
                out[f"{stem}.{expert}.{projection}.lora_B.weight"] = dtype, b[expert, rows]
    return out


def _pairs(tensors: Tensors, where: str, pairs: Mapping[str, Mapping[str, str]], count: int, rank: int, gate_up_alone: bool) -> list[Pair]:
    """The pairs of gate_up and of down. One that is missing is zero; `gate_up_alone`: a pair that is alone is gate_up's."""
    found: dict[str, Pair] = {}
    for inner, pair in pairs.items():
        (dtype, a), (_, b) = tensors[pair["A"]], tensors[pair["B"]]
        if a.shape[0] != count * rank or b.ndim != 2 or b.shape[1] != count * rank:
            raise Error("input", where + inner, f"matrices of {count} experts and rank {rank}: [{count * rank}, in] and [out, {count * rank}]",
                        f"{list(a.shape)} and {list(b.shape)}", "Give the model with which the adapter was trained", 3)
        found[inner] = dtype, a.reshape(count, rank, -1), np.ascontiguousarray(b.reshape(b.shape[0], rank, count).transpose(2, 0, 1))
    if len(found) == 2:
        return [found[".base_layer"], found[""]]
    (dtype, a, b), = found.values()
    inputs, outputs = a.shape[2], b.shape[1]
    if gate_up_alone:
        zero = dtype, np.zeros((count, rank, outputs // 2), a.dtype), np.zeros((count, inputs, rank), b.dtype)
        return [(dtype, a, b), zero]
    zero = dtype, np.zeros((count, rank, outputs), a.dtype), np.zeros((count, 2 * inputs, rank), b.dtype)
    return [zero, (dtype, a, b)]


def _write(target: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    modules = sorted({name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in tensors if ".lora_" in name} - {"base_layer"})
    config = {name: value for name, value in config.items() if name != "target_parameters"} | {"target_modules": modules}
    header, at = {}, 0
    for name, (dtype, numbers) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(numbers.shape), "data_offsets": [at, at + numbers.nbytes]}
        at += numbers.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    try:
        unfinished = target.with_name(target.name + ".unfinished")
        unfinished.mkdir(parents=True)
        (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        with (unfinished / _FILE).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, numbers in tensors.values():
                file.write(np.ascontiguousarray(numbers).tobytes())
        unfinished.rename(target)
    except OSError as problem:
        raise Error("write", str(target), "a new directory", f"{type(problem).__name__}: {problem}", "Choose another place", 2) from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m espalier.vllm_adapter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder that `espalier train --lora-rank` or peft wrote")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--model", metavar="BASE", help="the base model's folder; default: the one that the adapter names")
    parser.add_argument("--experts", choices=("each", "together"))
    given = parser.parse_args()
    try:
        print(json.dumps(convert(given.adapter, given.out, model=given.model, experts=given.experts)))
        return 0
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
