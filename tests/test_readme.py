"""What the README shows is run: each Python example, and the whole service of "Use it in your service"."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"(?:<!-- example: (\S+) -->\n)?```python\n(.*?)```", README, re.DOTALL)
FILES = {file: code for file, code in EXAMPLES if file}
SNIPPETS = [code for file, code in EXAMPLES if not file]

PRELUDE = """
from shmlimit import Guard
from shmlimit.adapters.falcon import RateLimitMiddleware
"""


def test_examples_are_found() -> None:
    """The patterns above find what the README has: two files of a service, and snippets."""
    assert set(FILES) == {"gunicorn_conf.py", "service.py"}
    assert len(SNIPPETS) == README.count("```python") - 2 >= 4


@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: code.strip().splitlines()[0][:40])
def test_snippet_runs(code: str, name: str) -> None:
    """A snippet runs as it stands, behind the imports that the page has shown before."""
    code = code.replace('"my-limits"', repr(name))
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_policies_of_the_table_are_what_they_say() -> None:
    """Each row of the table of policies names one policy in two ways."""
    import shmlimit

    rows = re.findall(r"^\| `\"(.+?)\"` \| `(\w+\(.+?\))` \|", README, re.MULTILINE)
    assert len(rows) >= 2
    for notation, constructor in rows:
        assert shmlimit.parse(notation) == eval(constructor, vars(shmlimit))


def test_files_that_are_linked_exist() -> None:
    """Links within the repository lead somewhere."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
