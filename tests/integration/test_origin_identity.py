"""Who racerd is to an origin: every way to get credentials, against fakes of the platforms."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import botocore.credentials
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import ConfigError, RacerError
from racerd.ids import ObjectId
from racerd.origin.factory import make_origin
from racerd.origin.protocol import CancelToken
from racerd.origin.stores import Stores
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics
from tests.servers.azure import ACCOUNT, Azure, azurite
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.obstore_rest import no_sockets_left
from tests.servers.s3 import KEY, S3, SECRET, seaweedfs
from tests.servers.scripted import ScriptedServer, Seen
from tests.servers.tokens import TokenServer

DATA = bytes(range(256)) * 40
OBJECT = ObjectId("cache", "bucket", b"model/config.json")
EXPIRES = "2099-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def _no_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No identity of whoever runs the tests."""
    cache = Path.home() / ".cache" / "racer-tests"
    monkeypatch.setenv("RACER_TEST_CACHE", os.environ.get("RACER_TEST_CACHE", str(cache)))
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCE_", "IDENTITY_", "MSI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(DATA) as server:
        yield server


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


def read(url: str, options: OriginOptions, object_id: ObjectId = OBJECT) -> bytes:
    """Heads and reads the object through an origin of its own."""
    with no_sockets_left():
        origin = make_origin(url, options, cache="cache", metrics=Metrics())
        try:
            version = origin.head(object_id, deadline=Deadline.after(30))
            view = origin.fetch(
                version, 0, version.size, deadline=Deadline.after(30), cancel=CancelToken()
            )
            return bytes(view)
        finally:
            origin.close()


def failure(url: str, options: OriginOptions, object_id: ObjectId = OBJECT) -> RacerError:
    with pytest.raises(RacerError) as caught:
        read(url, options, object_id)
    return caught.value


def refuse(url: str, options: OriginOptions, problem: str) -> None:
    """Expects that no origin is made, for `problem`, which quotes no secret."""
    with pytest.raises(ConfigError, match=problem) as caught:
        make_origin(url, options, cache="cache", metrics=Metrics())
    assert "no base64!" not in str(caught.value)


def authorizations(server: ScriptedServer) -> set[str]:
    return {seen.fields.get("authorization", "") for seen in server.requests}


def s3(server: ScriptedServer, **more: object) -> OriginOptions:
    options = OriginOptions(endpoint=server.url, allow_http=True, region="eu-west-1", retries=0)
    return replace(options, **more)  # type: ignore[arg-type]


# --- S3 -----------------------------------------------------------------------------------------


def test_s3_static_keys(server: ScriptedServer) -> None:
    """R30: keys in the settings; a session token goes along."""
    options = s3(server, access_key_id="AKIDSTATIC", secret_access_key=Secret("s"),
                 session_token=Secret("session"))  # fmt: skip
    assert read("s3://", options) == DATA
    for seen in server.requests:
        assert "Credential=AKIDSTATIC/" in seen.fields["authorization"]
        assert "/eu-west-1/s3/" in seen.fields["authorization"]
        assert seen.fields["x-amz-security-token"] == "session"


def test_s3_anonymous(server: ScriptedServer) -> None:
    """R30: nothing is signed, even where the environment has keys."""
    assert read("s3://", s3(server, anonymous=True)) == DATA
    assert authorizations(server) == {""}


def test_s3_environment(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30, L3: keys, region and endpoint of the environment, the same for reads and listings."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    options = OriginOptions(retries=0)
    assert read("s3://", options) == DATA
    assert all("AKIDENV" in a and "/ap-south-1/" in a for a in authorizations(server))
    server.requests.clear()
    with no_sockets_left():
        origin = make_origin("s3://", options, cache="cache", metrics=Metrics())
        with pytest.raises(RacerError, match="no XML"):
            list(origin.list_objects("bucket", b"", delimiter=None, after=None,
                                     deadline=Deadline.after(30)))  # fmt: skip
        assert server.url in origin.description
        origin.close()
    (seen,) = server.requests
    assert "AKIDENV" in seen.target and "ap-south-1" in seen.target


def test_s3_profile(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R30: a profile of the shared files, by setting or by AWS_PROFILE."""
    (tmp_path / "credentials").write_text(
        "[one]\naws_access_key_id = AKIDONE\naws_secret_access_key = s\n"
        "[two]\naws_access_key_id = AKIDTWO\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert read("s3://", s3(server, profile="one")) == DATA
    assert all("AKIDONE" in text for text in authorizations(server))
    server.requests.clear()
    monkeypatch.setenv("AWS_PROFILE", "two")
    assert read("s3://", s3(server)) == DATA
    assert all("AKIDTWO" in text for text in authorizations(server))
    refuse("s3://", s3(server, profile="nobody"), "nobody")


def test_a_profile_is_not_believed_for_longer_than_it_is_good(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R30, F62: what botocore hands out is good for ten minutes, and may not be for longer."""
    shared = tmp_path / "credentials"
    shared.write_text(f"[one]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    provider = Stores("s3://", s3(server, profile="one"))._profile
    assert provider.ttl.total_seconds() <= botocore.credentials._DEFAULT_MANDATORY_REFRESH_TIMEOUT


def test_s3_web_identity(
    server: ScriptedServer,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """R30: a service account's token is changed into keys at STS, over TLS."""
    (tmp_path / "token").write_text("the-service-account-token")
    answer = (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        "<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>AKIDWEB</AccessKeyId>"
        f"<SecretAccessKey>s</SecretAccessKey><Expiration>{EXPIRES}</Expiration>"
        "<SessionToken>web-session</SessionToken></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    with TokenServer({"/": answer}, certificates.context) as sts:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        assert read("s3://", s3(server, ca_bundle=str(certificates.ca))) == DATA
    assert all("AKIDWEB" in text for text in authorizations(server))
    assert server.requests[0].fields["x-amz-security-token"] == "web-session"
    assert "the-service-account-token" in sts.requests[0][1] + sts.requests[0][3]
    assert "reader" in sts.requests[0][1] + sts.requests[0][3]


def test_s3_pod_identity(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R30: the agent on the node gives keys for the pod's token."""
    (tmp_path / "token").write_text("pod-token")
    keys = {"AccessKeyId": "AKIDPOD", "SecretAccessKey": "s", "Token": "t", "Expiration": EXPIRES}
    with TokenServer({"/v1/credentials": keys}) as agent:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent.url}/v1/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        assert read("s3://", s3(server)) == DATA
    assert all("AKIDPOD" in text for text in authorizations(server))
    assert agent.requests[0][2]["authorization"] == "pod-token"


def test_s3_instance_metadata(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: the instance's role, through version 2 of the metadata service."""
    base = "/latest/meta-data/iam/security-credentials/"
    keys = {"AccessKeyId": "AKIDNODE", "SecretAccessKey": "s", "Token": "t", "Code": "Success",
            "Expiration": EXPIRES}  # fmt: skip
    answers = {"/latest/api/token": "imds-token", base: "role", f"{base}role": keys}
    with TokenServer(answers) as imds:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", imds.url)
        assert read("s3://", s3(server)) == DATA
    assert all("AKIDNODE" in text for text in authorizations(server))
    assert imds.requests[0][0] == "PUT"
    assert imds.requests[1][2]["x-aws-ec2-metadata-token"] == "imds-token"


def test_no_credentials_says_so(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: a node without identity: the error names the ways, and nothing was asked unsigned."""
    with TokenServer({}) as nothing:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", nothing.url)
        error = failure("s3://", s3(server))
    assert error.code == "origin_unavailable"
    assert "credentials" in error.message and "anonymous" in error.hint
    assert server.requests == []


@pytest.mark.servers
def test_a_real_s3_server_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R30: SeaweedFS checks signatures: right, wrong and no keys, public and private buckets."""
    caplog.set_level(logging.DEBUG)
    with seaweedfs(tmp_path / "weed", ["bucket", "public"]) as weed:
        weed.put("bucket", OBJECT.key, b"private")
        weed.put("public", OBJECT.key, b"for all")
        good = OriginOptions(
            endpoint=weed.url, allow_http=True, access_key_id=KEY, secret_access_key=Secret(SECRET)
        )
        public = ObjectId("cache", "public", OBJECT.key)
        nobody = OriginOptions(endpoint=weed.url, allow_http=True, anonymous=True)
        wrong = replace(good, secret_access_key=Secret("wrong-secret-key"), retries=0)
        assert read("s3://", good) == b"private"
        assert read("s3://", nobody, public) == b"for all"
        for options in (nobody, wrong):
            error = failure("s3://", options)
            assert error.code == "forbidden"
            assert "wrong-secret-key" not in f"{error.message}{error.hint}{caplog.text}"
        assert _listed(weed, nobody, "public") == [OBJECT.key]
        assert _listed(weed, good, "bucket") == [OBJECT.key]


def _listed(weed: S3, options: OriginOptions, bucket: str) -> list[bytes]:
    with no_sockets_left():
        origin = make_origin("s3://", options, cache="cache", metrics=Metrics())
        entries = origin.list_objects(
            bucket, b"", delimiter=None, after=None, deadline=Deadline.after(30)
        )
        keys = [entry.key for entry in entries]
        origin.close()
        return keys


# --- Azure --------------------------------------------------------------------------------------


def az(server: ScriptedServer, **more: object) -> OriginOptions:
    options = OriginOptions(endpoint=f"{server.url}/account", allow_http=True, retries=0)
    return replace(options, **more)  # type: ignore[arg-type]


@pytest.mark.servers
def test_azurite_decides(tmp_path: Path) -> None:
    """R30: a SAS that is right, wrong, or for something else; keys from the environment."""
    with azurite(tmp_path / "azurite", ["bucket"]) as azure:
        azure.put("bucket", OBJECT.key, b"private")
        base = OriginOptions(endpoint=azure.url, allow_http=True, retries=0)
        url = f"az://{ACCOUNT}"
        assert read(url, replace(base, sas=Secret(azure.sas()))) == b"private"
        assert read(url, replace(base, sas=Secret("?" + azure.sas()))) == b"private"
        assert _sas_listing(url, azure, base) == [OBJECT.key]
        broken = azure.sas()[:-8] + "AAAA%3D"
        error = failure(url, replace(base, sas=Secret(broken)))
        assert error.code == "forbidden" and "sig" not in error.message + error.hint
        assert failure(url, replace(base, anonymous=True)).code in ("forbidden", "not_found")


def _sas_listing(url: str, azure: Azure, base: OriginOptions) -> list[bytes]:
    with no_sockets_left():
        origin = make_origin(
            url, replace(base, sas=Secret(azure.sas())), cache="cache", metrics=Metrics()
        )
        entries = origin.list_objects(
            "bucket", b"", delimiter=None, after=None, deadline=Deadline.after(30)
        )
        keys = [entry.key for entry in entries]
        origin.close()
        return keys


def _bearer(server: ScriptedServer, token: str) -> bool:
    return authorizations(server) == {f"Bearer {token}"}


def test_an_account_key_that_is_none_is_refused_unquoted(server: ScriptedServer) -> None:
    refuse("az://account", az(server, account_key=Secret("no base64!")), "account_key")


def test_azure_bearer_token(server: ScriptedServer) -> None:
    assert read("az://account", az(server, bearer_token=Secret("tok"))) == DATA
    assert _bearer(server, "tok")


def test_azure_workload_identity(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R30: the pod's token is changed into one of Entra ID."""
    (tmp_path / "token").write_text("federated-token")
    answer = {"access_token": "entra", "expires_in": 3600, "token_type": "Bearer"}
    with TokenServer({"/tenant/oauth2/v2.0/token": answer}) as entra:
        monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", entra.url)
        monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
        monkeypatch.setenv("AZURE_CLIENT_ID", "client")
        assert read("az://account", az(server)) == DATA
    assert _bearer(server, "entra")
    assert "federated-token" in entra.requests[0][3]


def test_azure_client_secret(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"access_token": "entra", "expires_in": 3600, "token_type": "Bearer"}
    with TokenServer({"/tenant/oauth2/v2.0/token": answer}) as entra:
        monkeypatch.setenv("AZURE_CLIENT_SECRET", "secret")
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", entra.url)
        monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
        monkeypatch.setenv("AZURE_CLIENT_ID", "client")
        assert read("az://account", az(server)) == DATA
    assert _bearer(server, "entra")


def test_azure_managed_identity(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: the identity of the node, from its metadata service."""
    answer = {"access_token": "managed", "expires_in": "3600", "expires_on": "4070908800",
              "token_type": "Bearer", "resource": "https://storage.azure.com"}  # fmt: skip
    with TokenServer({"/metadata/identity/oauth2/token": answer}) as imds:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{imds.url}/metadata/identity/oauth2/token")
        assert read("az://account", az(server)) == DATA
    assert _bearer(server, "managed")


# --- Google -------------------------------------------------------------------------------------


def gs(server: ScriptedServer, **more: object) -> OriginOptions:
    options = OriginOptions(endpoint=server.url, allow_http=True, retries=0)
    return replace(options, **more)  # type: ignore[arg-type]


def test_google_anonymous_and_bearer_token(server: ScriptedServer) -> None:
    """R30: public buckets, and a token of the operator's."""
    assert read("gs://", gs(server, anonymous=True)) == DATA
    assert authorizations(server) == {""}
    server.requests.clear()
    assert read("gs://", gs(server, bearer_token=Secret("tok"))) == DATA
    assert _bearer(server, "tok")


def test_google_metadata_server(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: the node's service account, and GKE's Workload Identity, which speaks the same."""
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    answer = {"access_token": "google", "expires_in": 3600, "token_type": "Bearer"}
    with TokenServer({path: answer}) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.address)
        monkeypatch.setenv("GCE_METADATA_ROOT", metadata.address)
        assert read("gs://", gs(server)) == DATA
    assert _bearer(server, "google")
    assert metadata.requests[0][2]["metadata-flavor"] == "Google"


def test_google_service_account(server: ScriptedServer, tmp_path: Path) -> None:
    """R30: a key file; requests carry a token signed with it."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account", "client_email": "reader@example.org", "private_key_id": "1",
        "private_key": key.decode(), "client_id": "1",
    }  # fmt: skip
    path = tmp_path / "account.json"
    path.write_text(json.dumps(account))
    assert read("gs://", gs(server, service_account_file=str(path))) == DATA
    (text,) = authorizations(server)
    assert text.startswith("Bearer ey") and text.count(".") == 2
    nowhere = str(tmp_path / "nowhere.json")
    refuse("gs://", gs(server, service_account_file=nowhere), "service_account_file")


@pytest.mark.parametrize("way", ["metadata", "token", "token file"])
@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
def test_services_without_an_identity_say_so(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, way: str
) -> None:
    """R30, L5: it is the credentials that failed and not the object, wherever they come from."""
    url = "az://account" if scheme == "az" else f"{scheme}://"
    (tmp_path / "token").write_text("token")
    token = str(tmp_path / ("nowhere" if way == "token file" else "token"))
    with TokenServer({}) as nothing:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", nothing.url)
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{nothing.url}/token")
        monkeypatch.setenv("GCE_METADATA_HOST", nothing.address)
        monkeypatch.setenv("GCE_METADATA_ROOT", nothing.address)
        if way != "metadata":
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", token)
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", nothing.url)
            monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", token)
            monkeypatch.setenv("AZURE_AUTHORITY_HOST", nothing.url)
            monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
            monkeypatch.setenv("AZURE_CLIENT_ID", "client")
        error = failure(url, az(server) if scheme == "az" else gs(server))
    assert error.code == "origin_unavailable" and "no credentials" in error.message
    assert server.requests == []


# --- HTTP, and TLS everywhere -------------------------------------------------------------------


def test_http_bearer_token(server: ScriptedServer) -> None:
    """R30: hubs want one for private models."""
    assert read(server.url, OriginOptions(bearer_token=Secret("tok"))) == DATA
    assert _bearer(server, "tok")


ANONYMOUS = {"anonymous": True, "retries": 0, "region": "us-east-1"}


@pytest.mark.parametrize("scheme", ["http", "s3", "gs", "az"])
def test_a_private_ca_is_honoured_everywhere(
    certificates: Certificates, scheme: str, tmp_path: Path
) -> None:
    """L6: with the bundle it works; without, the error names the setting, and what is in use."""
    with ScriptedServer(DATA, tls=certificates.context) as server:
        url = {"http": server.url, "az": "az://account"}.get(scheme, f"{scheme}://")
        endpoint = None if scheme == "http" else server.url
        trusting = OriginOptions(
            endpoint=endpoint, ca_bundle=str(certificates.ca), anonymous=True, retries=0
        )
        assert read(url, trusting) == DATA
        error = failure(url, replace(trusting, ca_bundle=None))
        assert error.code == "origin_unavailable"
        assert "certificate is not trusted" in error.message and "ca_bundle" in error.hint
        (tmp_path / "no.pem").write_text("no certificate")
        for broken in (tmp_path / "nowhere.pem", tmp_path, tmp_path / "no.pem"):
            refuse(url, replace(trusting, ca_bundle=str(broken)), "ca_bundle")


def test_plain_http_has_to_be_allowed(server: ScriptedServer) -> None:
    """R30: credentials do not travel in the clear by accident."""
    for url in ("s3://", "gs://", "az://account"):
        refuse(url, OriginOptions(endpoint=server.url), "allow_http")
    assert server.requests == []


def test_virtual_hosted_buckets(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: without path style the bucket is part of the host's name."""
    monkeypatch.setenv("http_proxy", server.url)  # Names resolve nowhere here; a proxy sees them.
    options = s3(server, endpoint="http://store.test", path_style=False, anonymous=True)
    odd = ObjectId("cache", "bucket", b"a//b")
    for object_id, path in ((OBJECT, "/model/config.json"), (odd, "/a//b")):
        server.requests.clear()
        assert read("s3://", options, object_id) == DATA
        targets = {seen.target for seen in server.requests}
        assert targets == {f"http://bucket.store.test{path}"}


def test_buckets_can_be_restricted(server: ScriptedServer) -> None:
    """R30: other buckets cannot be named, and the error lists those that can."""
    options = s3(server, anonymous=True, buckets=("models", "public"))
    error = failure("s3://", options)
    assert error.code == "forbidden" and "models, public" in error.hint
    origin = make_origin("s3://", options, cache="cache", metrics=Metrics())
    assert origin.list_buckets(deadline=Deadline.after(5)) == ["models", "public"]
    with pytest.raises(RacerError, match="not one that this cache may read"):
        list(origin.list_objects("bucket", b"", delimiter=None, after=None,
                                 deadline=Deadline.after(5)))  # fmt: skip
    origin.close()
    only = make_origin("s3://models", s3(server), cache="cache", metrics=Metrics())
    assert only.list_buckets(deadline=Deadline.after(5)) == ["models"]
    only.close()
    assert server.requests == []


def test_requests_are_seen(server: ScriptedServer) -> None:
    """The fake itself: what the tests above believe is what was sent."""
    assert read(server.url, OriginOptions()) == DATA
    assert [seen.method for seen in server.requests] == ["HEAD", "GET"]
    assert isinstance(server.requests[0], Seen)
