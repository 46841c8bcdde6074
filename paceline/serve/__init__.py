"""An OpenAI-compatible server with speculation in the client's hands.

    request ─► middleware (key, size, id, log) ─► route ─► gate (bounded queue) ─► engine ─► JSON or events

`create_app(backend, config)` is the whole server as an ASGI application; `run_server` puts it behind uvicorn.
"""
