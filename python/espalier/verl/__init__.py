"""verl's FSDP and Megatron engines with prompts computed once: actor updates, old and reference log-probs.

    export VERL_ENGINE_VENDOR=espalier        the rest of the command stays as it was

verl loads this package itself if Espalier is installed (entry point `verl.plugins`). From a source tree, set
VERL_USE_EXTERNAL_MODULES=espalier.verl. Without VERL_ENGINE_VENDOR nothing is registered and nothing changes.

verl's losses, denominators, logging, clipping and optimizer stay in charge; its micro-batches become waves of whole responses.
Batches that cannot be shared run verl's own path, with one note in the log that names the reason. Options are arguments of `register`, and
environment variables are their defaults. `router_replay.mode=R3` of the engine's configuration replays the batch's `routed_experts`.
"""

import logging
import os
from typing import Literal

VENDOR = "espalier"
__all__ = ["VENDOR", "adds_up", "register"]


def register(*, verify: bool | None = None, trunk_state: Literal["keep", "recompute"] | None = None,
             schedule: Literal["auto", "shared", "dense"] | None = None) -> None:
    """Registers the engines with verl. A second call changes the options of later engines. None takes the environment variable.

    `verify` (ESPALIER_VERIFY, else False): every gradient of the first update is compared with verl's own path, and the run stops if they
    differ by more than rounding. `trunk_state` (ESPALIER_TRUNK_STATE, else "keep"): "recompute" saves memory by dropping a prompt's activations
    until its backward; FSDP1 (strategy=fsdp) always does so, and Megatron by its own recompute_granularity. `schedule` (ESPALIER_SCHEDULE,
    else "auto"): "shared" or "dense" overrides the plan's choice.
    """
    from espalier.verl import engine, options
    engine.register(VENDOR, options.resolved(verify, trunk_state, schedule))


def adds_up(loss_mode: str) -> None:
    """Declares that a policy loss that you registered with verl (`register_policy_loss`) may be computed wave by wave: it is a sum over
    tokens or rollouts, divided by counts of the whole mini-batch."""
    from espalier.verl import refusals
    refusals.ADDITIVE_LOSSES.add(loss_mode)


if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    try:
        register()
    except Exception:
        # verl reports a plugin that fails at debug level only, and would then train without it.
        logging.getLogger("espalier").exception("VERL_ENGINE_VENDOR=%s, but its engine cannot be registered: nothing is shared", VENDOR)
        raise
