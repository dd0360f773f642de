"""Falcon: a quota that depends on the customer, a count for each route, and a login that only failures use up."""

import hmac
import os

import falcon

from shmlimit import Guard, keys
from shmlimit.adapters.falcon import RateLimitMiddleware, limit

CUSTOMERS = {"key-of-ada": ("ada", "100/minute"), "key-of-bob": ("bob", "20/minute")}  # from your database
PASSWORDS = {"ada": "correct horse"}
ADDRESS = keys.client_ip()


def customer(req):
    """Who is limited: a customer whose key is known, else the address. Made-up keys earn nothing."""
    known = CUSTOMERS.get(req.get_header("X-Api-Key"))
    return f"customer {known[0]}" if known else ADDRESS(req)


def tier(req):
    """What they may do."""
    known = CUSTOMERS.get(req.get_header("X-Api-Key"))
    return known[1] if known else "10/minute"


class Worker:
    """Says which process answered."""

    def on_get(self, _req, resp, **_params):
        """The process id, as JSON."""
        resp.media = {"worker": os.getpid()}


class Login:
    """Five wrong passwords an hour from one address; right ones are free, until those are spent."""

    @limit(Guard("failed-logins", "5/hour", consume_on=lambda status: status == 401))
    def on_post(self, req, resp):
        """`{"name": …, "password": …}`."""
        given = req.get_media()
        expected = PASSWORDS.get(given.get("name"), "")
        if not expected or not hmac.compare_digest(expected.encode(), str(given.get("password")).encode()):
            raise falcon.HTTPUnauthorized(description="Name or password is wrong.")
        resp.media = {"worker": os.getpid()}


PER_CUSTOMER = Guard("per-customer", tier, key=customer, skip_paths=["/healthz", "/login"])
# One count for /items/{number}, not one for each item; decided after routing.
PER_ROUTE = Guard("per-route", "60/minute", key=keys.compose(keys.route, customer), skip_paths=["/healthz", "/login"])

app = falcon.App(middleware=[RateLimitMiddleware(PER_CUSTOMER, PER_ROUTE)])
app.add_route("/", Worker())
app.add_route("/items/{number:int}", Worker())
app.add_route("/healthz", Worker())
app.add_route("/login", Login())
