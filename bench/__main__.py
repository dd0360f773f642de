"""All benches, one after the other: what `make bench` runs.

    python bench [--quick] [--into DIRECTORY] [name …]

Results go to `bench/results`; those of `--quick`, which has too few rounds to be told, to `build/bench`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Script(NamedTuple):
    """A question: the table that answers it, about how long that takes on two cores, and what makes it quick."""

    result: str
    minutes: float
    quick: tuple[int, ...]


SCRIPTS = {
    "take": Script("take.md", 0.5, (4,)),
    "helper": Script("helper.md", 0.5, (4,)),
    "answering": Script("answering.md", 0.5, (2,)),
    "middleware": Script("middleware.md", 1, (12,)),
    "served": Script("served.md", 4, (8,)),
    "scaling": Script("scaling.md", 3, (3,)),
    "contention": Script("contention.md", 0.5, (10_000,)),
    "growth": Script("growth.md", 2, (2, 100_000)),
    "load": Script("load.md", 3, (8_192,)),
    "sqlite": Script("sqlite.md", 1.5, (3,)),
    "async_latency": Script("async_latency.md", 0.5, (2,)),
    "redis_store": Script("redis.md", 3, (2,)),
    "memcached": Script("memcached.md", 1.5, (2,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that everything runs")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY", help="where the results go")
    parser.add_argument("names", nargs="*", metavar="name", help=f"only these: {', '.join(SCRIPTS)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - SCRIPTS.keys():
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    into = chosen.into or (HERE.parent / "build" / "bench" if chosen.quick else HERE / "results")
    names = chosen.names or list(SCRIPTS)
    if not chosen.quick:
        print(f"about {sum(SCRIPTS[name].minutes for name in names):.0f} minutes, on a machine that does nothing else")
    failed = [name for name in names if not run(name, into.resolve(), quick=chosen.quick)]
    if failed:
        sys.exit(f"these failed, see above: {', '.join(failed)}")


def run(name: str, into: Path, *, quick: bool) -> bool:
    """Whether the script ended well and its table was written."""
    script = SCRIPTS[name]
    begin, began = time.monotonic(), time.time()
    command = [sys.executable, str(HERE / f"{name}.py"), *map(str, script.quick if quick else ())]
    print(f"== {name}", flush=True)
    done = subprocess.run(command, env={**os.environ, "BENCH_RESULTS": str(into)}, check=False)
    result = into / script.result
    written = result.exists() and result.stat().st_mtime >= began - 1
    print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)
    return done.returncode == 0 and written


if __name__ == "__main__":
    main()
