"""Streaming clients for kvloom models on Triton Inference Server."""

from kvloom_client.aio import AsyncClient, AsyncStream
from kvloom_client.client import Client, Stream
from kvloom_client.errors import (
    AnswerTimeout,
    Cancelled,
    ConnectionFailed,
    IncompleteAnswer,
    Internal,
    InvalidArgument,
    KvloomClientError,
    NotFound,
    RequestFailed,
    ServerError,
    TransportError,
    Unavailable,
)
from kvloom_client.wire import Answer, Chunk, RequestArguments

__all__ = [
    "Answer",
    "AnswerTimeout",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ConnectionFailed",
    "IncompleteAnswer",
    "Internal",
    "InvalidArgument",
    "KvloomClientError",
    "NotFound",
    "RequestArguments",
    "RequestFailed",
    "ServerError",
    "Stream",
    "TransportError",
    "Unavailable",
]
