"""`paceline cluster`: many workers behind one server, and a simulator of it.

paceline cluster up smollm2-135m --prefill 1 --decode 1      on this machine, until Ctrl-C or `paceline cluster down`
paceline cluster status
paceline cluster simulate --worker cpu.json --load requests=2000,rate=4,prompt=700,groups=20 --workers 1 2 4
paceline cluster simulate --worker gpu.json --trace mooncake.jsonl --ttft-ms 500 --gap-ms 50 --prefill-worker gpu.json
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from paceline.cli.cluster_running import add_port, run_down, run_restart, run_status
from paceline.cli.cluster_simulate import add_simulate, run_simulate
from paceline.cli.cluster_up import add_up, run_up
from paceline.cli.cluster_worker import add_worker, run_worker

VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "up": ("workers and the server in front of them, on this machine", add_up, run_up),
    "status": ("the workers of a running cluster and what they do", add_port, run_status),
    "restart": ("one worker after another, while streams go on", add_port, run_restart),
    "down": ("end a running cluster", add_port, run_down),
    "worker": ("one worker alone, for a cluster on several machines", add_worker, run_worker),
    "simulate": ("a load on a cluster that need not exist", add_simulate, run_simulate),
}


class _LazyParser(argparse.ArgumentParser):
    """Knows its arguments when it is used: `simulate` need not load what `up` asks for its options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        VERBS[self.prog.split()[-1]][1](self)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="cluster_verb", required=True, metavar="|".join(VERBS), parser_class=_LazyParser)
    for name, (summary, _, _) in VERBS.items():
        verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False)


def expand_arguments(arguments: Sequence[str]) -> list[str]:
    """With the options of `--config FILE` written out, where a verb has it."""
    from paceline.cli.config_file import expand

    if not arguments or arguments[0] not in ("up", "worker"):
        return list(arguments)
    return [arguments[0], *expand(arguments[1:], VERBS[arguments[0]][1])]


def run(args: argparse.Namespace) -> int:
    return VERBS[args.cluster_verb][2](args)
