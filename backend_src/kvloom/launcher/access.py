"""What clients of a tritonserver may use of its protocols."""

SWITCHED_OFF = ("model-repository", "trace", "logging")
"""Triton's names of what changes the server for everybody: nobody but its operator has business there, and he has no
need of it. Loading a model is running code: its files can be part of the request."""

SHARED_MEMORY = "shared-memory"
"""Registering regions of /dev/shm: who can may read and write what other programs of the server's user keep there."""

HEADER = "switched:off=-"
"""The header that Triton asks for in a request to what is switched off. No request can have it: in HTTP a header's name
ends at its first colon, and gRPC refuses names with one."""


def options(shared_memory: bool) -> list[str]:
    """Options of tritonserver that switch off what clients shall not use, over HTTP and gRPC, and allow what they may.

    Args:
        shared_memory: whether clients may register shared memory.
    """
    off = ",".join(SWITCHED_OFF if shared_memory else (SHARED_MEMORY, *SWITCHED_OFF))
    return [
        # what is loaded stays as it is, whatever anybody asks for
        "--model-control-mode=none",
        f"--http-restricted-api={off}:{HEADER}",
        f"--grpc-restricted-protocol={off}:{HEADER}",
        # a client that looks every few seconds whether its connection lives may do so while it waits for a long answer
        "--grpc-http2-max-ping-strikes=0",
        # The models must know which streams Triton would close at an error: it crashes if other requests are on them
        "--grpc-header-forward-pattern=triton_grpc_error",
    ]


def warnings(shared_memory: bool, user: int) -> list[str]:
    """What an operator should know about a start.

    Args:
        shared_memory: whether clients may register shared memory.
        user: id of the user that the server will run as.
    """
    said = []
    if user == 0:
        said.append("running as root: whoever finds a hole in the server has the whole machine; use another user")
    if shared_memory:
        said.append(
            "--shared-memory: every client can read and write what programs of this server's user keep in /dev/shm, "
            "and end the server by shortening a region"
        )
    return said
