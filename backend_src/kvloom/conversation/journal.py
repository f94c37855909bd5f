"""Saves the token ids and messages of conversations on disk, so that they survive a restart of the server."""

import json
import logging
import sqlite3
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.conversation.continuation import ChatHistory
from kvloom.conversation.registry import Conversation, ConversationId
from kvloom.private import check_own_file, private_folder

if TYPE_CHECKING:
    from kvloom.text.chat import Message

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    key TEXT PRIMARY KEY, salt TEXT NOT NULL, retain_s REAL NOT NULL, kv TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, keep INTEGER NOT NULL, ids BLOB NOT NULL,
    messages TEXT, mark_tokens INTEGER, mark_characters INTEGER
);
CREATE TABLE IF NOT EXISTS model (name TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS turns_of ON turns (key, number);
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation in the journal. Its history is empty if its first turn has not finished."""

    id: ConversationId
    salt: str
    retain_s: float
    kv: dict[str, object] | None
    history: "array[int]"
    chat: ChatHistory | None


class Journal:
    """A SQLite file with one row per turn: how many tokens of the earlier history stay, and which tokens it adds.

    Written rows survive a kill of the process, but not a loss of power, because nothing is synced. The journal is meant
    for restarts on the same machine. SQLite's write-ahead log drops a row that was only partly written.

    If the disk fails, the error is logged once, the journal's file is removed and serving continues without a journal.

    Only the thread that created it may use it.
    """

    def __init__(self, folder: Path, model: str):
        """Open the journal. Creates its folder and file if they do not exist.

        Args:
            folder: a folder for the journal alone. Only its owner may read the files.
            model: identifies the tokenizer of the ids. Conversations of another tokenizer are found without history.

        Raises:
            OSError: the folder can't be created, or belongs to another user.
            sqlite3.Error: the journal can't be opened.
        """
        self._path = private_folder(folder) / "conversations.sqlite"
        check_own_file(self._path)
        self._path.touch(mode=0o600)
        self._base: sqlite3.Connection | None = sqlite3.connect(self._path, isolation_level=None)
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = OFF")
        self._base.executescript(_SCHEMA)
        before = self._base.execute("SELECT name FROM model").fetchone()
        if before is None:
            self._base.execute("INSERT INTO model VALUES (?)", (model,))
        elif before != (model,):
            log.warning("the journal was written for another model: its conversations are lost")
            self._base.execute("DELETE FROM turns")
            self._base.execute("UPDATE model SET name = ?", (model,))

    def begin(self, conversation: Conversation) -> None:
        """Record a new conversation. It replaces an earlier one with the same id."""
        self.forget(conversation.id)
        row = (_key(conversation.id), conversation.salt, conversation.retain_s, json.dumps(conversation.kv))
        self._write("INSERT INTO conversations VALUES (?, ?, ?, ?)", row)

    def add(self, conversation: Conversation, before: "array[int]", said: "list[Message] | None") -> None:
        """Record a finished turn.

        Args:
            conversation: the conversation after the turn.
            before: its history before the turn.
            said: the turn's messages and the answer; None if the conversation has turns of raw text.
        """
        history, keep = conversation.history, len(before)
        if history[:keep] != before:
            shorter = min(keep, len(history))
            keep = next((i for i in range(shorter) if before[i] != history[i]), shorter)
        mark = conversation.chat.marks[-1] if conversation.chat is not None else (None, None)
        row = (_key(conversation.id), keep, history[keep:].tobytes(), None if said is None else json.dumps(said), *mark)
        self._write(
            "INSERT INTO turns (key, keep, ids, messages, mark_tokens, mark_characters) VALUES (?, ?, ?, ?, ?, ?)", row
        )

    def forget(self, conversation: ConversationId) -> None:
        """Delete a conversation."""
        for table in ("turns", "conversations"):
            self._write(f"DELETE FROM {table} WHERE key = ?", (_key(conversation),))

    def read(self) -> list[Found]:
        """All conversations, the least recently used first. Empty if the journal can't be read."""
        try:
            return list(self._read())
        except (sqlite3.Error, ValueError) as error:
            self._give_up(error)
            return []

    def _read(self) -> Iterator[Found]:
        assert self._base is not None
        rows = self._base.execute(
            "SELECT key, salt, retain_s, kv FROM conversations "
            "ORDER BY (SELECT max(number) FROM turns WHERE turns.key = conversations.key)"
        ).fetchall()
        for key, salt, retain_s, kv in rows:
            history, chat = self._history(key)
            yield Found(json.loads(key), salt, retain_s, json.loads(kv), history, chat)

    def close(self) -> None:
        """Write all buffered rows and close the file."""
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def _history(self, key: str) -> "tuple[array[int], ChatHistory | None]":
        assert self._base is not None
        history: array[int] = array("i")
        chat: ChatHistory | None = ChatHistory()
        rows = self._base.execute(
            "SELECT keep, ids, messages, mark_tokens, mark_characters FROM turns WHERE key = ? ORDER BY number", (key,)
        )
        for keep, ids, messages, *mark in rows:
            del history[keep:]
            history.frombytes(ids)
            if messages is None:
                chat = None
            elif chat is not None:
                chat.messages += json.loads(messages)
                chat.marks = [mark for mark in chat.marks if mark[0] <= keep] + [(mark[0], mark[1])]
        return history, chat

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._base is None:
            return
        try:
            self._base.execute(statement, values)
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.error("the journal failed and is removed; conversations will not survive a restart: %s", error)
        try:
            self.close()
        except sqlite3.Error as another:
            log.error("could not close the journal: %s", another)
        # The next server must not restore conversations from a journal that is incomplete
        for suffix in ("", "-wal", "-shm"):
            path = self._path.with_name(self._path.name + suffix)
            try:
                path.unlink(missing_ok=True)
            except OSError as another:
                log.error("could not remove the journal; remove it before the next start: %s", another)


def _key(conversation: ConversationId) -> str:
    """The id as JSON, because 7 and "7" are two conversations."""
    return json.dumps(conversation)
