"""A writer of the key file that is killed leaves copies of keys: they do not stay."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from racerd.crypto.keyring import Keyring, drop_epoch, rotate_key_file

_KILLED = """
import os, signal, sys
from pathlib import Path
from racerd.crypto import key_file

def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)

os.rename = os.link = die
path = Path(sys.argv[2])
if sys.argv[1] == "rotate":
    key_file.rotate_key_file(path)
elif sys.argv[1] == "drop":
    key_file.drop_epoch(path, 1)
else:
    key_file.create_key_file(path)
"""


def killed(while_: str, path: Path) -> list[str]:
    """Kills a writer right before its file is published; returns what it left."""
    done = subprocess.run([sys.executable, "-c", _KILLED, while_, path], check=False)
    assert done.returncode == -signal.SIGKILL
    left = [name for name in os.listdir(path.parent) if name.endswith(".new")]
    assert len(left) == 1
    return left


@pytest.mark.parametrize("while_", ["rotate", "drop"])
@pytest.mark.parametrize("then", ["start", "rotate"])
def test_a_killed_rotation_leaves_the_old_file_and_soon_no_copy(
    tmp_path: Path, while_: str, then: str
) -> None:
    """R23, F37: the next start, or the next writer, removes it; the old keys stay in use."""
    path = tmp_path / "keys"
    Keyring.open(path)
    rotate_key_file(path)
    before = path.read_bytes()
    killed(while_, path)
    assert path.read_bytes() == before
    if then == "start":
        assert Keyring.open(path).epochs == (1, 2)
    else:
        assert rotate_key_file(path) == 3
        drop_epoch(path, 1)
        assert Keyring.open(path).epochs == (2, 3)
    assert os.listdir(tmp_path) == ["keys"]


def test_a_killed_first_start_is_followed_by_another_first_start(tmp_path: Path) -> None:
    """F37: nothing was published; the next start makes its own key and removes the other."""
    path = tmp_path / "state" / "keys"
    path.parent.mkdir()
    killed("create", path)
    assert Keyring.open(path).epochs == (1,)
    assert os.listdir(path.parent) == ["keys"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_own_leftovers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    others = {
        ".keys.new",
        ".keys.0123456789abcdef.new.bak",
        "keys.new",
        ".other.0123456789abcdef.new",
    }
    for name in others:
        (tmp_path / name).write_bytes(b"precious")
    Keyring.open(path)
    assert set(os.listdir(tmp_path)) == others | {"keys"}


def test_leftovers_that_cannot_be_removed_are_told_and_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    Keyring.open(path)
    (tmp_path / ".keys.0123456789abcdef.new").mkdir()
    with caplog.at_level(logging.WARNING):
        assert Keyring.open(path).epochs == (1,)
    assert "has old copies beside it" in caplog.text and "remove .keys.*.new there" in caplog.text
