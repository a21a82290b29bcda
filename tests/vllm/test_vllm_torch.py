"""What the client's own tests say of torch, which is there where vLLM is and nowhere else."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TESTS = "clients/python/racer/tests/test_load_torch.py"
# pytest and what it is made of: of this environment, since vLLM's has none.
MODULES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "pygments", "pytest_timeout")


def test_tensors_of_torch(vllm_python: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """R18, R36, L13, L26, L38, L41: every one of them runs, and holds."""
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        file = Path(spec.origin)
        found = file.parent if file.name == "__init__.py" else file
        (tmp_path / found.name).symlink_to(found)
    done = subprocess.run(
        [
            vllm_python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "pytest_timeout",
            "-p",
            "no:cacheprovider",
            TESTS,
        ],
        cwd=REPOSITORY,
        env={**environ, "PYTHONPATH": f"{tmp_path}:{environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-10_000:]}\n{done.stderr[-2_000:]}"
    assert " passed" in done.stdout
