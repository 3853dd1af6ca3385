"""Megatron-Core on a machine without a GPU. Import it before megatron.

Nothing that computes a number is replaced, but that float64 stays float64 where Megatron rounds to float32 (router scores, losses), as the tests of
transformers have it, too. All stand-ins are functions: a TorchFunctionMode would not be active in a backward, where layers run again.
"""

import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # core/jit.py compiles small functions; here they run eagerly
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron demands for sequence parallelism
logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import torch  # noqa: E402

CUDA_NAMES = {torch.float64: "torch.cuda.FloatTensor", torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace", "zeros_like",
             "ones_like", "empty_like", "full_like")


class Nothing:
    """A stream or an event: nothing to order."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def placed(function):
    """Tensors that Megatron makes on "cuda" are made on the CPU."""
    def make(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return make


def place_on_cpu():
    for name in FACTORIES:
        setattr(torch, name, placed(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    own_type = torch.Tensor.type  # the distributed optimizer compares names of CUDA types
    torch.Tensor.type = lambda self, *a, **k: own_type(self, *a, **k) if a or k else CUDA_NAMES.get(self.dtype, own_type(self))
    own_exchange = torch.distributed.all_to_all_single
    numbers = lambda sizes: sizes.tolist() if torch.is_tensor(sizes) else sizes  # Megatron makes numbers of a GPU's tensors alone

    def exchange(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        return own_exchange(output, input, numbers(output_split_sizes), numbers(input_split_sizes), group, async_op)

    torch.distributed.all_to_all_single = exchange
    own_send = torch.distributed.isend

    def send(tensor, *args, **kwargs):
        """Sends a copy: Megatron frees what it sends overlapped, which a stream of a GPU would keep until it is sent."""
        return own_send(tensor.clone(), *args, **kwargs)

    torch.distributed.isend = torch.distributed.distributed_c10d.isend = send
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: Nothing()
    cuda.Stream = cuda.Event = Nothing
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = lambda seed: None
    cuda.is_current_stream_capturing = lambda: False


def keep_float64():
    def wide(function):
        return lambda x, *args, dtype=None, **more: function(
            x, *args, dtype=torch.float64 if torch.is_tensor(x) and x.dtype == torch.float64 else dtype, **more)

    torch.softmax, torch.nn.functional.softmax = wide(torch.softmax), wide(torch.nn.functional.softmax)
    own_float, own_to = torch.Tensor.float, torch.Tensor.to
    torch.Tensor.float = lambda self, *a, **k: self if self.dtype == torch.float64 else own_float(self, *a, **k)
    torch.Tensor.to = lambda self, *a, **k: self if self.dtype == torch.float64 and torch.float32 in (*a, k.get("dtype")) else own_to(self, *a, **k)


class Absent(types.ModuleType):
    """A module whose functions are never called here; as a decorator it changes nothing."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__, self.__path__, self.__version__ = importlib.machinery.ModuleSpec(name, None), [], "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda function: function


def stand_in_for_triton():
    """Megatron imports triton for kernels that only a GPU runs. The package is as large as half of torch."""
    if importlib.util.find_spec("triton") is None:
        from torch.utils._triton import has_triton_package
        assert not has_triton_package(), "torch remembers this answer, and asks for nothing more of triton"
        for name in ("triton", "triton.language"):
            sys.modules[name] = Absent(name)
        sys.modules["triton"].language = sys.modules["triton.language"]


stand_in_for_triton()
place_on_cpu()
keep_float64()
