"""The host's name and the loopback interface, through which ranks of one machine talk."""

import socket
from collections.abc import Callable, Iterator
from threading import Thread

from .finding import Finding

_SUBJECT = "network"


def network_findings(timeout_s: float) -> Iterator[Finding]:
    """Whether the host's own name resolves, and whether it can talk to itself."""
    host = socket.gethostname()
    answer = _within(timeout_s, lambda: _address(host))
    if isinstance(answer, OSError):
        yield Finding(
            _SUBJECT,
            "host name",
            host,
            f"The name of this host, {host}, does not resolve: {answer}. Ranks under"
            " torchrun look each other up by it.",
            f"add '127.0.0.1 {host}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo",
        )
    else:
        yield Finding(_SUBJECT, "host name", f"{host}, {answer}")
    answer = _within(timeout_s, _echo)
    if isinstance(answer, OSError):
        yield Finding(
            _SUBJECT,
            "loopback",
            "no answer",
            f"A socket on 127.0.0.1 does not answer: {answer}. Ranks of one machine talk"
            " through it.",
            "allow the loopback interface: in the firewall, or in the sandbox's network",
        )
    else:
        yield Finding(_SUBJECT, "loopback", "127.0.0.1 answers")


def _address(host: str) -> str:
    return str(socket.getaddrinfo(host, None)[0][4][0])


def _echo() -> str:
    """Send a byte to a port of this machine, and return what arrives."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as sender,
        server.accept()[0] as receiver,
    ):
        sender.sendall(b"1")
        return receiver.recv(1).decode()


def _within(timeout_s: float, call: Callable[[], str]) -> str | OSError:
    """What `call` returns or raises; a TimeoutError if it is not back in time.

    A look-up cannot be interrupted: its thread is left behind, and ends with the program.
    """
    answers: list[str | OSError] = []

    def answer() -> None:
        try:
            answers.append(call())
        except OSError as error:
            answers.append(error)

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else TimeoutError(f"no answer within {timeout_s:g} s")
