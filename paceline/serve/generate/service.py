"""What all routes of one server share."""

import logging
import time
from functools import cached_property

from paceline.serve.config import ServerConfig
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.http.gate import Gate
from paceline.serve.http.logs import log
from paceline.serve.observe.latest_steps import LatestSteps
from paceline.serve.observe.metrics import Metrics
from paceline.serve.tools.plan import ToolFormat, tool_format


class Service:
    def __init__(self, backend: ServedEngine, config: ServerConfig) -> None:
        self.backend = backend
        self.config = config
        self.metrics = Metrics()
        self.latest_steps = LatestSteps()
        self.gate = Gate(backend.max_num_seqs, config.max_queue_len, config.request_timeout_s)
        self.engine_dead = False
        self.begin_s = time.time()
        backend.watch(self.latest_steps.observe)
        backend.when_dead(self._note_death)
        if config.tool_call_parser is not None:
            assert self.tool_format  # one that does not go with the model is found out now

    @cached_property
    def tool_format(self) -> ToolFormat:
        return tool_format(self.backend.tokenizer, self.config.tool_call_parser)

    def _note_death(self, error: Exception) -> None:
        self.engine_dead = True
        log("engine_dead", level=logging.CRITICAL, error=error)
