"""Plain HTTP calls of the `generate` model, as in a user's program."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from kvloom.launcher.launch import Server


def post(server: Server, body: Any, endpoint: str = "generate", timeout: float = 120) -> tuple[int, str]:
    """POST to an endpoint of `generate`. ``body`` is JSON, or an object to encode. Returns (status, text)."""
    address = urlsplit(server.http_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=timeout)
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    try:
        connection.request("POST", f"/v2/models/generate/{endpoint}", content)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def answer(server: Server, **request: Any) -> dict[str, Any]:
    """The JSON reply of /generate."""
    status, text = post(server, request)
    assert status == 200, text
    return json.loads(text)


def events(server: Server, **request: Any) -> list[dict[str, Any]]:
    """The JSON of every event of /generate_stream."""
    status, text = post(server, request, "generate_stream")
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def refusal(server: Server, body: Any, endpoint: str = "generate") -> str:
    """The error text of a request that is refused before its answer begins."""
    status, text = post(server, body, endpoint)
    assert status in (400, 500), (status, text)
    # An error of the model before the first event is an event with the error's status
    found = json.loads(text.removeprefix("data: "))
    assert list(found) == ["error"]
    assert "Traceback" not in text
    assert ".py" not in text
    return found["error"]
