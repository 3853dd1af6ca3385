"""Files that gzip or zstd packed, whatever they hold."""

import gzip
import importlib
import io
import os

from .errors import RecordError, UnsupportedRecords

ENDINGS = (".gz", ".zst")
_GZIP, _ZSTD, _SKIPPABLE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", 0x184D2A50


def unpacked(file, path):
    """(file, name, size): `file` itself, or its unpacked bytes, with the name without its ending."""
    start = file.read(4)
    file.seek(0)
    if not start.startswith((_GZIP, _ZSTD)):
        return file, path, os.path.getsize(path)
    try:
        data = gzip.decompress(file.read()) if start.startswith(_GZIP) else _of_zstd(file.read(), path)
    except (OSError, EOFError, ValueError) as error:
        kind = "gzip" if start.startswith(_GZIP) else "zstd"
        raise RecordError(path, f"a complete {kind} file", str(error)[:80], "It was cut short or damaged; copy or write it again") from None
    name, ending = os.path.splitext(path)
    return io.BytesIO(data), name if ending.lower() in ENDINGS else path, len(data)


def _of_zstd(data, path):
    """Python has zstd since 3.14; before, the package zstandard or pyarrow has it. Both give what they have of a file that was cut."""
    _check_frames(data)
    for module, unpack in (("compression.zstd", lambda zstd: zstd.decompress(data)),
                           ("zstandard", lambda zstd: zstd.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()),
                           ("pyarrow", lambda arrow: arrow.CompressedInputStream(arrow.BufferReader(data), "zstd").read())):
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        try:
            return unpack(found)
        except Exception as error:  # each module has its own class for damaged data
            raise ValueError(str(error)) from None
    raise UnsupportedRecords(path, "a file that this Python can unpack", "zstd, which needs Python 3.14, zstandard or pyarrow", f"zstd -d {os.path.basename(path)}")


def _check_frames(data):
    """Raises ValueError if the frames of zstd (RFC 8878) do not end where the data do."""
    at = 0
    while at < len(data):
        magic = int.from_bytes(data[at : at + 4], "little")
        if magic & 0xFFFFFFF0 == _SKIPPABLE:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if not data.startswith(_ZSTD, at) or at + 5 > len(data):
            raise ValueError(f"no frame at byte {at}")
        descriptor = data[at + 4]
        single, content = descriptor >> 5 & 1, descriptor >> 6
        at += 5 + (not single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[content]
        last = False
        while not last and at + 3 <= len(data):
            block = int.from_bytes(data[at : at + 3], "little")
            last, size = bool(block & 1), 1 if block >> 1 & 3 == 1 else block >> 3  # a block of one repeated byte holds that byte
            at += 3 + size
        at += 4 * (descriptor >> 2 & 1)
        if not last:
            raise ValueError("the end of the file in a frame")
    if at != len(data):
        raise ValueError("the end of the file in a block")
