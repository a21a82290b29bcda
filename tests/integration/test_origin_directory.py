"""A directory as an origin, on a real file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from racerd.errors import RacerError
from racerd.ids import ObjectId
from racerd.origin import beneath
from racerd.origin.beneath import Beneath
from racerd.origin.directory import DirectoryOrigin
from racerd.origin.protocol import CancelToken, ListedPrefix
from racerd.runtime.deadline import Deadline


@pytest.fixture(params=["openat2", "walk"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryOrigin:
    """Both ways of opening must keep the same promises."""
    root = tmp_path / "root"
    (root / "b" / "sub").mkdir(parents=True)
    (root / "b" / "file.bin").write_bytes(bytes(range(256)) * 100)
    (root / "b" / "sub" / "deep").write_bytes(b"deep")
    (root / "other").mkdir()
    (root / "other" / "secret").write_bytes(b"other bucket")
    (tmp_path / "outside").write_bytes(b"outside")
    opens = Beneath(os.fsencode(root), lambda error: None)
    opens._refused = request.param == "walk"
    return DirectoryOrigin(os.fsencode(root), opens)


def _deadline() -> Deadline:
    return Deadline.after(30)


def _id(key: bytes, bucket: str = "b") -> ObjectId:
    return ObjectId("c", bucket, key)


def _read(origin: DirectoryOrigin, key: bytes) -> bytes:
    version = origin.head(_id(key), deadline=_deadline())
    return bytes(origin.fetch(version, 0, version.size, deadline=_deadline(), cancel=CancelToken()))


def _code(call: Callable[[], object]) -> str:
    with pytest.raises(RacerError) as caught:
        call()
    return caught.value.code


def test_reads_what_is_there(origin: DirectoryOrigin) -> None:
    """R30: any range of any file."""
    version = origin.head(_id(b"file.bin"), deadline=_deadline())
    assert (version.size, version.weak) == (25600, True)
    got = origin.fetch(version, 255, 300, deadline=_deadline(), cancel=CancelToken())
    assert bytes(got) == (bytes(range(256)) * 2)[255:300]
    assert _read(origin, b"sub/deep") == b"deep"


@pytest.mark.parametrize(
    "key",
    [b"../other/secret", b"/etc/passwd", b"sub/../file.bin", b"./file.bin", b"sub//deep",
     b"/file.bin", b"file.bin/", b"file.bin/x", b"sub", b"nowhere", b"..", b"sub/..", b"x" * 300],
)  # fmt: skip
def test_no_other_name_names_a_file(origin: DirectoryOrigin, key: bytes) -> None:
    """R30: a name that is not exactly a file's is not_found, never another object's bytes."""
    assert _code(lambda: origin.head(_id(key), deadline=_deadline())) == "not_found"


def test_symlinks_do_not_lead_out(origin: DirectoryOrigin, tmp_path: Path) -> None:
    """R30: nothing outside the root is reached, by a file's link or a folder's."""
    bucket = tmp_path / "root" / "b"
    (bucket / "out").symlink_to(tmp_path / "outside")
    (bucket / "relative").symlink_to("../../outside")
    (bucket / "folder").symlink_to(tmp_path)
    (bucket / "proc").symlink_to("/proc/self/root")
    (bucket / "absolute").symlink_to("/file.bin")  # Not the one beside it.
    for key in (b"out", b"relative", b"folder/outside", b"proc/etc/passwd", b"absolute"):
        assert _code(lambda key=key: origin.head(_id(key), deadline=_deadline())) == "not_found"
    listed = [e.key for e in origin.list_objects("b", b"", delimiter=None, after=None,
                                                 deadline=_deadline())]  # fmt: skip
    assert listed == [b"file.bin", b"sub/deep"]


def test_links_inside_the_root_work(origin: DirectoryOrigin, tmp_path: Path) -> None:
    """R30: model caches are built of links from snapshots to blobs, and links of links."""
    model = tmp_path / "root" / "m"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "blobs" / "123").write_bytes(b"weights")
    (model / "snapshots" / "abc" / "model").symlink_to("../../blobs/123")
    (model / "snapshots" / "main").symlink_to("abc")
    assert _read_of(origin, "m", b"snapshots/abc/model") == b"weights"
    assert _read_of(origin, "m", b"snapshots/main/model") == b"weights"
    listed = origin.list_objects("m", b"snap", delimiter=None, after=None, deadline=_deadline())
    assert [e.key for e in listed] == [b"snapshots/abc/model", b"snapshots/main/model"]


def test_links_that_lead_nowhere_or_in_circles_end(origin: DirectoryOrigin, tmp_path: Path) -> None:
    bucket = tmp_path / "root" / "b"
    (bucket / "self").symlink_to("self")
    (bucket / "gone").symlink_to("missing")
    (bucket / "sub" / "up").symlink_to("../../b")
    for key in (b"self", b"gone"):
        assert _code(lambda key=key: origin.head(_id(key), deadline=_deadline())) == "not_found"
    assert _read_of(origin, "b", b"sub/up/sub/up/file.bin")[:2] == b"\x00\x01"
    listed = origin.list_objects("b", b"", delimiter=None, after=None, deadline=_deadline())
    assert [entry.key for entry in listed] == [
        b"file.bin", b"sub/deep", b"sub/up/file.bin",
    ]  # fmt: skip


def _read_of(origin: DirectoryOrigin, bucket: str, key: bytes) -> bytes:
    version = origin.head(_id(key, bucket), deadline=_deadline())
    view = origin.fetch(version, 0, version.size, deadline=_deadline(), cancel=CancelToken())
    return bytes(view)


def test_odd_names_survive(origin: DirectoryOrigin, tmp_path: Path) -> None:
    """R30: a key is bytes; what the file system can name, clients can read."""
    names = [b"a b", b"a%20b", b"a+b", b"a#b?c", "ü→".encode(), b"\xff\xfe", b"-", b"...", b"a\nb"]
    for name in names:
        (tmp_path / "root" / "other" / os.fsdecode(name)).write_bytes(b"=" + name)
    for name in names:
        assert _read_of(origin, "other", name) == b"=" + name
    listed = origin.list_objects("other", b"", delimiter=None, after=None, deadline=_deadline())
    assert [entry.key for entry in listed] == sorted([*names, b"secret"])


def test_a_fifo_does_not_block(origin: DirectoryOrigin, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "root" / "b" / "pipe")
    assert _code(lambda: origin.head(_id(b"pipe"), deadline=_deadline())) == "not_found"


def test_a_replaced_file_is_another_version(origin: DirectoryOrigin, tmp_path: Path) -> None:
    """F55, F65: a pinned read of a file that was replaced or written to fails."""
    path = tmp_path / "root" / "b" / "file.bin"
    old = origin.head(_id(b"file.bin"), deadline=_deadline())
    path.with_name("new").write_bytes(b"x" * old.size)
    path.with_name("new").replace(path)

    def fetch() -> object:
        return origin.fetch(old, 0, 10, deadline=_deadline(), cancel=CancelToken())

    assert _code(fetch) == "version_changed"
    now = origin.head(_id(b"file.bin"), deadline=_deadline())
    path.write_bytes(b"y" * 10)
    assert _code(
        lambda: origin.fetch(now, 0, now.size, deadline=_deadline(), cancel=CancelToken())
    ) == "version_changed"  # fmt: skip


def test_a_file_that_changes_during_a_read_is_not_mixed(
    origin: DirectoryOrigin, tmp_path: Path
) -> None:
    """F55, F65: the version is compared after the last byte as well."""
    path = tmp_path / "root" / "b" / "file.bin"
    version = origin.head(_id(b"file.bin"), deadline=_deadline())

    class Writer(CancelToken):
        """Is asked between the chunks of a read, and writes to the file then."""

        @property
        def cancelled(self) -> bool:
            with path.open("r+b") as file:
                file.write(b"other bytes")
            return False

    assert _code(
        lambda: origin.fetch(version, 0, version.size, deadline=_deadline(), cancel=Writer())
    ) == "version_changed"  # fmt: skip


def test_cancelled_and_late_reads_stop(origin: DirectoryOrigin) -> None:
    """R7: a cancelled read ends at once; so does one whose deadline passed."""
    version = origin.head(_id(b"file.bin"), deadline=_deadline())
    cancel = CancelToken()
    cancel.cancel()
    assert _code(
        lambda: origin.fetch(version, 0, 10, deadline=_deadline(), cancel=cancel)
    ) == "origin_cancelled"  # fmt: skip
    assert _code(
        lambda: origin.fetch(version, 0, 10, deadline=Deadline.after(0), cancel=CancelToken())
    ) == "deadline_exceeded"  # fmt: skip


def test_listings(origin: DirectoryOrigin, tmp_path: Path) -> None:
    """Byte order of whole keys; `after` and the delimiter as object stores have them."""
    bucket = tmp_path / "root" / "b"
    (bucket / "sub.txt").write_bytes(b"")
    (bucket / "sub" / "a").write_bytes(b"1")

    def keys(
        prefix: bytes = b"", delimiter: bytes | None = None, after: bytes | None = None
    ) -> list[bytes]:
        entries = origin.list_objects(
            "b", prefix, delimiter=delimiter, after=after, deadline=_deadline()
        )
        return [entry.key for entry in entries]

    assert keys() == [b"file.bin", b"sub.txt", b"sub/a", b"sub/deep"]
    assert keys(after=b"sub/a") == [b"sub/deep"]
    assert keys(b"sub/") == [b"sub/a", b"sub/deep"]
    assert keys(b"sub/d") == [b"sub/deep"]
    assert keys(delimiter=b"/") == [b"file.bin", b"sub.txt", b"sub/"]
    assert keys(b"sub/", b"/") == [b"sub/a", b"sub/deep"]
    assert keys(b"nowhere/") == []
    entries = origin.list_objects("b", b"", delimiter=b"/", after=None, deadline=_deadline())
    assert [isinstance(e, ListedPrefix) for e in entries] == [False, False, True]
    assert origin.list_buckets(deadline=_deadline()) == ["b", "other"]


def test_a_missing_root_says_so(tmp_path: Path) -> None:
    """A mount that is not there yet is unavailable, and its objects are not called absent."""
    root = tmp_path / "nowhere"
    origin = DirectoryOrigin(os.fsencode(root), Beneath(os.fsencode(root), lambda error: None))
    assert _code(lambda: origin.head(_id(b"x"), deadline=_deadline())) == "origin_unavailable"
    assert _code(lambda: origin.list_buckets(deadline=_deadline())) == "origin_unavailable"
    (root / "b").mkdir(parents=True)
    (root / "b" / "x").write_bytes(b"here now")
    assert _read(origin, b"x") == b"here now"


def test_a_refused_openat2_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old kernels and seccomp filters: the walk takes over, and the reason is told one time."""

    def refuse(root: int, path: bytes, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(beneath, "openat2_beneath", refuse)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"walked")
    refusals: list[OSError] = []
    origin = DirectoryOrigin(os.fsencode(tmp_path), Beneath(os.fsencode(tmp_path), refusals.append))
    assert [_read(origin, b"x") for _ in range(3)] == [b"walked"] * 3
    assert [error.errno for error in refusals] == [errno.EPERM]


def test_closing_an_unfinished_listing_leaves_nothing(origin: DirectoryOrigin) -> None:
    """A listing that is dropped before or in the middle gives its descriptors back."""
    for asked in (0, 1):
        entries = origin.list_objects("b", b"", delimiter=None, after=None, deadline=_deadline())
        assert [next(entries).key for _ in range(asked)] == [b"file.bin"][:asked]
        del entries
