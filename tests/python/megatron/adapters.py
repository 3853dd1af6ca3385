"""LoRA around linear layers, as Megatron-Bridge wraps them, on one tensor parallel rank."""

import torch


class Adapted(torch.nn.Module):
    def __init__(self, inner, rank, seed):
        super().__init__()
        self.to_wrap = inner
        generator = torch.Generator().manual_seed(seed)
        out, into = inner.weight.shape
        draw = lambda *shape: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * .2)
        self.a, self.b = draw(rank, into), draw(out, rank)

    def forward(self, x):
        out, bias = self.to_wrap(x)
        return out + x @ self.a.T @ self.b.T, bias


def adapt(chunks, rank):
    """Freezes the chunks and wraps the linear layers of attention and MLP."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:  # as Megatron-Bridge does: layers that run again need an input with a gradient
            chunk.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_() if torch.is_grad_enabled() else out)
        for layer in chunk.decoder.layers:
            for at, (owner, name) in enumerate(((layer.self_attention, "linear_qkv"), (layer.self_attention, "linear_proj"), (layer.mlp, "linear_fc1"),
                                                (layer.mlp, "linear_fc2"))):
                setattr(owner, name, Adapted(getattr(owner, name), rank, 10 * layer.layer_number + at))
