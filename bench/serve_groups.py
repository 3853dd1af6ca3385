"""What does sharing save a server? One forward_backward of groups of 16, with prompts of 1,024 and responses of 256 tokens.

    tools/python bench/serve_groups.py [--program build/espalier] [--groups 32] [--other URL --process ID]

Prints rows that ran and rows that were sent, and seconds of one processor, on a random model of 4 layers of 128 in float32. `--model DIR`
writes that model and ends, so that another server of the protocol can be started on it under the name tiny/qwen3; with `--other` that server gets the same call, and
the seconds of its process are counted.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from serve_client import NAME, ByHand, group_data  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402
from text_model import byte_level_tokenizer, make_text_model  # noqa: E402

SHAPE = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048)
MEMBERS, PROMPT, RESPONSE = 16, 1024, 256
PATIENCE = 4 * 3600


class Other:
    """A server that runs already."""

    post, get, send, result = Server.post, Server.get, staticmethod(Server.send), Server.result

    def __init__(self, url):
        self.url = url


def processor_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server, process, data):
    """Metrics of the call, seconds of the processor."""
    model = ByHand(server, rank=16)
    model.metrics(model.forward_backward(1, data[:1], loss="importance_sampling")[1]["request_id"])
    before = processor_seconds(process)
    future = model.forward_backward(2, data, loss="importance_sampling")[1]["request_id"]
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            server.result(future, PATIENCE)
            break
        except TimeoutError:  # of one poll
            continue
    return model.metrics(future), processor_seconds(process) - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--model", type=Path, help="write the model into this directory, and end")
    parser.add_argument("--other", help="the address of another server")
    parser.add_argument("--process", type=int, help="its process")
    options = parser.parse_args()
    without_proxies()
    tokenizer = byte_level_tokenizer(["the quick brown fox"], 300)
    if options.model:
        make_text_model(options.model, tokenizer, **SHAPE)
        return
    data = group_data(np.random.default_rng(1), options.groups, MEMBERS, PROMPT, RESPONSE)
    sent = sum(len(tokens) for tokens, _ in data)
    with tempfile.TemporaryDirectory(prefix="espalier-groups-") as name:
        folder = Path(name)
        server = Server(options.program, {NAME: make_text_model(folder / "model", tokenizer, **SHAPE)}, "--state", folder / "state")
        try:
            metrics, seconds = measure(server, server.process.pid, data)
        finally:
            server.kill()
    ran = metrics["tokens_computed:sum"]
    print(f"{options.groups} groups of {MEMBERS}: {ran:.0f} rows ran, {sent} were sent ({sent / ran:.2f} times fewer), loss {metrics['loss:sum']:.6g}, {seconds:.1f} s", flush=True)
    if options.other:
        begin = time.monotonic()
        metrics, other = measure(Other(options.other), options.process, data)
        print(f"{options.other}: loss {metrics['loss:sum']:.6g}, {other:.1f} s ({other / seconds:.1f} times as many; {time.monotonic() - begin:.0f} s passed)")


if __name__ == "__main__":
    main()
