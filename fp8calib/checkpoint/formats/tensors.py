"""Scale tensors in a safetensors file by itself, under any of the names that checkpoints use.

Which strategy they have no file says: `tensor` where every tensor has one value.
"""

from __future__ import annotations

from pathlib import Path

from fp8calib.checkpoint import names
from fp8calib.checkpoint.formats import ScaleFile, trtllm
from fp8calib.checkpoint.reader import FoundScale, last_number
from fp8calib.checkpoint.safetensors_file import read_header, read_scale
from fp8calib.errors import ScaleError
from fp8calib.scales import Kind, LayerScales, ScaleSet, label, problems, require


def read(path: Path) -> ScaleFile:
    """The scales in `path`.

    Raises:
        ScaleError: none there, or some that cannot be used.
        CheckpointError: a damaged file.
    """
    header = read_header(path)
    if any(map(trtllm.is_factor, header)):
        return trtllm.read_tensors([header], str(path))
    found: dict[int, dict[Kind, FoundScale]] = {}
    modules: dict[int, str] = {}
    for name, info in sorted(header.items()):
        meaning = names.parse(name)
        index = last_number(meaning.module) if meaning else None
        if meaning is None or index is None:
            if not names.is_kv_zero_point(name):
                raise ScaleError(f"{path}: {name!r:.80} is no KV-cache scale of a layer")
            continue
        if modules.setdefault(index, meaning.module) != meaning.module:
            raise ScaleError(f"{path}: layer {index} occurs twice, in {name} too")
        values = read_scale(name, info)
        for kind in meaning.kinds:
            if kind in found.setdefault(index, {}):
                raise ScaleError(f"{path}: layer {index}: {kind}_scale occurs twice, as {name} too")
            found[index][kind] = FoundScale(
                name, meaning.form, path.name, info.dtype, values, loaded=True
            )
    if not found:
        raise ScaleError(f"{path} has no KV-cache scales")
    require(
        (
            f"{label(index, modules[index])}: {kind}_scale is missing"
            for index, kinds in sorted(found.items())
            for kind in ("k", "v")
            if kind not in kinds
        ),
        str(path),
    )
    sizes = {scale.values.size for kinds in found.values() for scale in kinds.values()}
    layers = {
        index: LayerScales(modules[index], **{kind: kinds[kind].values for kind in kinds})
        for index, kinds in sorted(found.items())
    }
    scales = ScaleSet("tensor" if sizes == {1} else "attn_head", layers)
    require(problems(scales, None), str(path))
    return ScaleFile(scales)
