"""Flask: ten requests a minute for each client address, and two of them for reports, whichever worker answers."""

import os

from flask import Flask, request

from shmlimit import Guard
from shmlimit.adapters.wsgi import OUTCOME, RateLimit
from shmlimit.stores.memory import MemoryStore

PER_IP = Guard("per-ip", "10/minute", skip_paths=["/healthz", "/static"])
REPORTS = Guard("reports", "2/minute", paths=["/reports"])  # beside the other one: what one refuses, neither counts


def create_app(*, development=False):
    """The application; in development it counts for itself, in one process, and no table is needed."""
    app = Flask(__name__)

    @app.get("/")
    def index():
        return {"worker": os.getpid()}

    @app.get("/reports")
    def reports():
        left = request.environ[OUTCOME]["reports"].remaining
        return {"worker": os.getpid(), "reports left": left}

    @app.get("/healthz")
    def healthz():
        return {"worker": os.getpid()}

    # Round `app.wsgi_app`, not `app`: so `flask run`, Flask's test client and gunicorn all go through it.
    store = MemoryStore() if development else None  # None: the table of gunicorn_conf.py
    app.wsgi_app = RateLimit(app.wsgi_app, PER_IP, REPORTS, store=store)
    return app
