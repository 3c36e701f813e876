"""Several processes give what one gives, to the last bit; a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import write_texts

from fp8calib.calibration import calibrate
from fp8calib.calibration.progress_file import ProgressFile, state_folder
from fp8calib.calibration.ranks import first_rank
from fp8calib.calibration.statistics import RangeStatistics
from fp8calib.errors import UserError

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """How many threads share a matrix product decides how its sums are rounded."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(
        tmp_path_factory.mktemp("data"),
        (f"text {number}: " + "abc XYZ 123. " * (1 + 3 * number % 7) for number in range(11)),
    )


def torchrun(processes: int, *args: str, program: tuple[str, ...] = ("-m", "fp8calib")) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *program, *args]
    return subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=240)


def same_files(one: Path, other: Path) -> None:
    names = {file.name for file in one.iterdir()}
    assert names == {file.name for file in other.iterdir()}
    for name in names - {"fp8calib.json", "README.md"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    records = [json.loads((folder / "fp8calib.json").read_text()) for folder in (one, other)]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("processes", "batch_size"), [(2, 2), pytest.param(3, 8, marks=pytest.mark.slow)]
)
def test_ranks_give_what_one_process_gives(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, processes: int, batch_size: int
) -> None:
    """Eleven texts of different lengths in six batches, the last one smaller; and in two, so that a
    rank has none."""
    options = ["--dataset", str(texts), "--strategy", "attn_head"]
    options += ["--batch-size", str(batch_size)]
    source = tiny("qwen3")
    done = torchrun(
        processes, "calibrate", str(source), "-o", str(tmp_path / "many"), *options, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "many")  # once, by the first
    assert done.stderr.count("recipe:") == 1
    calibrate(
        source, tmp_path / "one", dataset=str(texts), strategy="attn_head", batch_size=batch_size
    )
    same_files(tmp_path / "one", tmp_path / "many")


def test_a_rank_that_dies_ends_the_job(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    program = tmp_path / "dies.py"
    program.write_text(
        "import os\n"
        "from fp8calib.calibration.core import Collector\n"
        "from fp8calib.cli import main\n"
        "observe = Collector.__call__\n"
        "def die(self, *args, **kwargs):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os._exit(9)\n"
        "    return observe(self, *args, **kwargs)\n"
        "Collector.__call__ = die\n"
        "main()\n"
    )
    start = time.monotonic()
    done = torchrun(
        2, "calibrate", str(tiny()), "-o", str(tmp_path / "out"), "--dataset", str(texts),
        program=(str(program),),
    )  # fmt: skip
    assert done.returncode != 0
    assert time.monotonic() - start < 120
    assert not (tmp_path / "out").exists()


def test_one_process_is_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert first_rank()
    monkeypatch.setenv("RANK", "1")
    assert not first_rank()


def test_a_killed_run_goes_on_to_the_same_bits(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny("llama", num_hidden_layers=4)
    data = tmp_path / "texts.jsonl"
    words = random.Random(0)
    lines = [
        " ".join(str(words.randrange(10**6)) for _ in range(words.randrange(2, 30)))
        for _ in range(250)
    ]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fp8calib", "calibrate", str(source), "-o", str(out)]
    command += ["--dataset", str(data), "--samples", "250", "--batch-size", "1"]
    command += ["--checkpoint-every", "7"]
    state = state_folder(out) / "rank-0.npz"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=ONE_THREAD, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not state.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(random.random())
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not out.exists() and state.exists()
    done = subprocess.run(
        [*command, "--resume"], env=ONE_THREAD, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("resuming"))
    batches = int(line.split()[2])
    assert 7 <= batches < 250 and batches % 7 == 0
    assert not state_folder(out).exists()
    calibrate(source, tmp_path / "whole", dataset=str(data), samples=250, batch_size=1)
    same_files(tmp_path / "whole", out)


def test_only_the_same_run_is_resumed(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = {"dataset": str(texts), "batch_size": 2, "checkpoint_every": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8calib.calibration.observation.merge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate(tiny(), out, **options)
    state = state_folder(out) / "rank-0.npz"
    saved = state.read_bytes()
    others = [
        {"batch_size": 3},
        {"query": False},
        {"samples": 5},
        {"dtype": "bfloat16"},
    ]
    for change in others:
        with pytest.raises(UserError, match="another model, data or options"):
            calibrate(tiny(), out, resume=True, **(options | change))
    with pytest.raises(UserError, match="another model, data or options"):
        calibrate(tiny("mistral"), out, resume=True, **options)
    state.write_bytes(saved[:-40])
    with pytest.raises(UserError, match="damaged"):
        calibrate(tiny(), out, resume=True, **options)
    state.write_bytes(saved)
    calibrate(tiny(), out, resume=True, observer="mse", **options)  # of the same statistics
    assert not state.exists()


def test_state_is_replaced_whole(tmp_path: Path) -> None:
    statistics = RangeStatistics.empty(2)
    statistics.reserve(4)
    statistics.observe(torch.randn(1, 2, 9, 4), torch.tensor([3]), None)
    file = ProgressFile(tmp_path / "out", 0, "me")
    assert file.load() == (0, {})
    file.save(5, {(0, "k"): statistics})
    file.path.with_suffix(".tmp").write_bytes(b"what a killed process was writing")
    batches, found = file.load()
    assert batches == 5
    for name, value in vars(statistics).items():
        assert torch.equal(getattr(found[0, "k"], name), value)
