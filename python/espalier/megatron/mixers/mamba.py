"""Mamba-2: h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t, y_t = C_t h_t + D x_t, behind a short convolution.

Megatron's training path is one kernel for the convolution and the scan, which starts from nothing. Here the two parts run, by the kernels of the
same packages: `mamba_chunk_scan_combined` takes a state and returns one.
"""

import torch

from espalier.megatron.mixers import kernels, states
from espalier.rows import convolution
from espalier.rows.scans import over_segments


def attach(mixer):
    """Makes a MambaMixer run the rows of calls."""
    states.attach(mixer, _rows)


def _rows(mixer, x, look):
    """[T, z x B C dt] -> [T, H P] before the output projection."""
    inner, shared, heads = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state, mixer.nheads_local_tp
    z, xbc, dt = x.split([inner, inner + 2 * shared, heads], -1)
    weight, bias = _convolution_of(mixer)
    convolve = kernels.convolution(mixer, mixer.act, deterministic=False)
    xbc = convolution.over_segments(convolve, look.segments("inputs"), xbc.t()[None], weight, bias, activation=mixer.activation)[0].t()
    inputs, B, C = xbc.split([inner, shared, shared], -1)
    # The bias and softplus of dt are applied here, so that rows behind a segment have dt = 0, which changes no state.
    dt = torch.nn.functional.softplus(dt + mixer.dt_bias.float())
    rows = dict(x=inputs.unflatten(-1, (-1, mixer.headdim)), dt=dt, B=B.unflatten(-1, (-1, mixer.d_state)), C=C.unflatten(-1, (-1, mixer.d_state)),
                z=z.unflatten(-1, (-1, mixer.headdim)))
    A, D, scan = -mixer.A_log.float().exp(), mixer.D.float(), kernels.named(mixer, "mamba_chunk_scan_combined")
    more = dict(D=D.unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else D)
    if kernels.named(mixer, "MAMBA_HAS_STATE_DTYPE"):
        more["state_dtype"] = mixer.mamba_training_ssm_states_dtype

    def run(batch, start):
        return scan(batch["x"], batch["dt"], A, batch["B"], batch["C"], mixer.chunk_size, z=batch["z"], initial_states=start,
                    return_final_states=True, **more)

    y = over_segments(look.segments("state"), {name: part[None].contiguous() for name, part in rows.items()}, mixer.chunk_size, run)[0].flatten(1)
    return mixer.norm(y[:, None])[:, 0] if mixer.rmsnorm else y


def _convolution_of(mixer):
    """(weight [C, K], bias). The parameters are the mixer's own since 0.18, a Conv1d's before."""
    if hasattr(mixer, "conv1d_weight"):
        return mixer.conv1d_weight[:, 0], mixer.conv1d_bias
    return mixer.conv1d.weight[:, 0], mixer.conv1d.bias
