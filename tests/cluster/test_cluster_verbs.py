"""`paceline cluster`: what is wrong is said before anything is loaded."""

import socket
from pathlib import Path

import pytest

from paceline.cli import cluster_up
from paceline.cli.cluster import VERBS
from paceline.cli.main import _parser, main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--policy", "hope"], "there is no policy 'hope': choose one of local, remote, dynamo"),
        (["up", "--router", "nearest"], "there is no router 'nearest': choose one of round_robin"),
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


def test_workers_elsewhere_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert main(["cluster", "up", "--port", "0", "--workers-at", f"127.0.0.1:{port}"]) == 2
    assert f"nobody answers at 127.0.0.1:{port}" in capsys.readouterr().err


def test_status_and_down_of_a_cluster_that_is_not_there_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_up.tempfile, "gettempdir", lambda: str(tmp_path))
    for verb in ("status", "down"):
        assert main(["cluster", verb, "--port", "8765"]) == 1
        assert "no cluster runs at port 8765" in capsys.readouterr().out
    cluster_up._state_path(8765).write_text('{"pid": 999999999, "port": 8765, "workers": []}')  # it was killed
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
