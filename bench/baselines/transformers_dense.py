"""The plain dense update: transformers, SDPA, one micro-batch after the other, logits at response positions only.

    python bench/baselines/transformers_dense.py --model DIR --rollouts FILE [--micro-batch auto|N] [--threads N]

Micro-batches hold rollouts of equal length, so nothing is padded; `auto` times 1, 2 and 4 rollouts a micro-batch and keeps
the fastest. Prints one JSON object: seconds of each update, split in forward, backward and optimizer.
"""

import itertools

import torch

import workload


def micro_batches(records, size):
    """Lists of at most `size` records with equal prompt and response lengths."""
    lengths = lambda record: (len(record["prompt_ids"]), len(record["response_ids"]))
    for _, same in itertools.groupby(sorted(records, key=lengths), key=lengths):
        same = list(same)
        yield from (same[i:i + size] for i in range(0, len(same), size))


def make_accumulate(records, size):
    tokens = sum(len(record["response_ids"]) for record in records)

    def accumulate(model, clock):
        total = 0.0
        for batch in micro_batches(records, size):
            response = len(batch[0]["response_ids"])
            # The last response token predicts nothing, so it is not an input.
            ids = torch.tensor([(r["prompt_ids"] + r["response_ids"])[:-1] for r in batch])
            targets = torch.tensor([r["response_ids"] for r in batch])
            advantage = torch.tensor([r["advantage"] for r in batch])[:, None].expand(-1, response)
            with clock("forward"):
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=response).logits
                loss = workload.policy_loss(logits, targets, advantage) / tokens
            with clock("backward"):
                loss.backward()
            total += float(loss.detach())
        return total

    return accumulate


def fastest_size(model, records, sizes=(1, 2, 4)):
    """Times one forward and backward of up to four rollouts for every size; the gradients are dropped again."""
    sample, best = records[:4], None
    for size in sizes:
        if size > len(sample):
            continue
        clock = workload.Clock()
        make_accumulate(sample, size)(model, clock)  # the first pass warms up
        clock = workload.Clock()
        make_accumulate(sample, size)(model, clock)
        seconds = sum(clock.seconds.values())
        best = min(best or (seconds, size), (seconds, size))
    model.zero_grad(set_to_none=True)
    return best[1]


def main():
    parser = workload.arguments(__doc__)
    parser.add_argument("--micro-batch", default="auto", help="rollouts a micro-batch, or auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = workload.read_rollouts(options.rollouts)
    model = workload.load_model(options.model)
    size = fastest_size(model, records) if options.micro_batch == "auto" else int(options.micro_batch)
    workload.run(model, make_accumulate(records, size), options, "transformers_dense", micro_batch=size)


if __name__ == "__main__":
    main()
