"""Conversations: turns of one Triton sequence. The server keeps their KV cache between turns."""

import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from kvloom_client.answer import Answer, join
from kvloom_client.errors import (
    Cancelled,
    ConnectionFailed,
    KvloomClientError,
    NotFound,
    RequestFailed,
    UnknownSequence,
)
from kvloom_client.request import Place, Request, RequestArguments, build_control, build_request
from kvloom_client.retry import Watch

if TYPE_CHECKING:
    from kvloom_client.aio import AsyncClient, AsyncStream
    from kvloom_client.client import Client
    from kvloom_client.stream import Stream


class _Turns:
    """The state that both classes of conversations share.

    Attributes:
        id: the sequence id.
        begun: whether the server has the conversation, as far as the client knows. Otherwise the next turn starts it.
    """

    def __init__(self, conversation: int | str | None):
        self.id = uuid.uuid4().hex if conversation is None else conversation
        self.begun = False

    def _request(self, last: bool, **request: Any) -> Request:
        return build_request(place=Place(self.id, start=not self.begun, end=last), **request)

    def _opening(self) -> Request:
        """A request that starts the sequence in Triton and asks the engine for the conversation's status.

        If the engine does not have the conversation, it ends the sequence in Triton again. Triton has refused the turn
        before, so the engine has not seen it.
        """
        return build_control("status", self.id, place=Place(self.id, start=True))


class _Turn(Watch):
    """Updates ``begun`` during the attempts to send one turn.

    In doubt the server is assumed to have the conversation. If it does not, the next turn fails as NotFound, whereas a
    start would drop a conversation that the server may have.
    """

    def __init__(self, conversation: _Turns, last: bool):
        self._conversation = conversation
        self._start = not conversation.begun
        self._last = last

    def sending(self) -> None:
        # The last turn ends the conversation only when it has arrived
        if not self._last:
            self._conversation.begun = True

    def answered(self) -> None:
        if self._last:
            self._conversation.begun = False

    def failed(self, error: KvloomClientError) -> None:
        refused = isinstance(error, RequestFailed)
        # If another client has restarted the conversation, the server has it, with other content
        restarted = isinstance(error, Cancelled)
        if isinstance(error, NotFound) or (refused and self._last) or (refused and self._start and not restarted):
            self._conversation.begun = False
        elif isinstance(error, ConnectionFailed) and not error.sent:
            # The turn has changed nothing
            self._conversation.begun = not self._start

    def may_retry(self, error: KvloomClientError) -> bool:
        # A last turn ends the conversation even if it is refused
        ended = self._last and not self._start and isinstance(error, RequestFailed)
        return not ended and super().may_retry(error)


class Conversation(_Turns):
    """A conversation over gRPC, created by ``Client.conversation``. A context manager that ends it.

    The first turn starts the conversation on the server, and later turns send only new messages. If the server has lost
    it (idle for too long, evicted, server restarted), a turn fails with NotFound. The next turn starts a new
    conversation with the same id, so it must send all messages.

    Send one turn after the other. While a turn runs, another thread may ``interrupt`` it.
    """

    def __init__(self, client: "Client", conversation: int | str | None = None):
        """Create a conversation. Nothing is sent.

        Args:
            client: sends the requests.
            conversation: the sequence id; None generates one.
        """
        super().__init__(conversation)
        self._client = client

    def stream(
        self,
        *,
        last: bool = False,
        timeout: float | None = None,
        retries: int = 0,
        **request: Unpack[RequestArguments],
    ) -> "Stream":
        """Send a turn and receive the answer's chunks as they come. ``Client.stream`` describes the arguments.

        Args:
            last: whether the conversation ends with this turn, even if the server refuses it.
            timeout: maximum seconds for the whole answer including retries.
            retries: maximum number of retries. A last turn that the server has refused is not sent again, because it
                has ended its conversation.
            request: the new messages or text, sampling keys and options.
        """
        return self._ask(timeout, retries, last, stream=True, **request)

    def generate(
        self,
        *,
        last: bool = False,
        timeout: float | None = None,
        retries: int = 0,
        **request: Unpack[RequestArguments],
    ) -> Answer:
        """Send a turn and wait for the whole answer. The arguments are those of ``stream``.

        Raises:
            NotFound: the server has lost the conversation.
            RequestFailed: the server answered with another error. The turn has not changed the conversation, unless it
                was the last.
            TransportError: the answer did not arrive completely.
        """
        with self._ask(timeout, retries, last, stream=False, **request) as stream:
            return join(list(stream))

    def interrupt(self, timeout: float | None = None) -> None:
        """End the running answer (barge-in). Its stream ends as ``cancelled`` with the text so far.

        This text stays in the conversation. Any thread may call this.
        """
        self._client.control("cancel", self.id, timeout=timeout)

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """The state on the server: ``tokens``, ``blocks``, ``dtype``, ``policy``, ``idle_s``, ``busy``."""
        return self._client.control("status", self.id, timeout=timeout)

    def end(self, timeout: float | None = None) -> None:
        """End the conversation on the server after its running turns. Does nothing if the server does not have it."""
        if self.begun:
            self.begun = False
            try:
                self._client.control("end", self.id, timeout=timeout)
            except NotFound:
                return  # as wanted

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _ask(self, timeout: float | None, retries: int, last: bool, **request: Any) -> "Stream":
        return self._client._send(
            self._request(last, **request),
            timeout,
            retries,
            watch=_Turn(self, last),
            mend=self._reopen if self.begun else None,
        )

    def _reopen(self, error: KvloomClientError, timeout: float | None) -> "Stream | None":
        """Start the sequence in Triton again if Triton does not know it, for example after a restart of the server.

        Fails as NotFound if the engine does not have the conversation either.
        """
        return self._client._send(self._opening(), timeout, 0) if isinstance(error, UnknownSequence) else None


class AsyncConversation(_Turns):
    """A conversation over gRPC, created by ``AsyncClient.conversation``. Works like ``Conversation``."""

    def __init__(self, client: "AsyncClient", conversation: int | str | None = None):
        """Create a conversation, see ``Conversation``."""
        super().__init__(conversation)
        self._client = client

    def stream(
        self,
        *,
        last: bool = False,
        timeout: float | None = None,
        retries: int = 0,
        **request: Unpack[RequestArguments],
    ) -> "AsyncStream":
        """Send a turn and receive the answer's chunks as they come, see ``Conversation.stream``."""
        return self._ask(timeout, retries, last, stream=True, **request)

    async def generate(
        self,
        *,
        last: bool = False,
        timeout: float | None = None,
        retries: int = 0,
        **request: Unpack[RequestArguments],
    ) -> Answer:
        """Send a turn and wait for the whole answer, see ``Conversation.generate``."""
        async with self._ask(timeout, retries, last, stream=False, **request) as stream:
            return join([chunk async for chunk in stream])

    async def interrupt(self, timeout: float | None = None) -> None:
        """End the running answer, see ``Conversation.interrupt``."""
        await self._client.control("cancel", self.id, timeout=timeout)

    async def status(self, timeout: float | None = None) -> dict[str, Any]:
        """The conversation's state on the server, see ``Conversation.status``."""
        return await self._client.control("status", self.id, timeout=timeout)

    async def end(self, timeout: float | None = None) -> None:
        """End the conversation on the server, see ``Conversation.end``."""
        if self.begun:
            self.begun = False
            try:
                await self._client.control("end", self.id, timeout=timeout)
            except NotFound:
                return  # as wanted

    async def __aenter__(self) -> "AsyncConversation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    def _ask(self, timeout: float | None, retries: int, last: bool, **request: Any) -> "AsyncStream":
        return self._client._send(
            self._request(last, **request),
            timeout,
            retries,
            watch=_Turn(self, last),
            mend=self._reopen if self.begun else None,
        )

    def _reopen(self, error: KvloomClientError, timeout: float | None) -> "AsyncStream | None":
        """See ``Conversation._reopen``."""
        return self._client._send(self._opening(), timeout, 0) if isinstance(error, UnknownSequence) else None
