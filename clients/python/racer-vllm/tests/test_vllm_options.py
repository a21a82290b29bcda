"""Options, the version guard, places, and the command line of `racer-vllm serve`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import racer
from racer_vllm.choice import is_copied
from racer_vllm.fetch import fetch
from racer_vllm.guard import TESTED, VersionMismatch, check_version, missing_interface
from racer_vllm.options import LoaderOptions, parse_options
from racer_vllm.places import matching_places
from racer_vllm.plugin import register
from racer_vllm.record import ModelPlace, ModelPlaceError, place_of
from racer_vllm.serve import (
    VllmMissing,
    cache_root,
    engine_environ,
    find_vllm,
    model_name,
    vllm_command,
)


def test_options() -> None:
    """R35, L15: all have defaults, all can be given."""
    assert parse_options({}) == parse_options(None) == LoaderOptions()
    given = {
        "staging_bytes": 1 << 24,
        "in_flight": 8,
        "share": "off",
        "socket": "/s",
        "verify": True,
    }
    assert parse_options(given) == LoaderOptions(1 << 24, 8, "off", "/s", True)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"concurrency": 4}, "there is no option 'concurrency'"),
        ({"staging_bytes": "1GiB"}, "staging_bytes is '1GiB': a number of bytes"),
        ({"staging_bytes": True}, "staging_bytes is True"),
        ({"staging_bytes": 1000}, "staging_bytes is 1,000: 4 in flight need at least 524,288"),
        ({"in_flight": 0}, "in_flight is 0: 1 to 64"),
        ({"in_flight": 1.0}, "in_flight is 1.0"),
        ({"share": "on"}, "share is 'on': 'auto' or 'off'"),
        ({"share": []}, r"share is \[\]"),
        ({"socket": ""}, "socket is ''"),
        ({"verify": 1}, "verify is 1: true or false"),
        ([], "is a JSON object, not list"),
    ],
)
def test_wrong_options(given: object, problem: str) -> None:
    """R35, L15: what is wrong, and what there is."""
    with pytest.raises(ValueError, match=problem):
        parse_options(given)


def test_all_that_is_wrong_is_told_at_once() -> None:
    """L15: one start of vLLM takes a minute."""
    with pytest.raises(ValueError) as wrong:
        parse_options({"in_flight": 100, "verify": "yes", "threads": 3})
    text = str(wrong.value)
    assert all(word in text for word in ("in_flight is 100", "verify is 'yes'", "'threads'"))
    assert text.endswith("(options: staging_bytes, in_flight, share, socket, verify)")


def test_the_version_guard() -> None:
    """L53, L21: tested ones say nothing, newer ones a warning, older ones are refused."""
    assert check_version("0.32.0") is check_version("0.32.1+cpu") is None
    warning = check_version("0.33.0")
    assert warning is not None and "is tested with vLLM 0.32; this is vLLM 0.33.0" in warning
    assert check_version("1.0.0") is not None and check_version("dev") is not None
    with pytest.raises(VersionMismatch, match=r"this is vLLM 0\.9\.2, which is too old"):
        check_version("0.9.2")
    assert "lacks what load format racer needs (no name X)" in str(
        missing_interface("0.40", ImportError("no name X"))
    )
    assert (0, 32) in TESTED


def test_without_vllm_nothing_breaks(caplog: pytest.LogCaptureFixture) -> None:
    """L53: a vLLM without the interface (here: none) goes on, and one line says why."""
    register()
    [record] = caplog.records
    assert "load format racer is not there" in record.getMessage()


def test_the_package_needs_neither_vllm_nor_torch() -> None:
    """R33: what a node without an engine runs imports neither."""
    code = (
        "import sys, racer_vllm.cli, racer_vllm.fetch, racer_vllm.serve, racer_vllm.plugin;"
        "sys.exit(bool({'torch', 'vllm', 'numpy', 'racerd'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- places -------------------------------------------------------------------------------------


def test_places(tmp_path: Path) -> None:
    """R4: a URL is itself; a directory with weights is one; what is neither says what to do."""
    assert place_of("racer://local/hub/llama/").location == "racer://local/hub/llama/"
    (tmp_path / "model.safetensors").touch()
    assert place_of(str(tmp_path)) == ModelPlace(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelPlaceError, match=r"has no racer-model\.json .*racer-vllm-fetch"):
        place_of(str(tmp_path / "empty"))
    with pytest.raises(ModelPlaceError, match="is no directory on this node"):
        place_of("meta-llama/Llama-3")
    below = ModelPlace("racer://local/hub/llama").below("a b/c%.safetensors")
    assert below.location == "racer://local/hub/llama/a%20b/c%25.safetensors"


def test_a_prepared_place_lists_nothing(model: Any, tmp_path: Path) -> None:
    """R32, R34: what the record knows is not asked for; the weights are those of the model."""
    fetch(model.url, lambda _: tmp_path, socket=str(model.daemon.path))
    place = place_of(str(tmp_path))
    model.daemon.seen.clear()
    with racer.load(
        place.location, framework="numpy", names=place.names, socket=model.daemon.path
    ) as stream:
        assert [name for name, _ in stream] == ["t0", "t1"]
    assert model.daemon.count("/v1/objects/") > 0 and model.daemon.count("/v1/list") == 0


def test_files_by_pattern(model: Any, tmp_path: Path) -> None:
    """R4: the first pattern that matches decides; a star stays on its level."""
    for name in ("vae/b10.safetensors", "vae/b9.safetensors", "vae/deep/c.safetensors"):
        model.add(name, b"")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for location in (model.url, str(tmp_path)):
        found = matching_places(
            ModelPlace(location), ["none*/*", "v[ab]e/*"], socket=str(model.daemon.path)
        )
        names = [place.location.removeprefix(location) for place in found]
        assert names == ["/vae/b9.safetensors", "/vae/b10.safetensors"]
        with pytest.raises(racer.NotFound, match="matches none"):
            matching_places(ModelPlace(location), ["none"], socket=str(model.daemon.path))


def test_choice() -> None:
    """R34: everything but weights, pictures and data; our own record never."""
    for name in ("config.json", "tekken.json", "a/modeling_x.py", "qwen.tiktoken", "merges.txt"):
        assert is_copied(name)
    for name in ("a.bin", "x/b.pt", "original/params.json", ".gitattributes", "w.gguf"):
        assert not is_copied(name)
    assert is_copied("x/b.pt", ["x/*.pt"])
    assert not is_copied("racer-model.json", ["*"]) and not is_copied("m.safetensors", ["*"])


# --- serve --------------------------------------------------------------------------------------

URL = "racer://local/hub/meta/Llama 3"


def test_the_command_line() -> None:
    """R34: vLLM's arguments go through as they are; the model has a name that people know."""
    command = vllm_command(Path("/d"), URL, ["--port", "80", "--dtype=auto"])
    assert command == ["serve", "/d", "--load-format", "racer", "--port", "80", "--dtype=auto",
                       "--served-model-name", "Llama-3"]  # fmt: skip
    named = vllm_command(Path("/d"), URL, ["--served-model-name=x"])
    assert named == ["serve", "/d", "--load-format", "racer", "--served-model-name=x"]
    for wrong in ("--load-format=auto", "--load_format", "--model"):
        with pytest.raises(ValueError, match="decides --"):
            vllm_command(Path("/d"), URL, [wrong])


def test_names_and_places_of_directories() -> None:
    """L18, L19: below the user's cache, by name and digest."""
    assert cache_root({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/racer-vllm")
    assert cache_root({"HOME": "/h"}) == Path("/h/.cache/racer-vllm")
    assert model_name("racer://local/hub/") == "hub"
    assert model_name("racer://local/hub/..%2F/%FF") == "model"


def test_serve_becomes_vllm(model: Any, tmp_path: Path) -> None:
    """R34, L18: the process is vLLM's; a second start has the same directory; the socket is told
    to its workers. Here `vllm` is a script that shows what it was given."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "$$ $RACER_SOCKET $*"\nexit 7\n')
    script.chmod(0o755)
    environ = {
        "PATH": f"{script.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "racer_vllm", "serve", f"--socket={model.daemon.path}",
               model.url, "--port", "80", "--socket=/x"]  # fmt: skip
    starts = []
    for _ in range(2):
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 7, errors
        starts.append(output.split())
        assert starts[-1][:2] == [str(process.pid), str(model.daemon.path)]
    assert starts[0][2:] == starts[1][2:]
    folder = Path(starts[0][3])
    assert folder.parent == tmp_path / ".cache" / "racer-vllm" and folder.name.startswith("llama-")
    assert starts[0][4:] == ["--load-format", "racer", "--port", "80", "--socket=/x",
                             "--served-model-name", "llama"]  # fmt: skip
    assert (folder / "racer-model.json").exists()


def test_serve_without_a_url() -> None:
    """R34: what is missing is the URL alone; all the options are told."""
    done = subprocess.run(
        [sys.executable, "-m", "racer_vllm", "serve"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.endswith("the following arguments are required: URL\n")
    assert "[--socket PATH | --run-dir DIR]" in done.stderr


def test_the_environment_of_the_workers() -> None:
    """R34: they find the racerd that the command found."""
    environ = {"RACER_SOCKET": "/old", "A": "b"}
    assert engine_environ(environ, socket=None, run_dir=None) == environ
    assert engine_environ(environ, socket="/s", run_dir=None)["RACER_SOCKET"] == "/s"
    assert engine_environ(environ, socket=None, run_dir="/r") == {"RACER_RUN_DIR": "/r", "A": "b"}


def test_serve_without_vllm(tmp_path: Path) -> None:
    """R34: said before anything is copied."""
    with pytest.raises(VllmMissing, match="no program `vllm`"):
        find_vllm({"PATH": str(tmp_path)})
    (tmp_path / "vllm").touch(0o755)
    assert find_vllm({"PATH": os.fspath(tmp_path)}) == str(tmp_path / "vllm")
