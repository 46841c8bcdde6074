"""`paceline cluster up`, `status`, `down` and `worker`: a cluster of local processes, or of workers elsewhere.

While a cluster runs, a small file in the temporary folder says where it is; `status` and `down` read it.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import serve
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.cluster.app import RayCluster
    from paceline.cluster.backend import Address
    from paceline.cluster.local import LocalWorkers

DOWN_TIMEOUT_S = 60.0
# Not for workers: keys do not belong into a list of processes.
SERVER_ONLY = {"help", "config", "host", "port", "api_key", "admin_key", "run"}


def add_up(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("--prefill", type=int, default=1, metavar="N", help="workers that only read prompts")
    group.add_argument("--decode", type=int, default=1, metavar="N", help="workers that answer (default: %(default)s)")
    group.add_argument(
        "--workers-at", nargs="+", default=[], metavar="HOST:PORT", help="use these instead: `paceline cluster worker`"
    )
    group.add_argument("--ray", action="store_true", help="workers as replicas of Ray Serve (extra cluster)")
    group.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster that runs, or auto; with --ray")
    group.add_argument(
        "--router", default="kv_aware", metavar="NAME", help="round_robin, power_of_two, dynamo, kv_aware"
    )
    group.add_argument("--policy", default="cost", metavar="NAME", help="where prompts are computed: cost, dynamo, ...")
    group.add_argument(
        "--worker-file", metavar="FILE", help="measured pass cost; left out: measured when workers start"
    )


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
    group.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="of the cluster's server (default: %(default)s)")


def run_up(args: argparse.Namespace) -> int:
    from paceline.cluster.backend import ClusterBackend
    from paceline.cluster.worker_spec import WorkerSpec
    from paceline.models.loading import load_tokenizer
    from paceline.models.resolve import resolve_model
    from paceline.serve.http.server import run_server

    _check_names(args)
    _check_port(args.host, args.port)
    path = _state_path(args.port)
    if _running(path) is not None:
        raise InvalidOptionError(
            f"a cluster runs at port {args.port} already: paceline cluster down --port {args.port}"
        )
    spec = WorkerSpec.load(args.worker_file) if args.worker_file else None
    tokenizer = load_tokenizer(resolve_model(args.name or args.model))  # fetched once, before the workers want it
    workers = _on_ray(args) if args.ray else _local(args)
    workers.start()
    try:
        addresses = [_address(text) for text in args.workers_at] or workers.addresses()
        discover = workers.addresses if args.ray else None
        backend = ClusterBackend(addresses, tokenizer, args.router, args.policy, spec, discover=discover)
        path.write_text(json.dumps({"pid": os.getpid(), "port": args.port, "workers": addresses}))
        return run_server(backend, serve.server_config(args), args.host, args.port, args.log_level)
    finally:
        path.unlink(missing_ok=True)
        workers.end()


def _check_names(args: argparse.Namespace) -> None:
    """Before minutes of loading, not after."""
    from paceline.cluster.choosers import CHOOSERS
    from paceline.cluster.policy import POLICIES, parse_choice

    parse_choice("router", args.router, tuple(CHOOSERS))
    parse_choice("policy", args.policy, tuple(POLICIES))
    if args.address and not args.ray:
        raise InvalidOptionError("--address is of a Ray cluster: give --ray too, or --workers-at for workers elsewhere")
    if args.ray and args.workers_at:
        raise InvalidOptionError("--ray starts the workers and --workers-at uses others: give one of them")
    if not args.workers_at and (args.decode < 1 or args.prefill < 0):
        raise InvalidOptionError(
            f"a cluster has 1 decode worker or more, got --prefill {args.prefill} --decode {args.decode}"
        )


def _check_port(host: str, port: int) -> None:
    """Before the workers load their models, not after."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise InvalidOptionError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


def _on_ray(args: argparse.Namespace) -> "RayCluster":
    from paceline.cluster.app import RayCluster

    counts = {"prefill": args.prefill, "decode": args.decode}
    args.num_threads = args.num_threads or _threads(args)
    engine = argparse.Namespace(**{key: value for key, value in vars(args).items() if key not in SERVER_ONLY})
    make_engine = functools.partial(serve.make_engine, engine)  # runs in the replicas
    gpus = 1.0 if args.device == "cuda" else 0.0
    return RayCluster(make_engine, serve.chosen_per_request(), counts, args.address, args.num_threads, gpus)


def _threads(args: argparse.Namespace) -> int:
    """Of each worker, where several share this machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(args.prefill + args.decode))


def _local(args: argparse.Namespace) -> "LocalWorkers":
    from paceline.cluster.local import LocalWorker, LocalWorkers

    if args.workers_at:
        return LocalWorkers([])
    command = [sys.executable, "-m", "paceline", "cluster", "worker", *_engine_options(args)]
    if args.num_threads is None:
        command += ["--num-threads", str(_threads(args))]
    counts = {"prefill": args.prefill, "decode": args.decode}
    names = [(role, i) for role, count in counts.items() for i in range(count)]
    return LocalWorkers([LocalWorker(f"{role}-{i}", role, command) for role, i in names])


def _engine_options(args: argparse.Namespace) -> list[str]:
    """Options that say what engine it is, as `up` was given them."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    words = [args.name] if args.name else []
    for action in parser._actions:
        if not action.option_strings or action.dest in SERVER_ONLY:
            continue
        value = vars(args)[action.dest]
        if value == action.default:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(action.option_strings[0 if value else -1])
        elif action.nargs == 0:
            words.append(action.option_strings[0])
        else:
            values = value if isinstance(value, list) else [value]
            words += [action.option_strings[0], *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return words


def run_worker(args: argparse.Namespace) -> int:
    from paceline.cluster.joining import ROLES
    from paceline.cluster.worker_main import run_worker

    if args.role not in ROLES:
        raise InvalidOptionError(f"there is no role {args.role!r}: choose one of {', '.join(ROLES)}")
    host, port = _address(args.listen)
    llm = serve.make_engine(args)
    name = args.worker_name or f"{args.role}@{args.listen}"
    methods, events = serve.chosen_per_request(), args.kv_events[:2]
    return asyncio.run(run_worker(llm, methods, args.role, name, host, port, args.end_with_stdin, events))


def run_status(args: argparse.Namespace) -> int:
    from paceline.cli.lab import format_table

    state = _running(_state_path(args.port))
    if state is None:
        print(f"no cluster runs at port {args.port}")
        return 1
    rows = asyncio.run(_rows([(host, port) for host, port in state["workers"]]))
    print(f"http://127.0.0.1:{state['port']}  process {state['pid']}\n")
    print(format_table(rows))
    return 0


async def _rows(addresses: "list[Address]") -> list[dict[str, Any]]:
    from paceline.cluster.status import ask, worker_row
    from paceline.cluster.transport import ChannelClosedError, UnreachableError

    rows = []
    for host, port in addresses:
        try:
            rows.append(worker_row(await ask(host, port)))
        except (UnreachableError, ChannelClosedError):
            rows.append({"worker": f"{host}:{port}", "role": "not reachable"})
    return sorted(rows, key=len, reverse=True)


def run_down(args: argparse.Namespace) -> int:
    path = _state_path(args.port)
    state = _running(path)
    if state is None:
        print(f"no cluster runs at port {args.port}")
        return 1
    os.kill(state["pid"], signal.SIGTERM)
    end_s = time.monotonic() + DOWN_TIMEOUT_S
    while _running(path) is not None:
        if time.monotonic() > end_s:
            print(f"process {state['pid']} has not ended: its streams may still drain", file=sys.stderr)
            return 1
        time.sleep(0.1)
    return 0


def _state_path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"paceline-cluster-{os.getuid()}-{port}.json"


def _running(path: Path) -> dict[str, Any] | None:
    """What the file says, where its process lives and it is ours."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if path.stat().st_uid != os.getuid():
            return None
        state: dict[str, Any] = json.loads(path.read_text())
        os.kill(state["pid"], 0)
        return state
    return None


def _address(text: str) -> "Address":
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidOptionError(f"an address is HOST:PORT, got {text!r}")
    return host, int(port)
