"""Calls the engine's kernels on host tensors through the C interface (espalier/binding/kernel_interface.h)."""

import ctypes
import json

import torch

from espalier import native
from espalier.errors import Error

_NAMES = {torch.float32: b"float32", torch.float64: b"float64", torch.bfloat16: b"bfloat16"}


class _Shape(ctypes.Structure):
    _fields_ = [  # type: ignore[assignment]
        (name, ctypes.c_int64) for name in ("own_rows", "path_rows", "heads", "kv_heads", "head_dim")] + [
        ("scale", ctypes.c_double), ("subtree_end", ctypes.c_void_p)]


class _Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "path_k", "path_v")] + [
        (name + "_stride", ctypes.c_int64) for name in ("q", "k", "v", "path_k", "path_v")]


def serves(tensor):
    """True if the kernels support the tensor's device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in _NAMES


def _call(function, *arguments):
    core = native.library()
    core.omp_set_num_threads(torch.get_num_threads())  # the core and torch may use separate OpenMP runtimes
    if getattr(core, function)(*arguments) != 0:
        raise Error.of(json.loads(core.espalier_last_error()))


def _pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def _rows(x):
    """x [N, heads, D] with contiguous heads and elements, copied only if needed. Rows may have any stride."""
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()


class _Attention:
    """Shape and operands of one kernel call. Keeps the operands alive until the kernel has read them."""

    def __init__(self, q, k, v, path_k, path_v, subtree_end, scale):
        self.operands = [_rows(x) for x in (q, k, v, path_k, path_v)]
        self.subtree_end = subtree_end.contiguous()
        self.shape = _Shape(q.shape[0], path_k.shape[0], q.shape[1], k.shape[1], q.shape[2], scale, self.subtree_end.data_ptr())
        self.inputs = _Inputs(*(x.data_ptr() for x in self.operands), *(x.stride(0) for x in self.operands))
        self.dtype = _NAMES[q.dtype]

    def call(self, function, *tensors):
        _call(function, self.dtype, ctypes.byref(self.shape), ctypes.byref(self.inputs), *map(_pointer, tensors))


def accumulator(dtype):
    """The dtype of sums: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention_forward(q, k, v, path_k, path_v, subtree_end, scale):
    """Returns out [T, H, D] and lse [H, T]."""
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q.dtype))
    _Attention(q, k, v, path_k, path_v, subtree_end, scale).call("espalier_attention_forward", out, lse)
    return out, lse


def add_attention_backward(grad_out, q, k, v, path_k, path_v, subtree_end, out, lse, path_grad_k, path_grad_v, scale):
    """Returns the gradients of q, k and v. Adds the path's gradients to path_grad_k and path_grad_v, contiguous and of the accumulator's dtype."""
    grad_q = q.new_empty(q.shape)
    own_k, own_v = (x.new_zeros(x.shape, dtype=path_grad_k.dtype) for x in (k, v))
    grad_out, out, lse = grad_out.contiguous(), out.contiguous(), lse.contiguous()
    _Attention(q, k, v, path_k, path_v, subtree_end, scale).call(
        "espalier_add_attention_backward", out, lse, grad_out, grad_q, own_k, own_v, path_grad_k, path_grad_v)
    return grad_q, own_k.to(k.dtype), own_v.to(v.dtype)


def head_row_sums(logits, inverse):
    """Returns [R, 3] float64 for contiguous logits [R, V] and inverse temperatures [R] float64. With z = logit * inverse, the columns are
    the largest logit, log sum exp(z - max z), and the entropy of softmax(z).
    """
    inverse = inverse.contiguous()
    sums = torch.empty((logits.shape[0], 3), dtype=torch.float64)
    _call("espalier_head_row_sums", _NAMES[logits.dtype], _pointer(logits), ctypes.c_int64(logits.shape[0]),
          ctypes.c_int64(logits.shape[1]), _pointer(inverse), _pointer(sums))
    return sums


def compute_head_row_gradient(logits, inverse, sums, grad_logprob, grad_entropy):
    """Overwrites logits [R, V] with their gradient, except the term at each row's target, which the caller adds."""
    held = [x.contiguous() for x in (inverse, sums, grad_logprob, grad_entropy)]
    _call("espalier_compute_head_row_gradient", _NAMES[logits.dtype], _pointer(logits), ctypes.c_int64(logits.shape[0]),
          ctypes.c_int64(logits.shape[1]), *map(_pointer, held))
