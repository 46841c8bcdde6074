"""Requests made up from the API's own description: whatever comes in, nothing is answered with a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from paceline.serve.config import ServerConfig
from paceline.serve.http.app import create_app
from tests.serve import fake

APP = create_app(
    fake.FakeBackend(max_model_len=64), ServerConfig(("fake",), request_timeout_s=5, max_rate_per_client=1e6)
)
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.filterwarnings("ignore")  # of the tool's own dependencies
def test_no_request_is_answered_with_a_server_error(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error])
