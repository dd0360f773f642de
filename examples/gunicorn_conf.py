"""gunicorn's configuration for the examples. The last line makes the table that all workers share."""

import os

from shmlimit.adapters.gunicorn import install

bind = "127.0.0.1:8000"
workers = 4

# Without a name the table is named after the user and this file.
install(globals(), name=os.environ.get("SHMLIMIT_NAME"))
