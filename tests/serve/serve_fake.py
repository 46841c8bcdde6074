"""A server process over the fake engine, for tests that send signals: python serve_fake.py PORT STEP_S DRAIN_S."""

import sys

from paceline.serve.config import ServerConfig
from paceline.serve.http.server import run_server
from tests.serve import fake

if __name__ == "__main__":
    port, step_s, drain_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    config = ServerConfig(("fake",), drain_timeout_s=drain_s)
    sys.exit(run_server(fake.FakeBackend(step_s), config, "127.0.0.1", port))
