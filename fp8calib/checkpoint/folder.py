"""Output folders that appear whole or not at all.

Everything is written into a hidden sibling, ``.NAME.fp8calib-tmp-PID-RANDOM``, flushed to disk, and
renamed. A process that was killed leaves only such a sibling; the next run removes it, telling a
dead writer from a live one by the lock that a writer holds on its folder until it ends.
An earlier output is exchanged with the new one in a single step (renameat2). File systems without
that step see two renames; a crash between them leaves the old one as ``.NAME.fp8calib-old-...``,
and the next run puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fp8calib.errors import CheckpointError
from fp8calib.sizes import size_text

SIDECAR = "fp8calib.json"
STDOUT = Path("-")  # as an output file; a folder cannot go there
_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file (btrfs, xfs, ...)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h, for renameat2


def check_output(output: Path | str, overwrite: bool, source: Path | str | None = None) -> None:
    """Refuse an output folder that could not be written, before any expensive work; first clear
    away what a killed run may have left beside it.

    Args:
        output: the folder to write.
        overwrite: whether an earlier output of fp8calib there may be replaced.
        source: the checkpoint that is read, which must stay as it is.

    Raises:
        CheckpointError: one line saying what is in the way.
    """
    if Path(output) == STDOUT:
        raise CheckpointError(
            "the output - is stdout, and a checkpoint is a folder: name one with -o"
        )
    output = Path(output).resolve()
    try:
        str(output).encode()
        longest = len(os.fsencode(_sibling(output, "tmp").name))
        limit = os.pathconf(next(p for p in output.parents if p.exists()), "PC_NAME_MAX")
    except (UnicodeEncodeError, OSError) as problem:
        raise CheckpointError(f"cannot write the output {str(output)!a}: {problem}") from None
    if longest > limit:
        raise CheckpointError(f"the output's name is too long: at most {limit - 50} bytes")
    if source is not None and output.is_relative_to(Path(source).resolve()):
        raise CheckpointError(f"the output {output} lies in the source model's folder")
    if source is not None and Path(source).resolve().is_relative_to(output):
        raise CheckpointError(f"the output {output} contains the source model's folder")
    _recover(output)
    if output.exists():
        _check_existing(output, overwrite)
    parent = next(place for place in output.parents if place.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CheckpointError(f"cannot write {output}: {parent} is not a folder you can write to")


def _check_existing(output: Path, overwrite: bool) -> None:
    if not output.is_dir():
        raise CheckpointError(f"the output {output} exists and is not a folder")
    if output.is_mount():
        raise CheckpointError(f"the output {output} is a mount point: name a folder inside it")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"the output {output} exists: choose another with -o, or pass --overwrite"
        )
    if not (output / SIDECAR).is_file():
        raise CheckpointError(
            f"the output {output} was not written by fp8calib (it has no {SIDECAR}), so "
            "--overwrite does not replace it: remove it yourself or choose another"
        )


def check_room(output: Path | str, files: Iterable[Path]) -> None:
    """Refuse an output whose file system has no room for copies of `files`, where it cannot share
    their blocks instead."""
    files = list(files)
    parent = next(place for place in Path(output).resolve().parents if place.is_dir())
    free, needed = shutil.disk_usage(parent).free, sum(file.stat().st_size for file in files)
    if needed <= free:
        return
    try:
        with tempfile.TemporaryFile(dir=parent) as probe, files[0].open("rb") as reader:
            shared = _share_blocks(reader, probe)
    except OSError as problem:  # such as /proc, where no file can be made
        raise CheckpointError(f"cannot write {output}: {problem.strerror}") from None
    if not shared:
        raise CheckpointError(
            f"{parent} has {size_text(free)} free, the weights take {size_text(needed)}: "
            "free some space, choose another output, or share the weights with --link"
        )


@contextmanager
def staged(output: Path | str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `output` when the block ends well, and is removed when it
    does not. Raises CheckpointError for what `check_output` refuses, and for a full disk."""
    check_output(output, overwrite)
    output = Path(output).resolve()
    with scratch(output) as staging:
        yield staging
        _flush(staging)
        _put_in_place(staging, output, overwrite)


@contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """A folder beside `output` for work on the way to it. It is gone when the block ends; if the
    process is killed, the next run removes it. Raises CheckpointError for a full disk."""
    folder = _sibling(output, "tmp")
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        raise CheckpointError(f"cannot write {output}: {problem.strerror}") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"cannot write {output}: {problem.strerror}; nothing was left there"
            ) from problem
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_file(output: Path, overwrite: bool) -> None:
    """Refuse an output file that could not be written; raises CheckpointError."""
    if output == STDOUT:
        return
    try:
        there = output.is_symlink() or output.exists()
        parent = next(place for place in output.absolute().parents if place.exists())
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"cannot write the output {str(output)!a:.99}: {problem}") from None
    if there and not (overwrite and output.is_file()):
        how = "" if overwrite else ": choose another with -o, or pass --overwrite"
        raise CheckpointError(f"the output {output} exists{how or ' and is no file'}")
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CheckpointError(f"cannot write {output}: {parent} is not a folder you can write to")


def write_file(output: Path, content: bytes, overwrite: bool) -> None:
    """Write a single file, whole or not at all, or to standard output; raises CheckpointError. A
    link stays, and what it points to is replaced: never the link itself, which may be /dev/stdout.
    """
    check_file(output, overwrite)
    if output == STDOUT:
        sys.stdout.buffer.write(content)
        return
    output = output.resolve()
    unfinished = _sibling(output, "tmp")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            unfinished.replace(output)
        else:
            os.link(unfinished, output)  # unlike a rename, fails where something is in the way
    except FileExistsError:
        raise CheckpointError(f"the output {output} was made by another run") from None
    except OSError as problem:
        raise CheckpointError(f"cannot write {output}: {problem.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _sibling(output: Path, role: str) -> Path:
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    return output.parent / f".{output.name}.fp8calib-{role}-{unique}"


def _recover(output: Path) -> None:
    """Remove what killed runs left beside `output`; put an earlier output back if one of them was
    killed while it replaced it."""
    for leftover in _siblings(output, "tmp"):
        with suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover)
            finally:
                os.close(lock)
    for earlier in _siblings(output, "old"):
        if output.exists():
            shutil.rmtree(earlier, ignore_errors=True)
        else:
            earlier.rename(output)


def _siblings(output: Path, role: str) -> list[Path]:
    prefix = f".{output.name}.fp8calib-{role}-"
    if not output.parent.is_dir():
        return []
    return [place for place in output.parent.iterdir() if place.name.startswith(prefix)]


def _flush(folder: Path) -> None:
    """Write everything below `folder` through to the disk."""
    for place, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(place, name))
        _flush_entry(Path(place))


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(staging: Path, output: Path, overwrite: bool) -> None:
    if not overwrite or not output.exists() or not any(output.iterdir()):
        try:
            staging.rename(output)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(f"the output {output} was made by another run") from None
    elif not _exchange(staging, output):
        earlier = _sibling(output, "old")
        output.rename(earlier)
        staging.rename(output)
        shutil.rmtree(earlier, ignore_errors=True)
    _flush_entry(output.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(other))


def copy_file(source: Path, target: Path, link: bool = False) -> None:
    """Copy `source` byte for byte: sharing its blocks where the file system can, else by the
    kernel's own copy; with `link` as a second name of the same file.

    Raises:
        CheckpointError: `link` across file systems.
    """
    if link:
        try:
            os.link(source, target)
        except OSError as problem:
            raise CheckpointError(
                f"cannot hard-link {source} ({problem.strerror}): leave --link out to copy"
            ) from problem
        return
    with source.open("rb") as reader, target.open("xb") as writer:
        if _share_blocks(reader, writer):
            return
    shutil.copyfile(source, target)


def _share_blocks(source: IO[bytes], target: IO[bytes]) -> bool:
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:  # another file system, or one without reflinks
        return False
    return True
