"""FP8 checkpoints written with torch.float8_e4m3fn, and the numbers that they stand for: value(code) times the scale of its block, in float32."""

import json

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def spread(scales, shape, blocks):
    """The scale of every number of a matrix."""
    return scales.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[:shape[0], :shape[1]]


def quantise(weight, blocks, scale_dtype=torch.float32, power_of_two=False):
    """(codes, scales [blocks of rows, blocks of columns]) of a matrix; its last blocks may be smaller."""
    weight = weight.float()
    rows, columns = weight.shape
    scales = torch.stack([torch.stack([part.abs().max() for part in strip.split(blocks[1], 1)]) for strip in weight.split(blocks[0], 0)]) / LARGEST
    scales = scales.log2().ceil().exp2() if power_of_two else scales.to(scale_dtype).float()
    codes = (weight / spread(scales, (rows, columns), blocks)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scales.to(scale_dtype)


def dequantise(codes, scales, blocks):
    return codes.float() * spread(scales.float(), codes.shape, blocks)


def is_linear(name, tensor):
    """Matrices of layers without routers, as FP8 models are published."""
    return tensor.ndim == 2 and ".layers." in name and not name.endswith((".gate.weight", ".router.weight"))


def store(model, folder, blocks=(128, 128), ending="_scale_inv", scale_dtype=torch.float32, power_of_two=False, chosen=is_linear, skipped=("lm_head",),
          quantisation=None, reshape=lambda scales: scales, plain_dtype=torch.float32):
    """(directory in FP8, the same with the matrices as `plain_dtype`) of a model directory with one file."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not chosen(name, tensor):
            continue
        of_rows, of_columns = (size or whole for size, whole in zip(blocks, tensor.shape))
        codes, scales = quantise(tensor, (of_rows, of_columns), scale_dtype, power_of_two)
        packed[name], packed[name + ending] = codes, reshape(scales).contiguous()
        plain[name] = dequantise(codes, scales, (of_rows, of_columns)).to(plain_dtype)
    if quantisation is None:
        quantisation = FP8_CONFIG | {"weight_block_size": None if None in blocks else list(blocks), "modules_to_not_convert": list(skipped)}
    for directory, values, more in (("fp8", packed, {"quantization_config": quantisation}), ("plain", plain, {})):
        (folder / directory).mkdir(parents=True)
        save_file(values, folder / directory / "model.safetensors", metadata={"format": "pt"})
        (folder / directory / "config.json").write_text(json.dumps(config | more))
    return folder / "fp8", folder / "plain"
