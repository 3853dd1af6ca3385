"""The user's reward function: compute_score of a Python file. Its parameters tell which of three forms it has.

    compute_score(data_source, solution_str, ground_truth, extra_info)         verl's: returns a number, or a dict with "score"
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)     verl's for batches: returns a list of these
    compute_score(prompts, completions, **columns)                             TRL's: returns a list of numbers

It may be a coroutine function. None in place of a number: the response was not judged.
"""

import asyncio
import inspect
import json
import math
import os

from .channel import ServiceError
from .user_file import described, finite_number, imported

NAME = "compute_score"


def _storable(value):
    """Returns `value` as JSON would store it, or as text if JSON cannot."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)


def _number(value):
    """Converts a return value to the score that the program reads: {"score" or None, "accuracy" or None, "extra" or None}."""
    extra = None
    if isinstance(value, dict):
        if "score" not in value:
            raise ServiceError("number", f"a dict without 'score': {value!r}"[:300])
        extra = {str(name): member for name, member in value.items() if name != "score"}
        value = value["score"]
    score = None if value is None else finite_number(value)
    accuracy = extra.get("acc") if extra else None
    try:
        accuracy = None if accuracy is None or not math.isfinite(float(accuracy)) else float(accuracy)
    except (TypeError, ValueError):
        accuracy = None
    extra = {name: _storable(member) for name, member in extra.items()} if extra else None
    return {"score": score, "accuracy": accuracy, "extra": extra}


def form_of(parameters):
    return "trl" if "completions" in parameters else "batch" if "solution_strs" in parameters else "single"


class RewardFunction:
    def __init__(self, path):
        self._path = path
        module = imported(path, "espalier_reward")
        self._function = getattr(module, NAME, None)
        if not callable(self._function):
            names = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == "espalier_reward"]
            raise ServiceError("missing", ", ".join(names) or "no function at all")
        parameters = inspect.signature(self._function).parameters
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = set(parameters)
        self.form = form_of(parameters)

    def _call(self, arguments):
        try:
            value = self._function(**arguments)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
        except BaseException as error:  # sys.exit() in the function also counts as its failure
            raise described(error, self._path) from error

    def _batch_arguments(self, items):
        def column(name):
            return [item[name] for item in items]

        if self.form == "batch":
            return {"data_sources": column("data_source"), "solution_strs": column("solution_str"),
                    "ground_truths": column("ground_truth"), "extra_infos": column("extra_info")}
        # TRL: a prompt of messages has a completion of messages.
        said = [item["solution_str"] if item["messages"] is None else [{"role": "assistant", "content": item["solution_str"]}]
                for item in items]
        columns = {"prompts": [item["messages"] or item["prompt"] for item in items], "completions": said,
                   "completion_ids": column("response_ids"),
                   **{name: column(name) for name in ("data_source", "ground_truth", "extra_info")}}
        return columns if self._takes_any else {name: values for name, values in columns.items() if name in self._names}

    def scores(self, items):
        """Yields one score for each item, in order, each as soon as it is known."""
        if self.form == "single":
            for item in items:
                yield _number(self._call({name: item[name] for name in ("data_source", "solution_str", "ground_truth", "extra_info")}))
            return
        values = self._call(self._batch_arguments(items))
        try:
            values = list(values)
        except TypeError as error:
            raise ServiceError("number", f"{type(values).__name__} instead of a list of {len(items)} scores") from error
        if len(values) != len(items):
            raise ServiceError("number", f"a list of {len(values)} scores for {len(items)} responses")
        for value in values:
            yield _number(value)


def serve(path, channel):
    function = RewardFunction(os.path.abspath(path))
    channel.answer(ready={"form": function.form})
    for request in channel.requests():
        try:
            for score in function.scores(request["score"]):
                channel.answer(**score)
        except ServiceError as error:
            channel.fail(error)
