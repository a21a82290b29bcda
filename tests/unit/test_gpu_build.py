"""The cache of compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from racerd.errors import DeviceError
from racerd.gpu import build
from racerd.gpu.build import KernelCache, load_module


@pytest.fixture
def kernels(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def test_what_was_put_is_got_for_its_architecture_alone(kernels: KernelCache) -> None:
    """R17: an entry belongs to one architecture; the folder is ours alone."""
    assert kernels.get("sm_90") is None
    kernels.put("sm_90", b"image")
    assert kernels.get("sm_90") == b"image"
    assert kernels.get("sm_80") is None
    assert kernels.folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in kernels.folder.iterdir()] == [kernels.path("sm_90").name]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "swapped"])
def test_a_damaged_entry_is_compiled_again(
    damage: str, kernels: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R17: a torn or rotten entry is never loaded; it is replaced."""
    path = kernels.put("sm_90", b"image " * 100)
    entry = path.read_bytes()
    path.write_bytes(
        {
            "cut": entry[:-1],
            "flipped": entry[:-1] + bytes([entry[-1] ^ 1]),
            "empty": b"",
            "swapped": b"\x7fELF" + entry[4:],
        }[damage]
    )
    compiled: list[str] = []
    monkeypatch.setattr(build, "compile_kernels", lambda a: compiled.append(a) or b"fresh")
    assert load_module("sm_90", kernels) == b"fresh"
    assert load_module("sm_90", kernels) == b"fresh"
    assert compiled == ["sm_90"]


def test_a_folder_that_others_can_write_is_refused(kernels: KernelCache) -> None:
    """R17: kernels run beside the keys: they are not taken from just anybody."""
    kernels.put("sm_90", b"image")
    kernels.folder.chmod(0o777)
    with pytest.raises(DeviceError) as refused:
        kernels.get("sm_90")
    assert refused.value.code == "kernel_cache_unsafe"
    assert "chmod" in refused.value.hint


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R17: what was compiled is used, though it cannot be kept."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "compile_kernels", lambda architecture: b"fresh")
    monkeypatch.setattr(KernelCache, "get", lambda self, architecture: None)
    assert load_module("sm_90", KernelCache(tmp_path / "file" / "below")) == b"fresh"
    assert "not kept" in caplog.text


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: one variable for containers, the usual place elsewhere."""
    monkeypatch.setenv("RACER_KERNEL_CACHE", "/somewhere")
    assert build.default_folder() == Path("/somewhere")
    monkeypatch.delenv("RACER_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert build.default_folder() == Path("/xdg/racer/kernels")


def test_the_kernels_compile_for_a_real_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R17: NVRTC takes the sources as they are, without a GPU; the command says what it made."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install racerd[gpu]")
    assert build.main(["--cache", str(tmp_path / "k"), "sm_90"]) == 0
    assert "compiled in" in capsys.readouterr().out
    image = KernelCache(tmp_path / "k").get("sm_90")
    assert image is not None and image.startswith(b"\x7fELF")
    assert b"racer_open_frames" in image and b"racer_prepare_records" in image
    assert build.main(["--cache", str(tmp_path / "k"), "sm_90"]) == 0
    assert "cached" in capsys.readouterr().out
    assert build.main(["--cache", str(tmp_path / "k"), "sm_00"]) == 1
    assert "sm_00" in capsys.readouterr().err
    assert os.listdir(tmp_path / "k") == [KernelCache(tmp_path / "k").path("sm_90").name]
