"""Sends metrics to Weights & Biases: one run, one request per line of metrics."""

import json
import os

from .channel import ServiceError


def _begin(settings):
    try:
        import wandb
    except ImportError as error:
        raise ServiceError("package", f"{type(error).__name__}: {error}", package="wandb") from error
    try:
        run = wandb.init(project=os.environ.get("WANDB_PROJECT", "espalier"), name=settings["name"] or None, config=settings["options"])
        # A warm start counts its own steps, so its charts need a separate axis.
        wandb.define_metric("warm_start/step")
        wandb.define_metric("warm_start/*", step_metric="warm_start/step")
    except Exception as error:  # network, login, a full disk
        raise ServiceError("wandb", f"{type(error).__name__}: {error}") from error
    return run


def serve(settings, channel):
    run = _begin(json.loads(settings))
    channel.answer(ready={})
    for request in channel.requests():
        if request.get("finish"):
            run.finish()
        elif request["kind"] == "warm_start":
            run.log({**request["scalars"], "warm_start/step": request["step"]})
        else:
            run.log(request["scalars"], step=request["step"])
        channel.answer(done=True)
