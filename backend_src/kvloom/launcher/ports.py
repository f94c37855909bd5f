"""Chooses and checks the TCP ports of a server. All are on one address."""

import ipaddress
import random
import socket
from collections import deque
from dataclasses import dataclass

from kvloom.errors import LaunchError

HOST = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"
_LOOPBACK = {EVERY_INTERFACE: HOST, "::": "::1"}
"""The addresses of all interfaces, and the one by which this machine reaches them."""

# Below the kernel's range of ports for outgoing connections
_CANDIDATES = range(20000, 32000)

# Sockets whose names reserve the ports of the last 16 launches. Servers before those have bound their ports themselves
_claims: deque[socket.socket] = deque(maxlen=4 * 16)


@dataclass(frozen=True)
class Ports:
    """The port numbers of the endpoints, where 0 means any free port, and their IPv4 or IPv6 address."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    health: int = 0
    host: str = HOST

    def resolved(self) -> "Ports":
        """A copy with a free port instead of every 0.

        Raises:
            LaunchError: a port is in use or given twice, or the host is not an address of this machine.
        """
        if not _can_bind(self.host):
            raise LaunchError(
                f"host {self.host!r}: not an IPv4 or IPv6 address of this machine; {EVERY_INTERFACE} is all of IPv4, "
                "and :: is all"
            )
        chosen: dict[str, int] = {}
        for name, port in self._numbers().items():
            if port and (port in chosen.values() or not _is_free(self.host, port)):
                raise LaunchError(f"port {port} is in use; give another --{name}-port, or 0 for any free one")
            if port:
                chosen[name] = port
        candidates = iter(random.sample(_CANDIDATES, len(_CANDIDATES)))
        for name in self._numbers():
            if name not in chosen:
                free = (p for p in candidates if p not in chosen.values() and _is_free(self.host, p))
                port = next(filter(_claim, free), 0)
                if not port:
                    raise LaunchError(f"no free port among {_CANDIDATES.start} to {_CANDIDATES.stop - 1}")
                chosen[name] = port
        return Ports(**chosen, host=self.host)

    def address(self, name: str) -> str:
        """``host:port`` of the endpoint ``name``, with an IPv6 address in brackets."""
        return f"{in_brackets(self.host)}:{self._numbers()[name]}"

    @property
    def own_host(self) -> str:
        """The address for connections from this machine."""
        return _LOOPBACK.get(self.host, self.host)

    def own_address(self, name: str) -> str:
        """``host:port`` for connections from this machine to the endpoint ``name``."""
        return f"{in_brackets(self.own_host)}:{self._numbers()[name]}"

    def _numbers(self) -> dict[str, int]:
        return {"http": self.http, "grpc": self.grpc, "metrics": self.metrics, "health": self.health}


def in_brackets(host: str) -> str:
    """An address as it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


def family(host: str) -> socket.AddressFamily:
    """The family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_bind(host: str) -> bool:
    try:
        return _is_free(str(ipaddress.ip_address(host)), 0)
    except ValueError:
        return False


def _claim(port: int) -> bool:
    """Reserve a port among all launchers until tritonserver binds it. False if it is reserved already.

    The reservation is a name in Linux's abstract socket namespace. It disappears with its process, and containers with
    separate ports have separate names.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0kvloom-port-{port}")
    except OSError:
        name.close()
        return False
    _claims.append(name)
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket(family(host)) as probe:
        # As servers do: a port with only lingering connections of an earlier server is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
