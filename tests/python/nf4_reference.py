"""NF4 as bitsandbytes stores it, written out in NumPy: quantise, store, and read again (QLoRA, section 3; the numbers' digits are bitsandbytes')."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

CODES = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
                  0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                  0.7229568362236023, 1.0], np.float32)
BLOCK, NESTED_BLOCK = 64, 256
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8",
          "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": None}
MEMBERS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")


def dynamic_map():
    """The 256 numbers of a quantised absmax: for each power of ten means of neighbours among even steps, with both signs."""
    numbers = [0.0, 1.0]
    for i in range(7):
        steps = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = 10.0 ** (i - 6) * ((steps[:-1] + steps[1:]) / 2)
        numbers += means.tolist() + (-means).tolist()
    return np.sort(np.array(numbers, np.float32))


def quantise(weight, nested):
    """Tensors of a matrix, by the end of their names ("": the codes)."""
    blocks = weight.float().numpy().reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(1)
    middles = ((CODES[1:].astype(np.float64) + CODES[:-1]) / 2).astype(np.float32)
    scaled = blocks * (np.float32(1) / absmax)[:, None]
    codes = (scaled[..., None] > middles).sum(-1).astype(np.uint8).reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    out = {"": (codes[:, 0] << 4 | codes[:, 1])[:, None], "quant_map": CODES}
    if nested:
        offset = np.float32(absmax.astype(np.float64).mean())
        rest, table = absmax - offset, dynamic_map()
        groups = [rest[first:first + NESTED_BLOCK] for first in range(0, len(rest), NESTED_BLOCK)]
        most = np.array([np.abs(group).max() for group in groups], np.float32)
        scaled = np.concatenate([group * (np.float32(1) / m) for group, m in zip(groups, most)])
        out |= {"absmax": np.abs(table - scaled[:, None]).argmin(1).astype(np.uint8), "nested_absmax": most, "nested_quant_map": table}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        out["absmax"] = absmax
    out["quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {end: torch.from_numpy(values.copy()) for end, values in out.items()}


def dequantise(stored):
    """The matrix that `quantise` stands for, in the dtype that it was quantised from."""
    state = json.loads(bytes(stored["quant_state.bitsandbytes__nf4"].tolist()))
    absmax = stored["absmax"].numpy()
    if "nested_absmax" in stored:
        factors = np.repeat(stored["nested_absmax"].numpy(), NESTED_BLOCK)[:len(absmax)]
        absmax = stored["nested_quant_map"].numpy()[absmax] * factors + np.float32(state["nested_offset"])
    pairs = stored[""].numpy()
    values = CODES[np.concatenate([pairs >> 4, pairs & 15], 1).reshape(-1)] * np.repeat(absmax, BLOCK)
    return torch.from_numpy(values.reshape(state["shape"])).to(getattr(torch, state["dtype"]))


def is_quantised(name, tensor):
    """Matrices of layers; transformers leaves out heads, and embeddings and routers are no linear layers there."""
    return tensor.ndim == 2 and ".layers." in name and not name.endswith((".gate.weight", ".router.weight"))


def store(model, folder, nested=True, dtype=torch.bfloat16, chosen=is_quantised, skipped=None):
    """(directory in NF4, the same with the matrices that the codes stand for) of a model directory with one file."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    config = json.loads((model / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            parts = quantise(tensor, nested)
            plain[name] = dequantise(parts)
            del packed[name]
            packed |= {name + ("." + end if end else ""): values for end, values in parts.items()}
    quantisation = CONFIG | {"bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": skipped}
    for directory, values, more in (("nf4", packed, {"quantization_config": quantisation}), ("plain", plain, {}), ("source", tensors, {})):
        (folder / directory).mkdir(parents=True)
        save_file(values, folder / directory / "model.safetensors", metadata={"format": "pt"})
        (folder / directory / "config.json").write_text(json.dumps(config | more))
    return folder / "nf4", folder / "plain"
