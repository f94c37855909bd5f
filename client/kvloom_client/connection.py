"""A client's connection to its server: address, encryption and headers. All clients use it."""

import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import grpc

from kvloom_client.errors import InvalidArgument

Compression = Literal["gzip", "deflate"]
"""The compression of gRPC messages. Triton's HTTP endpoints for answers support none."""

Headers = tuple[tuple[str, str], ...]
"""Names in lower case, and values."""

_PLAIN, _ENCRYPTED = ("http", "grpc"), ("https", "grpcs")

_ALGORITHMS = {None: None, "gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a connection.

    Attributes:
        ca_file: PEM file of the trusted CA certificates; None for those that the system or gRPC trusts.
        certificate_file: PEM file of the client's certificate, for a server that requires one.
        key_file: the private key of ``certificate_file``.
    """

    ca_file: str | Path | None = None
    certificate_file: str | Path | None = None
    key_file: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise InvalidArgument("INVALID_ARG: tls: give certificate_file and key_file together, or neither")


@dataclass(frozen=True, slots=True)
class Connection:
    """The address of a server, and the encryption and headers of every call.

    Attributes:
        address: ``host:port``, followed by the path if the URL of a proxy has one.
        tls: the TLS settings; None for no encryption.
        headers: the headers of every call.
    """

    address: str
    tls: Tls | None
    headers: Headers

    @classmethod
    def parse(cls, url: str, tls: Tls | bool, headers: Mapping[str, str]) -> "Connection":
        """Check the arguments of a client.

        Args:
            url: ``host:port``. ``https://`` or ``grpcs://`` in front of it means TLS.
            tls: TLS settings; True for TLS with the certificates that the system trusts.
            headers: the headers of every call.

        Raises:
            InvalidArgument: an argument is wrong. The message names it.
        """
        scheme, slashes, rest = url.partition("://")
        address = (rest if slashes else url).rstrip("/")
        if slashes and scheme not in _PLAIN + _ENCRYPTED:
            raise InvalidArgument(f"INVALID_ARG: url: {scheme}:// is unknown; known: {', '.join(_PLAIN + _ENCRYPTED)}")
        if scheme in _PLAIN and slashes and tls:
            raise InvalidArgument(f"INVALID_ARG: tls: the URL says {scheme}://, which is not encrypted")
        encrypted = bool(tls) or (bool(slashes) and scheme in _ENCRYPTED)
        return cls(address, (tls if isinstance(tls, Tls) else Tls()) if encrypted else None, _checked(headers))

    @property
    def base_url(self) -> str:
        """The base URL for HTTP."""
        return f"{'http' if self.tls is None else 'https'}://{self.address}"

    def open(self, library: Any, options: Sequence[tuple[str, int]], compression: Compression | None) -> Any:
        """Open a gRPC channel.

        Args:
            library: ``grpc`` or ``grpc.aio``.
            options: the options of the channel.
            compression: the compression of sent messages.

        Raises:
            InvalidArgument: the address has a path, a file can't be read, or the compression is unknown.
        """
        if urlsplit(f"//{self.address}").path:
            raise InvalidArgument(f"INVALID_ARG: url: gRPC takes host:port without a path, not {self.address!r}")
        if compression not in _ALGORITHMS:
            raise InvalidArgument(f"INVALID_ARG: compression: {compression!r} is unknown; known: gzip, deflate")
        more = {"options": options, "compression": _ALGORITHMS[compression]}
        if self.tls is None:
            return library.insecure_channel(self.address, **more)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_content("ca_file", self.tls.ca_file),
            private_key=_content("key_file", self.tls.key_file),
            certificate_chain=_content("certificate_file", self.tls.certificate_file),
        )
        return library.secure_channel(self.address, credentials, **more)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The SSL context for HTTP; None for no encryption.

        Raises:
            InvalidArgument: a file can't be read or contains no certificate or key.
        """
        if self.tls is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls.ca_file)
            if self.tls.certificate_file is not None:
                context.load_cert_chain(self.tls.certificate_file, self.tls.key_file)
        except OSError as error:
            files = ", ".join(str(file) for file in (self.tls.ca_file, self.tls.certificate_file) if file is not None)
            raise InvalidArgument(f"INVALID_ARG: tls: {files}: {error}") from error
        return context


def _checked(headers: Mapping[str, str]) -> Headers:
    checked = []
    for name, value in headers.items():
        if not re.fullmatch(r"[0-9A-Za-z_.-]+", name) or name.lower().startswith("grpc-"):
            raise InvalidArgument(f"INVALID_ARG: headers: {name!a} is not a valid name of a header")
        if not re.fullmatch(r"[ -~]*", value):
            raise InvalidArgument(f"INVALID_ARG: headers: the value of {name} is not printable ASCII")
        checked.append((name.lower(), value))
    return tuple(checked)


def _content(name: str, file: str | Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"INVALID_ARG: tls: {name}: {file}: {error.strerror}") from error


def parse_headers(lines: Iterable[str]) -> dict[str, str]:
    """Parse headers from lines of the form ``NAME: VALUE``.

    Raises:
        InvalidArgument: a line has no colon.
    """
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise InvalidArgument(f"INVALID_ARG: headers: {line!r} is not NAME: VALUE")
        headers[name.strip()] = value.strip()
    return headers
