"""`racer-vllm-fetch`: what it copies, what it refuses, and what several at once make of it."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

import racer
from clients.python.racer.tests.fake_daemon import Reply, Seen, error
from racer.cli.files import UnsafeName
from racer.safetensors import SafetensorsError
from racer_vllm.fetch import ForeignFile, IncompleteModel, Survey, Written, fetch
from racer_vllm.record import RECORD_NAME, place_of, read_record

GET = "POST|GET"


def fetched(model: Any, folder: Path, **options: Any) -> tuple[Survey, Written]:
    survey, _, written = fetch(
        model.url, lambda _: folder, socket=str(model.daemon.path), **options
    )
    return survey, written


def tree(folder: Path) -> set[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in files if name != ".racer-vllm.lock"}


def test_everything_but_the_weights(model: Any, tmp_path: Path) -> None:
    """R34: configuration, tokenizer and index as they are; of the shards the headers alone; and
    the record, which says where the rest is."""
    survey, written = fetched(model, tmp_path / "dir")
    names = {*model.copied, model.index, *model.shards}
    assert tree(tmp_path / "dir") == names | {RECORD_NAME}
    assert set(written.copied) == names and not written.unchanged
    for name in (*model.copied, model.index):
        assert (tmp_path / "dir" / name).read_bytes() == model.content(name)
    for name in model.shards:
        whole = model.content(name)
        header = whole[: 8 + struct.unpack("<Q", whole[:8])[0]]
        assert (tmp_path / "dir" / name).read_bytes() == header
    assert survey.weight_bytes == sum(len(model.content(name)) for name in model.shards)
    place = place_of(str(tmp_path / "dir"))
    assert (place.location, place.versions) == (model.url, dict.fromkeys(model.shards, '"v1"'))
    assert set(place.names or ()) == {model.index, *model.shards}


def test_headers_are_no_weights(model: Any, tmp_path: Path) -> None:
    """R34: the reference reader refuses a header that has nothing behind it."""
    fetched(model, tmp_path / "dir")
    with pytest.raises(SafetensorError, match="incomplete"):
        safe_open(tmp_path / "dir" / model.shards[0], "numpy").__enter__()


def test_again_reads_nothing(model: Any, tmp_path: Path) -> None:
    """R34, L18, L19: the same directory, by ETag; no object is read a second time."""
    fetched(model, tmp_path / "dir")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dir").rglob("*")}
    model.daemon.seen.clear()
    _, written = fetched(model, tmp_path / "dir")
    assert not written.copied and len(written.unchanged) == 6
    copies = [seen for seen in model.daemon.seen
              if seen.method == "GET" and seen.path.endswith(tuple(model.copied))]  # fmt: skip
    assert not copies
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "dir").rglob("*")}


def test_a_new_version(model: Any, tmp_path: Path) -> None:
    """R34: what changed is copied, what is gone goes, and nothing else."""
    fetched(model, tmp_path / "dir")
    (tmp_path / "dir" / "mine.txt").write_text("notes")
    model.add("config.json", b'{"architectures": ["Other"]}', '"v2"')
    model.remove("1_Pooling/config.json")
    _, written = fetched(model, tmp_path / "dir")
    assert (written.copied, written.removed) == (["config.json"], ["1_Pooling/config.json"])
    assert (tmp_path / "dir" / "config.json").read_bytes() == b'{"architectures": ["Other"]}'
    assert "1_Pooling/config.json" not in tree(tmp_path / "dir")
    assert (tmp_path / "dir" / "mine.txt").read_text() == "notes"


def test_a_copy_that_was_changed_is_made_again(model: Any, tmp_path: Path) -> None:
    """R34, L39: what is there is checked by its content, not by its being there."""
    fetched(model, tmp_path / "dir")
    (tmp_path / "dir" / "tokenizer.json").write_bytes(b"[]")
    _, written = fetched(model, tmp_path / "dir")
    assert written.copied == ["tokenizer.json"]
    assert (tmp_path / "dir" / "tokenizer.json").read_bytes() == b"{}"


def test_a_version_that_changes_meanwhile(model: Any, tmp_path: Path) -> None:
    """R34: the model is looked at again, so that no mixture comes of it."""

    def change(seen: Seen) -> Reply | None:
        model.put('"v2"')
        return None

    model.daemon.on(f"GET .*{model.prefix}/tokenizer.json", change)
    fetched(model, tmp_path / "dir")
    record = read_record(str(tmp_path / "dir"))
    assert record is not None
    assert {held.etag for held in (*record.files.values(), *record.shards.values())} == {'"v2"'}


def test_several_at_once(model: Any, tmp_path: Path) -> None:
    """R34: one of them copies, the others find it done; the directory is as after one."""
    results: list[Written] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetched(model, tmp_path / "dir")[1]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(written.copied) for written in results) == [0, 0, 0, 0, 0, 6]
    assert tree(tmp_path / "dir") == {*model.copied, model.index, *model.shards, RECORD_NAME}


def test_an_end_in_the_middle(model: Any, tmp_path: Path) -> None:
    """R34: there is no record then and no half file, and the next run ends it."""
    model.daemon.always(f"GET .*{model.shards[1]}", error(403, "forbidden"))
    with pytest.raises(racer.Forbidden):
        fetched(model, tmp_path / "dir")
    assert RECORD_NAME not in tree(tmp_path / "dir")
    for folder in (tmp_path / "dir", tmp_path / "dir" / "1_Pooling"):
        folder.mkdir(exist_ok=True)
        (folder / ".racer-0123.part").write_bytes(b"half")
    model.daemon._hooks.clear()
    fetched(model, tmp_path / "dir")
    assert tree(tmp_path / "dir") == {*model.copied, model.index, *model.shards, RECORD_NAME}


@pytest.mark.parametrize("name", ["../outside.json", "a/../../b.json", "/etc/x.json", "a//b.json"])
def test_names_that_leave_the_directory(model: Any, tmp_path: Path, name: str) -> None:
    """R34: refused before anything is written."""
    model.add(name, b"{}")
    with pytest.raises(UnsafeName):
        fetched(model, tmp_path / "dir")
    assert not (tmp_path / "dir").exists() and not (tmp_path / "outside.json").exists()


def test_a_link_that_leaves_the_directory(model: Any, tmp_path: Path) -> None:
    """R34: links in the directory are not followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeName, match="link"):
        fetched(model, tmp_path / "dir")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_with_other_files(model: Any, tmp_path: Path) -> None:
    """R34: somebody's weights are not replaced by headers."""
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / model.shards[0]).write_bytes(b"weights")
    with pytest.raises(ForeignFile, match=model.shards[0]):
        fetched(model, tmp_path / "dir")
    assert (tmp_path / "dir" / model.shards[0]).read_bytes() == b"weights"


@pytest.mark.parametrize("content", [b"weights", None])
def test_a_refused_directory_is_left_as_it_was(
    model: Any, tmp_path: Path, content: bytes | None
) -> None:
    """R34: no lock and no folder in what is somebody else's: files of the same names, or links."""
    folder = tmp_path / "dir"
    folder.mkdir()
    if content is None:
        (folder / "config.json").symlink_to("blob")
    else:
        (folder / model.shards[0]).write_bytes(content)
    before = os.listdir(folder)
    with pytest.raises(ForeignFile, match="is there, and is not the model's"):
        fetched(model, folder)
    assert os.listdir(folder) == before


def test_a_directory_that_was_published(model: Any, tmp_path: Path) -> None:
    """R34: a prepared directory that somebody uploaded with its record and lock is a model like
    others; the names of ours are neither copied nor, by a later run, removed."""
    for name in (".racer-vllm.lock", "sub/.racer-vllm.lock", "sub/racer-model.json"):
        model.add(name, b"theirs")
    folder = tmp_path / "dir"
    _, written = fetched(model, folder, also=["*"])
    assert not any(".racer-" in name or "racer-model" in name for name in written.copied)
    assert not (folder / "sub").exists() and (folder / ".racer-vllm.lock").read_bytes() == b""
    record = read_record(str(folder))
    assert record is not None
    named = {**record.files, ".racer-vllm.lock": record.files["config.json"]}
    told = dataclasses.replace(record, files=named).to_bytes()
    (folder / RECORD_NAME).write_bytes(told)
    _, written = fetched(model, folder, also=["*"])
    assert not written.removed and (folder / ".racer-vllm.lock").exists()


def test_what_is_missing_is_named(model: Any, tmp_path: Path) -> None:
    """R34, L17: the configuration, a shard; with the node that asked."""
    model.remove(model.shards[1])
    with pytest.raises(SafetensorsError, match="maps 1 tensors to it, and it is not") as missing:
        fetched(model, tmp_path / "dir")
    assert missing.value.file == f"{model.url}/{model.shards[1]}"
    model.remove("config.json")
    node = os.uname().nodename
    with pytest.raises(IncompleteModel, match=f"no config.json under {model.url}/, .*{node}"):
        fetched(model, tmp_path / "dir")
    assert not (tmp_path / "dir").exists()


def test_an_origin_that_cannot_list(model: Any, tmp_path: Path) -> None:
    """R34: the usual names are tried."""
    model.daemon.always("GET /v1/list", error(404, "not_found"))
    _, written = fetched(model, tmp_path / "dir")
    assert set(written.copied) == {*model.copied, model.index, *model.shards}


def test_more_on_demand(model: Any, tmp_path: Path) -> None:
    """R34: --also takes what is left out by its kind."""
    model.add("sparse_linear.pt", b"small")
    survey, _ = fetched(model, tmp_path / "dir", also=["sparse_*.pt"])
    assert (tmp_path / "dir" / "sparse_linear.pt").read_bytes() == b"small"
    assert "pytorch_model.bin" not in tree(tmp_path / "dir")
    assert not survey.warnings


def test_warnings(model: Any, tmp_path: Path) -> None:
    """R34: no tokenizer, and a name that nobody can ask for."""
    model.remove("tokenizer.json")
    model.daemon.put("hub", f"{model.prefix}/".encode() + b"\xff.json", b"{}")
    survey, _ = fetched(model, tmp_path / "dir")
    assert survey.warnings == [
        "left out: \\xff.json, whose name is not UTF-8",
        "there is no tokenizer with it: give the engine --tokenizer",
    ]


def test_the_digest_tells_versions(model: Any, tmp_path: Path) -> None:
    """L18, L19: the same for the same model, whoever surveys it; another for another version."""
    first, _ = fetched(model, tmp_path / "one")
    again, _ = fetched(model, tmp_path / "two")
    record = read_record(str(tmp_path / "one"))
    assert record is not None and first.digest == again.digest == record.digest
    model.add("config.json", b"{}", '"v2"')
    assert fetched(model, tmp_path / "two")[0].digest != first.digest


# --- the command -------------------------------------------------------------------------------


def command(
    model: Any, *arguments: object, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "RACER_SOCKET": str(model.daemon.path)}
    program = [sys.executable, "-c", "import sys; from racer_vllm.cli import main_fetch as main;"
               "sys.exit(main())"]  # fmt: skip
    return subprocess.run(
        [*before, *program, *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command(model: Any, tmp_path: Path) -> None:
    """R34: one line of what was done; errors with a hint and the statuses of `racer`."""
    done = command(model, model.url, tmp_path / "dir")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"{model.url} -> {tmp_path / 'dir'}: 6 files copied, 0 unchanged;"
    )
    quiet = command(model, "-q", model.url, tmp_path / "dir")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    missing = command(model, "racer://local/hub/none", tmp_path / "dir")
    assert missing.returncode == 3 and "no config.json under" in missing.stderr
    assert "`racer ls` shows what is there" in missing.stderr
    bad = command(model, "s3://hub/llama", tmp_path / "dir")
    assert bad.returncode == 2 and "not a racer URL" in bad.stderr
    unwritable = command(model, model.url, "/proc/x")
    assert unwritable.returncode == 1
    assert "cannot write /proc/x: No such file" in unwritable.stderr
    assert "give another place" in unwritable.stderr and "Errno" not in unwritable.stderr


def test_a_prepared_directory_that_cannot_be_written(model: Any, tmp_path: Path) -> None:
    """R34: a volume mounted read-only is fine as long as it has what the model has."""
    folder = tmp_path / "dir"
    folder.mkdir()
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    read_only = ("unshare", "-rm", "sh", "-c", mount, str(folder))
    if subprocess.run([*read_only, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here: nothing can be mounted read-only")
    fresh = command(model, model.url, folder, before=read_only)
    assert fresh.returncode == 1 and "Read-only file system" in fresh.stderr
    assert command(model, model.url, folder).returncode == 0
    again = command(model, model.url, folder, before=read_only)
    assert again.returncode == 0 and "0 files copied, 6 unchanged" in again.stdout, again.stderr
    model.add("config.json", b"{}", '"v2"')
    changed = command(model, model.url, folder, before=read_only)
    assert changed.returncode == 1 and "Read-only file system" in changed.stderr


def test_the_place_of_the_socket(model: Any, tmp_path: Path) -> None:
    """R34: `--run-dir` as for `racer`; what is wrong with a place names the option."""
    run_dir = model.daemon.run_dir
    done = command(model, "--run-dir", run_dir, model.url, tmp_path / "dir")
    assert done.returncode == 0, done.stderr
    for option in ("--run-dir", "--socket"):
        wrong = command(model, option, tmp_path / "none", model.url, tmp_path / "dir")
        assert wrong.returncode == 4 and f"the path came from {option}" in wrong.stderr
    both = command(model, "--run-dir", "/x", "--socket", "/y", model.url, tmp_path / "dir")
    assert both.returncode == 2


def test_a_record_that_is_no_record(model: Any, tmp_path: Path) -> None:
    """R34: told with what to do, by the loader's side too."""
    (tmp_path / RECORD_NAME).write_text(json.dumps({"format": 9}))
    with pytest.raises(racer.RacerError, match=r"its format is 9.*run racer-vllm-fetch again"):
        place_of(str(tmp_path))
    with pytest.raises(ForeignFile, match=r"its format is 9.*give another directory"):
        fetched(model, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_an_end_in_the_middle_and_a_new_version(model: Any, tmp_path: Path) -> None:
    """R34, L19: what the first run wrote before it was killed is replaced, or removed, by the next
    one, though no record tells of it; what others put there is not."""
    folder = tmp_path / "dir"
    model.add("old.json", b"1")
    model.add("new.json", b"1")
    script = (
        "import os, pathlib, sys, racer_vllm.fetch as f\n"
        "f._Writer._header = lambda *_: os._exit(9)\n"
        "f.fetch(sys.argv[1], lambda _: pathlib.Path(sys.argv[2]), socket=sys.argv[3])\n"
    )
    arguments = [model.url, str(folder), str(model.daemon.path)]
    assert subprocess.run([sys.executable, "-c", script, *arguments]).returncode == 9
    assert (folder / "old.json").exists() and not (folder / RECORD_NAME).exists()
    model.put('"v2"')
    model.add("config.json", b'{"architectures": ["Tiny"], "v": 2}', '"v2"')
    model.remove("old.json")
    (folder / "later.json").write_text("mine")
    fetched(model, folder)
    assert (folder / "config.json").read_bytes() == model.content("config.json")
    assert not (folder / "old.json").exists() and (folder / "later.json").exists()
    assert (folder / ".racer-vllm.lock").read_bytes() == b""
    model.add("later.json", b"the model's")
    with pytest.raises(ForeignFile, match=r"later\.json"):
        fetched(model, folder)
    assert (folder / "later.json").read_text() == "mine"


def test_a_record_that_is_a_link(model: Any, tmp_path: Path) -> None:
    """R34: neither followed nor replaced, and told before anything is written, also by a run that
    finds the directory as its own."""
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / RECORD_NAME).symlink_to(tmp_path / "elsewhere")
    for ours in (False, True):
        if ours:
            (folder / ".racer-vllm.lock").touch()
        before = sorted(os.listdir(folder))
        with pytest.raises(ForeignFile, match=RECORD_NAME):
            fetched(model, folder)
        assert sorted(os.listdir(folder)) == before and not (tmp_path / "elsewhere").exists()


def test_a_directory_without_a_name(model: Any, tmp_path: Path) -> None:
    """R34: an empty name is a mistake, and does not stand for the current directory."""
    for arguments in (["fetch", model.url, ""], ["serve", "--dir=", model.url]):
        done = subprocess.run(
            [sys.executable, "-m", "racer_vllm", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and "is empty" in done.stderr
    assert not (tmp_path / "config.json").exists()
