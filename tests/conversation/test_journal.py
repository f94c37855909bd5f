"""The journal: what an engine finds that starts after another one was killed."""

import random
import shutil
import sqlite3
from array import array
from pathlib import Path
from unittest import mock

import pytest
from test_continuation import FORGETS_THOUGHTS, answer_to, user
from transformers import AutoTokenizer

from kvloom.config import Settings
from kvloom.conversation.journal import Journal
from kvloom.conversation.registry import Conversation
from kvloom.errors import SettingsError
from kvloom.request import FinishReason
from support.talks import Talks
from support.tiny_models import make_tiny
from support.tiny_server import tokens

MODEL = "a hash of the tokenizer"


def killed(folder: Path, to: Path) -> Path:
    """What is on disk at this moment: a process that is killed leaves no more."""
    shutil.copytree(folder, to)
    return to


def test_conversations_go_on_after_a_kill(model, stateless, tmp_path):
    driver = Talks(model, journal_dir=tmp_path / "first")
    histories = {}
    for name in (7, "7", "ended"):
        answer = driver.say(name, tokens(1, 20), start=True, salt="s")
        histories[name] = [*tokens(1, 20), *answer.ids]
    driver.say("once", tokens(1, 20), start=True, end=True)
    driver.say(7, tokens(2, 5))
    histories[7] += [*tokens(2, 5), *stateless([*histories[7], *tokens(2, 5)])]
    driver.turns.manager.end("ended", lambda: None)
    # these are running
    driver.turn(7, tokens(3, 5))
    driver.turn("begun", tokens(4, 5), start=True)
    for _ in range(3):
        driver.engine.step()

    after = Talks(model, journal_dir=killed(tmp_path / "first", tmp_path / "second"))
    assert len(after.turns.manager.registry) == 2
    assert set(after.triton.told) == {("start", 7), ("start", "7"), ("start", "begun")}
    after.engine.check_invariants()
    for name in (7, "7"):
        assert after.turns.status(name).tokens == len(histories[name])
        answer = after.say(name, tokens(5, 5), salt="s")
        assert answer.usage.prompt_tokens == len(histories[name]) + 5
        assert answer.ids == stateless([*histories[name], *tokens(5, 5)])
        # another salt is refused: it was journalled, too
        assert answer.error is None
        assert "cache_salt" in str(after.say(name, tokens(5, 5), salt="other").error)
    assert str(after.say("begun", tokens(5, 5)).error) == "NOT_FOUND: conversation begun: lost"
    assert str(after.say("ended", tokens(5, 5)).error) == "NOT_FOUND: conversation ended: unknown"
    assert str(after.say("once", tokens(5, 5)).error) == "NOT_FOUND: conversation once: unknown"
    after.end_all()

    last = Talks(model, journal_dir=killed(tmp_path / "second", tmp_path / "third"))
    assert len(last.turns.manager.registry) == 0
    driver.run_all()
    driver.end_all()


def test_chats_are_still_rendered_as_a_whole(tmp_path):
    model = make_tiny(tmp_path / "model", max_position_embeddings=2048)
    reference = AutoTokenizer.from_pretrained(model)
    reference.chat_template = FORGETS_THOUGHTS
    reference.save_pretrained(model)
    messages, folder = [], tmp_path / "0"
    for turn in range(5):
        driver = Talks(model, journal_dir=folder)
        messages = [*messages, user(f"And {turn}?")]
        answer = driver.say("chat", messages=messages[-1:], start=not turn, temperature=1.0, seed=turn)
        whole = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = list(answer.sequence.request.prompt_ids)
        assert reference.decode(prompt, skip_special_tokens=False) == whole
        messages = [*messages, answer_to(reference, answer.ids)]
        folder = killed(folder, tmp_path / str(turn + 1))
        driver.end_all()


def test_a_half_written_record_is_not_there(tmp_path):
    """Wherever the file is cut off, every conversation is in a state that it once had."""
    rng = random.Random(3)
    journal = Journal(tmp_path / "journal", MODEL)
    states: dict[int, list[list[int]]] = {name: [[]] for name in range(4)}
    conversations = {name: Conversation(name) for name in states}
    for conversation in conversations.values():
        journal.begin(conversation)
    for _ in range(60):
        conversation = rng.choice(list(conversations.values()))
        before = conversation.history
        keep = rng.choice([len(before)] * 4 + [len(before) // 2])
        conversation.history = before[:keep] + array("i", rng.choices(range(50_000), k=rng.randrange(1, 60)))
        journal.add(conversation, before, None)
        states[conversation.id].append(list(conversation.history))
    log = next((tmp_path / "journal").glob("*-wal")).name
    size = (tmp_path / "journal" / log).stat().st_size
    assert size > 10_000
    lost = 0
    for attempt in range(40):
        folder = killed(tmp_path / "journal", tmp_path / str(attempt))
        with (folder / log).open("r+b") as file:
            file.truncate(size if not attempt else rng.randrange(size))
        for path in folder.glob("*-shm"):
            path.unlink()
        found = {one.id: list(one.history) for one in Journal(folder, MODEL).read()}
        if not attempt:
            assert found == {name: history[-1] for name, history in states.items()}
        assert all(history in states[name] for name, history in found.items())
        lost += sum(history != states[name][-1] for name, history in found.items())
    assert lost


def test_a_broken_disk_ends_the_journal_and_nothing_else(model, stateless, tmp_path, caplog):
    driver = Talks(model, journal_dir=tmp_path)
    first = driver.say(7, tokens(1, 20), start=True)
    driver.turns.manager._journal._base.execute("PRAGMA query_only = ON")
    second = driver.say(7, tokens(2, 5))
    assert second.ids == stateless([*tokens(1, 20), *first.ids, *tokens(2, 5)])
    driver.say(8, tokens(2, 5), start=True)
    [record] = [record for record in caplog.records if "journal" in record.message]
    assert "will not survive a restart" in record.message
    assert not list(tmp_path.iterdir()), "an old state would be taken for the truth"
    driver.end_all()


def test_a_full_disk_and_a_folder_that_changed_take_no_answer(model, stateless, tmp_path, caplog):
    driver = Talks(model, journal_dir=tmp_path)
    first = driver.say(7, tokens(1, 20), start=True)
    base = driver.turns.manager._journal._base
    base.execute(f"PRAGMA max_page_count = {base.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        while True:
            base.execute("INSERT INTO turns (key, keep, ids) VALUES ('filler', 0, zeroblob(20))")
    # somebody has put something else there
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "conversations.sqlite").mkdir()
    second = driver.say(7, tokens(2, 50))
    assert second.reason is FinishReason.LENGTH
    assert second.ids == stateless([*tokens(1, 20), *first.ids, *tokens(2, 50)])
    assert "database or disk is full" in caplog.text
    assert "could not remove the journal" in caplog.text
    assert driver.say(7, tokens(3, 5)).error is None
    driver.end_all()


def test_a_turn_that_can_not_be_kept_gets_its_answer_and_loses_its_conversation(tmp_path, caplog):
    driver = Talks(make_tiny(tmp_path, max_position_embeddings=2048))
    other = driver.turn("other", tokens(9, 20), start=True, max_tokens=30)
    answer = driver.turn("chat", messages=[user("And then?")], start=True)
    queued = driver.turn("chat", messages=[user("And now?")])
    # as an answer would be that has no text
    with mock.patch.object(driver.tokenizer, "decode", side_effect=ValueError("no text")):
        driver.run_all()
    assert (answer.reason, len(answer.ids)) == (FinishReason.LENGTH, 8)
    assert str(queued.error) == "NOT_FOUND: conversation chat: lost, an earlier turn failed"
    assert len(other.ids) == 30
    assert "conversation chat is lost" in caplog.text
    assert ("end", "chat") in driver.triton.told
    driver.end_all()


def test_what_can_not_be_read_is_given_up(tmp_path, caplog):
    journal = Journal(tmp_path, MODEL)
    journal.begin(Conversation("a"))
    journal._base.execute("UPDATE conversations SET kv = 'no JSON'")
    assert journal.read() == []
    assert "the journal failed and is removed" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_models_conversations_are_lost(model, tmp_path):
    before = Talks(model, journal_dir=tmp_path / "before")
    before.say(7, tokens(1, 20), start=True)
    folder = killed(tmp_path / "before", tmp_path / "after")
    journal = Journal(folder, "another model")
    assert [list(found.history) for found in journal.read()] == [[]]
    journal.close()
    driver = Talks(model, journal_dir=folder)
    assert str(driver.say(7, tokens(2, 5)).error) == "NOT_FOUND: conversation 7: lost"
    before.end_all()


def test_a_smaller_server_restores_those_used_last(model, tmp_path):
    before = Talks(model, journal_dir=tmp_path / "before")
    for name in range(1, 6):
        before.say(name, tokens(name, 20), start=True)
    folder = killed(tmp_path / "before", tmp_path / "after")
    driver = Talks(model, journal_dir=folder, max_conversations=2)
    driver.engine.check_invariants()
    for name in (1, 2, 3):
        assert str(driver.say(name, tokens(2, 5)).error) == f"NOT_FOUND: conversation {name}: evicted"
    for name in (4, 5):
        assert driver.say(name, tokens(2, 5)).error is None
    driver.end_all()
    before.end_all()


def test_a_history_that_only_gets_shorter(tmp_path):
    journal, conversation = Journal(tmp_path, MODEL), Conversation("a", history=array("i", [1, 2]))
    journal.begin(conversation)
    journal.add(conversation, array("i"), None)
    conversation.history = array("i", [1])
    journal.add(conversation, array("i", [1, 2]), None)
    assert [list(found.history) for found in journal.read()] == [[1]]


def test_a_folder_that_can_not_be_used_is_told_at_start(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="^setting journal_dir="):
        Talks(model, journal_dir=tmp_path / "file")
    (tmp_path / "conversations.sqlite").write_text("no database at all, but long enough to be looked at")
    with pytest.raises(SettingsError, match="^setting journal_dir="):
        Talks(model, journal_dir=tmp_path)


def test_more_sequences_than_triton_keeps_are_refused():
    settings = {"max_conversations": "63000", "max_queue": "1272", "max_running": "64"}
    Settings.parse(settings).check_slots(65536)
    with pytest.raises(SettingsError, match="max_conversations=63000, max_queue=1273 and max_running=64 .* need 65537"):
        Settings.parse({**settings, "max_queue": "1273"}).check_slots(65536)


def test_who_reads_sees_what_was_written(tmp_path):
    journal = Journal(tmp_path, MODEL)
    conversation = Conversation("a", "salt", -1.0, {"dtype": "auto"})
    journal.begin(conversation)
    conversation.history = array("i", [1, 2, 3])
    journal.add(conversation, array("i"), None)
    [found] = journal.read()
    assert (found.id, found.salt, found.retain_s, found.kv) == ("a", "salt", -1.0, {"dtype": "auto"})
    assert (list(found.history), found.chat) == ([1, 2, 3], None)
    journal.begin(Conversation("a"))
    assert [list(found.history) for found in journal.read()] == [[]]
    journal.close()
    assert sqlite3.connect(tmp_path / "conversations.sqlite").execute("SELECT count(*) FROM turns").fetchone() == (0,)
