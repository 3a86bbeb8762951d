"""A report that follows running certifications: served on the loopback interface only, for a bounded time.

The address holds a random part, so that other users of the machine cannot guess it; requests for another host name (a page
elsewhere that resolves its name to this machine) are refused. Nothing is written but the page, at the end.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from equipoise.core.errors import EquipoiseError, InputError
from equipoise.core.files import atomic_write
from equipoise.report.collect import collect
from equipoise.report.page import plotly_source, refreshing, render, write_report
from equipoise.report.sections import esc
from equipoise.runs import is_run, open_run

#: the only interface that is served
LOOPBACK = "127.0.0.1"
#: seconds between two looks at the runs, and after which a browser asks again
EVERY = 5.0


@dataclass
class Live:
    """The page that is shown now; `token` is the part of its address that nobody can guess."""

    page: bytes = b""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(18))


class _Server(ThreadingHTTPServer):
    """Answers with the page, to nobody but this machine."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, live: Live) -> None:
        self.live = live
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.live.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    server_version = "equipoise"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, under its own address and host name only."""
        hosts = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        asked = self.path == f"/{self.server.live.token}/" and self.headers.get("Host") in hosts
        content = self.server.live.page if asked else b"not found"
        self.send_response(200 if asked else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if asked else "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def follow(
    runs: Sequence[Path],
    output: Path,
    *,
    title: str = "Certified robustness",
    alpha: float | None = None,
    port: int = 0,
    seconds: float = 7200.0,
    every: float = EVERY,
    announce: Callable[[str], None] = lambda address: None,
) -> str:
    """Serve the report of these runs until all are finished, the time is up or it is interrupted; why it ended.

    A page is made when more inputs are stored. At the end it is written to `output`.
    """
    strange = [r for r in runs if r.exists() and not is_run(r)]
    if strange:
        raise InputError(f"{strange[0]} is not a run directory: --watch follows runs of equipoise certify")
    if not any(map(is_run, runs)):
        raise InputError(f"{runs[0]} is not a run directory yet: start equipoise certify first")
    plotly = plotly_source()
    live, end = Live(), time.monotonic() + seconds
    try:
        server = _Server(port, live)
    except OSError as error:
        raise InputError(f"cannot listen on port {port}: {error.strerror}; leave --port out for a free one") from error
    seen: tuple[int, ...] | None = None
    why = f"{seconds / 60:g} minutes are over"
    live.page, done = _look(runs, title, alpha, plotly, every)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    announce(server.address)
    try:
        while time.monotonic() < end:
            counts = tuple(_count(r) for r in runs)
            if counts != seen:
                live.page, done = _look(runs, title, alpha, plotly, every)
                seen = counts
            if done:
                why = "the runs are finished"
                break
            time.sleep(max(0.0, min(every, end - time.monotonic())))
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        server.shutdown()
        server.server_close()
    started = [r for r in runs if is_run(r) and _count(r)]
    if started:
        write_report(collect(started, title=title, alpha=alpha), output)
    else:
        atomic_write(output, live.page.decode())
    return why


def _count(run: Path) -> int:
    try:
        return len(open_run(run).rows) if is_run(run) else 0
    except EquipoiseError:
        return 0  # it is being made


def _look(
    runs: Sequence[Path], title: str, alpha: float | None, plotly: str, every: float
) -> tuple[bytes, bool]:  # fmt: skip
    """The page of what is there, and whether every run is finished."""
    again = max(1, round(every))
    try:
        started = [r for r in runs if _count(r)]
        totals = [open_run(r).total if is_run(r) else 0 for r in runs]
        done = all(0 < total <= _count(r) for r, total in zip(runs, totals, strict=True))
        data = collect(started, title=title, alpha=alpha)
        return render(data, plotly, None if done else again).encode(), done
    except EquipoiseError as error:
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refreshing(again)}<title>{esc(title)}</title></head>'
            f"<body><p>Nothing to show yet: {esc(error)}</p></body></html>"
        )
        return page.encode(), False
