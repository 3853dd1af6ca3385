"""The user's environment: class Environment of a Python file, one object for each trajectory.

    reset(self, prompt, **fields)   begins a trajectory. Returns None, or an observation, which is appended to the prompt
    step(self, text)                called after each turn. Returns (observation, reward, done)
    close(self)                     optional: called at the end of the trajectory

They may be coroutine functions. Coroutines of all trajectories in one request run concurrently.
"""

import asyncio
import inspect
import os

from .channel import ServiceError
from .user_file import described, finite_number, imported

NAME = "Environment"


def _checked_observation(value, what):
    fine = value is None or isinstance(value, (str, dict)) or isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    if not fine:
        raise ServiceError("observation", f"{what}: {type(value).__name__}: {value!r}"[:300])
    return value


class Environments:
    def __init__(self, path):
        self._path = path
        module = imported(path, "espalier_environment")
        self._class = getattr(module, NAME, None)
        if not inspect.isclass(self._class):
            names = [name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == "espalier_environment"]
            raise ServiceError("missing", ", ".join(names) or "no class at all")
        lacking = [name for name in ("reset", "step") if not callable(getattr(self._class, name, None))]
        if lacking:
            raise ServiceError("method", f"{NAME} without {' and '.join(lacking)}")
        parameters = inspect.signature(self._class.reset).parameters
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = set(parameters)
        self._open = {}
        self._loop = asyncio.new_event_loop()

    def _answers(self, calls, checked):
        """Yields one checked answer for each call, in order, each as soon as it is known. If all functions are coroutine functions, the calls run
        concurrently."""
        together = all(inspect.iscoroutinefunction(function) for function, _, _ in calls)
        values = iter(self._run(self._gathered(calls))) if together else None
        for function, arguments, fields in calls:
            value = next(values) if together else self._run(function, *arguments, **fields)
            if isinstance(value, BaseException):
                raise described(value, self._path) from value
            yield checked(value)

    def _run(self, function, /, *arguments, **fields):
        try:
            value = function(*arguments, **fields) if callable(function) else function
            return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value
        except BaseException as error:  # sys.exit() in the environment also counts as its failure
            raise described(error, self._path) from error

    @staticmethod
    async def _gathered(calls):
        return await asyncio.gather(*(function(*arguments, **fields) for function, arguments, fields in calls), return_exceptions=True)

    def _close(self, trajectory):
        close = getattr(self._open.pop(trajectory), "close", None)
        if close is not None:
            self._run(close)

    def reset(self, items):
        """Closes all open trajectories and begins new ones."""
        for trajectory in list(self._open):
            self._close(trajectory)
        calls = []
        for item in items:
            self._open[item["trajectory"]] = environment = self._run(self._class)
            fields = item["fields"] if self._takes_any else {name: value for name, value in item["fields"].items() if name in self._names}
            calls.append((environment.reset, (item["prompt"],), fields))
        for observation in self._answers(calls, lambda value: _checked_observation(value, "reset")):
            yield {"observation": observation}

    def step(self, items):
        calls = [(self._open[item["trajectory"]].step, (item["text"],), {}) for item in items]
        for item, answer in zip(items, self._answers(calls, self._stepped)):
            if answer["done"] or item["last"]:
                self._close(item["trajectory"])
            yield answer

    @staticmethod
    def _stepped(value):
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            raise ServiceError("step", f"{type(value).__name__}: {value!r}"[:300])
        observation, reward, done = value
        return {"observation": _checked_observation(observation, "step"), "reward": finite_number(reward), "done": bool(done)}


def serve(path, channel):
    environments = Environments(os.path.abspath(path))
    channel.answer(ready={})
    for request in channel.requests():
        try:
            for answer in environments.reset(request["reset"]) if "reset" in request else environments.step(request["step"]):
                channel.answer(**answer)
        except ServiceError as error:
            channel.fail(error)
