"""The key file and the ring: rights, publication, reloading, and nothing that shows a key."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from racerd.crypto import key_file
from racerd.crypto.keyring import Keyring, drop_epoch, rotate_key_file
from racerd.errors import ConfigError

OLD = secrets.token_hex(32)
NEW = secrets.token_hex(32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys"


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def entry(epoch: int, key: str, state: str = "active") -> str:
    return f'[[epochs]]\nepoch = {epoch}\nstate = "{state}"\nkey = "{key}"\n'


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def problems(path: Path) -> list[str]:
    """The problems of opening `path`; none of them shows what the file holds."""
    with pytest.raises(ConfigError) as caught:
        Keyring.open(path)
    shown = "".join(traceback.format_exception(caught.value, chain=True)).lower()
    assert OLD not in shown
    assert NEW not in shown
    return caught.value.problems


# ---------- the first start


def test_the_first_start_makes_a_key_for_this_user_alone(path: Path) -> None:
    """R20: one random key, mode 0600, in a folder of this user; nothing else is left there."""
    ring = Keyring.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]
    assert (ring.epochs, ring.active.epoch, len(ring.active.key)) == ((1,), 1, 32)
    again = Keyring.open(path)
    assert again.active.same_key(ring.active)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_umask_changes_nothing(path: Path, umask: int) -> None:
    path.parent.mkdir()
    before = os.umask(umask)
    try:
        Keyring.open(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_first_starts_side_by_side_agree_on_one_key(path: Path) -> None:
    """Whoever publishes first wins; the others use that key and overwrite nothing."""
    rings: list[Keyring] = []
    start = threading.Barrier(8)

    def open_ring() -> None:
        start.wait()
        rings.append(Keyring.open(path))

    threads = [threading.Thread(target=open_ring) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ring.active.key for ring in rings}) == 1
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("call", ["fsync", "link", "fchmod"])
def test_a_first_start_that_fails_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """F37: a key file is there whole or not at all; the next start just works."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(ConfigError, match="No space left on device"):
            Keyring.open(path)
    assert os.listdir(path.parent) == []
    assert Keyring.open(path).active.epoch == 1


def test_the_file_is_synced_before_it_is_published(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F39: else a crash could leave an empty file under the final name."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "rename")}
    for name in real:

        def record(*args: object, name: str = name) -> object:
            if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):  # type: ignore[arg-type]
                calls.append("fsync folder")
            else:
                calls.append(name)
            return real[name](*args)

        monkeypatch.setattr(os, name, record)
    Keyring.open(path)
    assert calls == ["fsync", "link", "fsync folder"]
    calls.clear()
    rotate_key_file(path)
    assert calls == ["fsync", "rename", "fsync folder"]


def test_a_missing_file_can_be_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Keyring.open(path, create=False)
    assert not path.exists()


# ---------- files that are refused


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o666])
def test_a_file_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    (problem,) = problems(write(path, "version = 1\n" + entry(1, OLD), mode))
    assert f"mode {mode:04o}" in problem
    assert f"chmod 600 {path}" in problem
    assert "defaultMode" in problem


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_file_of_this_user_alone_is_used(path: Path, mode: int) -> None:
    assert Keyring.open(write(path, "version = 1\n" + entry(4, OLD), mode)).epochs == (4,)


def test_a_mounted_secret_is_used(path: Path, tmp_path: Path) -> None:
    """Kubernetes mounts a Secret as symlinks through `..data`; a rotation swaps the link."""
    for version, key in (("..1", OLD), ("..2", NEW)):
        write(tmp_path / version / "keys", f"version = 1\n{entry(int(version[2]), key)}", 0o400)
    path.parent.mkdir()
    data = path.parent / "..data"
    data.symlink_to(tmp_path / "..1")
    path.symlink_to("..data/keys")
    ring = Keyring.open(path)
    data.unlink()
    data.symlink_to(tmp_path / "..2")
    assert ring.reload()
    assert ring.epochs == (2,)


def test_what_is_no_file_is_refused_and_blocks_nobody(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    assert "not a regular file" in problems(path)[0]
    path.unlink()
    path.mkdir(0o700)
    assert "regular file" in problems(path)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    os.chown(write(path, "version = 1\n" + entry(1, OLD)), 12345, -1)
    assert "belongs to user 12345" in problems(path)[0]


def test_a_huge_file_is_refused(path: Path) -> None:
    write(path, "version = 1\n" + entry(1, OLD) + "#" * key_file.FILE_BYTES_MAX)
    assert f"limit is {key_file.FILE_BYTES_MAX}" in problems(path)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "version must be 1"),
        (f"version = 2\n{entry(1, OLD)}", "version must be 1"),
        ("version = 1\n", "[[epochs]]"),
        (f"version = 1\nkey = '{OLD}'\n{entry(1, NEW)}", "unknown keys"),
        (f"version = 1\n{entry(1, OLD)}{entry(2, NEW)}", "exactly one"),
        (f"version = 1\n{entry(1, OLD, 'retiring')}", "exactly one"),
        (f"version = 1\n{entry(1, OLD)}{entry(1, NEW, 'retiring')}", "same number"),
        (f"version = 1\n{entry(1, OLD)}{entry(2, OLD.upper(), 'retiring')}", "same key"),
        (f"version = 1\n{entry(0, OLD)}", "1 to 4294967295"),
        (f"version = 1\n{entry(2**32, OLD)}", "1 to 4294967295"),
        (f"version = 1\n{entry(1, OLD).replace('epoch = 1', 'epoch = true')}", "whole number"),
        (f"version = 1\n{entry(1, OLD, 'passive')}", '"active" or "retiring"'),
        (f"version = 1\n{entry(1, OLD[:-1])}", "64 hex digits"),
        (f"version = 1\n{entry(1, OLD[:-1] + 'g')}", "64 hex digits"),
        (f"version = 1\n{entry(1, OLD)}note = '{NEW}'\n", "nothing else"),
        (f"version = 1\n{entry(1, '00' * 32)}", "not random"),
        (f"version = 1\nepochs = '{OLD}'\n", "[[epochs]]"),
        (f"version = 1\nepochs = ['{OLD}']\n", "nothing else"),
        (f"version = 1\n[[epochs]]\nepoch = 1\nkey = \"{OLD}\nstate = 'active'\n", "line 4"),
        (f"version = 1\n{OLD}\n", "line 2"),
        (f"version = 1\n{entry(1, OLD)}{entry(1, OLD)}"[:-40], "not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_being_quoted(
    path: Path, text: str, expected: str
) -> None:
    """Half-written, edited by hand, of another version: the place is told, never the content."""
    assert any(expected in problem for problem in problems(write(path, text)))


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    write(path, "")
    path.write_bytes(b"\xff\xfe" + os.urandom(64))
    assert "not TOML in UTF-8" in problems(path)[0]


def test_every_problem_is_told(path: Path) -> None:
    write(path, f"version = 3\n{entry(0, OLD, 'x')}{entry(1, 'y')}")
    assert len(problems(path)) == 4


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="key file"):
        Keyring.open(tmp_path / "file" / "keys")


# ---------- epochs and reloading


def test_rotation_keeps_old_pages_readable(path: Path) -> None:
    ring = Keyring.open(path)
    first = ring.active
    assert not ring.reload()
    assert rotate_key_file(path) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert ring.active is first  # Nothing changes before the reload.
    assert ring.reload()
    assert (ring.active.epoch, ring.epochs) == (2, (1, 2))
    assert ring.get(1) is first
    assert not ring.active.same_key(first)


def test_pages_of_a_removed_epoch_are_misses(path: Path) -> None:
    """R22: a page whose key is gone is fetched again, not an error."""
    ring = Keyring.open(path)
    rotate_key_file(path)
    drop_epoch(path, 1)
    assert ring.reload()
    assert ring.get(1) is None
    assert ring.get(2) is ring.active
    assert ring.get(99) is None


def test_only_a_retiring_epoch_can_be_dropped(path: Path) -> None:
    Keyring.open(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="rotate first"):
        drop_epoch(path, 1)
    with pytest.raises(ConfigError, match="no epoch 5"):
        drop_epoch(path, 5)
    assert path.read_bytes() == before


def test_rotation_of_what_is_not_there_is_told(path: Path, tmp_path: Path) -> None:
    for missing in (path, tmp_path / "keys"):
        with pytest.raises(ConfigError, match="cannot be rotated"):
            rotate_key_file(missing)
    assert not path.exists()


def test_a_rotation_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Keyring.open(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match="Input/output error"):
            rotate_key_file(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_rotations_side_by_side_lose_no_epoch(path: Path) -> None:
    ring = Keyring.open(path)
    threads = [threading.Thread(target=rotate_key_file, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ring.reload()
    assert ring.epochs == tuple(range(1, 10))


def test_the_number_of_epochs_is_bounded(path: Path) -> None:
    Keyring.open(path)
    for _ in range(key_file.EPOCHS_MAX - 1):
        rotate_key_file(path)
    with pytest.raises(ConfigError, match="drop retiring ones"):
        rotate_key_file(path)
    assert len(Keyring.open(path).epochs) == key_file.EPOCHS_MAX


@pytest.mark.parametrize(
    "text", ["", "version = 1\n[[epochs]]\nepoch = 1\nstate = 'act", "version = 1\n" * 2]
)
def test_a_half_written_file_keeps_the_old_ring(path: Path, text: str) -> None:
    """The caller hears of it, and pages go on being opened and sealed."""
    ring = Keyring.open(path)
    active = ring.active
    whole = path.read_bytes()
    write(path, text)
    with pytest.raises(ConfigError, match=str(path)):
        ring.reload()
    assert ring.active is active
    assert ring.get(1) is active
    path.write_bytes(whole)
    assert not ring.reload()


def test_a_file_that_vanished_or_opened_up_keeps_the_old_ring(path: Path) -> None:
    ring = Keyring.open(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        ring.reload()
    path.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        ring.reload()
    assert ring.epochs == (1,)


def test_a_known_epoch_keeps_its_key(path: Path) -> None:
    """Another key under an old number would make every page of it look corrupt."""
    ring = Keyring.open(write(path, f"version = 1\n{entry(1, OLD)}"))
    write(path, f"version = 1\n{entry(1, NEW)}")
    with pytest.raises(ConfigError, match="new epoch"):
        ring.reload()
    assert ring.active.key.hex() == OLD


def test_an_epoch_can_become_active_again(path: Path) -> None:
    ring = Keyring.open(write(path, f"version = 1\n{entry(1, OLD)}"))
    write(path, f"version = 1\n{entry(1, OLD, 'retiring')}{entry(2, NEW)}")
    assert ring.reload()
    assert ring.active.epoch == 2
    write(path, f"version = 1\n{entry(1, OLD)}{entry(2, NEW, 'retiring')}")
    assert ring.reload()
    assert ring.active.epoch == 1


def test_a_ring_does_not_show_its_keys(path: Path) -> None:
    ring = Keyring.open(write(path, f"version = 1\n{entry(1, OLD)}"))
    assert OLD not in repr(ring)
    assert "active=1" in repr(ring)
