"""Restricts which of tritonserver's protocols clients may use."""

SWITCHED_OFF = ("model-repository", "trace", "logging")
"""Triton's names of the protocols that change the server for all clients. No client needs them, and loading a model
means running code, because its files can be part of the request."""

SHARED_MEMORY = "shared-memory"
"""Triton's name of the protocol to register regions of /dev/shm. A client that may use it can read and write the shared
memory of other programs of the server's user."""

HEADER = "switched:off=-"
"""The header that Triton requires for a restricted protocol. No request can have it: in HTTP a header's name ends at
its first colon, and gRPC rejects names with a colon."""


def options(shared_memory: bool) -> list[str]:
    """The options of tritonserver that restrict its protocols, over HTTP and gRPC.

    Args:
        shared_memory: whether clients may register shared memory.
    """
    off = ",".join(SWITCHED_OFF if shared_memory else (SHARED_MEMORY, *SWITCHED_OFF))
    return [
        # Clients can't load or unload models
        "--model-control-mode=none",
        f"--http-restricted-api={off}:{HEADER}",
        f"--grpc-restricted-protocol={off}:{HEADER}",
        # A client may send keepalive pings while it waits for a long answer
        "--grpc-http2-max-ping-strikes=0",
        # The models must know which streams Triton would close at an error: it crashes if other requests are on them
        "--grpc-header-forward-pattern=triton_grpc_error",
    ]


def warnings(shared_memory: bool, user: int) -> list[str]:
    """The warnings to show to the operator when the server starts.

    Args:
        shared_memory: whether clients may register shared memory.
        user: the id of the user that the server runs as.
    """
    said = []
    if user == 0:
        said.append("running as root: an attacker who breaks into the server controls the machine; use another user")
    if shared_memory:
        said.append(
            "--shared-memory: every client can read and write the shared memory of this user's programs in /dev/shm, "
            "and can crash the server by shortening a region"
        )
    return said
