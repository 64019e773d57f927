"""A file system of the mind in which power can be lost: what a save did, and every state of the
disk that may be left.

Each operation changes one inode: an entry of a directory, or bytes of a file. fsync makes what was
done to that inode so far durable; anything else may be lost or kept, in any combination. An entry
that is kept leads to its inode, whatever that still holds. Knows nothing of checkpoints.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpoint.filesystem import Disk

Tree = frozenset[tuple[str, bytes | None]]


@dataclass
class Operation:
    """`entries`: (name, inode or None for removed) of directory `inode`; or `data` at `offset` of
    file `inode`; or a new `length`. `synced_at`: the number of operations after which it is
    durable; without end where nothing made it so."""

    inode: int
    entries: tuple[tuple[str, int | None], ...] = ()
    data: bytes = b""
    offset: int = 0
    length: int | None = None
    synced_at: float = field(default=float("inf"))


class Recorder(Disk):
    """Does every step of a save for real below `root` and keeps it as operations; what lies there
    before is durable."""

    def __init__(self, root: Path):
        self.root = root
        self.operations: list[Operation] = []
        self._next = 0
        self.directories: dict[int, dict[str, int]] = {}
        self.files: dict[int, bytes] = {}
        self.top = self._read(root)
        self._now: dict[int, dict[str, int]] = {
            inode: dict(names) for inode, names in self.directories.items()
        }
        self._open: dict[int, int] = {}

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _read(self, path: Path) -> int:
        """The inode of what is there already."""
        inode = self._new()
        if path.is_dir():
            self.directories[inode] = {}
            self.directories[inode] |= {one.name: self._read(one) for one in sorted(path.iterdir())}
        else:
            self.files[inode] = path.read_bytes()
        return inode

    def _at(self, path: Path) -> int:
        """The inode of a path as it is now."""
        inode = self.top
        for name in path.relative_to(self.root).parts:
            inode = self._now[inode][name]
        return inode

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        for name, inode in operation.entries:
            if inode is None:
                self._now[operation.inode].pop(name)
            else:
                self._now[operation.inode][name] = inode

    def _sync(self, inode: int) -> None:
        """An operation of its own, that changes nothing: before it, what it makes durable can still
        be lost."""
        self.operations.append(Operation(inode))
        for operation in self.operations:
            if operation.inode == inode and operation.synced_at == float("inf"):
                operation.synced_at = len(self.operations)

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        inode = self._new()
        self.directories[inode] = {}
        self._now[inode] = {}
        self._add(Operation(self._at(path.parent), ((path.name, inode),)))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        inode = self._new()
        self.files[inode] = b""
        self._add(Operation(self._at(path.parent), ((path.name, inode),)))
        self._open[descriptor] = inode
        return descriptor

    def reserve(self, descriptor: int, path: Path, length: int) -> None:
        super().reserve(descriptor, path, length)
        self._add(Operation(self._open[descriptor], length=length))

    def write(self, descriptor: int, path: Path, data: memoryview | bytes, offset: int) -> None:
        super().write(descriptor, path, data, offset)
        half = len(data) // 2
        for low, high in ((0, half), (half, len(data))):
            self._add(
                Operation(self._open[descriptor], data=bytes(data[low:high]), offset=offset + low)
            )

    def fsync(self, descriptor: int, path: Path) -> None:
        self._sync(self._open[descriptor])

    def fsync_directory(self, path: Path) -> None:
        self._sync(self._at(path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        assert source.parent == target.parent
        self._add(
            Operation(
                self._at(source.parent),
                ((target.name, self._at_entry(source)), (source.name, None)),
            )
        )

    def _at_entry(self, path: Path) -> int:
        return self._now[self._at(path.parent)][path.name]

    def exchange(self, first: Path, second: Path) -> bool:
        assert super().exchange(first, second)
        a = self._at_entry(first)
        b = self._at_entry(second)
        self._add(Operation(self._at(first.parent), ((first.name, b), (second.name, a))))
        return True

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._add(Operation(self._at(path.parent), ((path.name, None),)))

    def remove_tree(self, path: Path) -> None:
        inode = self._at(path)
        super().remove_tree(path)
        for name in sorted(self._now[inode]):
            self._add(Operation(inode, ((name, None),)))
        self._add(Operation(self._at(path.parent), ((path.name, None),)))

    def unsynced(self, done: int) -> list[int]:
        """Which of the first `done` operations a loss of power just then may take."""
        return [number for number in range(done) if self.operations[number].synced_at > done]

    def after_a_crash(self, done: int, lost: frozenset[int]) -> Tree:
        """What is on the disk when power is lost after `done` operations and those numbered `lost`
        are not there."""
        directories = {inode: dict(names) for inode, names in self.directories.items()}
        files = dict(self.files)
        for number in range(done):
            operation = self.operations[number]
            if number in lost:
                continue
            for name, inode in operation.entries:
                if inode is None:
                    directories[operation.inode].pop(name, None)
                else:
                    directories[operation.inode][name] = inode
            if operation.inode in files:
                data = files[operation.inode]
                if operation.length is not None:
                    files[operation.inode] = data.ljust(operation.length, b"\0")
                elif operation.data:
                    data = data.ljust(operation.offset, b"\0")
                    files[operation.inode] = (
                        data[: operation.offset]
                        + operation.data
                        + data[operation.offset + len(operation.data) :]
                    )
        return _tree(self.top, directories, files)


def _tree(top: int, directories: dict[int, dict[str, int]], files: dict[int, bytes]) -> Tree:
    """(path, bytes, or None for a directory) of everything that is reached."""

    def below(inode: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, child in directories[inode].items():
            if child in files:
                yield prefix + name, files[child]
            else:
                yield prefix + name, None
                yield from below(child, prefix + name + "/")

    return frozenset(below(top, ""))


def lay_out(tree: Tree, root: Path) -> None:
    """Make `root` this tree."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in sorted(tree, key=lambda item: item[0]):
        if data is None:
            (root / name).mkdir()
        else:
            descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(descriptor, data)
            os.close(descriptor)
