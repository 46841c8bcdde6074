"""`paceline cluster`: what is wrong is said before anything is loaded."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from paceline.cli import cluster_running, cluster_up
from paceline.cli.cluster import VERBS
from paceline.cli.main import _parser, main
from paceline.cluster.status import ask
from paceline.cluster.transport import UnreachableError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--policy", "hope"], "there is no policy 'hope': choose one of local, remote, dynamo"),
        (["up", "--router", "nearest"], "there is no router 'nearest': choose one of round_robin"),
        (["up", "--policy", "dynamo,patience=3"], "policy dynamo has no option 'patience': it has max_local_tokens"),
        (["up", "--router", "dynamo,temperature=hot"], "router dynamo: expected option=number, got 'temperature=hot'"),
        (["up", "--worker-file", "/nowhere.json"], "/nowhere.json is not a worker file"),
        (["up", "--workers-at", "somewhere"], "an address is HOST:PORT, got 'somewhere'"),
        (["up", "--decode", "3", "--max-decode", "2"], "--max-decode 2 is fewer than --decode 3"),
        (["up", "--max-decode", "2", "--workers-at", "a:1"], "they do not go with --workers-at"),
        (["up", "--transport", "pigeon"], "there is no transport 'pigeon': choose one of tcp, nixl"),
        (["worker", "--transport", "pigeon"], "there is no transport 'pigeon': choose one of tcp, nixl"),
        (["up", "--decode", "0"], "a cluster has 1 decode worker or more, got --prefill 1 --decode 0"),
        (["up", "--address", "auto"], "--address is of a Ray cluster: give --ray too"),
        (["up", "--ray", "--workers-at", "a:1"], "give one of them"),
        (["worker", "--role", "sampler"], "there is no role 'sampler': choose one of prefill, decode, mixed"),
        (["worker", "--listen", "here"], "an address is HOST:PORT, got 'here'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_noticed_before_workers_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["cluster", "up", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_workers_port_in_use_is_noticed_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["cluster", "worker", "no-such-model", "--listen", f"127.0.0.1:{port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --listen" in (
        capsys.readouterr().err
    )


def test_an_address_where_something_else_answers_is_named() -> None:
    async def run(answer: bytes) -> str:
        ended = asyncio.Event()

        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            await reader.read()
            writer.close()
            ended.set()

        server = await asyncio.start_server(other, "127.0.0.1", 0)
        async with server:
            with pytest.raises(UnreachableError) as found:
                await ask("127.0.0.1", server.sockets[0].getsockname()[1], timeout_s=0.2)
            await ended.wait()
        return str(found.value)

    assert "not a Paceline cluster connection" in asyncio.run(run(b"HTTP/1.1 400 Bad Request\r\n" + 40 * b" "))
    assert "takes connections but says nothing: is it a worker?" in asyncio.run(run(b""))


def test_a_cluster_that_starts_says_so_and_one_that_runs_is_not_started_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_running.tempfile, "gettempdir", lambda: str(tmp_path))
    with cluster_running.StateFile(8765).held():
        assert main(["cluster", "status", "--port", "8765"]) == 0
        assert f"the cluster at port 8765 is starting: process {os.getpid()}" in capsys.readouterr().out
        assert main(["cluster", "up", "--port", "8765"]) == 2
        assert "a cluster runs at port 8765 already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_workers_elsewhere_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert main(["cluster", "up", "--port", "0", "--workers-at", f"127.0.0.1:{port}"]) == 2
    assert f"nobody answers at 127.0.0.1:{port}" in capsys.readouterr().err


def test_status_and_down_of_a_cluster_that_is_not_there_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_running.tempfile, "gettempdir", lambda: str(tmp_path))
    for verb in ("status", "down"):
        assert main(["cluster", verb, "--port", "8765"]) == 1
        assert "no cluster runs at port 8765" in capsys.readouterr().out
    cluster_running.StateFile(8765).path.write_text('{"pid": 999999999, "port": 8765, "workers": []}')  # it was killed
    assert main(["cluster", "status", "--port", "8765"]) == 1


def test_workers_get_the_engines_options_and_no_keys() -> None:
    words = ["cluster", "up", "smollm2-135m", "--spec-method", "eagle3", "--no-prefix-caching", "--max-num-seqs", "9"]
    args = _parser("cluster").parse_args([*words, "--api-key", "secret", "--port", "9000"])
    options = cluster_up._engine_options(args)
    assert options[0] == "smollm2-135m" and "secret" not in options and "9000" not in options
    again = _parser("cluster").parse_args(["cluster", "worker", *options])
    assert (again.name, again.spec_method, again.prefix_caching, again.max_num_seqs) == (
        "smollm2-135m",
        "eagle3",
        False,
        9,
    )


def test_every_verb_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main(["cluster", verb, "--help"])
        assert "--" in capsys.readouterr().out
