"""The dict of a model's processor, image by image. Rollouts whose dicts have some images in common share these, wherever they stand."""

import numpy as np
import torch

GRID = "image_grid_thw"


def of(tensors, runs):
    """[(an image's tensors, number of its features)], in the order of the images. `tensors`: a dict of a processor. `runs`: the lengths of the runs of
    image tokens in the rollout. A dict that does not show where its images begin is one image."""
    tokens = sum(runs)
    if GRID in tensors and set(tensors) == {"pixel_values", GRID}:
        patches = tensors[GRID].prod(-1).tolist()  # pixel_values has a row for each
        return _cut(tensors, patches, _shares(patches, tokens), len(tensors["pixel_values"])) or [(tensors, tokens)]
    count = len(tensors["pixel_values"])
    if count < 2 or any(x.dim() == 0 or len(x) != count for x in tensors.values()):
        return [(tensors, tokens)]
    equal = all(bool((x == x[:1]).all()) for name, x in tensors.items() if name != "pixel_values")
    sizes = _shares([1] * count, tokens) if equal else runs if len(runs) == count else None
    return _cut(tensors, [1] * count, sizes, count) or [(tensors, tokens)]


def _shares(parts, whole):
    """`whole` in the ratio of the parts, or None if a share is no integer."""
    total = sum(parts)
    return None if not whole or any(part * whole % total for part in parts) else [part * whole // total for part in parts]


def _cut(tensors, rows, sizes, expected):
    """`tensors`, with `rows` rows of pixel_values for each image, and one row of all others."""
    if sizes is None or sum(rows) != expected:
        return None
    ends = np.cumsum([0, *rows]).tolist()
    cut = lambda name, i: slice(ends[i], ends[i + 1]) if name == "pixel_values" else slice(i, i + 1)
    return [({name: x[cut(name, i)] for name, x in tensors.items()}, size) for i, size in enumerate(sizes)]


def joined(parts):
    """One dict of the tensors of several images."""
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def chains(sequences):
    """Lists of the items that `sequences` contain, each item once. Two items are in one list if they always follow each other."""
    after, before = {}, {}
    for items in sequences:
        for a, b in zip((None, *items), (*items, None)):
            after.setdefault(a, set()).add(b)
            before.setdefault(b, set()).add(a)
    follows = {a: b for a, (b, *others) in after.items() if a is not None and b is not None and not others and before[b] == {a}}
    out = []
    for item in sorted(set(before) - {None} - set(follows.values())):
        out.append([item])
        while out[-1][-1] in follows:
            out[-1].append(follows[out[-1][-1]])
    return out
