"""A server of `espalier serve` as a process, for tests that talk to it."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request


class Server:
    """Starts the program and waits for its address. `options`: of the command line."""

    def __init__(self, program, models, *options):
        self.command = [str(program), "serve", "--threads", "1", *(f"--model={name}={folder}" for name, folder in models.items()), *map(str, options)]
        self.port = 0
        self.start()

    def start(self):
        """Also again, at the same address."""
        self.process = subprocess.Popen([*self.command, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        found = re.search(r"http://\S+", first)
        if not found:
            self.process.kill()
            raise AssertionError(f"{' '.join(self.command)}\nsaid {first!r}\n{self.process.stderr.read()}")
        self.url = found[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def post(self, path, body, kind="application/json", headers=(), method="POST"):
        """(status, JSON or bytes) of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(urllib.request.Request(self.url + path, data, {"Content-Type": kind, **dict(headers)}, method=method))

    def get(self, path, headers=()):
        return self.send(urllib.request.Request(self.url + path, headers=dict(headers)))

    @staticmethod
    def send(request):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text, kind = answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            status, text, kind = error.code, error.read(), error.headers["Content-Type"]
        return status, json.loads(text) if kind == "application/json" else text

    def result(self, future, seconds=60):
        """The result of a future: JSON, or bytes of protobuf."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, answer = self.post("/api/v1/retrieve_future", {"request_id": future})
            if status != 408:
                return status, answer
        raise AssertionError(f"no result of {future} within {seconds} s")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError("the server did not end after SIGTERM") from None
        self.process.stdout.close()
        self.process.stderr.close()


def without_proxies():
    """The SDK's transport and urllib would ask a proxy for the local server."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") and name.lower() != "no_proxy":
            os.environ.pop(name)
