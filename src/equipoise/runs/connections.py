"""How the file of a run is opened, and what SQLite's errors mean for its user."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from equipoise.core.errors import one_line


def connect(path: Path, writable: bool) -> sqlite3.Connection:
    """For writing, with a log that survives a killed process; or for reading, of folders that cannot be written too."""
    if not writable:
        return _reading(path)
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a power cut the last inputs at most
    except sqlite3.Error:
        db.close()
        raise
    return db


def _reading(path: Path) -> sqlite3.Connection:
    """Read-only; a WAL file in a folder that cannot be written opens only as immutable, which is right if no log is left."""
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", timeout=30, isolation_level=None, uri=True)
    try:
        db.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        db.close()
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", isolation_level=None, uri=True)
    return db


def explain(path: Path, error: sqlite3.Error) -> str:
    """What went wrong and what to do, in a sentence."""
    text, code = one_line(error), getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return f"cannot write {path} ({text}): free some space and run the same command again; what is stored is kept"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"cannot open {path} for writing ({text}): check the permissions of the folder"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is in use by another process ({text}): wait for it or stop it"
    return f"{path} is damaged ({text}): move it away and run the same command again, or restore it from a copy"
