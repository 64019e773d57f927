"""A file of this machine as one of a store."""

from pathlib import Path

from megatron.addons.object_storage import object_stores
from megatron.addons.object_storage.block_cache import StoredFile


def stored_file(path: Path) -> StoredFile:
    """As it is now."""
    files = object_stores.client(f"file://{path}")
    info = files.info(str(path))
    return StoredFile(f"file://{path}", info["size"], "key", object_stores.version(info))
