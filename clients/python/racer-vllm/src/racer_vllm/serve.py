"""`racer-vllm serve`: the directory of a model, and vLLM on it, in one step.

Layer: on `fetch`. The directory's name is made of the model's location and version: the same model
has the same directory at each start and on each node, and a new version has a new one, so that a
running engine's files never change under it. The process becomes vLLM's: signals, exit status and
output are vLLM's own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from racer.errors import RacerError
from racer.urls import RacerUrl
from racer_vllm.fetch import Survey
from racer_vllm.options import LOAD_FORMAT

_DIGEST_CHARS = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class VllmMissing(RacerError):
    """There is no vLLM to start."""

    default_code = "vllm_missing"


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where directories of models are kept: `$XDG_CACHE_HOME/racer-vllm`."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return Path(base) / "racer-vllm"


def model_name(url: str) -> str:
    """The last part of a URL, as a name for people."""
    parsed = RacerUrl.parse(url)
    parts = [part for part in parsed.key.decode("utf-8", "replace").split("/") if part]
    last = _UNSAFE.sub("-", parts[-1] if parts else parsed.bucket or parsed.cache).strip(".-")
    return last or "model"


def model_folder(root: Path, survey: Survey) -> Path:
    return root / f"{model_name(survey.location)}-{survey.digest[:_DIGEST_CHARS]}"


def vllm_command(folder: Path, url: str, arguments: Sequence[str]) -> list[str]:
    """The command line. Raises ValueError for arguments that contradict it."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for option in ("--load-format", "--model"):
        if option in given:
            raise ValueError(f"racer-vllm serve decides {option} itself: leave it out")
    named = "--served-model-name" in given
    name = [] if named else ["--served-model-name", model_name(url)]
    # Names last: vLLM's option takes several, and would take what follows for one.
    return ["serve", os.fspath(folder), "--load-format", LOAD_FORMAT, *arguments, *name]


def find_vllm(environ: Mapping[str, str]) -> str:
    """vLLM's program: of this Python's environment, else of the path. Raises VllmMissing."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("vllm", path=beside) or shutil.which("vllm", path=environ.get("PATH"))
    if found is None:
        raise VllmMissing(
            f"there is no program `vllm` beside {sys.executable}, nor on the path",
            hint="install racer-vllm into the environment of vLLM",
        )
    return found


def engine_environ(
    environ: Mapping[str, str], *, socket: str | None, run_dir: str | None
) -> dict[str, str]:
    """The environment of vLLM, through which its workers find racerd as the command did."""
    changed = dict(environ)
    if socket is not None:
        changed["RACER_SOCKET"] = os.path.abspath(socket)
    if run_dir is not None:
        changed.pop("RACER_SOCKET", None)  # It would count before the directory.
        changed["RACER_RUN_DIR"] = os.path.abspath(run_dir)
    return changed


def become_vllm(program: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replaces this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [program, *command], environ)
