"""The gated delta rule of Qwen3-Next and Qwen3.5: S_t = exp(g_t) S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, behind a short convolution."""

import functools

import torch

from espalier.megatron.mixers import kernels, states
from espalier.rows import convolution
from espalier.rows.scans import over_segments

_CHUNK = 64  # rows, in fla and in Megatron's own function


def attach(mixer):
    """Makes a GatedDeltaNet run the rows of calls."""
    states.attach(mixer, _rows)


def _rows(mixer, x, look):
    """[T, q k v z beta alpha] -> [T, H D] before the output projection."""
    config, ranks = mixer.config, mixer.tp_size
    keys, values, heads = mixer.qk_dim // ranks, mixer.v_dim // ranks, mixer.num_value_heads // ranks
    qkv, gate, beta, alpha = x.split([2 * keys + values, values, heads, heads], -1)
    convolve = kernels.convolution(mixer, mixer.act_fn, config.deterministic_mode)
    qkv = convolution.over_segments(convolve, look.segments("inputs"), qkv.t()[None], mixer.conv1d.weight[:, 0], mixer.conv1d.bias,
                                    activation=mixer.activation)[0].t()
    q, k, v = (part.unflatten(-1, (-1, width)) for part, width in zip(
        qkv.split([keys, keys, values], -1), (mixer.key_head_dim, mixer.key_head_dim, mixer.value_head_dim)))
    if mixer.use_qk_l2norm:
        q, k = (kernels.named(mixer, "l2norm")(part.contiguous()) for part in (q, k))
    repeats = mixer.num_value_heads // mixer.num_key_heads
    if repeats > 1:
        q, k = (part.repeat_interleave(repeats, 1) for part in (q, k))
    decay = -mixer.A_log.exp() * torch.nn.functional.softplus(alpha.float() + mixer.dt_bias)
    rows = dict(q=q, k=k, v=v, g=decay, beta=beta.sigmoid())
    run = functools.partial(_run, _rule(mixer))
    out = over_segments(look.segments("state"), {name: part[None].contiguous() for name, part in rows.items()}, _CHUNK, run)
    return mixer._apply_gated_norm(out, gate.unflatten(-1, (-1, mixer.value_head_dim))).reshape(len(x), -1)


def _rule(mixer):
    rule = getattr(mixer, "gated_delta_rule", None)
    if rule is not None:
        return rule
    return kernels.named(mixer, "torch_chunk_gated_delta_rule" if mixer.config.deterministic_mode else "chunk_gated_delta_rule")


def _run(rule, rows, start):
    return rule(rows["q"], rows["k"], rows["v"], g=rows["g"], beta=rows["beta"], initial_state=start, output_final_state=True,
                use_qk_l2norm_in_kernel=False)
