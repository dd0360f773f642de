"""FastAPI: ten requests a minute for each client address, over an included router and a mounted application too.

uvicorn starts its workers one by one (spawn), so there is nothing for them to inherit: each opens the table by name.
"""

import os

from fastapi import APIRouter, FastAPI

from shmlimit import Guard, SharedTable
from shmlimit.adapters.asgi import RateLimit

table = SharedTable.open(os.environ.get("SHMLIMIT_NAME", "fastapi-example"))
items = APIRouter(prefix="/items")
admin = FastAPI()
app = FastAPI()


@app.get("/")
@app.get("/healthz")
@admin.get("/users")
async def worker():
    """Says which process answered."""
    return {"worker": os.getpid()}


@items.get("/{number}")
async def item(number: int):
    """An item."""
    return {"worker": os.getpid(), "item": number}


app.include_router(items)
app.mount("/admin", admin)
app.add_middleware(RateLimit, Guard("per-ip", "10/minute", skip_paths=["/healthz"]), store=table)
