"""Conversations: turns of one Triton sequence, whose cache the server keeps between them."""

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
    """What both conversations know of their turns.

    Attributes:
        id: the sequence id.
        begun: whether the server has it, as far as is known here: a turn begins it otherwise.
    """

    def __init__(self, conversation: int | str | None):
        self.id = uuid.uuid4().hex if conversation is None else conversation
        self.begun = False

    def _request(self, last: bool, **request: Any) -> Request:
        return build_request(place=Place(self.id, start=not self.begun, end=last), **request)

    def _opening(self) -> Request:
        """Lets Triton know the id, and asks the engine whether it has the conversation.

        Of a conversation that it does not have, the engine ends what this began in Triton. Triton has refused the turn
        before, so that the engine has seen nothing of it, not even that it was the last.
        """
        return build_control("status", self.id, place=Place(self.id, start=True))


class _Turn(Watch):
    """One turn on its way: keeps ``begun`` as what is known of the server while the tries go on.

    In doubt the server has the conversation: a next turn is then refused as NotFound where it has none, and a start
    would make it forget what it may well have.
    """

    def __init__(self, conversation: _Turns, last: bool):
        self._conversation = conversation
        self._start = not conversation.begun
        self._last = last

    def sending(self) -> None:
        # a last one has ended nothing before it has arrived
        if not self._last:
            self._conversation.begun = True

    def answered(self) -> None:
        if self._last:
            self._conversation.begun = False

    def failed(self, error: KvloomClientError) -> None:
        refused = isinstance(error, RequestFailed)
        # one that another client restarted is there, with other content
        restarted = isinstance(error, Cancelled)
        if isinstance(error, NotFound) or (refused and self._last) or (refused and self._start and not restarted):
            self._conversation.begun = False
        elif isinstance(error, ConnectionFailed) and not error.sent:
            # as before the turn
            self._conversation.begun = not self._start

    def may_retry(self, error: KvloomClientError) -> bool:
        # a last turn ends what it was to go on, also where it is refused
        ended = self._last and not self._start and isinstance(error, RequestFailed)
        return not ended and super().may_retry(error)


class Conversation(_Turns):
    """A conversation over gRPC, made by ``Client.conversation``. As a context manager it is ended on leaving.

    The first turn begins it on the server, the later ones say only what is new. A conversation that the server has
    lost (idle for too long, evicted, restarted) fails with NotFound; the turn after that begins a new one of the same
    id, so it must say all that is to be known.

    One turn after the other; while one is on its way, another thread may ``interrupt`` it.
    """

    def __init__(self, client: "Client", conversation: int | str | None = None):
        """Args: client: whom to ask. conversation: the sequence id; None mints one."""
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
        """Say something and get the answer's chunks as they come; ``Client.stream`` explains the arguments.

        Args:
            last: the conversation ends with this turn, also where the server refuses it.
            timeout: seconds for the whole answer, retries included.
            retries: how often to ask again where that is safe. A last turn that the server has refused is not sent
                again: it has ended the conversation that it belongs to.
            request: what is new, and how to sample.
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
        """Say something and wait for the whole answer; the arguments are those of ``stream``.

        Raises:
            NotFound: the server has lost the conversation.
            RequestFailed: the server answered with another error; the conversation is as before the turn, unless that
                was to be the last.
            TransportError: the answer did not arrive, or not whole.
        """
        with self._ask(timeout, retries, last, stream=False, **request) as stream:
            return join(list(stream))

    def interrupt(self, timeout: float | None = None) -> None:
        """End the answer that is on its way (barge-in): its stream ends as ``cancelled``, with all that was said.

        What was said stays part of the conversation. From any thread.
        """
        self._client.control("cancel", self.id, timeout=timeout)

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """What the server keeps of it: ``tokens``, ``blocks``, ``dtype``, ``policy``, ``idle_s``, ``busy``."""
        return self._client.control("status", self.id, timeout=timeout)

    def end(self, timeout: float | None = None) -> None:
        """Let the server forget it, after the turns that are on their way; nothing happens where it has none."""
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
        """Where only Triton may have lost it, as a server that was just started anew has: what lets it know it again.

        That fails as NOT_FOUND where the engine has lost it too.
        """
        return self._client._send(self._opening(), timeout, 0) if isinstance(error, UnknownSequence) else None


class AsyncConversation(_Turns):
    """A conversation over gRPC, made by ``AsyncClient.conversation``; as ``Conversation``."""

    def __init__(self, client: "AsyncClient", conversation: int | str | None = None):
        """Args: client: whom to ask. conversation: the sequence id; None mints one."""
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
        """Say something and get the answer's chunks as they come; as ``Conversation.stream``."""
        return self._ask(timeout, retries, last, stream=True, **request)

    async def generate(
        self,
        *,
        last: bool = False,
        timeout: float | None = None,
        retries: int = 0,
        **request: Unpack[RequestArguments],
    ) -> Answer:
        """Say something and wait for the whole answer; as ``Conversation.generate``."""
        async with self._ask(timeout, retries, last, stream=False, **request) as stream:
            return join([chunk async for chunk in stream])

    async def interrupt(self, timeout: float | None = None) -> None:
        """End the answer that is on its way; as ``Conversation.interrupt``."""
        await self._client.control("cancel", self.id, timeout=timeout)

    async def status(self, timeout: float | None = None) -> dict[str, Any]:
        """What the server keeps of it; as ``Conversation.status``."""
        return await self._client.control("status", self.id, timeout=timeout)

    async def end(self, timeout: float | None = None) -> None:
        """Let the server forget it; as ``Conversation.end``."""
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
        """As ``Conversation._reopen``."""
        return self._client._send(self._opening(), timeout, 0) if isinstance(error, UnknownSequence) else None
