"""The TCP ports of a server, all on one address."""

import ipaddress
import random
import socket
from collections import deque
from dataclasses import dataclass

from kvloom.errors import LaunchError

HOST = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"

# below the range from which the kernel takes the ports of outgoing connections
_CANDIDATES = range(20000, 32000)

# the names that stand for the ports this process has chosen; servers that began 16 launches ago hold theirs themselves
_claims: deque[socket.socket] = deque(maxlen=4 * 16)


@dataclass(frozen=True)
class Ports:
    """Port numbers of the endpoints, where 0 stands for any free one, and the IPv4 address they are taken on."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    health: int = 0
    host: str = HOST

    def resolved(self) -> "Ports":
        """The same with a free port in place of every 0.

        Raises:
            LaunchError: a port is taken or given twice, or the host is no address of this machine.
        """
        if not _can_bind(self.host):
            raise LaunchError(
                f"host {self.host!r}: not an IPv4 address of this machine; {EVERY_INTERFACE} is all of them"
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
        """``host:port`` that the endpoint ``name`` listens on."""
        return f"{self.host}:{self._numbers()[name]}"

    @property
    def own_host(self) -> str:
        """The address by which this machine itself reaches them."""
        return HOST if self.host == EVERY_INTERFACE else self.host

    def _numbers(self) -> dict[str, int]:
        return {"http": self.http, "grpc": self.grpc, "metrics": self.metrics, "health": self.health}


def _can_bind(host: str) -> bool:
    try:
        return _is_free(str(ipaddress.IPv4Address(host)), 0)
    except ValueError:
        return False


def _claim(port: int) -> bool:
    """Keep other launchers off a port until tritonserver takes it; False where one of them, or this one, has it.

    A name in Linux's abstract namespace goes with its process, and is as private to a container as its ports.
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
    with socket.socket() as probe:
        # as servers do: connections that linger after an earlier server's end don't count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
