"""`safe_open` over racer's sources: the interface of the format's own library."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import racer
from racer.safetensors import SafetensorsError
from tests.support.safetensors_bytes import model_file

LAYOUT: dict[str, tuple[str, list[int]]] = {
    "b": ("F32", [5, 3, 2]),
    "a": ("I16", [7]),
    "z": ("U8", [0, 4]),
    "s": ("F64", []),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    content, _ = model_file(LAYOUT, metadata={"format": "pt"})
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    return path


def test_names_and_metadata(path: Path) -> None:
    """R37: sorted names, names in the order of their bytes, and the file's own strings."""
    with racer.safe_open(path, "numpy") as file:
        assert file.keys() == ["a", "b", "s", "z"]
        assert file.offset_keys() == ["b", "a", "z", "s"]
        assert file.metadata() == {"format": "pt"}
        piece = file.get_slice("b")
        assert piece.get_shape() == [5, 3, 2] and piece.get_dtype() == "F32"


def test_tensors_as_the_reference_gives_them(path: Path) -> None:
    """L41: the same arrays as the format's library reads from the same file."""
    reference = pytest.importorskip("safetensors")
    with reference.safe_open(path, "numpy") as theirs, racer.safe_open(path, "numpy") as ours:
        for name in theirs.keys():  # noqa: SIM118 - not a dict
            want, got = theirs.get_tensor(name), ours.get_tensor(name)
            assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


indices = st.one_of(
    st.integers(-6, 6),
    st.slices(7),
    st.tuples(st.integers(-5, 4) | st.slices(5), st.slices(3) | st.integers(0, 2)),
    st.just(()),
    st.just(Ellipsis),
    st.tuples(st.slices(5), st.just(Ellipsis), st.integers(0, 1)),
)


@given(st.sampled_from(sorted(LAYOUT)), indices)
def test_slices_are_those_of_the_whole(name: str, index: Any) -> None:
    """R35: any index gives what it gives on the whole array, errors included."""
    import tempfile

    content, contents = model_file(LAYOUT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(content)
        with racer.safe_open(path, "numpy") as file:
            whole = file.get_tensor(name)
            assert whole.tobytes() == contents[name]
            try:
                want = whole[index]
            except IndexError:
                with pytest.raises(IndexError):
                    file.get_slice(name)[index]
                return
            np.testing.assert_array_equal(file.get_slice(name)[index], want)


def test_whoever_uses_the_reference_needs_no_other_names(path: Path) -> None:
    """R37: frameworks as the format's library also calls them, and every method that it has."""
    reference = pytest.importorskip("safetensors")
    with reference.safe_open(path, framework="np") as theirs:
        with racer.safe_open(path, framework="np") as ours:
            methods = {name for name in dir(theirs) if not name.startswith("_")}
            assert methods <= set(dir(ours))
            want, got = theirs.get_tensors(), ours.get_tensors()
            assert list(got) == ours.offset_keys() and got.keys() == want.keys()
            assert all(got[name].tobytes() == want[name].tobytes() for name in want)
    with pytest.raises(ValueError, match="'pt' or 'numpy'"):
        racer.safe_open(path, framework="flax")  # type: ignore[arg-type]


def test_slices_read_only_their_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: rows in the middle cost no more than their bytes."""
    from racer.models.local import LocalLanding

    reads: list[int] = []
    original = LocalLanding.read

    def recording(landing: Any, file: Any, start: int, stop: int) -> Any:
        reads.append(stop - start)
        return original(landing, file, start, stop)

    monkeypatch.setattr(LocalLanding, "read", recording)
    with racer.safe_open(path, "numpy") as file:
        assert file.get_slice("b")[1:3, 0].shape == (2, 2)
        assert file.get_slice("b")[-1].shape == (3, 2)
        assert file.get_slice("b")[4:1].shape == (0, 3, 2)
        assert file.get_slice("z")[:].shape == (0, 4)
    assert reads == [2 * 24, 24]


def test_a_directory_as_one(tmp_path: Path) -> None:
    """L14: all shards under one name space, as the index has them."""
    for number, name in enumerate(("x", "y")):
        content, _ = model_file({name: ("U8", [4])}, metadata={name: "1"}, seed=number)
        (tmp_path / f"m-{number}.safetensors").write_bytes(content)
    weight_map = {"x": "m-0.safetensors", "y": "m-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with racer.safe_open(tmp_path, "numpy") as file:
        assert file.keys() == ["x", "y"] and file.metadata() == {"x": "1", "y": "1"}
        assert file.get_tensor("y").tobytes() == bytes([37, 38, 39, 40])


def test_tensors_are_their_own(path: Path) -> None:
    """L38: what was read before is not touched by the next read, or by closing."""
    with racer.safe_open(path, "numpy") as file:
        first = file.get_tensor("b")
        before = first.tobytes()
        assert not np.shares_memory(first, file.get_tensor("b"))
        file.get_tensor("a")
    assert first.tobytes() == before


def test_from_several_threads(path: Path) -> None:
    """R36: one landing, many threads, right bytes."""
    _, contents = model_file(LAYOUT)
    wrong: list[str] = []
    with racer.safe_open(path, "numpy") as file:

        def read(name: str) -> None:
            for _ in range(50):
                if file.get_tensor(name).tobytes() != contents[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=read, args=(name,)) for name in LAYOUT]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_errors(path: Path, tmp_path: Path) -> None:
    """R37, L41: unknown names, what numpy cannot hold, broken files, and use after closing."""
    with racer.safe_open(path, "numpy") as file:
        with pytest.raises(SafetensorsError, match="there is no tensor 'nope'"):
            file.get_tensor("nope")
        with pytest.raises(SafetensorsError, match="there is no tensor"):
            file.get_slice("nope")
    with pytest.raises(racer.Closed):
        file.get_tensor("b")
    content, _ = model_file({"t": ("F4", [4])})
    path.write_bytes(content)
    with racer.safe_open(path, "numpy") as file:
        with pytest.raises(SafetensorsError, match="F4") as caught:
            file.get_tensor("t")
        assert caught.value.unsupported and caught.value.tensor == "t"
    path.write_bytes(content[:-1])
    with pytest.raises(SafetensorsError, match="cut short"):
        racer.safe_open(path, "numpy")
    with pytest.raises(SafetensorsError, match="no such file"):
        racer.safe_open(tmp_path / "x.safetensors", "numpy")
