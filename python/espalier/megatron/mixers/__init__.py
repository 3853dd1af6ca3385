"""Recurrent layers: the gated delta rule and Mamba-2, whose rows learn of earlier rows by a state and by the last inputs of a convolution.

A layer's projections, norms and gates are each row's own and stay Megatron's. Each segment of a call starts from what its parent left
(espalier.rows.segments). A trunk keeps the states behind its last row, and the sums of the gradients that rows below have for them.
"""

from espalier.megatron.mixers import gated_delta_net, mamba

_ATTACH = {"GatedDeltaNet": gated_delta_net.attach, "MambaMixer": mamba.attach}  # by class: importing these modules needs packages of their kernels


def is_recurrent(module):
    """True if a layer's mixer passes states on, in a way that is known here."""
    return type(module).__name__ in _ATTACH and type(module).__module__.startswith("megatron.core.ssm.")


def attach(module):
    """Makes a recurrent mixer run the rows of calls."""
    if is_recurrent(module):
        _ATTACH[type(module).__name__](module)
