"""Reads torch.save files without torch: the current zip archive and the older stream of pickles. Storages are raw bytes."""

import zipfile

from . import pickles
from .errors import RecordError, UnsupportedRecords
from .tensors import Storage

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_DAMAGED = "It was cut short or damaged; copy or write it again"


def is_zip(start):
    return start[:4] == b"PK\x03\x04"


def is_legacy(start):
    """True if the file begins with the pickle of torch's magic number: protocol, a frame from protocol 4 on, then LONG1 with ten bytes."""
    return start[:1] == b"\x80" and b"\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little") in start


def load_zip(file, where):
    """The object that torch.save wrote. `file`: open for reading. It must stay open while storages are read."""
    try:
        archive = zipfile.ZipFile(file)
        names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RecordError(where, "a complete torch file", f"a zip archive that cannot be read: {error}", _DAMAGED) from None
    objects = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(objects) != 1 or any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise UnsupportedRecords(where, "a file of torch.save", "another zip archive", "Save a dict of tensors with torch.save")
    prefix = objects[0].removesuffix("data.pkl")

    def part(name):
        try:
            if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
                raise RecordError(where, "parts as torch.save writes them", f"{name} compressed")
            return archive.read(name)
        except (KeyError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
            raise RecordError(where, f"a readable part {name}", str(error), _DAMAGED) from None

    if prefix + "byteorder" in names and part(prefix + "byteorder") != b"little":
        raise UnsupportedRecords(where, "little-endian tensors", "big-endian ones", "Save it again on this machine")
    storages = {}

    def storage(key):
        dtype, name, count = pickles.storage_key(key, where)
        if (name, dtype) not in storages:
            def read():
                data = part(f"{prefix}data/{name}")
                if len(data) < pickles.storage_bytes(dtype, count):
                    raise RecordError(where, f"{count} numbers in storage {name}", f"{len(data)} bytes", _DAMAGED)
                return data
            storages[name, dtype] = Storage(read, dtype)
        return storages[name, dtype]

    return pickles.load_bytes(part(objects[0]), where, storage)


def load_legacy(file, where):
    """The object in a file of the older format: pickles of the magic number, the version, the machine, the object and the storage keys, then the
    storages."""
    data, storages = {}, {}

    def storage(key):
        dtype, name, count = pickles.storage_key(key, where)
        if len(key) > 5 and key[5] is not None:
            raise UnsupportedRecords(where, "storages of their own", "views of other storages", "Save it with a newer torch")
        if name not in storages:
            storages[name] = (Storage(lambda: data[name], dtype), dtype, count)
        return storages[name][0]

    magic, version = pickles.load(file, where), pickles.load(file, where)
    if magic != _LEGACY_MAGIC or version != _LEGACY_PROTOCOL:
        raise UnsupportedRecords(where, f"version {_LEGACY_PROTOCOL} of torch's older format", str(version))
    pickles.load(file, where)
    content = pickles.load(file, where, storage)
    for name in pickles.load(file, where):
        if name not in storages:
            raise RecordError(where, "storages that the object names", f"storage {str(name)[:40]}", _DAMAGED)
        _, dtype, count = storages[name]
        size = pickles.storage_bytes(dtype, count)
        found = int.from_bytes(file.read(8), "little")
        data[name] = file.read(size) if found == count else b""
        if len(data[name]) != size:
            raise RecordError(where, f"{count} numbers in storage {name}", "fewer", _DAMAGED)
    return content
