"""`make bench-loaders`, on a tiny model, with the loaders that need no other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.safetensors_bytes import model_file
from tools.bench_loaders.lanes import LANES
from tools.bench_loaders.measure import Benchmark, Disagreement
from tools.bench_loaders.scene import Scene

# Every state in which racerd can be, and a loader beside it.
KEYS = (
    "racer-shared",
    "racer-shared-listing",
    "racer-first",
    "racer-memory",
    "racer-disk",
    "racer-s3",
    "pread-memory",
)
ROUNDS = 2

pytestmark = [pytest.mark.servers, pytest.mark.slow]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        layout = {f"{number}.large": ("F16", [3000, 1000]), f"{number}.small": ("F32", [7])}
        length = int.from_bytes(model_file(layout)[0][:8], "little")
        # Tensors that lie askew are copied, and nobody would keep their shared memory.
        content, _ = model_file(layout, seed=number, header_pad=-length % 8)
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def scene_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "scene"
    folder.mkdir()
    return folder


def test_a_run_measures_every_lane(model: Path, scene_folder: Path) -> None:
    """R36: the loads agree on every byte, and each was served as its lane says."""
    lanes = [lane for lane in LANES if lane.key in KEYS]
    lines: list[str] = []
    with Scene(model, scene_folder) as scene:
        benchmark = Benchmark(scene, Path(sys.executable), framework="numpy")
        found = benchmark.run(lanes, ROUNDS, lines.append)
    assert [result.key for result in found] == [lane.key for lane in lanes]
    assert benchmark.tensors == 4
    assert benchmark.tensor_bytes == 2 * (3000 * 1000 * 2 + 7 * 4)
    assert len(lines) == len(KEYS) * ROUNDS
    for lane, result in zip(lanes, found, strict=True):
        assert len(result.runs) == ROUNDS
        assert result.seconds > 0
        assert (result.daemon_cpu_seconds is not None) == lane.is_ours


def test_tensors_that_differ_end_the_run(model: Path, scene_folder: Path) -> None:
    """A load of other bytes is an error, never a figure."""
    lane = next(lane for lane in LANES if lane.key == "pread-memory")
    with Scene(model, scene_folder) as scene:
        benchmark = Benchmark(scene, Path(sys.executable), framework="numpy")
        benchmark.run([lane], 1, lambda line: None)
        path = model / "model-00002-of-00002.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(Disagreement, match="its tensors are not those"):
            benchmark.run([lane], 1, lambda line: None)


def test_a_load_that_fails_is_tried_again_and_said(model: Path, scene_folder: Path) -> None:
    """A file that is cut off for good ends the run after three tries; each is told."""
    lane = next(lane for lane in LANES if lane.key == "pread-memory")
    lines: list[str] = []
    path = model / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with Scene(model, scene_folder) as scene:
        benchmark = Benchmark(scene, Path(sys.executable), framework="numpy")
        with pytest.raises(RuntimeError, match="ended with 1"):
            benchmark.run([lane], 1, lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        "pread-memory failed, and is tried again"
    ] * 2


def test_an_unknown_lane_is_refused_with_those_there_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench_loaders", "--docs", str(tmp_path), "nonsense"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "racer-memory" in ended.stderr
    assert not list(tmp_path.iterdir())
