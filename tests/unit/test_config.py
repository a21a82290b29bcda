"""Settings: sources, precedence, and errors that say what is wrong, all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from racerd.cli import describe, parse_flags
from racerd.config import Settings, load_settings
from racerd.config.declarations import SETTINGS, Surroundings
from racerd.errors import ConfigError
from racerd.units import GIB, MIB
from tools.settings_table import DOCUMENT, updated


def load(
    *arguments: str,
    environ: dict[str, str] | None = None,
    root: bool = True,
    cwd: Path = Path("/w"),
) -> Settings:
    around = Surroundings(environ or {}, root, Path("/home/user"))
    loaded = load_settings(parse_flags(arguments), environ or {}, around=around, cwd=cwd)
    return loaded.settings


def problems(
    *arguments: str, environ: dict[str, str] | None = None, root: bool = True
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, environ=environ, root=root)
    return caught.value.problems


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "racer.toml"
    path.write_text(text)
    return f"--config={path}"


def test_no_configuration_serves_something() -> None:
    """R17, R31: a cache `local` on ./models, gpu auto, bounded memory and slab, known places."""
    settings = load()
    assert settings.caches["local"].origin == "file:///w/models"
    assert (settings.gpu, settings.diagnostics) == ("auto", ("127.0.0.1", 9090))
    assert settings.state_dir == Path("/var/lib/racer")
    assert settings.run_dir == Path("/run/racer")
    assert settings.key_file == Path("/var/lib/racer/keys")
    (disk,) = settings.disks
    assert disk.path == Path("/var/lib/racer/slab-0")
    assert disk.size_bytes is not None
    assert disk.size_bytes <= 64 * GIB
    assert 64 * MIB <= settings.memory <= 16 * GIB


def test_places_of_an_ordinary_user() -> None:
    settings = load(environ={"XDG_RUNTIME_DIR": "/run/user/7"}, root=False)
    assert settings.state_dir == Path("/home/user/.local/state/racer")
    assert settings.run_dir == Path("/run/user/7/racer")
    (problem,) = problems(root=False)
    assert "--run-dir" in problem


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, 'memory = "1GiB"\ndirty = "64MiB"\nplaintext = 100000000\n')
    settings = load(
        file, "--memory=3GiB", environ={"RACER_MEMORY": "2GiB", "RACER_DIRTY": "128MiB"}
    )
    assert (settings.memory, settings.dirty, settings.plaintext) == (3 * GIB, 128 * MIB, 10**8)


def test_check_config_says_where_each_value_came_from(tmp_path: Path) -> None:
    """F41: the effective settings can be seen."""
    flags = parse_flags([config(tmp_path, "request_pages = 3\n"), "--memory=1GiB"])
    text = describe(load_settings(flags, {"RACER_GPU": "off"}))
    found = {line.split()[0]: line.split()[-1] for line in text.splitlines()}
    assert found["memory"] == "flag"
    assert found["gpu"] == "variable"
    assert found["request_pages"] == "file"
    assert found["drain_seconds"] == "default"


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        'memori = 1\ndrain_seconds = "soon"\n[caches.Bad_Name]\norigin = "file:///x"\n'
        '[caches.ok]\norigin = "ftp://x"\nregoin = "eu"\n[caches.empty]\n'
        '[[disks]]\npath = "/d"\nsize = 4\n',
    )
    found = "\n".join(problems(file, "--gpu=maybe", environ={"RACER_SCRUB_BYTES_PER_SEC": "1"}))
    for expected in (
        "memori: unknown; did you mean memory?",
        "drain_seconds: a number of seconds is wanted",
        "caches.Bad_Name",
        "'ftp://x' has no known scheme",
        "caches.ok.regoin: unknown; did you mean region?",
        "caches.empty.origin: missing",
        "disks[0].size: unknown",
        "--gpu: one of auto, on, off is wanted",
        "RACER_SCRUB_BYTES_PER_SEC: unknown; did you mean RACER_SCRUB_BYTES_PER_SECOND?",
    ):
        assert expected in found


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("--memory=12XB", "unit"),
        ("--memory=17", "out of bounds"),
        ("--page-bytes=100000", "power of two"),
        ("--frame-bytes=32MiB", "frame_bytes"),
        ("--memory=16MiB", "4 pages"),
        ("--diagnostics=nowhere", "HOST:PORT"),
        ("--diagnostics=h:99999", "HOST:PORT"),
        ("--socket-mode=999", "file mode"),
        ("--socket-mode=0440", "file mode"),
        ("--free-space-floor=150%", "out of bounds"),
        ("--request-pages=1.5", "whole number"),
        ("--cache=nothing", "NAME=URL"),
        ("--cache=a=s3://user:secret@host", "credentials"),
        ("--cache=a=file://relative/x", "file:///absolute"),
        ("--disk=/d:12", "out of bounds"),
        ("--disk=/d:many", "PATH:BYTES"),
        ("--log-level=loud", "debug, info"),
        ("--config=/does/not/exist", "cannot be read"),
    ],
)
def test_bad_values_are_refused_with_the_reason(argument: str, part: str) -> None:
    """F13: each limit is in the message."""
    found = problems(argument)
    assert any(part in problem for problem in found)
    assert "secret" not in str(found)


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    """F75, R31: the limit of 107 bytes is checked before anything starts, and is in the message."""
    name = "a" * 63
    run_dir = "/run/" + "r" * (107 - len(f"/run//{name}/client/socket"))
    assert load(f"--run-dir={run_dir}", f"--cache={name}=file:///m")
    (problem,) = problems(f"--run-dir={run_dir}r", f"--cache={name}=file:///m")
    assert "107" in problem
    longest = ".".join(["b" * 40, "c" * 41])
    assert load(f"--cache={longest}=file:///m")
    assert problems(f"--cache={longest}d=file:///m")


def test_one_disk_twice_is_refused() -> None:
    assert "twice" in problems("--disk=/d:1GiB", "--disk=/d:2GiB")[0]


@pytest.mark.parametrize(("text", "gpu"), [("true", "on"), ("false", "off"), ("auto", "auto")])
def test_the_gpu_variable_of_deployments(text: str, gpu: str) -> None:
    """R17: RACER_ENABLE_GPU=auto|true|false."""
    assert load(environ={"RACER_ENABLE_GPU": text}).gpu == gpu
    assert load("--gpu=off", environ={"RACER_ENABLE_GPU": text}).gpu == "off"
    assert "RACER_ENABLE_GPU" in problems(environ={"RACER_ENABLE_GPU": "yes"})[0]


def test_variables_of_others_are_not_ours() -> None:
    """Kubernetes makes variables of every Service; the client has its own."""
    load(environ={"RACER_SOCKET": "/s", "RACER_DATAPLANE_SERVICE_HOST": "10.0.0.1",
                  "RACER_DATAPLANE_PORT_9090_TCP": "tcp://10.0.0.1:9090"})  # fmt: skip


def test_secrets_do_not_show(tmp_path: Path) -> None:
    """R30: a credential in a setting is never printed."""
    file = config(
        tmp_path, '[caches.a]\norigin = "s3://"\nsecret_access_key = "TOPSECRET"\nsas = "SIG"\n'
    )
    settings = load(file)
    shown = repr(settings) + describe(load_settings(parse_flags([file]), {}))
    assert "TOPSECRET" not in shown
    assert "SIG" not in shown
    secret = settings.caches["a"].options.secret_access_key
    assert secret is not None
    assert secret.reveal() == "TOPSECRET"


def test_lists_from_variables() -> None:
    settings = load(
        environ={"RACER_CACHES": "a=file:///x,b=s3://", "RACER_DISKS": "/d1:1GiB,/d2:2GiB"}
    )
    assert {name: c.origin for name, c in settings.caches.items()} == {
        "a": "file:///x",
        "b": "s3://",
    }
    assert [d.size_bytes for d in settings.disks] == [GIB, 2 * GIB]


def test_the_documentation_shows_every_setting() -> None:
    text = DOCUMENT.read_text()
    assert updated(text) == text, "run `python -m tools.settings_table --write`"


def test_every_setting_has_a_field_and_a_flag() -> None:
    fields: dict[str, Any] = vars(load())
    assert {s.name for s in SETTINGS} == fields.keys() - {"disks", "caches"}
    assert parse_flags([f"{s.flag}=1" for s in SETTINGS])
