"""From a request body to a `Call`: what can be wrong with it, short of the engine's own checks, is found here."""

from paceline.llm.worker import in_worker
from paceline.serve.generate.call import Call
from paceline.serve.generate.params import prompt_token_ids, sampling_params
from paceline.serve.generate.service import Service
from paceline.serve.http.limits import check_model, check_options
from paceline.serve.http.logs import log
from paceline.serve.http.request_bodies import ChatCompletionRequest, GenerationRequest
from paceline.serve.http.tenants import Tenant
from paceline.serve.tools.plan import tool_plan


async def prepare(service: Service, body: GenerationRequest, call_id: str, tenant: Tenant) -> Call:
    backend, config = service.backend, service.config
    model = check_model(body.model, config)
    check_options(body, config)
    prompts = await prompt_token_ids(body, backend, config)
    plan = None
    if isinstance(body, ChatCompletionRequest):
        plan = tool_plan(body, lambda: service.tool_format)
    if plan is not None:  # whose schemas are in the prompt: that says how large they are
        await in_worker(sum(len(p) for p in prompts), plan.check_schemas)
    params = await sampling_params(body, [len(p) for p in prompts], backend, config, plan)
    call = Call(call_id, model, body, prompts, params, tenant.cache_salt(body.cache_salt), plan)
    if isinstance(body, ChatCompletionRequest):
        call.reasoning_parser = config.reasoning_parser
    call.only_echo = body.max_tokens == 0
    service.metrics.prompt_tokens.inc(sum(len(p) for p in prompts))
    if config.log_prompts:
        log("prompt", id=call.id, prompts=[backend.tokenizer.decode(p, False) for p in prompts])
    return call
