"""Streaming clients for kvloom models on Triton Inference Server."""

from kvloom_client.aio import AsyncClient, AsyncStream
from kvloom_client.answer import Answer, Chunk
from kvloom_client.client import Client
from kvloom_client.connection import Tls
from kvloom_client.conversation import AsyncConversation, Conversation
from kvloom_client.errors import (
    AccessDenied,
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
    UnknownSequence,
)
from kvloom_client.http import HttpClient
from kvloom_client.request import RequestArguments
from kvloom_client.stream import Stream

__all__ = [
    "AccessDenied",
    "Answer",
    "AnswerTimeout",
    "AsyncClient",
    "AsyncConversation",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ConnectionFailed",
    "Conversation",
    "HttpClient",
    "IncompleteAnswer",
    "Internal",
    "InvalidArgument",
    "KvloomClientError",
    "NotFound",
    "RequestArguments",
    "RequestFailed",
    "ServerError",
    "Stream",
    "Tls",
    "TransportError",
    "Unavailable",
    "UnknownSequence",
]
