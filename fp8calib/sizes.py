"""Sizes in bytes as people read them."""

from __future__ import annotations

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that it has one of: ``1.5 GB``, ``269.1 MB``, ``10 bytes``."""
    for name, unit in _UNITS.items():
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} bytes"
