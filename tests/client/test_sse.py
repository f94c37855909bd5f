"""Server-sent events, however their bytes are cut."""

import pytest

from kvloom_client.sse import events


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_however_they_are_cut(size, end):
    lines = [
        ": hello",
        "event: x",
        'data: {"a": "Größe 🙂\u2028\x85"}',
        "",
        "",
        "data:1",
        "data:  2",
        "data",
        "id: 3",
        "",
    ]
    stream = end.join([*lines, ": the last line", "data: cut off"]).encode()
    parts = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert list(events(parts)) == ['{"a": "Größe 🙂\u2028\x85"}', "1\n 2\n"]
