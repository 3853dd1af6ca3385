"""Stands in for the packages of recurrent layers, whose kernels run on a GPU alone: fla and mamba_ssm. Import it before megatron.

Megatron's own training path takes `mamba_split_conv1d_scan_combined`, written here as a sum over all earlier rows. `mamba_chunk_scan_combined`, which
takes a state, is written as the recurrence. So are the functions of fla, which take packed sequences too; with `deterministic_mode` Megatron has
functions of its own in torch.
"""

import sys
import types

import torch
import torch.nn.functional as F


def l2norm(x, dim=-1, eps=1e-6):
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def _sequences(rows, ends):
    """Slices of the packed sequences of a call."""
    ends = [0, rows] if ends is None else ends.tolist()
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def causal_conv1d(x, weight, bias=None, activation=None, cu_seqlens=None, **_):
    """x [n, T, C] -> ([n, T, C], None)"""
    found = [F.conv1d(F.pad(x[:, at].transpose(1, 2), (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight)).transpose(1, 2)
             for at in _sequences(x.shape[1], cu_seqlens)]
    assert activation == "silu"
    return F.silu(torch.cat(found, 1)), None


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    """q, k [n, T, H, D], v [n, T, H, E], g, beta [n, T, H], states [n, H, D, E] -> ([n, T, H, E], states of the last sequence)"""
    assert not use_qk_l2norm_in_kernel
    out = []
    for at in _sequences(q.shape[1], cu_seqlens):
        state = v.new_zeros(len(q), *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
        for t in range(at.start, at.stop):
            state = state * g[:, t].exp()[..., None, None]
            error = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhde,nhd->nhe", state, k[:, t]))
            state = state + k[:, t, ..., None] * error[:, :, None]
            out.append(torch.einsum("nhde,nhd->nhe", state, q[:, t]) * q.shape[-1] ** -.5)
    return torch.stack(out, 1), state if output_final_state else None


def mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, D=None, chunk_size=None, activation="silu", headdim=None, ngroups=1, **_):
    """[n, T, z x B C dt] -> [n, T, H P]: y_t = sum over s <= t of (C_t B_s) exp(A (dt_(s+1) + ... + dt_t)) dt_s x_s, gated by silu(z)."""
    return torch.stack([_split_scan(one, weight, bias, dt_bias, A, D, headdim, ngroups) for one in zxbcdt])


def _split_scan(zxbcdt, weight, bias, dt_bias, A, D, headdim, ngroups):
    heads, rows = len(A), len(zxbcdt)
    inner = heads * headdim
    shared = (zxbcdt.shape[-1] - 2 * inner - heads) // 2
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * shared, heads], -1)
    xbc = F.silu(F.conv1d(F.pad(xbc.t()[None], (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight)))[0].t()
    x, B, C = xbc.split([inner, shared, shared], -1)
    x, B, C = x.unflatten(-1, (heads, headdim)), *(part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 1) for part in (B, C))
    dt = F.softplus(dt + dt_bias)
    decays = (dt * A).cumsum(0)
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()[..., None]
    between = (decays[:, None] - decays[None]).masked_fill(~seen, float("-inf")).exp()
    y = torch.einsum("thn,shn,tsh,sh,shp->thp", C, B, between, dt, x) + D[:, None] * x
    return y.flatten(1) * F.silu(z)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, initial_states=None, return_final_states=False, **_):
    """x, z [n, T, H, P], dt [n, T, H], B and C [n, T, G, N], states [n, H, P, N] -> (y [n, T, H, P], states)."""
    n, rows, heads, width = x.shape
    B, C = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
    state, out = x.new_zeros(n, heads, width, B.shape[-1]) if initial_states is None else initial_states, []
    for t in range(rows):
        state = state * (A * dt[:, t]).exp()[..., None, None] + torch.einsum("nh,nhp,nhk->nhpk", dt[:, t], x[:, t], B[:, t])
        out.append(torch.einsum("nhpk,nhk->nhp", state, C[:, t]) + D[:, None] * x[:, t])
    y = torch.stack(out, 1)
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_final_states else y


class RMSNorm(torch.nn.Module):
    """The norm of groups of channels behind the gate."""

    def __init__(self, size, eps=1e-5, group_size=None, dtype=None, **_):
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size or size

    def forward(self, x, z=None):
        groups = (x if z is None else x * F.silu(z)).unflatten(-1, (-1, self.group))
        return (groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


def _module(name, **content):
    parts = name.split(".")
    for at in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:at]), types.ModuleType(".".join(parts[:at])))
    vars(sys.modules[name]).update(content)


_module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=RMSNorm)
_module("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined)
_module("fla.modules.l2norm", l2norm=l2norm)
_module("fla.modules.convolution", causal_conv1d=causal_conv1d)
_module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)
