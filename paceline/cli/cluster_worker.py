"""`paceline cluster worker`: one worker alone. `paceline cluster up` starts its own with this verb."""

import argparse
import socket
from typing import TYPE_CHECKING

from paceline.cli import serve
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.cluster.backend import Address


def add_worker(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--role", default="mixed", metavar="ROLE", help="prefill, decode or mixed (default: %(default)s)"
    )
    group.add_argument("--worker-name", default="", metavar="NAME", help="of this worker (default: its address)")
    group.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="(default: %(default)s)")
    group.add_argument(
        "--kv-events",
        nargs="+",
        default=[],
        metavar="ENDPOINT",
        help="publish KV events as vLLM does, such as tcp://*:5557",
    )
    group.add_argument("--transport", default="tcp", metavar="NAME", help="of KV blocks: tcp or nixl (default: tcp)")
    group.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def run_worker(args: argparse.Namespace) -> int:
    from paceline.cluster.block_transport import check_transport
    from paceline.cluster.event_loop import run
    from paceline.cluster.joining import ROLES
    from paceline.cluster.parent import Parent
    from paceline.cluster.worker_main import run_worker

    if args.role not in ROLES:
        raise InvalidOptionError(f"there is no role {args.role!r}: choose one of {', '.join(ROLES)}")
    check_transport(args.transport)
    host, port = parse_address(args.listen)
    check_port(host, port, "--listen")
    parent = Parent() if args.end_with_stdin else None
    llm = serve.make_engine(args)
    name = args.worker_name or f"{args.role}@{args.listen}"
    methods, events = serve.chosen_per_request(), args.kv_events[:2]
    return run(run_worker(llm, methods, args.role, name, host, port, parent, events, args.transport))


def parse_address(text: str) -> "Address":
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidOptionError(f"an address is HOST:PORT, got {text!r}")
    return host, int(port)


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Before models are loaded, not after."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise InvalidOptionError(f"cannot listen on {host}:{port}: {reason}; choose another {option}") from error
