"""Conversations' token ids and messages on disk, so that they outlive the process that serves them."""

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
    """A conversation as the journal has it; without history, its first turn has not finished."""

    id: ConversationId
    salt: str
    retain_s: float
    kv: dict[str, object] | None
    history: "array[int]"
    chat: ChatHistory | None


class Journal:
    """A SQLite file with a row per turn: how much of the history before it stays, and what it adds.

    What is written is there when the process is killed, and not when the machine loses power: nothing is synced, it is
    meant for restarts on the same machine. A record that was being written is not there (SQLite's write-ahead log).

    A fault of the disk is logged once and ends the journal, whose file is removed: serving goes on without it.

    Used by the thread that made it only.
    """

    def __init__(self, folder: Path, model: str):
        """Open or make the journal in a folder, which is made if it does not exist.

        Args:
            folder: of the journal alone; only its owner may read what is written there.
            model: stands for the tokenizer that the ids are of. Conversations of another one are found without history.

        Raises:
            OSError: the folder can't be made, or belongs to somebody else.
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
            log.warning("the journal is of another model: its conversations are lost")
            self._base.execute("DELETE FROM turns")
            self._base.execute("UPDATE model SET name = ?", (model,))

    def begin(self, conversation: Conversation) -> None:
        """A conversation has started; whatever had its id is gone."""
        self.forget(conversation.id)
        row = (_key(conversation.id), conversation.salt, conversation.retain_s, json.dumps(conversation.kv))
        self._write("INSERT INTO conversations VALUES (?, ?, ?, ?)", row)

    def add(self, conversation: Conversation, before: "array[int]", said: "list[Message] | None") -> None:
        """A turn has finished.

        Args:
            conversation: with what the turn has added.
            before: its history before the turn.
            said: the turn's messages and the answer; None where the conversation is none of messages.
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
        """A conversation is over."""
        for table in ("turns", "conversations"):
            self._write(f"DELETE FROM {table} WHERE key = ?", (_key(conversation),))

    def read(self) -> list[Found]:
        """What is in the journal, the conversation that was used longest ago first; nothing where it can't be read."""
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
        """Write what is left, and close the file."""
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
        log.error("the journal is given up, conversations will not survive a restart: %s", error)
        try:
            self.close()
        except sqlite3.Error as another:
            log.error("the journal could not be closed: %s", another)
        # what is no longer kept up must not be taken for the truth by the next server
        for suffix in ("", "-wal", "-shm"):
            path = self._path.with_name(self._path.name + suffix)
            try:
                path.unlink(missing_ok=True)
            except OSError as another:
                log.error("remove the journal, or the next server takes it for the truth: %s", another)


def _key(conversation: ConversationId) -> str:
    """7 and "7" are two conversations."""
    return json.dumps(conversation)
