"""Django: ten requests a minute for each client address. The limiter is round the whole project, over WSGI or ASGI.

In a project of several files the two last assignments belong into its wsgi.py and asgi.py.
"""

import os
import sys

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import include, path

from shmlimit import Guard
from shmlimit.adapters import asgi, wsgi
from shmlimit.stores.memory import MemoryStore

settings.configure(
    DEBUG=os.environ.get("DJANGO_DEBUG") == "1",
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", "for this example only"),
    ROOT_URLCONF=__name__,
    WSGI_APPLICATION=f"{__name__}.application",  # what runserver serves
    MIDDLEWARE=["django.middleware.security.SecurityMiddleware", "django.middleware.common.CommonMiddleware"],
)


def worker(_request):
    """Says which process answered."""
    return JsonResponse({"worker": os.getpid()})


urlpatterns = [
    path("", worker),
    path("healthz", worker),
    path("shop/", include([path("items/<int:number>", lambda request, number: worker(request))])),  # noqa: ARG005
]

PER_IP = Guard("per-ip", "10/minute", skip_paths=["/healthz"])
STORE = MemoryStore() if settings.DEBUG else None  # None: the table of gunicorn_conf.py

application = wsgi.RateLimit(get_wsgi_application(), PER_IP, store=STORE)
asgi_application = asgi.RateLimit(get_asgi_application(), PER_IP, store=STORE)

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
