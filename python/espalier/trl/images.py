"""Splits TRL's image fields, which are flattened over the rows of a batch, into the images of each row (espalier.hf.images): the prompt's, then
images that tools and environments returned."""

import torch

from espalier.errors import Unsupported
from espalier.hf import images
from espalier.hf.model_parts import decoder_config
from espalier.hf.rollouts import Rollouts

_MADE_ANEW = {"token_type_ids", "mm_token_type_ids"}  # computed from the tokens instead
_SAY_WHERE = _MADE_ANEW | {"num_images"}  # all zero without images
_KNOWN = {"pixel_values", "image_grid_thw", "image_sizes"} | _SAY_WHERE


def of(model, rows, fields):
    """(Rollouts of the batch with their Images, the fields that Espalier does not know). Without images: (None, all fields that say more than that)."""
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    if given.get("pixel_values") is None:
        return None, sorted(name for name, value in given.items() if name not in _SAY_WHERE or torch.as_tensor(value).any())
    if not set(given) <= _KNOWN:
        return None, sorted(set(given) - _KNOWN)
    count = rows.shape[0]
    records = [dict(prompt_ids=rows.prompt(i), response_ids=rows.response(i), images=own) for i, own in enumerate(_by_row(given, count))]
    for record in records:
        if record["images"] is None:
            del record["images"]
    prepared = Rollouts(records, decoder_config(model).vocab_size)
    prepared = prepared.with_images(images.of(model, prepared))
    if prepared.images is None:
        return None, []
    if prepared.images.mutual and any(len(part) and int(part[-1]) == prepared.images.token for part in prepared.prompts + prepared.responses):
        raise Unsupported("this batch", "prompts and responses that do not end in an image, whose rows see each other", "an image's last token")
    for name in sorted(_MADE_ANEW & set(given) & prepared.images.forward_takes):
        if given[name].shape != rows.ids.shape or bool((((given[name] != 0) != (rows.ids == prepared.images.token)) & (rows.mask != 0)).any()):
            raise Unsupported("this batch", f"{name} that mark its image tokens, and no others", "others")
    return prepared, []


def _by_row(given, count):
    """The images of each row as a dict, or None for a row without images."""
    pixels, grids, sizes = (given.get(name) for name in ("pixel_values", "image_grid_thw", "image_sizes"))
    each = given.get("num_images")
    if each is None:
        if len(grids if grids is not None else pixels) != count:
            raise Unsupported("this batch", "num_images, or one image per row", f"{len(pixels)} of {count} rows")
        each = [1] * count
    ends = torch.tensor([0, *each]).cumsum(0).tolist()
    if grids is not None:
        parts = torch.cat([torch.zeros(1, dtype=torch.long), grids.prod(-1).cpu().cumsum(0)])[ends].tolist()  # pixel_values has a row for each patch
    elif len(pixels) == ends[-1]:
        parts = ends
    else:
        raise Unsupported("this batch", "pixel_values of one row per image, or image_grid_thw", f"{len(pixels)} rows of {ends[-1]} images")
    for row in range(count):
        own = slice(ends[row], ends[row + 1])
        more = {name: value[own] for name, value in (("image_grid_thw", grids), ("image_sizes", sizes)) if value is not None}
        yield {"pixel_values": pixels[parts[row]:parts[row + 1]], **more} if each[row] else None
