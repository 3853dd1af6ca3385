"""Files of quantised weights that are damaged."""

import shutil

from safetensors.torch import load_file, save_file


def refused_with_changed_tensors(espalier, directory, change, status, word, weights, tensor, rollouts, folder):
    """`change` changes the tensors of a copy of the model in place. `train` refuses the copy with the exit status, whether it holds the weights
    as `weights` or reads them, and names the tensor and the word. It writes nothing."""
    model, out = folder / "model", folder / "out"
    model.mkdir()
    shutil.copy(directory / "config.json", model)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for held in (weights, "source"):
        told = espalier("train", "--model", model, "--rollouts", rollouts, "--lora-rank", 4, "--weights", held, "--out", out, expect=status).stderr
        assert tensor in told and word in told and not out.exists(), told
