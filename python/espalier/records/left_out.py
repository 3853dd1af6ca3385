"""The fields of a dump that no field of a record takes. A reader names them, or refuses the file if they change the loss.

Every reader passes the fields that it does not take to `Notes.leave`, which makes one note of their names. Media are refused (`refuse_media`):
without them a model would run other tokens than the trainer.
"""

from .errors import UnsupportedRecords
from .pickles import Inert
from .tensors import DTYPES, Tensor, as_list

_MEDIA = ("pixel_values", "image", "video", "audio", "input_features", "multi_modal", "multimodal", "mm_", "pixel_attention_mask", "spatial_shapes")
_TYPES = "token_type_ids"  # 0 for text tokens


class Notes(list):
    """The notes of a reading, each once."""

    def __init__(self):
        super().__init__()
        self._left = {}  # a dict keeps the order

    def add(self, note):
        if note not in self:
            self.append(note)

    def leave(self, fields):
        """Collects the names of fields that a record does not take. `fields`: a mapping; those without a value are not named."""
        self._left.update((name, None) for name, value in fields.items() if holds_something(value))

    def finish(self):
        """Ends the reading: makes one note of all names."""
        if self._left:
            self.append(f"fields that no field of a record takes: {', '.join(sorted(map(str, self._left)))}")
        self._left = {}


def holds_something(value):
    """False for None, empty texts and containers, and containers of such values only."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.dtype not in DTYPES else [1] * (0 not in value.shape)
    if isinstance(value, dict):
        return any(map(holds_something, value.values()))
    if isinstance(value, (list, tuple, frozenset)):
        return any(map(holds_something, value))
    return value is not None and value != "" and value != b""


def refuse_media(where, fields):
    """Raises UnsupportedRecords if one of the fields, a mapping, holds images or other media."""
    for name, value in fields.items():
        if str(name).startswith(_MEDIA) and holds_something(value) and not (str(name).endswith(_TYPES) and _all_zero(value)):
            raise UnsupportedRecords(f"{where}: {name}", "tokens only", "images or other media",
                                     "Records hold text tokens. espalier.hf and espalier.trl train rollouts with images in Python")


def _all_zero(value):
    if isinstance(value, Tensor):
        value = value.tolist()
    return all(map(_all_zero, as_list(value))) if isinstance(value, (list, tuple)) else not isinstance(value, Inert) and value == 0
