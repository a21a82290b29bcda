"""Settings: sources, precedence, and errors that say what is wrong, all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from racerd.cli import describe, main, parse_flags
from racerd.config import Loaded, OriginOptions, Settings, diff, load_settings
from racerd.config.caches import OPTIONS
from racerd.config.declarations import SETTINGS, Surroundings
from racerd.config.machine import SLAB_MAX, SLAB_MIN, FileSystem, Machine, _limits_upwards
from racerd.errors import ConfigError
from racerd.units import GIB, KIB, MIB, TIB
from tools.settings_table import DOCUMENT, updated

MACHINE = Machine(available_bytes=64 * GIB, limit_bytes=None)
FILE_SYSTEM = FileSystem(total_bytes=TIB, free_bytes=TIB // 2)


def loaded(
    *arguments: str,
    environ: dict[str, str] | None = None,
    root: bool = True,
    folder: Path = Path("/w"),
    machine: Machine = MACHINE,
    file_system: FileSystem = FILE_SYSTEM,
) -> Loaded:
    home = Path("/home/user")
    around = Surroundings(environ or {}, root, home, folder, machine, lambda _: file_system)
    return load_settings(parse_flags(arguments), environ or {}, around=around)


def load(*arguments: str, **more: Any) -> Settings:
    return loaded(*arguments, **more).settings


def problems(*arguments: str, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **more)
    return caught.value.problems


def config(tmp_path: Path, text: str, mode: int = 0o644) -> str:
    path = tmp_path / "racer.toml"
    path.write_text(text)
    path.chmod(mode)
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
    assert disk.size_bytes == 64 * GIB
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
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()}
    assert found["memory"].endswith("flag --memory")
    assert found["gpu"].endswith("variable RACER_GPU")
    assert found["request_pages"].endswith(f"file {tmp_path}/racer.toml")
    assert found["drain_seconds"].endswith("default")
    assert found["caches.local"].endswith("default")
    assert found["socket_mode"].startswith("0660")
    assert found["memory"].startswith("1 GiB")


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


def test_one_disk_or_cache_twice_is_refused() -> None:
    assert "twice" in problems("--disk=/d:1GiB", "--disk=/d:2GiB")[0]
    assert "twice" in problems("--cache=a=file:///x", "--cache=a=file:///y")[0]


def test_compatibility_mode_follows_the_variable_of_cufile() -> None:
    """R11: CUFILE_ALLOW_COMPAT_MODE=true turns it on; a setting of ours is stronger."""
    assert load().cufile_allow_compat_mode is False
    for text, expected in (("true", True), ("TRUE", True), ("1", False), ("false", False)):
        assert load(environ={"CUFILE_ALLOW_COMPAT_MODE": text}).cufile_allow_compat_mode is expected
    on = {"CUFILE_ALLOW_COMPAT_MODE": "true"}
    assert load("--cufile-allow-compat-mode=false", environ=on).cufile_allow_compat_mode is False


def test_staging_holds_pages() -> None:
    """R10: a GPU that cannot stage two pages would serve nobody: said before anything starts."""
    [problem] = problems("--gpu-staging-bytes=32MiB")
    assert problem.startswith("gpu_staging_bytes: 32 MiB must hold 2 pages of 16 MiB")
    assert load("--gpu-staging-bytes=33MiB").gpu_staging_bytes == 33 << 20
    assert load("--gpu-staging-bytes=1MiB", "--gpu=off").gpu == "off"


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
    text = (
        '[caches.a]\norigin = "s3://"\naccess_key_id = "k"\nsecret_access_key = "TOPSECRET"\n'
        '[caches.b]\norigin = "az://account"\nsas = "TOPSECRET"\n'
    )
    file = config(tmp_path, text, 0o600)
    settings = load(file)
    shown = repr(settings) + str(settings) + describe(loaded(file))
    assert "TOPSECRET" not in shown
    assert "***" in shown
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


# ---------- sources


def test_unknown_flags_are_told_with_the_rest_and_the_nearest_name() -> None:
    found = problems("--memroy=1GiB", "--drain-seconds=-1", "leftover", "--mem=1")
    text = "\n".join(found)
    assert "--memroy=1GiB: unknown; did you mean --memory?" in text
    assert "--drain-seconds: -1 s is out of bounds" in text
    assert "leftover" in text
    assert "--mem=1" in text  # No abbreviations: a new flag must not change what an old one means.
    assert len(found) == 4


def test_an_error_names_source_setting_kind_and_limit(tmp_path: Path) -> None:
    file = config(tmp_path, 'retries = 1\nconnections_max = 0\nmemory = "1Gi"\n')
    found = problems(file, "--drain-seconds=never", environ={"RACER_DISK_THREADS": "0"})
    assert (
        "--drain-seconds: a number of seconds is wanted (drain_seconds: seconds, 0 to 3600 s)"
        in found
    )
    assert (
        "RACER_DISK_THREADS: 0 is out of bounds (disk_threads: whole number, 1 to 1,024)" in found
    )
    assert (
        f"{tmp_path}/racer.toml: connections_max: 0 is out of bounds (connections_max: whole"
        in ("\n".join(found))
    )
    assert f"{tmp_path}/racer.toml: retries: unknown" in found
    (memory,) = [problem for problem in found if ": memory:" in problem]
    assert "unit 'Gi'" in memory
    assert "(memory: byte size, 1 MiB to 64 TiB)" in memory


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e999", "", " ", "9" * 400, "true", "0x10", "\u0661\u0662x"]
)
@pytest.mark.parametrize("flag", ["--drain-seconds", "--disk-threads", "--free-space-floor"])
def test_odd_numbers_are_refused_not_fatal(flag: str, text: str) -> None:
    (problem,) = problems(f"{flag}={text}")
    assert problem.startswith(flag)


@pytest.mark.parametrize(
    "text",
    ["request_pages = true\n", "request_pages = 1979-05-27\n", "request_pages = [1]\n",
     'memory = 1.5\n', "memory = true\n", "drain_seconds = nan\n", "gpu = true\n",
     'state_dir = ""\n', 'state_dir = "a\\u0000b"\n', 'run_dir = "~nobody-here/x"\n',
     "socket_mode = 660\n", "caches = 3\n", "disks = 3\n", "disks = [3]\n", "[caches]\na = 1\n",
     'disks = ["~nobody-here/x"]\n', "[[disks]]\nbytes = 4\n", "[caches.a]\norigin = 1\n"],
)  # fmt: skip
def test_toml_of_the_wrong_kind_is_one_problem(tmp_path: Path, text: str) -> None:
    (problem,) = problems(config(tmp_path, text))
    assert str(tmp_path) in problem


@pytest.mark.parametrize("content", [b"memory = ", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_no_toml_is_one_problem(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "racer.toml"
    path.write_bytes(content)
    (problem,) = problems(environ={"RACER_CONFIG": str(path)})
    assert problem.startswith(f"RACER_CONFIG {path}: not TOML")
    (problem,) = problems(f"--config={tmp_path}")
    assert "cannot be read: Is a directory" in problem


def test_two_names_of_one_setting_that_both_speak_are_refused() -> None:
    """R17, L10: one switch."""
    (problem,) = problems(environ={"RACER_GPU": "on", "RACER_ENABLE_GPU": "true"})
    assert "RACER_ENABLE_GPU" in problem


def test_addresses() -> None:
    assert load("--diagnostics=off").diagnostics is None
    assert load("--diagnostics=[::1]:0").diagnostics == ("::1", 0)
    assert "[::1]:8" in describe(loaded("--diagnostics=[::1]:8"))
    for text in ("::1:9090", "host", ":1", "host:", "host:1x", "host:-1", "[]:1"):
        assert "HOST:PORT" in problems(f"--diagnostics={text}")[0]


def test_a_socket_for_everybody_is_allowed_and_said() -> None:
    """F77: 0660 unless somebody says otherwise, and then it is said."""
    assert load().socket_mode == 0o660
    (warning,) = loaded("--socket-mode=0666").warnings
    assert "every user of this node" in warning


# ---------- caches and disks


def test_a_flag_replaces_the_origin_and_keeps_the_options(tmp_path: Path) -> None:
    file = config(
        tmp_path, '[caches.a]\norigin = "s3://"\nregion = "eu"\n[caches.b]\norigin = "s3://"\n'
    )
    settings = load(file, "--cache=a=s3://bucket", environ={"RACER_CACHES": "c=file:///never"})
    assert list(settings.caches) == ["a", "b"]
    assert settings.caches["a"].origin == "s3://bucket"
    assert settings.caches["a"].options.region == "eu"


def test_the_default_origin_is_a_url_whatever_the_folder_is_called(tmp_path: Path) -> None:
    odd = tmp_path / "a b%20#?ü"
    assert load(folder=odd).caches["local"].origin == (odd / "models").as_uri()
    assert load(config(tmp_path, "[caches]\n")).caches == {}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ('origin = "file:///m"\nregion = "eu"', "region: does not apply to file://"),
        ('origin = "az://a"\nprofile = "p"', "profile: does not apply to az:// but to s3"),
        ('origin = "az://"', "az://ACCOUNT"),
        ('origin = "s3://bucket/prefix"', "takes no path"),
        ('origin = "s3://"\nendpoint = "http://127.0.0.1:9000"', "allow_http = true"),
        ('origin = "s3://"\nendpoint = "127.0.0.1:9000"', "http(s)://HOST"),
        ('origin = "s3://"\nendpoint = "https://u:hush@h"', "credentials"),
        ('origin = "https://"', "http(s)://HOST"),
        ('origin = "https://h:port/"', "not a URL"),
        ('origin = "https://h/x?sig=hush"', "no query"),
        ('origin = "https://u:hush@h/"', "credentials"),
        ('origin = "ftp://u:hush@h/"', "credentials"),
        ('origin = "s3://"\naccess_key_id = "k"', "come together"),
        ('origin = "s3://"\nanonymous = true\nprofile = "p"', "contradicts profile"),
        ('origin = "s3://"\nca_bundle = "/no/such.pem"', "/no/such.pem is not there"),
        ('origin = "s3://"\nbuckets = ["a/b"]', "'a/b' is not a bucket name"),
        ('origin = "s3://"\nbuckets = ["a", "a"]', "without repetitions"),
        ('origin = "s3://"\nretries = 1000', "0 to 100"),
        ('origin = "s3://"\nretrys = 10', "did you mean retries?"),
        (
            'origin = "s3://"\naccess_key_id = "k"\nsecret_access_key_env = "NONE"',
            "NONE is not set",
        ),
        ('origin = "az://a"\nsas_file = "/no/such"', "/no/such cannot be read"),
        ('origin = "az://a"\nsas_env = ""', "text is wanted"),
        ('origin = "az://a"\nsas = "hush"', "others can read the file"),
    ],
)
def test_options_of_a_cache_are_checked(tmp_path: Path, options: str, part: str) -> None:
    """L3, L5, L6: what could only fail at the first read is told before anything starts."""
    found = problems(config(tmp_path, f"[caches.c]\n{options}\n"))
    assert any(part in problem for problem in found), found
    assert all("caches.c." in problem for problem in found)
    assert "hush" not in str(found)


def test_secrets_from_variables_and_files(tmp_path: Path) -> None:
    """R30: static keys without a secret in the settings."""
    secret = tmp_path / "secret"
    secret.write_text("from-file\n")
    file = config(
        tmp_path,
        '[caches.a]\norigin = "s3://"\naccess_key_id = "k"\nsecret_access_key_env = "MY_KEY"\n'
        f'[caches.b]\norigin = "az://account"\nsas_file = "{secret}"\n',
    )
    settings = load(file, environ={"MY_KEY": "from-variable"})
    key, sas = settings.caches["a"].options.secret_access_key, settings.caches["b"].options.sas
    assert key is not None and key.reveal() == "from-variable"
    assert sas is not None and sas.reveal() == "from-file"
    for content in (b"", b"\n", b"\xff\xfe", b"x" * (65 * KIB)):
        secret.write_bytes(content)
        (problem,) = problems(file, environ={"MY_KEY": "x"})
        assert f"{secret} is empty" in problem


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    text = '[caches.b]\norigin = "az://account"\nsas = "a"\nsas_env = "B"\n'
    (problem,) = problems(config(tmp_path, text, 0o600), environ={"B": "b"})
    assert "give one of them" in problem


def test_every_option_has_a_field_in_step_with_its_default() -> None:
    fields = OriginOptions.__dataclass_fields__
    assert OPTIONS.keys() - {"quota_bytes"} == fields.keys()


def test_disks_of_every_source(tmp_path: Path) -> None:
    file = config(tmp_path, '[[disks]]\npath = "/a"\nbytes = "2GiB"\n[[disks]]\npath = "/b"\n')
    assert [(str(d.path), d.size_bytes) for d in load(file).disks] == [
        ("/a", 2 * GIB),
        ("/b", None),
    ]
    file = config(tmp_path, 'disks = ["/a:2GiB", "/b"]\n')
    assert [(str(d.path), d.size_bytes) for d in load(file).disks] == [
        ("/a", 2 * GIB),
        ("/b", None),
    ]
    assert [str(d.path) for d in load(file, environ={"RACER_DISKS": "/c:1GiB\n/d"}).disks] == [
        "/c", "/d",
    ]  # fmt: skip
    assert [str(d.path) for d in load(file, "--disk=/e").disks] == ["/e"]


def test_budgets_fit_the_container() -> None:
    """L9, F41: more than the container has is refused, and defaults never are."""
    small = Machine(available_bytes=64 * GIB, limit_bytes=GIB)
    settings = load(machine=small)
    assert settings.memory + settings.plaintext < GIB
    (problem,) = problems("--memory=900MiB", machine=small)
    assert "memory limit of 1 GiB" in problem
    (problem,) = problems("--memory=128MiB", "--dirty=256MiB")
    assert "dirty: 256 MiB" in problem


# ---------- defaults from the machine


@given(st.integers(0, 64 * TIB), st.one_of(st.none(), st.integers(1, 64 * TIB)))
def test_memory_defaults_are_bounded(available: int, limit: int | None) -> None:
    """F13: whatever the machine says."""
    machine = Machine(available, limit)
    usable = min(available, limit or available)
    assert 64 * MIB <= machine.memory_default <= max(64 * MIB, min(16 * GIB, usable // 4))
    assert 64 * MIB <= machine.plaintext_default <= max(64 * MIB, min(512 * MIB, usable // 8))


@given(
    total=st.integers(0, 100 * TIB),
    free=st.floats(0, 1),
    floor=st.floats(0, 0.95),
    slab=st.integers(0, 200 * GIB),
    allocated=st.floats(0, 1),
)
@example(total=1000 * GIB, free=0.16, floor=0.15, slab=60 * GIB, allocated=0.0)
def test_the_default_slab_leaves_the_floor_free(
    total: int, free: float, floor: float, slab: int, allocated: float
) -> None:
    """F13, F23: however full a new slab gets, the share of the file system stays free. One that is
    there is not given up, nor cut, because others have filled the file system."""
    free_bytes = int(total * free)
    slab_allocated = min(int(slab * allocated), total - free_bytes)
    system = FileSystem(total, free_bytes, slab, slab_allocated)
    size = system.slab_default(floor)
    if slab >= SLAB_MIN:
        assert size == min(slab, SLAB_MAX)
        return
    if size is None:
        room = free_bytes + slab_allocated - int(total * floor)
        assert room // 2 < SLAB_MIN + MIB
        return
    assert SLAB_MIN <= size <= SLAB_MAX
    free_when_full = free_bytes + slab_allocated - size
    assert free_when_full >= int(total * floor)


@given(st.integers(GIB, 100 * TIB), st.floats(0, 1), st.floats(0, 1))
def test_the_default_slab_keeps_its_size_over_restarts(
    total: int, free: float, written: float
) -> None:
    """F2, F3: what the slab itself has written is not missing the next time."""
    free_bytes = int(total * free)
    first = FileSystem(total, free_bytes).slab_default(0.15)
    if first is not None:
        taken = int(first * written)
        again = FileSystem(total, free_bytes - taken, first, taken)
        assert again.slab_default(0.15) == first


def test_no_room_for_a_slab_is_said_and_served(tmp_path: Path) -> None:
    """F23, R23: no disk tier rather than a full disk."""
    full = FileSystem(total_bytes=TIB, free_bytes=TIB // 10)
    found = loaded(f"--state-dir={tmp_path}", file_system=full)
    assert found.settings.disks == ()
    assert str(tmp_path) in found.warnings[0]
    assert "warning: pages are not kept on disk" in describe(found)


def test_the_smallest_memory_limit_above_this_process_counts(tmp_path: Path) -> None:
    """Cgroup v2 says `max`, v1 a number near 2**63, and a container may not see its own path."""
    for folder, text in (("", "max\n"), ("a", "3000\n"), ("a/b", "5000\n"), ("a/b/c", "x\n")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(text)
    assert min(_limits_upwards(tmp_path, "/a/b/c", "memory.max")) == 3000
    assert _limits_upwards(tmp_path, "/a/b", "memory.max") == [5000, 3000]
    assert _limits_upwards(tmp_path, "/", "memory.max") == []
    assert _limits_upwards(tmp_path, "/not/seen/here", "memory.max") == []
    (tmp_path / "memory.max").write_text(f"{2**63 - 4096}\n")
    assert _limits_upwards(tmp_path, "/x", "memory.max") == []


def test_this_machine_has_memory_and_a_file_system(tmp_path: Path) -> None:
    machine = Machine.here()
    assert machine.available_bytes > 0
    slab = tmp_path / "not" / "yet" / "slab"
    before = FileSystem.of(slab)
    assert 0 <= before.free_bytes <= before.total_bytes
    assert (before.slab_bytes, before.slab_allocated_bytes) == (0, 0)
    slab.parent.mkdir(parents=True)
    slab.write_bytes(b"x" * 100_000)
    assert FileSystem.of(slab).slab_bytes == 100_000


# ---------- reloading


def test_a_reload_tells_what_it_can_change_and_what_not(tmp_path: Path) -> None:
    """R31: caches come and go without a restart."""
    file = config(tmp_path, '[caches.a]\norigin = "s3://"\n[caches.b]\norigin = "s3://"\n')
    old = loaded(file)
    config(
        tmp_path,
        'memory = "1GiB"\nlog_level = "debug"\ndisks = ["/x:1GiB"]\n'
        '[caches.b]\norigin = "gs://"\nquota_bytes = "1GiB"\n[caches.c]\norigin = "s3://"\n',
    )
    new = load_settings(parse_flags([file]), {}, previous=old)
    change = diff(old.settings, new.settings)
    assert change.changed == ("log_level", "caches.a", "caches.b", "caches.c")
    assert change.restart == ("memory", "dirty", "disks")
    assert change.settings.log_level == "debug"
    assert change.settings.memory == old.settings.memory
    assert change.settings.disks == old.settings.disks
    assert {n: c.origin for n, c in change.settings.caches.items()} == {"b": "gs://", "c": "s3://"}
    assert change.settings.caches["b"].quota_bytes == GIB


def test_other_free_memory_is_no_change_of_settings() -> None:
    old = loaded()
    new = load_settings(parse_flags([]), {}, previous=old)
    change = diff(old.settings, new.settings)
    assert (change.changed, change.restart) == ((), ())
    assert change.settings == old.settings


# ---------- the command


def test_check_config_ends_with_2_and_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--memory=x", "--gpu=y", "--state-dir=/s", "--run-dir=/r"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(":")[1].strip() for line in shown.err.splitlines()] == ["--gpu", "--memory"]
    assert main(["check-config", "--memory"]) == 2
    assert "expected one argument" in capsys.readouterr().err
    assert main(["chek-config"]) == 2
    assert "check-config" in capsys.readouterr().err


def test_check_config_prints_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check-config", "--state-dir=/s", "--run-dir=/r", "--cache=c=s3://b"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "caches.c.path_style" in shown
    assert "flag --cache" in shown


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("racerd ")


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS:
        assert setting.flag in shown
    assert "default: 0.15" in shown


def test_too_little_memory_is_told_once_and_with_what_to_do() -> None:
    """What follows from it by default is no problem of its own."""
    [problem] = problems("--memory=1MiB")
    assert problem.startswith("memory: 1 MiB must hold 4 pages of 16 MiB")
    assert "give it 64 MiB or more, or a smaller --page-bytes" in problem
    assert {each.partition(":")[0] for each in problems("--memory=1MiB", "--dirty=1MiB")} == {
        "memory",
        "dirty",
    }
    assert load("--memory=64MiB").dirty == 32 << 20
