"""Which file a name inside a checkpoint may mean."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fp8calib.errors import CheckpointError


def safe_file(folder: Path, name: str) -> Path:
    """The real path of file `name` of a checkpoint folder, which must not lead out of it.

    Links into the blobs of the same Hugging Face cache entry (``models--X/snapshots/REV/file ->
    ../../blobs/HASH``) are what a downloaded model consists of, and are followed.

    Raises:
        CheckpointError: a name or link that leads elsewhere, or nowhere.
    """
    shown = name if name.isprintable() and len(name) <= 200 else f"{name[:200]!r}"
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: the file name {shown} leads out of the checkpoint")
    root = folder.resolve()
    try:
        real = (root / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise CheckpointError(f"{folder}: the file {shown} is missing") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{folder}: {shown} is a link that leads out of the checkpoint")
    if not real.is_file():
        raise CheckpointError(f"{folder}: {shown} is no regular file")
    return real
