"""`paceline cluster up`: the server over local processes, replicas of Ray, or workers elsewhere."""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.cli import serve
from paceline.cli.cluster_running import StateFile
from paceline.cli.cluster_worker import check_port, parse_address
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.cluster.app import RayCluster
    from paceline.cluster.backend import Address, Scaling
    from paceline.cluster.local import LocalWorkers

# Not for workers: keys do not belong into a list of processes.
SERVER_ONLY = {"help", "config", "host", "port", "api_key", "admin_key", "run"}


def add_up(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("--prefill", type=int, default=1, metavar="N", help="workers that only read prompts")
    group.add_argument("--decode", type=int, default=1, metavar="N", help="workers that answer (default: %(default)s)")
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--max-{role}", type=int, metavar="N", help=f"start up to N {role} workers as the traffic needs them"
        )
    group.add_argument(
        "--workers-at", nargs="+", default=[], metavar="HOST:PORT", help="use these instead: `paceline cluster worker`"
    )
    group.add_argument("--ray", action="store_true", help="workers as replicas of Ray Serve (extra cluster)")
    group.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster that runs, or auto; with --ray")
    group.add_argument(
        "--router", default="kv_aware", metavar="NAME", help="round_robin, power_of_two, dynamo, kv_aware"
    )
    group.add_argument("--policy", default="cost", metavar="NAME", help="where prompts are computed: cost, dynamo, ...")
    group.add_argument("--transport", default="tcp", metavar="NAME", help="of KV blocks: tcp or nixl (default: tcp)")
    group.add_argument(
        "--worker-file", metavar="FILE", help="measured pass cost; left out: measured when workers start"
    )


def run_up(args: argparse.Namespace) -> int:
    from paceline.cluster.backend import ClusterBackend
    from paceline.cluster.worker_spec import WorkerSpec
    from paceline.models.loading import load_tokenizer
    from paceline.models.resolve import resolve_model
    from paceline.serve.http.server import run_server

    _check_names(args)
    elsewhere = [parse_address(text) for text in args.workers_at]
    spec = WorkerSpec.load(args.worker_file) if args.worker_file else None
    with StateFile(args.port).held() as state, _sigterm_ends():
        check_port(args.host, args.port)
        tokenizer = load_tokenizer(resolve_model(args.name or args.model))  # fetched once, before the workers want it
        workers = _on_ray(args) if args.ray else _local(args)
        if not elsewhere:
            counts = f"{args.prefill} prefill, {args.decode} decode; threads of each: {_threads(args)}"
            print(f"paceline: workers are starting ({counts})", file=sys.stderr)
        try:
            workers.start()

            def discover() -> "Sequence[Address]":
                found = elsewhere or workers.addresses()
                state.write(found)  # for `status`
                return found

            backend = ClusterBackend(
                discover(),
                tokenizer,
                args.router,
                args.policy,
                spec,
                discover=discover,
                scaling=_scaling(args, workers),
            )
            return run_server(backend, serve.server_config(args), args.host, args.port, args.log_level)
        finally:
            workers.end()


@contextlib.contextmanager
def _sigterm_ends() -> Iterator[None]:
    """While workers start: they end too. The server has its own way as soon as it runs."""

    def end(signal_number: int, frame: object) -> None:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _scaling(args: argparse.Namespace, workers: "LocalWorkers | RayCluster") -> "Scaling | None":
    from paceline.cluster.autoscale import Limits
    from paceline.cluster.backend import Scaling

    counts = {"prefill": args.prefill, "decode": args.decode}
    most = {"prefill": args.max_prefill or args.prefill, "decode": args.max_decode or args.decode}
    if most == counts:
        return None
    return Scaling(workers.scale, counts, {role: Limits(counts[role], most[role]) for role in counts})


def _check_names(args: argparse.Namespace) -> None:
    """Before minutes of loading, not after."""
    from paceline.cluster.block_transport import check_transport
    from paceline.cluster.choosers import make_chooser
    from paceline.cluster.policy import make_policy
    from paceline.cluster.prefill_time import PrefillTime
    from paceline.cluster.worker_spec import WorkerSpec
    from paceline.lab.pass_cost import PassCost

    any_time = PrefillTime(WorkerSpec("any", PassCost.of({1: 1.0})))  # the real one is measured by the workers
    check_transport(args.transport)
    if args.workers_at and args.transport != "tcp":
        raise InvalidOptionError("--transport is of workers that start here: give it to `paceline cluster worker`")
    make_chooser(args.router, any_time)
    make_policy(args.policy, any_time, any_time)
    if args.address and not args.ray:
        raise InvalidOptionError("--address is of a Ray cluster: give --ray too, or --workers-at for workers elsewhere")
    if args.ray and args.workers_at:
        raise InvalidOptionError("--ray starts the workers and --workers-at uses others: give one of them")
    if args.workers_at and (args.max_prefill or args.max_decode):
        raise InvalidOptionError("--max-prefill and --max-decode start workers here: they do not go with --workers-at")
    for role, least, most in (("prefill", args.prefill, args.max_prefill), ("decode", args.decode, args.max_decode)):
        if most is not None and most < least:
            raise InvalidOptionError(f"--max-{role} {most} is fewer than --{role} {least}")
    if not args.workers_at and (args.decode < 1 or args.prefill < 0):
        raise InvalidOptionError(
            f"a cluster has 1 decode worker or more, got --prefill {args.prefill} --decode {args.decode}"
        )


def _on_ray(args: argparse.Namespace) -> "RayCluster":
    from paceline.cluster.app import RayCluster

    counts = {"prefill": args.prefill, "decode": args.decode}
    args.num_threads = _threads(args)
    engine = argparse.Namespace(**{key: value for key, value in vars(args).items() if key not in SERVER_ONLY})
    make_engine = functools.partial(serve.make_engine, engine)  # runs in the replicas
    gpus = 1.0 if args.device == "cuda" else 0.0
    return RayCluster(
        make_engine, serve.chosen_per_request(), counts, args.address, args.num_threads, gpus, args.transport
    )


def _threads(args: argparse.Namespace) -> int:
    """Of each worker: several share this machine."""
    if args.num_threads is not None:
        return int(args.num_threads)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int((args.max_prefill or args.prefill) + (args.max_decode or args.decode)))


def _local(args: argparse.Namespace) -> "LocalWorkers":
    from paceline.cluster.local import LocalWorker, LocalWorkers

    if args.workers_at:
        return LocalWorkers([])
    command = [sys.executable, "-m", "paceline", "cluster", "worker", *_engine_options(args)]
    if args.num_threads is None:
        command += ["--num-threads", str(_threads(args))]
    command += ["--transport", args.transport]
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
