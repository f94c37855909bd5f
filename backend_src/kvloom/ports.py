"""The TCP ports of a server, all on 127.0.0.1."""

import random
import socket
from dataclasses import asdict, dataclass

from kvloom.errors import LaunchError

HOST = "127.0.0.1"

# below the range from which the kernel takes the ports of outgoing connections
_CANDIDATES = range(20000, 32000)


@dataclass(frozen=True)
class Ports:
    """Port numbers of the endpoints; 0 stands for any free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0
    health: int = 0

    def resolved(self) -> "Ports":
        """The same with a free port in place of every 0.

        Raises:
            LaunchError: a port is taken or given twice.
        """
        chosen: dict[str, int] = {}
        for name, port in asdict(self).items():
            if port and (port in chosen.values() or not _is_free(port)):
                raise LaunchError(f"port {port} is in use; give another --{name}-port, or 0 for any free one")
            if port:
                chosen[name] = port
        candidates = random.sample(_CANDIDATES, len(_CANDIDATES))
        for name in asdict(self):
            if name not in chosen:
                # nobody holds the port until tritonserver takes it; chosen at random, two launchers rarely collide
                port = next((port for port in candidates if port not in chosen.values() and _is_free(port)), 0)
                if not port:
                    raise LaunchError(f"no free port among {_CANDIDATES.start} to {_CANDIDATES.stop - 1}")
                chosen[name] = port
        return Ports(**chosen)

    def address(self, name: str) -> str:
        """``host:port`` of the endpoint ``name``."""
        return f"{HOST}:{asdict(self)[name]}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as servers do: connections that linger after an earlier server's end don't count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
