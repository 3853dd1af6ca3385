"""The phase of the call that runs in this thread (attention.Phase)."""

import contextvars

phase_of_call = contextvars.ContextVar("espalier_phase", default=None)


def current():
    """The phase of the call that runs in this thread, or None."""
    return phase_of_call.get()
