"""The text that a calibration reads."""

from __future__ import annotations

from pathlib import Path

from fp8calib import console
from fp8calib.data import TokenData, default_dataset, load_data
from fp8calib.recipe import Calibration


def load_calibration_text(
    model: str, source: Path, asked: Calibration, trust_remote_code: bool
) -> TokenData:
    """The text to calibrate on: the model's default where none is asked for, no longer than the
    model can read."""
    from fp8calib.model_loading import load_tokenizer, max_length

    dataset, split = asked.dataset, asked.split
    if dataset is None:
        dataset, default_split = default_dataset(model)
        split = split or default_split
    longest = max_length(source, trust_remote_code) or asked.max_seq_len
    if asked.max_seq_len > longest:
        console.info(f"texts are cut to {longest} tokens: the model has no more positions")
    return load_data(
        load_tokenizer(source, trust_remote_code),
        dataset,
        split=split,
        samples=asked.samples,
        max_seq_len=min(asked.max_seq_len, longest),
        seed=asked.seed,
        text_column=asked.text_column,
        messages_column=asked.messages_column,
    )
