"""Checks of conversations on a real server with a tiny model."""

from kvloom_client import NotFound
from support.server import eventually, metrics
from support.tiny_server import GREEDY


def expect_conversations(server, count):
    """Wait until the metrics, which are up to 0.2 s old, count so many conversations."""
    eventually(lambda: metrics(server)["kvloom_conversations"] == count)


def fresh(client, ids, count=8):
    """The stateless answer to a whole history."""
    return client.generate(input_ids=ids, max_tokens=count, **GREEDY, timeout=60).token_ids


def known_to_triton(client, name):
    """Whether Triton passes a turn without a start to the engine, which has no conversation with this id."""
    talk = client.conversation(name)
    talk.begun = True
    try:
        talk.generate(input_ids=[5], max_tokens=1, timeout=30)
    except NotFound as error:
        return "START flag" not in str(error)
    raise AssertionError("there is a conversation")
