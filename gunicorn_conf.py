"""gunicorn's configuration for the demo: `make serve`. GUNICORN_CMD_ARGS goes over it."""

import os

from shmlimit.adapters.gunicorn import install

bind = "127.0.0.1:8000"
workers = 4  # enough to see several of them answer

_slots = os.environ.get("SHMLIMIT_SLOTS", "65536")
if not _slots.isdecimal():
    raise SystemExit(f"SHMLIMIT_SLOTS must be a number of slots, such as 65536, not {_slots!r}")

_name = os.environ.get("SHMLIMIT_NAME", "shmlimit-demo")
_file = os.environ.get("SHMLIMIT_DB") or f"{_name}.sqlite3"

# Last: it wraps the hooks above it, and one below it would replace it.
install(globals(), name=_name, slots=int(_slots), sqlite=_file)
