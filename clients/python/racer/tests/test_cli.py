"""The command `racer`, run as a process: output, exit statuses, files, signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.python.racer.tests.fake_daemon import FakeDaemon, Reply, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.cli.files import UnsafeName, check_distinct, safe_parts, whole_file
from racer.cli.units import counted, format_bytes, parse_bytes
from racer.transfer import RING_PART_BYTES

Racer = Callable[..., "subprocess.CompletedProcess[bytes]"]
COMMAND = [sys.executable, "-m", "racer.cli"]


@pytest.fixture
def environment(daemon: FakeDaemon) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RACER_")}
    return kept | {"RACER_RUN_DIR": str(daemon.run_dir)}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Racer:
    def run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            cwd=tmp_path,
            env=environment,
            timeout=60,
        )

    return run


def done(result: subprocess.CompletedProcess[bytes]) -> str:
    assert result.returncode == 0, result.stderr.decode()
    assert not result.stderr, result.stderr.decode()
    return result.stdout.decode()


def lines(result: subprocess.CompletedProcess[bytes]) -> list[dict[str, object]]:
    return [json.loads(line) for line in done(result).splitlines()]


# --- looking ------------------------------------------------------------------------------------


def test_stat(daemon: FakeDaemon, run: Racer) -> None:
    url = daemon.put("llama", "weights", pattern(5000), '"w1"')
    told = done(run("stat", url))
    assert "5000 (4.9 KiB)" in told
    assert '"w1"' in told
    (value,) = lines(run("stat", url, "--json"))
    assert (value["url"], value["size"], value["etag"]) == (url, 5000, '"w1"')


def test_ls(daemon: FakeDaemon, run: Racer) -> None:
    urls = [daemon.put("llama", name, b"12") for name in ("a", "sub/b", "sub/c d")]
    assert done(run("ls", "racer://local/llama/")).split() == [urls[0], "racer://local/llama/sub/"]
    assert done(run("ls", "-r", "racer://local/llama/")).split() == urls
    assert done(run("ls", "racer://local/")).split() == ["racer://local/llama/"]
    assert [v["url"] for v in lines(run("ls", "-r", "--json", "racer://local/llama/"))] == urls
    assert '"v1"' in done(run("ls", "-l", "racer://local/llama/a"))


def test_names_cannot_drive_the_terminal(daemon: FakeDaemon, run: Racer) -> None:
    daemon.put("llama", "a", b"", '"\x1b[31m"'.replace("\x1b", "\x80"))
    assert "\\x80" in done(run("ls", "-l", "racer://local/llama/"))


def test_explain_evict_prefetch(daemon: FakeDaemon, run: Racer) -> None:
    url = daemon.put("llama", "weights", pattern(5000))
    assert "memory: not kept" in done(run("explain", url))
    (value,) = lines(run("explain", url, "--json"))
    assert value["pages"] == [
        {
            "page": 0,
            "rung": "disk",
            "why": {"memory": "not kept"},
            "last_rung": None,
            "last_age_seconds": None,
        }
    ]
    assert "2 pages" in done(run("evict", url))
    assert "pinned: 1 page, " in done(run("pin", url))
    (value,) = lines(run("pin", "-r", "racer://local/llama/", "--json"))
    assert value["room_bytes"] == 8000
    told = done(run("pins", "local"))
    assert "object" in told and "prefix" in told and url in told and "2 pins" in told
    assert told == done(run("pins")), "all caches are one"
    (value,) = lines(run("pins", "local", "--json"))
    assert (value["cache"], value["room_bytes"]) == ("local", 8000)
    assert [(pin["url"], pin["prefix"]) for pin in value["pins"]] == [
        (url, False),
        ("racer://local/llama/", True),
    ]
    assert "unpinned" in done(run("unpin", url))
    assert "not pinned" in done(run("unpin", url))
    (value,) = lines(run("prefetch", "racer://local/llama/", "--json"))
    assert (value["objects"], value["bytes"], value["rungs"]) == (1, 5000, {"origin": 5000})


def test_caches(daemon: FakeDaemon, run: Racer) -> None:
    with FakeDaemon(daemon.run_dir, "two"):
        told = done(run("caches"))
        assert [line.split()[0] for line in told.splitlines()] == ["cache", "local", "two"]
        assert [value["cache"] for value in lines(run("caches", "--json"))] == ["local", "two"]
    # The socket of `two` is there still, and nobody listens.
    result = run("caches")
    assert result.returncode == 4
    assert b"daemon_unavailable" in result.stdout
    assert b"ready" in result.stdout


# --- bytes --------------------------------------------------------------------------------------


def test_cat(daemon: FakeDaemon, run: Racer) -> None:
    data = pattern(RING_PART_BYTES + MIB)
    url = daemon.put("llama", "weights", data)
    small = daemon.put("llama", "small", b"small")
    assert run("cat", url, small).stdout == data + b"small"
    assert run("cat", url, "--offset", "1MiB", "--length", "10").stdout == data[MIB : MIB + 10]
    result = run("cat", small, "--json")
    assert result.stdout == b"small"
    assert json.loads(result.stderr) == {"objects": 1, "bytes": 5}


def test_cp_of_one_object(daemon: FakeDaemon, run: Racer, tmp_path: Path) -> None:
    data = pattern(RING_PART_BYTES + 5)
    url = daemon.put("llama", "deep/weights", data)
    (tmp_path / "folder").mkdir()
    for target, path in (
        ("file", "file"),
        ("folder", "folder/weights"),
        ("made/", "made/weights"),
        ("made/other", "made/other"),
    ):
        done(run("cp", url, target))
        assert (tmp_path / path).read_bytes() == data
    assert {p.name for p in tmp_path.iterdir()} == {"run", "folder", "file", "made"}


def test_cp_of_a_prefix(daemon: FakeDaemon, run: Racer, tmp_path: Path) -> None:
    names = {"config.json": b"{}", "sub/a b%": b"x", "sub/deep/w": pattern(MIB), "empty": b""}
    for name, data in names.items():
        daemon.put("llama", f"m/{name}", data)
    daemon.put("llama", "mm", b"not under it")
    (value,) = lines(run("cp", "racer://local/llama/m/", "out", "--json"))
    assert (value["objects"], value["bytes"]) == (4, MIB + 3)
    got = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert got == names
    done(run("cp", "-r", "racer://local/llama/m", "again"))
    assert (tmp_path / "again" / "mm").read_bytes() == b"not under it"
    done(run("cp", "racer://local/", "all"))
    assert (tmp_path / "all" / "llama" / "m" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("name", ["../out", "a/../b", "/abs", "a//b", "./a", "dir/", "x" * 256])
def test_cp_refuses_names_that_leave_the_folder(
    daemon: FakeDaemon, run: Racer, tmp_path: Path, name: str
) -> None:
    """Nothing is copied where one name is refused."""
    daemon.put("llama", "m/good", b"good")
    daemon.put("llama", f"m/{name}", b"evil")
    result = run("cp", "racer://local/llama/m/", "target")
    assert result.returncode == 1
    assert b"cannot be copied" in result.stderr
    assert not (tmp_path / "target").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_cp_does_not_follow_links_out_of_the_folder(
    daemon: FakeDaemon, run: Racer, tmp_path: Path
) -> None:
    daemon.put("llama", "m/sub/file", b"evil")
    daemon.put("llama", "m/link", b"replaced")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "sub").symlink_to(tmp_path / "outside")
    (tmp_path / "target" / "link").symlink_to(tmp_path / "outside" / "kept")
    result = run("cp", "racer://local/llama/m/", "target", "-j", "1")
    assert result.returncode == 1
    assert b"symbolic link is in the way" in result.stderr
    assert [p.name for p in (tmp_path / "outside").iterdir()] == ["kept"]
    assert (tmp_path / "outside" / "kept").read_text() == "kept"


def test_cp_names_what_it_cannot_write(daemon: FakeDaemon, run: Racer, tmp_path: Path) -> None:
    """With what to do, and without numbers of errors or names that only the program knows."""
    url = daemon.put("llama", "m/weights", b"data")
    (tmp_path / "file").write_text("file")
    (tmp_path / "out" / "weights").mkdir(parents=True)
    for source, target, named, remedy in (
        (url, "/proc/x/y", "/proc/x: ", "give another place"),
        (url, "file/x", "file: ", "a file is in the way"),
        ("racer://local/llama/m/", "file", "file: ", "a file is in the way"),
        ("racer://local/llama/m/", "out", "out/weights: ", "a folder is in the way"),
    ):
        result = run("cp", source, target)
        told = result.stderr.decode()
        assert result.returncode == 1
        assert told.startswith(f"racer: cannot write {named}") and remedy in told
        assert "Errno" not in told and "b'" not in told and ".part" not in told


def test_cp_refuses_an_object_that_is_a_folder_too(daemon: FakeDaemon, run: Racer) -> None:
    daemon.put("llama", "m/a", b"1")
    daemon.put("llama", "m/a/b", b"2")
    result = run("cp", "racer://local/llama/m/", "target")
    assert result.returncode == 1
    assert b"a file cannot be both" in result.stderr


def test_cp_leaves_nothing_of_what_failed(daemon: FakeDaemon, run: Racer, tmp_path: Path) -> None:
    """L39: a file is there whole or not at all, and what was there before stays."""
    url = daemon.put("llama", "weights", pattern(3 * RING_PART_BYTES))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights").write_text("before")
    daemon.on("POST /v1/host-read", None, error(502, "corrupt"))
    result = run("cp", url, "out")
    assert result.returncode == 8
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["weights"]
    assert (tmp_path / "out" / "weights").read_text() == "before"


def test_load(daemon: FakeDaemon, run: Racer) -> None:
    sizes = {"config.json": 2, "empty": 0, "w-1": 3 * MIB, "w-2": 5 * MIB + 1}
    for name, size in sizes.items():
        daemon.put("llama", f"m/{name}", pattern(size))
    told = done(run("load", "racer://local/llama/m/"))
    assert "w-2" in told
    assert f"{sum(sizes.values())}" in told.splitlines()[-1]
    assert "memory" in told.splitlines()[-1]
    (value,) = lines(run("load", "racer://local/llama/m/", "--json"))
    assert value["rungs"] == {"memory": sum(sizes.values())}
    assert [o["bytes"] for o in value["objects"]] == [sizes[n] for n in sorted(sizes)]  # type: ignore[attr-defined]


def test_bench(daemon: FakeDaemon, run: Racer) -> None:
    url = daemon.put("llama", "weights", pattern(3 * MIB))
    assert "p99" in done(run("bench", url, "--count", 5, "--size", "4KiB"))
    (value,) = lines(run("bench", url, "--count", 7, "--size", "1MiB", "-j", 2, "--json"))
    assert (value["reads"], value["bytes"]) == (7, 7 * MIB)
    assert value["rungs"] == {"memory": 7 * MIB}
    (value,) = lines(run("bench", url, "--seconds", 0.05, "--json"))
    assert value["read_bytes"] == 3 * MIB


# --- going wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (error(404, "not_found"), 3),
        (error(412, "version_changed"), 5),
        (error(403, "forbidden"), 6),
        (error(504, "deadline_exceeded"), 7),
        (error(502, "origin_unavailable"), 7),
        (error(502, "corrupt"), 8),
        (error(500, "internal"), 1),
        (Reply(raw=b"nonsense\r\n\r\n"), 1),
    ],
)
def test_exit_statuses(daemon: FakeDaemon, run: Racer, reply: Reply, status: int) -> None:
    url = daemon.put("llama", "a", b"a")
    daemon.always("GET /v1/list", reply)
    result = run("ls", "racer://local/llama/")
    assert result.returncode == status
    assert result.stderr.startswith(b"racer: ")
    result = run("ls", "racer://local/llama/", "--json")
    assert result.returncode == status
    assert set(json.loads(result.stderr)["error"]) == {"code", "message", "hint", "retry"}
    assert not result.stdout
    assert done(run("stat", url))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("stat",),
        ("stat", "http://x"),
        ("cat", "racer://local/llama/"),
        ("cat", "racer://local/a/b", "--offset", "many"),
        ("bench", "racer://local/a/b", "--jobs", "0"),
        ("stat", "racer://local/a/b", "--timeout", "0"),
        ("stat", "racer://local/a/b", "--socket", "x", "--run-dir", "y"),
    ],
)
def test_wrong_usage(run: Racer, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr


def test_no_daemon(run: Racer, tmp_path: Path) -> None:
    result = run("stat", "racer://nowhere/a/b")
    assert result.returncode == 4
    assert b"caches there: local" in result.stderr
    result = run("caches", "--run-dir", tmp_path / "empty")
    assert result.returncode == 4
    assert str(tmp_path / "empty").encode() in result.stderr


def test_places_are_called_as_they_were_typed(run: Racer, tmp_path: Path) -> None:
    for option in ("--socket", "--run-dir"):
        result = run("stat", "racer://local/a/b", option, tmp_path / "none")
        assert result.returncode == 4
        assert f"the path came from {option}".encode() in result.stderr


def test_what_is_no_object(daemon: FakeDaemon, run: Racer) -> None:
    """A file in the root, and a prefix where one object is wanted."""
    daemon.put("llama", "m/weights", b"data")
    result = run("cat", "racer://local/toplevel.txt")
    assert result.returncode == 2 and b"belongs to no bucket" in result.stderr
    for prefix, status in (("racer://local/llama/", 2), ("racer://local/llama/m/", 3)):
        result = run("explain", prefix)
        assert result.returncode == status
        assert f"explain takes one object: `racer ls {prefix}`".encode() in result.stderr


def test_a_pin_of_nothing(daemon: FakeDaemon, run: Racer) -> None:
    daemon.put("llama", "there", b"data")
    nothing = Reply(body=b'{"pages": 0, "bytes": 0, "room_bytes": 9}')
    daemon.always("POST /v1/pin/", nothing)
    for url, waits in (("none", True), ("there", False), ("none/", True), ("", False)):
        told = done(run("pin", f"racer://local/llama/{url}"))
        assert ("nothing is there now" in told) == waits
    daemon.always("GET /v1/list", error(404, "not_found"))
    assert "nothing is there" not in done(run("pin", "racer://local/llama/none/"))


def test_help_lists_the_exit_statuses(run: Racer) -> None:
    told = done(run("--help"))
    assert all(f"{status} " in told for status in (*range(9), 130, 141))


def test_a_closed_pipe_is_no_error(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    """`racer cat … | head` says nothing."""
    url = daemon.put("llama", "weights", pattern(4 * RING_PART_BYTES))
    for i in range(3000):
        daemon.put("many", f"key-{i:06}" + "x" * 100, b"")
    for arguments in (["cat", url], ["ls", "racer://local/many/"]):
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""
        process.stderr.close()


def test_ctrl_c_ends_everything(
    daemon: FakeDaemon, environment: dict[str, str], tmp_path: Path
) -> None:
    """Also while a thread waits for the daemon; no part of a file is left."""
    for n in range(3):
        daemon.put("llama", f"m/w{n}", pattern(MIB))
    asked, release = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        asked.set()
        release.wait(60)

    daemon.always("POST /v1/host-read", hold)
    process = subprocess.Popen(
        [*COMMAND, "cp", "racer://local/llama/m/", "out"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd=tmp_path,
    )
    assert asked.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    release.set()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not list((tmp_path / "out").iterdir())


def test_a_progress_bar_on_a_terminal_only(
    daemon: FakeDaemon, environment: dict[str, str], run: Racer, tmp_path: Path
) -> None:
    url = daemon.put("llama", "weights", pattern(3 * MIB))
    done(run("cp", url, "one"))
    ours, theirs = pty.openpty()
    subprocess.run(
        [*COMMAND, "cp", url, "two"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "100 %" in shown
    assert shown.endswith("\r\x1b[K")


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("4KiB", 4096), ("1.5GiB", 3 << 29), ("10GB", 10**10), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]


def test_plurals() -> None:
    assert [counted(n, "page") for n in (0, 1, 2)] == ["0 pages", "1 page", "2 pages"]


def test_safe_names() -> None:
    assert safe_parts(b"a/\xff b/c") == (b"a", b"\xff b", b"c")
    check_distinct([(b"a", b"b"), (b"a", b"c"), (b"ab",)])
    for name in (b"", b"/", b"..", b"a/..", b"a\0b"):
        with pytest.raises(UnsafeName):
            safe_parts(name)


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            with whole_file(folder, b"name", 10):
                raise AssertionError("not reached")
    finally:
        os.close(folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["racer", "racer.client", "racer.cli"])
def test_what_importing_brings_in(module: str) -> None:
    """R33: neither torch nor CUDA nor anything else, and nothing that is slow to import."""
    code = f"import sys, {module}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    loaded = set(
        subprocess.check_output(
            [sys.executable, "-S", "-c", code],
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        ).split()
    )
    assert not loaded & {
        "asyncio",
        "cuda",
        "ctypes",
        "dataclasses",
        "inspect",
        "logging",
        "numpy",
        "racerd",
        "random",
        "tempfile",
        "torch",
        "uvloop",
    }
