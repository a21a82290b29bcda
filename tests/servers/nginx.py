"""nginx: plain files over HTTP/1.1 with ranges, strong ETags and If-Match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import answers, free_port, need, server

_CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
worker_rlimit_nofile 4096;
events {{ worker_connections 1024; }}
http {{
  access_log {folder}/access.log; default_type application/octet-stream; sendfile on;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; limit_rate {rate}; }}
}}
"""


@dataclass(frozen=True)
class Nginx:
    url: str
    access_log: Path


@contextlib.contextmanager
def nginx(folder: Path, root: Path, *, rate: int = 0) -> Iterator[Nginx]:
    """Serves the files below `root`; `folder` takes its own files.

    `rate`: bytes per second of one connection, 0 for as fast as it can.
    """
    program = need("nginx", "nginx")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, root=root, port=port, rate=rate))
    command = [program, "-c", str(config), "-p", str(folder)]
    with server(command, folder / "out.log", lambda: answers(port)):
        yield Nginx(f"http://127.0.0.1:{port}", folder / "access.log")
