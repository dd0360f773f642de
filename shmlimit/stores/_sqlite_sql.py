"""The tables of a `SqliteStore`, and every statement that is run on them."""

from __future__ import annotations

import re

from shmlimit.errors import ConfigError

_NAME = re.compile(r"(?!sqlite_)[a-z_][a-z0-9_]{0,63}", re.ASCII | re.IGNORECASE)


def valid_table_name(text: object) -> bool:
    """Whether `text` can name a store's table: 1 to 64 ASCII letters, digits and underscores, no digit first, and not
    SQLite's own prefix `sqlite_`.
    """
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


class Sql:
    """The statements, for a table name; a `ConfigError` for one that is no `valid_table_name`.

    `expires_us` is when a row's state has expired, and `due_us`, which has the index, when a purge looks at the row:
    then or earlier; a row that is looked at too early is put off. PERF: each hit moves the expiry, and to write that
    into an index would take as long as all the rest of a commit.
    """

    def __init__(self, table: str) -> None:
        if not valid_table_name(table):
            raise ConfigError(f"table must be 1 to 64 of a-z, 0-9 and _, no digit or sqlite_ first, not {table!r}")
        rows, index, forgotten = f'"{table}"', f'"{table}:due"', f'"{table}:forgotten"'
        identity = "policy = ? AND key = ?"
        # ruff: noqa: S608 - valid_table_name has seen what is put in
        self.make = (
            f"""CREATE TABLE IF NOT EXISTS {rows} (
                id INTEGER PRIMARY KEY, policy TEXT NOT NULL, key BLOB NOT NULL, state TEXT NOT NULL,
                expires_us INTEGER NOT NULL, due_us INTEGER NOT NULL, written_us INTEGER NOT NULL, UNIQUE (policy, key))
            """,
            f"CREATE INDEX IF NOT EXISTS {index} ON {rows} (due_us)",
            f"""CREATE TABLE IF NOT EXISTS {forgotten} (
                id INTEGER PRIMARY KEY CHECK (id = 1), own_us INTEGER NOT NULL, turned_us INTEGER NOT NULL,
                given_us INTEGER NOT NULL, latest_us INTEGER NOT NULL)
            """,
            f"INSERT OR IGNORE INTO {forgotten} VALUES (1, 0, 0, 0, 0)",
        )
        self.made = f"SELECT count(*) FROM sqlite_master WHERE name IN ('{table}', '{table}:due', '{table}:forgotten')"
        self.find = f"SELECT id, state, written_us, due_us FROM {rows} WHERE {identity}"
        self.add = f"INSERT INTO {rows} (policy, key, state, expires_us, due_us, written_us) VALUES (?, ?, ?, ?, ?, ?)"
        self.change = f"UPDATE {rows} SET state = ?, expires_us = ?, written_us = ? WHERE id = ?"
        self.change_due = f"UPDATE {rows} SET state = ?, expires_us = ?, written_us = ?, due_us = ? WHERE id = ?"
        self.remove = f"DELETE FROM {rows} WHERE id = ?"
        self.lifetime = f"SELECT id, expires_us, written_us FROM {rows} WHERE {identity}"
        self.due = f"SELECT id, expires_us FROM {rows} WHERE due_us <= ? ORDER BY due_us LIMIT ?"
        self.next_due = f"SELECT min(due_us) FROM {rows}"
        self.put_off = f"UPDATE {rows} SET due_us = ? WHERE id = ?"
        self.count = f"SELECT count(*) FROM {rows}"
        self.forgotten = f"SELECT own_us, turned_us, given_us, latest_us FROM {forgotten} WHERE id = 1"
        self.forget_own = f"UPDATE {forgotten} SET own_us = max(own_us, ?), latest_us = max(latest_us, ?)"
        self.forget_given = f"UPDATE {forgotten} SET given_us = max(given_us, ?), latest_us = max(latest_us, ?)"
        self.turn = f"UPDATE {forgotten} SET own_us = ?, turned_us = ?"
