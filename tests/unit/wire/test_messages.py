"""Typed requests: every operation, and what each refuses."""

from __future__ import annotations

import pytest

from racerd.errors import ProtocolError, RacerError, RequestError
from racerd.ids import ObjectId
from racerd.wire.errors import MethodNotAllowed
from racerd.wire.heads import RequestHead
from racerd.wire.messages import (
    Evict,
    Explain,
    GetInfo,
    GetObject,
    GpuRead,
    HostRead,
    ListBuckets,
    ListObjects,
    Message,
    Prefetch,
    RegisterTarget,
    ReleaseTarget,
    StatObject,
    Takes,
    deadline_seconds,
    parse_message,
)
from racerd.wire.ranges import ByteRange

K = ObjectId("c", "b", b"k")
GPU = "GPU-7374616e-642d-696e-2d67-70750000000a"
ON_GPU = {"racer_target_kind": "gpu", "racer_gpu": GPU, "racer_target_bytes": "7"}
TARGET = "0123456789abcdef" * 2


def parse(line: str, **fields: str) -> Message:
    method, target = line.split(" ")
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return parse_message(RequestHead(method, target, named), "c")


def test_every_operation() -> None:
    assert parse("GET /v1/info") == GetInfo()
    assert parse("HEAD /v1/objects/b/k") == StatObject(K, None, None)
    assert parse("GET /v1/objects/b/k", range="bytes=1-", if_match='W/"x"') == GetObject(
        K, 'W/"x"', ByteRange(1, None, None)
    )
    assert parse("GET /v1/list/") == ListBuckets()
    assert parse("GET /v1/list/b/") == ListObjects("b", b"", None, None, 1000)
    assert parse("GET /v1/list/b/p%2B?delimiter=/&limit=7&after=p%2Fa+") == ListObjects(
        "b", b"p+", b"/", b"p/a+", 7
    )
    assert parse("GET /v1/list/b/?delimiter=%2F&after=&limit=10000") == ListObjects(
        "b", b"", b"/", None, 10_000
    )
    assert parse("POST /v1/targets") == RegisterTarget("host")
    assert parse("POST /v1/targets", **ON_GPU) == RegisterTarget("gpu", GPU, 7)
    shouted = {**ON_GPU, "racer_gpu": GPU.upper()}
    assert parse("POST /v1/targets", **shouted) == RegisterTarget("gpu", GPU, 7)
    assert parse("POST /v1/gpu-read/b/k", racer_target=TARGET, racer_target_offset="9") == GpuRead(
        K, None, None, TARGET, 9
    )
    assert parse(f"DELETE /v1/targets/{TARGET}") == ReleaseTarget(TARGET)
    assert parse("POST /v1/prefetch/b/k") == Prefetch(K, None, None)
    assert parse("POST /v1/evict/b/k") == Evict("b", b"k", prefix=False)
    assert parse("POST /v1/evict/b/?prefix=true") == Evict("b", b"", prefix=True)
    assert parse("GET /v1/explain/b/k") == Explain(K, None, None)


def test_host_read_takes_a_descriptor_unless_it_names_a_target() -> None:
    one_shot = parse("POST /v1/host-read/b/k", racer_target_offset="4096")
    assert one_shot == HostRead(K, None, None, None, 4096)
    assert one_shot.takes is Takes.ONE
    named = parse("POST /v1/host-read/b/k", racer_target=TARGET)
    assert named == HostRead(K, None, None, TARGET, 0)
    assert named.takes is Takes.NONE
    assert parse("POST /v1/targets").takes is Takes.ONE
    assert parse("GET /v1/info").takes is Takes.NONE


def test_odd_keys_survive() -> None:
    message = parse("GET /v1/objects/b//..//%2e%2F%20+%25%FF/")
    assert isinstance(message, GetObject)
    assert message.object_id.key == b"/..//./ +%\xff/"


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("GET /v1/info/", {}),
        ("GET /v1/info?x=1", {}),
        ("GET /v1/objects/b", {}),
        ("GET /v1/objects/b/", {}),
        ("GET /v1/objects//k", {}),
        ("GET /v1/objects/a%2Fb/k", {}),
        ("GET /v1/objects/b/%00", {}),
        ("GET /v1/objects/b/" + "k" * 1025, {}),
        ("GET /v1/objects/b/k?versionId=3", {}),
        ("GET /v1/objects/b/k?", {}),
        ("GET /v1/objects/b/k", {"range": "bytes=1-2,3-4"}),
        ("GET /v1/objects/b/k", {"if_match": "*"}),
        ("GET /v1/objects/b/k", {"if_match": "unquoted"}),
        ("GET /v1/objects/b/k", {"if_match": '"a", "b"'}),
        ("GET /v1/objects/b/k", {"if_match": 'w/"a"'}),
        ("GET /v1/list/b", {}),
        ("GET /v1/list", {}),
        ("GET /v1/list/b/?delimiter=x", {}),
        ("GET /v1/list/b/?limit=0", {}),
        ("GET /v1/list/b/?limit=10001", {}),
        ("GET /v1/list/b/?limit=-1", {}),
        ("GET /v1/list/b/?max-keys=1", {}),
        ("GET /v1/list/?limit=1", {}),
        ("GET /v1/list/b/" + "p" * 1025, {}),
        ("POST /v1/targets/x", {}),
        ("DELETE /v1/targets", {}),
        ("DELETE /v1/targets/" + TARGET.upper(), {}),
        ("DELETE /v1/targets/" + TARGET + "0", {}),
        ("POST /v1/host-read/b/k", {"racer_target": "x"}),
        ("POST /v1/host-read/b/k", {"racer_target_offset": "-1"}),
        ("POST /v1/host-read/b/k", {"racer_target_offset": "1e3"}),
        ("POST /v1/host-read/b/k", {"racer_target_offset": ""}),
        ("POST /v1/gpu-read/b/k", {}),
        ("POST /v1/gpu-read/b/k", {"racer_target": "x"}),
        ("POST /v1/gpu-read/b/k", {"racer_target": TARGET, "racer_target_offset": "-1"}),
        ("POST /v1/targets", {"racer_target_kind": "gpu"}),
        ("POST /v1/targets", {"racer_target_kind": "gpu", "racer_gpu": GPU}),
        ("POST /v1/targets", {**ON_GPU, "racer_target_bytes": "0"}),
        ("POST /v1/targets", {**ON_GPU, "racer_target_bytes": "2MiB"}),
        ("POST /v1/targets", {**ON_GPU, "racer_gpu": GPU[4:]}),
        ("POST /v1/targets", {**ON_GPU, "racer_gpu": GPU + "0"}),
        ("POST /v1/targets", {**ON_GPU, "racer_gpu": "0"}),
        ("POST /v1/evict/b/", {}),
        ("POST /v1/evict/b/k?prefix=yes", {}),
        ("POST /v1/evict/b/k?prefx=true", {}),
    ],
)
def test_malformed_requests_are_refused(line: str, fields: dict[str, str]) -> None:
    with pytest.raises(RacerError) as caught:
        parse(line, **fields)
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize("target", ["/", "/v1", "/v1/", "/v2/info", "/v1/object/b/k", "//v1/info"])
def test_an_unknown_operation_is_named(target: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(f"GET {target}")
    assert caught.value.code == "unknown_operation"
    assert "objects" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("POST /v1/objects/b/k", ("GET", "HEAD")),
        ("GET /v1/targets", ("POST", "DELETE")),
        ("GET /v1/host-read/b/k", ("POST",)),
        ("DELETE /v1/evict/b/k", ("POST",)),
        ("HEAD /v1/info", ("GET",)),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(line: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        parse(line)
    assert caught.value.allowed == allowed


def test_deadlines() -> None:
    def seconds(text: str | None) -> float:
        fields = {} if text is None else {"racer-deadline-ms": text}
        return deadline_seconds(RequestHead("GET", "/", fields))

    assert (seconds(None), seconds("1"), seconds("86400000")) == (300.0, 0.001, 86_400.0)
    for text in ("0", "86400001", "-1", "1.5", "", "9" * 30):
        with pytest.raises(ProtocolError):
            seconds(text)
