"""Calibrated checkpoints on disk, and the only place that knows their tensors' names.

Reading and inspecting import no torch.
"""

from __future__ import annotations

from fp8calib.checkpoint.config import read_config
from fp8calib.checkpoint.folder import check_output, check_room
from fp8calib.checkpoint.inspection import Inspection, inspect
from fp8calib.checkpoint.reader import Checkpoint, open_checkpoint, read_scales
from fp8calib.checkpoint.scheme import check_scheme, needed_kv_cache_dtype
from fp8calib.checkpoint.serving import serve_command, serving_notes
from fp8calib.checkpoint.structure import layers_from_checkpoint
from fp8calib.checkpoint.writer import check_source, write_checkpoint

__all__ = [
    "Checkpoint",
    "Inspection",
    "check_output",
    "check_room",
    "check_scheme",
    "check_source",
    "inspect",
    "layers_from_checkpoint",
    "needed_kv_cache_dtype",
    "open_checkpoint",
    "read_config",
    "read_scales",
    "serve_command",
    "serving_notes",
    "write_checkpoint",
]
