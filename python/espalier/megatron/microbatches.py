"""The autograd functions by which a trunk's forward and backward are two micro-batches of a schedule."""

import torch


def alias(x):
    """The same memory without a graph and without a base. The schedule may free it once it is sent; it refuses views."""
    out = torch.empty((1,), dtype=x.dtype, device=x.device)
    out.data = x.data
    return out


class Hold(torch.autograd.Function):
    """(received, [output]) -> the output without its graph. The input that was received gets the gradient 0. The list hides the output from autograd, which would
    run its graph in this backward otherwise."""

    @staticmethod
    def forward(ctx, received, held):
        ctx.like = received.shape, received.dtype, received.device
        return alias(held[0])

    @staticmethod
    def backward(ctx, _):
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None


class Graph:
    """A trunk's graph in one chunk. `roots`: tensors whose gradients its backward starts from. `received`: the chunk's input, or None in the first
    stage. `shape`: of the output that is sent on, or None in the last stage."""

    def __init__(self, roots, received, shape):
        self.roots, self.received, self.shape = roots, received, shape


class Close(torch.autograd.Function):
    """(received, graph, gradients) -> zeros like the trunk's output. The backward is the trunk's own. `gradients(grad)`: of the graph's roots, from the
    gradient of the output."""

    @staticmethod
    def forward(ctx, received, graph, gradients):
        ctx.graph, ctx.gradients, ctx.like = graph, gradients, (received.shape, received.dtype, received.device)
        root = graph.roots[0]
        return torch.zeros(graph.shape if graph.shape is not None else (), dtype=root.dtype, device=root.device)

    @staticmethod
    def backward(ctx, grad):
        graph = ctx.graph
        if graph.received is not None:
            graph.received.grad = None  # the zeros of the opening, which may still be on their way to the stage before
        pairs = [(root, given) for root, given in zip(graph.roots, ctx.gradients(grad)) if root.requires_grad]
        if pairs:  # the engine itself, because the storage of an output that was sent is gone
            roots, given = zip(*pairs)
            torch.autograd.Variable._execution_engine.run_backward(roots, given, False, False, (), True, True)
        received, graph.roots, graph.received = graph.received, None, None
        if received is not None and received.grad is not None:
            return received.grad, None, None
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None, None


class Nothing(torch.autograd.Function):
    """A scalar 0 whose backward gives x the gradient 0: Megatron's DDP waits for a gradient of every parameter."""

    @staticmethod
    def forward(ctx, x):
        ctx.like = x.shape, x.dtype, x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        shape, dtype, device = ctx.like
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Spread(torch.autograd.Function):
    """(values [E'], places [E'], E, group) -> [E]: values of tokens that lie on different context parallel ranks, the same on all of them. Every rank
    computes the same loss from them, so the backward takes each rank's own part."""

    @staticmethod
    def forward(ctx, values, places, count, group):
        ctx.save_for_backward(places)
        out = values.new_zeros(count).index_copy_(0, places, values)
        torch.distributed.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        places, = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None
