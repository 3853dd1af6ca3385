"""Clients of `espalier serve` in tests: data as recipes send them, requests by hand, and the same adapter computed densely in float64."""

import inspect
import urllib.request

import numpy as np
import peft
import tinker
import torch
from safetensors.torch import load
from tinker.proto import tinker_public_pb2 as pb

import oracle
from make_model import VOCABULARY

NAME = "tiny/qwen3"
RANK, ALPHA = 4, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def draw_datum(generator, prompt, length, loss, columns=0):
    """One datum as recipes send it: 0 as target on the prompt's positions. With `columns` each row has so many targets, most weights being 0."""
    answer = generator.integers(0, VOCABULARY, length)
    tokens, before = [*prompt, *answer[:-1]], len(prompt) - 1
    rows = before + length

    def numbers(values):
        return np.concatenate([np.zeros(before), values]).astype(np.float32)

    if columns:
        targets = torch.tensor(generator.integers(1, VOCABULARY, (rows, columns)))
        weights = torch.tensor(generator.normal(size=(rows, columns)) * (generator.random((rows, columns)) < 0.1)).float()
        inputs = {"target_tokens": targets, "weights": weights}
    else:
        inputs = {"target_tokens": np.array([0] * before + list(answer), np.int64)}
        if loss == "cross_entropy":
            inputs["weights"] = numbers(generator.normal(size=length))
        else:
            inputs["logprobs"] = numbers(-4.5 + generator.normal(size=length))
            inputs["advantages"] = numbers(generator.normal(size=length))
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = numbers(generator.integers(0, 2, length))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([int(t) for t in tokens]), loss_fn_inputs=inputs)


def draw_group(seed, loss, n=3, columns=0):
    generator = np.random.default_rng(seed)
    prompt = [int(t) for t in generator.integers(0, VOCABULARY, 9)]
    return [draw_datum(generator, prompt, int(generator.integers(3, 8)), loss, columns) for _ in range(n)]


def takes(function, argument):
    """Whether this version of the SDK has an argument."""
    return argument in inspect.signature(function).parameters


def ready(client):
    """A client of the SDK, which newer versions give as a future."""
    return client.result() if hasattr(client, "result") else client


def external_weights(server, training, name="weights"):
    """The adapter as the server writes it for other programs; for an SDK that cannot ask for that, as it is in the server's folder."""
    if hasattr(training, "save_weights_external"):
        run, kind, name = training.save_weights_external(name).result().path.removeprefix("tinker://").split("/")
        urls = server.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")[1]["urls"]
        tensors = load(urllib.request.urlopen(urls["adapter_model.safetensors"]).read())
    else:
        path = training.save_weights_for_sampler(name).result().path.removeprefix("tinker://")
        tensors = load((server.state / "runs" / path / "adapter_model.safetensors").read_bytes())
    return {name: values for name, values in tensors.items() if ".lora_" in name}


class Dense:
    """The same adapter on transformers' model in float64, one datum a forward."""

    def __init__(self, folder, weights=None, rank=RANK):
        config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=TARGETS)
        self.model = peft.get_peft_model(oracle.load_model(folder, torch.float64), config, autocast_adapter_dtype=False).double()
        self.parameters = {name.replace(".default.", "."): p for name, p in self.model.named_parameters() if p.requires_grad}
        if weights is not None:
            assert set(weights) == set(self.parameters)
            with torch.no_grad():
                for name, values in weights.items():
                    assert values.dtype == torch.float64
                    self.parameters[name].copy_(values)

    def rows(self, tokens):
        return torch.log_softmax(self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0], -1)

    def logprobs(self, datum):
        rows = self.rows(datum.model_input.to_ints())
        targets = dense_tensor(datum.loss_fn_inputs["target_tokens"])
        return rows.gather(1, targets.reshape(len(rows), -1)).reshape(targets.shape)

    def gradients(self, data, loss, config=None):
        """(loss, {name: gradient}) of the summed loss."""
        total = sum(dense_loss(loss, datum, self.logprobs(datum), config) for datum in data)
        return total.item(), dict(zip(self.parameters, torch.autograd.grad(total, list(self.parameters.values()))))


def dense_tensor(tensor):
    found = tensor.to_torch()
    return found.to_dense() if found.layout != torch.strided else found


def series(datum, name):
    return dense_tensor(datum.loss_fn_inputs[name]).double()


def dense_loss(name, datum, logprobs, config=None):
    """The formulas of docs/serve.md, written as torch has them."""
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05, **(config or {})}
    if name == "cross_entropy":
        return -(series(datum, "weights") * logprobs).sum()
    old, advantages = series(datum, "logprobs"), series(datum, "advantages")
    low, high = (series(datum, key) if key in datum.loss_fn_inputs else torch.tensor(config[key], dtype=torch.float64) for key in ("clip_low_threshold", "clip_high_threshold"))
    ratio = torch.exp(logprobs - old)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "gspo":
        mask = series(datum, "sequence_ratio_mask") != 0
        mean = (logprobs.detach() - old)[mask].mean() if mask.any() else torch.zeros((), dtype=torch.float64)
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    if name == "cispo":
        return -(clipped.detach() * logprobs * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - config["beta"] / 2 * (logprobs - old) ** 2).sum()
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def group_data(generator, groups, n, prompt, response):
    """Data by hand: groups of n responses to a prompt, with these lengths."""
    out = []
    for _ in range(groups):
        shared = generator.integers(0, VOCABULARY, prompt).tolist()
        for _ in range(n):
            tokens = shared + generator.integers(0, VOCABULARY, response).tolist()
            targets = [0] * (prompt - 1) + tokens[prompt:]
            zeros = [0.0] * (prompt - 1)
            out.append((tokens[:-1], {"target_tokens": targets, "logprobs": zeros + [-4.5] * response, "advantages": zeros + generator.normal(size=response).tolist()}))
    return out


class ByHand:
    """A session and a model of its own, and requests as bytes."""

    def __init__(self, server, rank=RANK):
        self.server = server
        self.session = server.post("/api/v1/create_session", {"tags": [], "sdk_version": "by hand"})[1]["session_id"]
        made = server.post("/api/v1/create_model", {"session_id": self.session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": rank, "seed": 1}})[1]
        self.model = made["model_id"]
        assert server.result(made["request_id"])[1]["model_id"] == self.model

    def message(self, number, data, loss="cross_entropy", forward_only=False, config=()):
        message = pb.ForwardBackwardRequest(model_id=self.model, seq_id=number, loss_fn=loss, forward_only=forward_only)
        for name, value in dict(config).items():
            message.loss_fn_config[name] = value
        for tokens, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
            for name, values in inputs.items():
                tensor = datum.loss_fn_inputs[name]
                values = np.array(values)
                tensor.dtype = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
                tensor.shape.extend(values.shape)
                tensor.dense = values.astype(np.int64 if values.dtype.kind == "i" else np.float32).tobytes()
        return message.SerializeToString()

    def forward_backward(self, number, data, **more):
        return self.post_bytes(self.message(number, data, **more))

    def post_bytes(self, body, **headers):
        return self.server.post("/api/v1/forward_backward", body, kind="application/x-protobuf", headers=headers)

    def optim_step(self, number, **adam):
        return self.server.post("/api/v1/optim_step", {"model_id": self.model, "seq_id": number, "adam_params": adam})

    def save(self, number, name):
        return self.server.post("/api/v1/save_weights", {"model_id": self.model, "seq_id": number, "path": name})

    def save_for_sampler(self, number, sampler):
        return self.server.post("/api/v1/save_weights_for_sampler", {"model_id": self.model, "seq_id": number, "sampling_session_seq_id": sampler})

    def sample(self, number, **params):
        """Tokens and log-probs of two samples with the weights that it has now, by a snapshot."""
        made = self.server.result(self.save_for_sampler(number, number)[1]["request_id"])[1]
        asked = self.server.post("/api/v1/asample", {"sampling_session_id": made["sampling_session_id"], "seq_id": 1, "num_samples": 2,
                                                     "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 9, 2]}]}, "sampling_params": {"max_tokens": 8, "seed": 3, **params}})
        status, answer = self.server.result(asked[1]["request_id"])
        assert status == 200 and isinstance(answer, bytes), answer
        out = pb.SampleResponse()
        out.ParseFromString(answer)
        return [(one.tokens, one.logprobs) for one in out.sequences]

    def metrics(self, future):
        status, answer = self.server.result(future)
        assert status == 200, answer
        if isinstance(answer, dict):
            assert "error" not in answer, answer
            return answer["metrics"]
        out = pb.ForwardBackwardOutput()
        out.ParseFromString(answer)
        return dict(out.metrics)
